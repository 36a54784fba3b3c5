//! Flight records of other processes: what their ranks did last, also when these hang or have ended.
//!
//! [`Communicator::flight_record`](crate::Communicator::flight_record) reads those of the caller's own world.

pub use crate::liveness::{
    metrics, of_directory, of_process, CallTotals, FlightRecord, RankRecord, RankState, RecordedCall,
    UnreadRank,
};
