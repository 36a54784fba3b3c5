//! Who reduces: this crate, a copy, or another library. All of them on the memory of one [`Endpoint`].

use std::convert::Infallible;

use fast_allreduce::{DType, ReduceOp};

use super::check::Promise;
use super::device::Endpoint;
use super::reference::Number;
use crate::failure::Failure;

/// Another library's allreduce.
pub trait Rival<E: Endpoint> {
    /// As it is in the results.
    fn name(&self) -> &'static str;

    /// Which library this is, with its version.
    fn library(&self) -> String;

    /// Why it cannot do this one, if it cannot.
    fn refusal(&self, dtype: DType, op: ReduceOp) -> Option<&'static str>;

    /// Starts an allreduce, as [`Endpoint::all_reduce`].
    fn all_reduce<T: Number>(
        &self,
        endpoint: &E,
        input: &E::Memory<T>,
        output: &mut E::Memory<T>,
        op: ReduceOp,
    ) -> Result<(), Failure>;

    /// Starts an allreduce in place.
    fn all_reduce_in_place<T: Number>(
        &self,
        endpoint: &E,
        data: &mut E::Memory<T>,
        op: ReduceOp,
    ) -> Result<(), Failure>;
}

/// One of those that are measured together.
pub enum Contender<'a, E: Endpoint> {
    /// This crate.
    Ours(&'a E),
    /// A copy of the same size, made by every rank at the same time: no allreduce, but what one cannot beat by much.
    Memcpy(&'a E),
    /// Another library.
    Rival(&'a E, &'a E::Rival),
}

impl<E: Endpoint> Clone for Contender<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

// Of references, whatever an endpoint is.
impl<E: Endpoint> Copy for Contender<'_, E> {}

impl<'a, E: Endpoint> Contender<'a, E> {
    /// Whose memory and clock it uses.
    pub fn endpoint(&self) -> &'a E {
        match self {
            Self::Ours(endpoint) | Self::Memcpy(endpoint) | Self::Rival(endpoint, _) => endpoint,
        }
    }

    /// As it is in the results.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ours(_) => "fast-allreduce",
            Self::Memcpy(_) => "memcpy",
            Self::Rival(_, rival) => rival.name(),
        }
    }

    /// How it does it, where that is known.
    pub fn algorithm(&self, count: usize, dtype: DType) -> Option<&'static str> {
        match self {
            Self::Ours(endpoint) => Some(endpoint.communicator().plan(count, dtype).algorithm.name()),
            _ => None,
        }
    }

    /// Why it cannot do this one, if it cannot.
    pub fn refusal(&self, dtype: DType, op: ReduceOp) -> Option<&'static str> {
        match self {
            Self::Rival(_, rival) => rival.refusal(dtype, op),
            _ => None,
        }
    }

    /// What its results are held to; `None` if it has none.
    pub fn promise(&self) -> Option<Promise> {
        match self {
            Self::Ours(_) => Some(Promise::SameBits),
            Self::Memcpy(_) => None,
            Self::Rival(..) => Some(Promise::AnyOrder),
        }
    }

    /// Starts a call out of place.
    pub fn all_reduce<T: Number>(
        &self,
        input: &E::Memory<T>,
        output: &mut E::Memory<T>,
        op: ReduceOp,
    ) -> Result<(), Failure> {
        match self {
            Self::Ours(endpoint) => endpoint.all_reduce(input, output, op),
            Self::Memcpy(endpoint) => endpoint.copy(input, output),
            Self::Rival(endpoint, rival) => rival.all_reduce(endpoint, input, output, op),
        }
    }

    /// Starts a call in place. A copy needs somewhere to go to.
    pub fn all_reduce_in_place<T: Number>(
        &self,
        data: &mut E::Memory<T>,
        spare: &mut E::Memory<T>,
        op: ReduceOp,
    ) -> Result<(), Failure> {
        match self {
            Self::Ours(endpoint) => endpoint.all_reduce_in_place(data, op),
            Self::Memcpy(endpoint) => endpoint.copy(data, spare),
            Self::Rival(endpoint, rival) => rival.all_reduce_in_place(endpoint, data, op),
        }
    }
}

/// For devices and builds without another library.
impl<E: Endpoint> Rival<E> for Infallible {
    fn name(&self) -> &'static str {
        match *self {}
    }

    fn library(&self) -> String {
        match *self {}
    }

    fn refusal(&self, _: DType, _: ReduceOp) -> Option<&'static str> {
        match *self {}
    }

    fn all_reduce<T: Number>(
        &self,
        _: &E,
        _: &E::Memory<T>,
        _: &mut E::Memory<T>,
        _: ReduceOp,
    ) -> Result<(), Failure> {
        match *self {}
    }

    fn all_reduce_in_place<T: Number>(
        &self,
        _: &E,
        _: &mut E::Memory<T>,
        _: ReduceOp,
    ) -> Result<(), Failure> {
        match *self {}
    }
}
