//! Symmetric memory of a GPU as cudarc sees it: this rank's part is a slice.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use super::SymmetricMemory;
use crate::device::cuda::Cuda;
use crate::dtype::Element;

impl<T: Element> DeviceSlice<T> for SymmetricMemory<T, Cuda> {
    fn len(&self) -> usize {
        self.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.endpoint.device.default_stream()
    }
}

/// In no event tracking, as a [`Buffer`](crate::Buffer).
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
