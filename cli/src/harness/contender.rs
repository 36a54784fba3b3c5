//! The contenders of a measurement: this crate, a copy, or another library, on the memory of one [`MeasuredRank`].

use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp};

use super::check::Promise;
use super::device::{Batch, Call, MeasuredRank};
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
    /// Returns the name in results.
    fn name(&self) -> &'static str;

    /// Returns the library's name and version.
    fn library(&self) -> String;

    /// Returns why the library does not support this call, if it does not. `op` is ignored by calls that do not reduce.
    fn refusal(&self, kind: CallKind, dtype: DType, op: ReduceOp) -> Option<&'static str>;

    /// Returns whether the library has this placement, with the buffers of [`Work::in_place`].
    fn has(&self, kind: CallKind, placement: Placement) -> bool;

    /// Starts a call, like [`MeasuredRank::start`].
    fn start(
        &self,
        measured: &E,
        work: &Work,
        input: &E::Memory,
        output: &mut E::Memory,
    ) -> Result<(), Failure>;

    /// Starts a call in place.
    fn start_in_place(&self, measured: &E, work: &Work, data: &mut E::Memory) -> Result<(), Failure>;

    /// Prepares calls to be timed, like [`MeasuredRank::batch`].
    fn batch<'a>(&'a self, measured: &'a E, call: Call<'a>) -> Result<Batch<'a>, Failure> {
        measured.batch(call)
    }
}

/// A contender of a measurement.
pub enum Contender<'a, E: MeasuredRank> {
    /// This crate.
    Ours(&'a E),
    /// A copy of the same size, made by every rank at the same time: a lower bound for collectives.
    Memcpy(&'a E),
    /// Another library.
    Rival(&'a E, &'a dyn Rival<E>),
}

impl<E: MeasuredRank> Clone for Contender<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

// Not derived, because E need not be Copy.
impl<E: MeasuredRank> Copy for Contender<'_, E> {}

impl<'a, E: MeasuredRank> Contender<'a, E> {
    /// Returns the measured rank whose memory and clock it uses.
    pub fn measured(&self) -> &'a E {
        match self {
            Self::Ours(measured) | Self::Memcpy(measured) | Self::Rival(measured, _) => measured,
        }
    }

    /// Returns the name in results.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ours(_) => OURS,
            Self::Memcpy(_) => "memcpy",
            Self::Rival(_, rival) => rival.name(),
        }
    }

    /// Returns the planned algorithm of this crate's allreduces.
    pub fn algorithm(&self, work: &Work) -> Option<Algorithm> {
        match self {
            Self::Ours(measured) if work.kind == CallKind::AllReduce && measured.nodes() == 1 => {
                Some(measured.communicator().plan(work.count(), work.dtype).algorithm)
            }
            _ => None,
        }
    }

    /// Returns why the contender does not support this call, if it does not.
    pub fn refusal(&self, kind: CallKind, dtype: DType, op: ReduceOp) -> Option<&'static str> {
        match self {
            Self::Rival(_, rival) => rival.refusal(kind, dtype, op),
            Self::Ours(measured) if measured.nodes() > 1 && op == ReduceOp::Avg && !dtype.is_float() => {
                Some("Hierarchical has no averages of integers")
            }
            _ => None,
        }
    }

    /// Returns whether the contender has this placement of the call.
    pub fn has(&self, work: &Work, placement: Placement) -> bool {
        match self {
            // Placements that this crate lacks are not compared.
            _ if placement == Placement::InPlace && work.in_place().is_none() => false,
            Self::Rival(_, rival) => rival.has(work.kind, placement),
            _ => true,
        }
    }

    /// Returns the promise that its results are checked against; `None` for a copy.
    pub fn promise(&self, work: &Work) -> Option<Promise> {
        match self {
            // A ring adds in another order for each slice, and rounds partial sums.
            Self::Ours(_) if self.algorithm(work).is_some_and(|algorithm| !algorithm.is_direct()) => {
                Some(Promise::AnyOrder)
            }
            // Two levels, of sockets or of nodes, round partial sums as well.
            Self::Ours(measured)
                if measured.nodes() > 1 || measured.communicator().ranks_of_socket().is_some() =>
            {
                Some(Promise::AnyOrder)
            }
            Self::Ours(_) => Some(Promise::SameBits),
            Self::Memcpy(_) => None,
            Self::Rival(..) => Some(Promise::AnyOrder),
        }
    }

    /// Prepares calls to be timed.
    pub fn batch<'b>(&'b self, call: Call<'b>) -> Result<Batch<'b>, Failure> {
        match self {
            Self::Ours(measured) | Self::Memcpy(measured) => measured.batch(call),
            Self::Rival(measured, rival) => rival.batch(measured, call),
        }
    }

    /// Starts a call. In place the data is in `input`, and a copy goes to `output`.
    #[inline]
    pub fn start(
        &self,
        work: &Work,
        placement: Placement,
        input: &mut E::Memory,
        output: &mut E::Memory,
    ) -> Result<(), Failure> {
        match (self, placement) {
            (Self::Ours(measured), Placement::OutOfPlace) => measured.start(work, input, output),
            (Self::Ours(measured), Placement::InPlace) => measured.start_in_place(work, input),
            (Self::Memcpy(measured), _) => measured.copy(input, output),
            (Self::Rival(measured, rival), Placement::OutOfPlace) => {
                rival.start(measured, work, input, output)
            }
            (Self::Rival(measured, rival), Placement::InPlace) => rival.start_in_place(measured, work, input),
        }
    }
}
