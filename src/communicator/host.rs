//! The collectives of the host device: on slices, run to their end within the call.

use super::{check_pointers, Communicator, Message};
use crate::device::Host;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::op::ReduceOp;

impl Communicator<Host> {
    /// Reduces the ranks' `input`s element by element into every rank's `output`.
    ///
    /// Nothing is allocated. An input that lies in a [`Buffer`](crate::Buffer) is read by the peers where it is, any other is
    /// copied once.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::Timeout`] naming ranks that did not come; see [`Communicator`] on what follows.
    pub fn all_reduce<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        let (input, output, count) = (input.as_ptr() as u64, output.as_mut_ptr() as u64, input.len());
        // SAFETY: both slices hold that many elements of T for the length of the call, which the host runs to its end;
        // an exclusive borrow overlaps with no other.
        unsafe { self.run(Message { input, output, count, dtype: T::DTYPE, op }, ()) }
    }

    /// Reduces the ranks' `data` element by element, in place.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_in_place<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let address = data.as_mut_ptr() as u64;
        let message = Message { input: address, output: address, count: data.len(), dtype: T::DTYPE, op };
        // SAFETY: the slice holds that many elements for the length of the call; in place is input == output.
        unsafe { self.run(message, ()) }
    }

    /// [`Communicator::all_reduce`] on raw pointers, for callers that know the type only at run time.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`], [`Error::InvalidPointer`] for null or misaligned pointers, and
    /// [`Error::Overlap`] unless the buffers are disjoint or the same.
    ///
    /// # Safety
    ///
    /// `input` is valid for reads, and `output` for writes, of `count` elements of `dtype`, and no other thread writes the
    /// one or accesses the other during the call.
    pub unsafe fn all_reduce_raw(
        &self,
        input: *const libc::c_void,
        output: *mut libc::c_void,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let message = Message { input: input as u64, output: output as u64, count, dtype, op };
        check_pointers(&message)?;
        // SAFETY: the caller's; the pointers have been checked for alignment and overlap.
        unsafe { self.run(message, ()) }
    }

    /// # Safety
    ///
    /// As [`Communicator::start`]; kernels of the host have ended when it returns.
    unsafe fn run(&self, message: Message, stream: ()) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.start(message, stream, |_, _| Ok(0)) }?;
        self.healthy()
    }
}
