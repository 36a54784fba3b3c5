//! Values whose drop keeps the caller's CUDA context current.

use std::mem::ManuallyDrop;
use std::ops::Deref;

use crate::device::cuda::driver::current::CallersContext;

/// A value of a GPU. Its drop may make the GPU's context current, and then restores the caller's.
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
        // SAFETY: this is the only drop of the value, and nothing uses it afterwards.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}
