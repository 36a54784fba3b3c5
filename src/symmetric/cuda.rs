//! Symmetric memory and registered buffers of a GPU as cudarc sees them: this rank's part is a slice.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use super::{Buffer, SymmetricMemory};
use crate::device::cuda::Cuda;
use crate::element::Element;

impl<T: Element> DeviceSlice<T> for SymmetricMemory<T, Cuda> {
    fn len(&self) -> usize {
        self.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.endpoint.device.default_stream()
    }
}

/// In no event tracking, as a [`Buffer`].
impl<T: Element> DevicePtr<T> for SymmetricMemory<T, Cuda> {
    fn device_ptr<'a>(&'a self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.address(), SyncOnDrop::Record(None))
    }
}

impl<T: Element> DevicePtrMut<T> for SymmetricMemory<T, Cuda> {
    fn device_ptr_mut<'a>(&'a mut self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.address(), SyncOnDrop::Record(None))
    }
}

impl<T: Element> DeviceSlice<T> for Buffer<T, Cuda> {
    fn len(&self) -> usize {
        self.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.device().default_stream()
    }
}

/// The crate's own buffers are in no event tracking: their uses are ordered by the streams that the caller names.
impl<T: Element> DevicePtr<T> for Buffer<T, Cuda> {
    fn device_ptr<'a>(&'a self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.address(), SyncOnDrop::Record(None))
    }
}

impl<T: Element> DevicePtrMut<T> for Buffer<T, Cuda> {
    fn device_ptr_mut<'a>(&'a mut self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.address(), SyncOnDrop::Record(None))
    }
}
