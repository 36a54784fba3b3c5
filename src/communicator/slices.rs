//! Memory of typed calls, by device.

use crate::device::{Device, Host};

/// The types of memory that typed calls of a device take: slices on the host, cudarc's `DevicePtr` on a GPU.
pub trait Slices: Device {
    /// Memory that is read.
    type Read<'a, T: 'a>: Copy;
    /// Memory that is written.
    type Write<'a, T: 'a>;

    /// Returns the number of elements.
    #[doc(hidden)]
    fn len<T>(slice: Self::Read<'_, T>) -> usize;
    /// Returns the number of elements.
    #[doc(hidden)]
    fn len_mut<T>(slice: &Self::Write<'_, T>) -> usize;
}

impl Slices for Host {
    type Read<'a, T: 'a> = &'a [T];
    type Write<'a, T: 'a> = &'a mut [T];

    fn len<T>(slice: &[T]) -> usize {
        slice.len()
    }
    fn len_mut<T>(slice: &&mut [T]) -> usize {
        slice.len()
    }
}
