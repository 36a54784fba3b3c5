//! Whose calls they are: this crate's, a copy's, or another library's. All of them on the memory of one [`MeasuredRank`].

use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp};

use super::check::Promise;
use super::device::MeasuredRank;
use super::work::Work;
use crate::failure::Failure;

/// This crate's name in the results.
pub const OURS: &str = "fast-allreduce";

/// Whether a call has two buffers or one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    OutOfPlace,
    InPlace,
}

/// Another library's collectives.
pub trait Rival<E: MeasuredRank> {
    /// As it is in the results.
    fn name(&self) -> &'static str;

    /// Which library this is, with its version.
    fn library(&self) -> String;

    /// Why it cannot do this one, if it cannot. `op` is of those that reduce.
    fn refusal(&self, kind: CallKind, dtype: DType, op: ReduceOp) -> Option<&'static str>;

    /// Whether it has this placement of the collective, with the input and the output where [`Work::in_place`] says.
    fn has(&self, kind: CallKind, placement: Placement) -> bool;

    /// Starts a call, as [`MeasuredRank::start`].
    fn start(
        &self,
        endpoint: &E,
        work: &Work,
        input: &E::Memory,
        output: &mut E::Memory,
    ) -> Result<(), Failure>;

    /// Starts a call in place.
    fn start_in_place(&self, endpoint: &E, work: &Work, data: &mut E::Memory) -> Result<(), Failure>;
}

/// One of those that are measured together.
pub enum Contender<'a, E: MeasuredRank> {
    /// This crate.
    Ours(&'a E),
    /// A copy of the same size, made by every rank at the same time: no collective, but what one cannot beat by much.
    Memcpy(&'a E),
    /// Another library.
    Rival(&'a E, &'a dyn Rival<E>),
}

impl<E: MeasuredRank> Clone for Contender<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

// Of references, whatever an endpoint is.
impl<E: MeasuredRank> Copy for Contender<'_, E> {}

impl<'a, E: MeasuredRank> Contender<'a, E> {
    /// Whose memory and clock it uses.
    pub fn endpoint(&self) -> &'a E {
        match self {
            Self::Ours(endpoint) | Self::Memcpy(endpoint) | Self::Rival(endpoint, _) => endpoint,
        }
    }

    /// As it is in the results.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ours(_) => OURS,
            Self::Memcpy(_) => "memcpy",
            Self::Rival(_, rival) => rival.name(),
        }
    }

    /// How it does it, where there are several ways, and which one is known: as planned, whatever the operation.
    pub fn algorithm(&self, work: &Work, dtype: DType) -> Option<Algorithm> {
        match self {
            Self::Ours(endpoint) if work.kind == CallKind::AllReduce => {
                Some(endpoint.communicator().plan(work.count(), dtype).algorithm)
            }
            _ => None,
        }
    }

    /// Why it cannot do this one, if it cannot.
    pub fn refusal(&self, kind: CallKind, dtype: DType, op: ReduceOp) -> Option<&'static str> {
        match self {
            Self::Rival(_, rival) => rival.refusal(kind, dtype, op),
            _ => None,
        }
    }

    /// Whether it has this placement of the call.
    pub fn has(&self, work: &Work, placement: Placement) -> bool {
        match self {
            // There is nothing to compare with what this crate has not.
            _ if placement == Placement::InPlace && work.in_place().is_none() => false,
            Self::Rival(_, rival) => rival.has(work.kind, placement),
            _ => true,
        }
    }

    /// What its results are held to; `None` if it has none.
    pub fn promise(&self, work: &Work, dtype: DType) -> Option<Promise> {
        match self {
            // A ring adds in another order for each slice, and rounds what it passes on.
            Self::Ours(_) if self.algorithm(work, dtype).is_some_and(|algorithm| !algorithm.is_direct()) => {
                Some(Promise::AnyOrder)
            }
            Self::Ours(_) => Some(Promise::SameBits),
            Self::Memcpy(_) => None,
            Self::Rival(..) => Some(Promise::AnyOrder),
        }
    }

    /// Starts a call out of place.
    #[inline]
    pub fn start(&self, work: &Work, input: &E::Memory, output: &mut E::Memory) -> Result<(), Failure> {
        match self {
            Self::Ours(endpoint) => endpoint.start(work, input, output),
            Self::Memcpy(endpoint) => endpoint.copy(input, output),
            Self::Rival(endpoint, rival) => rival.start(endpoint, work, input, output),
        }
    }

    /// Starts a call in place. A copy needs somewhere to go to.
    #[inline]
    pub fn start_in_place(
        &self,
        work: &Work,
        data: &mut E::Memory,
        spare: &mut E::Memory,
    ) -> Result<(), Failure> {
        match self {
            Self::Ours(endpoint) => endpoint.start_in_place(work, data),
            Self::Memcpy(endpoint) => endpoint.copy(data, spare),
            Self::Rival(endpoint, rival) => rival.start_in_place(endpoint, work, data),
        }
    }
}
