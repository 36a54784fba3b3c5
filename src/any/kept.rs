//! What is dropped with the caller's CUDA context kept.

use std::mem::ManuallyDrop;
use std::ops::Deref;

use crate::device::cuda::driver::current::CallersContext;

/// A value of a GPU. Whoever drops it keeps the context that is current.
#[derive(Debug)]
pub struct Kept<T>(ManuallyDrop<T>);

impl<T> Kept<T> {
    pub fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T> Deref for Kept<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        let _context = CallersContext::keep();
        // SAFETY: once, and nobody has it any more.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}
