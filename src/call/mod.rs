//! Calls as values: a collective on addresses, the words by which ranks compare calls, and the arguments of launches.
//!
//! Nothing here depends on a device.

mod arguments;
mod cache;
mod collective;
mod experts;
mod fused;
mod gathered;
#[rustfmt::skip]
mod generated;
mod identity;
mod launch;
mod operand;
mod quantized;
mod recorder;
pub(crate) mod recording;
mod saved;
mod sharded;
mod transfer;

pub(crate) use self::arguments::{is_all_gather, number_after, set_number, tag_in_words, Call};
pub(crate) use self::cache::{CallCache, Prepared, PreparedTransfers};
pub use self::collective::Collective;
pub(crate) use self::experts::no_expert;
pub use self::experts::RawExperts;
#[cfg(feature = "cuda")]
pub(crate) use self::fused::FusedOperand;
pub use self::fused::{RawFused, RawQuantizedRows};
pub use self::gathered::RawGatheredRows;
pub(crate) use self::identity::CallId;
pub use self::identity::CallKind;
pub(crate) use self::launch::{nanoseconds, LaunchContext, NO_LIMIT};
pub(crate) use self::operand::same_length;
pub use self::quantized::{QuantizedTransport, Transport};
pub(crate) use self::recorder::Recorder;
pub(crate) use self::saved::{Span, UsedMemory};
pub use self::sharded::RawShardedRows;
#[cfg(feature = "cuda")]
pub(crate) use self::sharded::{operands as sharded_operands, ShardedOperand};
pub(crate) use self::transfer::{check_transfers, transfers_id};
#[cfg(feature = "cuda")]
pub(crate) use self::transfer::{pack, NO_TRANSFERS};
pub use self::transfer::{Direction, Group, Transfer};
pub(crate) use crate::catalogue::Division;
