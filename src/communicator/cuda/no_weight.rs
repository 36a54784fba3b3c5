//! Weights that are not there, as cudarc's slices.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DeviceSlice, SyncOnDrop};

use crate::call::NoWeight;

impl<T> DeviceSlice<T> for NoWeight {
    fn len(&self) -> usize {
        match *self {}
    }

    fn stream(&self) -> &Arc<CudaStream> {
        match *self {}
    }
}

impl<T> DevicePtr<T> for NoWeight {
    fn device_ptr<'a>(&'a self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        match *self {}
    }
}
