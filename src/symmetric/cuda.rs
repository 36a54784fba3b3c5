//! Makes this rank's part of symmetric memory and registered buffers a cudarc slice.

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

/// cudarc's event tracking does not apply, as with a [`Buffer`].
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

/// cudarc's event tracking does not apply: the streams of the caller order the uses of this crate's buffers.
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
