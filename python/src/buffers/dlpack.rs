//! Buffers by DLPack: the capsule that most array libraries export (version 0 of the specification).

use std::ffi::{c_int, c_void};

use fast_allreduce::{DType, DeviceId};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyDictMethods, PyTuple};

use super::interface::{count_of, is_contiguous};
use super::{Operand, Required};
use crate::interpreter::call;

const CPU: c_int = 1;
const CUDA: c_int = 2;
const CUDA_HOST: c_int = 3;
const CUDA_MANAGED: c_int = 13;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: c_int,
    device_id: c_int,
    ndim: c_int,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

fn dtype_of(code: u8, bits: u8, lanes: u16) -> Option<DType> {
    DType::ALL.into_iter().find(|dtype| dtype.dlpack() == (code, bits) && lanes == 1)
}

/// Calls an object's `__dlpack__`, ordered on the call's stream, and returns the buffer. Exporters refuse read-only
/// memory themselves, because this version of DLPack cannot mark it.
pub fn operand(export: &Bound<'_, PyAny>, required: Required<'_>) -> PyResult<Operand> {
    /// The stream number that asks for no ordering.
    const UNORDERED: i64 = -1;
    let py = export.py();
    let arguments = PyDict::new(py);
    if required.device != DeviceId::Cpu {
        let stream = required.streams.map_or(Ok(UNORDERED), |streams| streams.of_dlpack(py))?;
        arguments.set_item("stream", stream)?;
    }
    let capsule = call(export, &PyTuple::empty(py), Some(&arguments)).map_err(|refusal| {
        let problem = format!("cannot be exported by DLPack: {refusal}");
        required.refused_for(py, problem, refusal)
    })?;
    // SAFETY: a live object, and a static name.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dltensor".as_ptr()) };
    if managed.is_null() {
        return Err(required.refused(py, format_args!("exports no DLPack capsule: {}", PyErr::fetch(py))));
    }
    // SAFETY: a capsule of this name points to a struct whose first member is the tensor, and which lives as long as
    // the capsule.
    let tensor = unsafe { &*managed.cast::<Tensor>() };
    let device = match tensor.device_type {
        CPU => DeviceId::Cpu,
        CUDA => DeviceId::Cuda(usize::try_from(tensor.device_id).unwrap_or(usize::MAX)),
        CUDA_HOST if required.device == DeviceId::Cpu => DeviceId::Cpu,
        CUDA_MANAGED => required.device,
        other => return Err(required.refused(py, format_args!("is on a device of DLPack's type {other}"))),
    };
    required.check_device(py, device)?;
    let Some(dtype) = dtype_of(tensor.code, tensor.bits, tensor.lanes) else {
        let Tensor { code, bits, lanes, .. } = tensor;
        return Err(required.unsupported(py, format_args!("DLPack {code}, {bits} bits, {lanes} lanes")));
    };
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |pointer: *mut i64| match dimensions == 0 || pointer.is_null() {
        true => &[][..],
        // SAFETY: `ndim` numbers, by the specification.
        false => unsafe { std::slice::from_raw_parts(pointer, dimensions) },
    };
    let (shape, strides) = (list(tensor.shape), list(tensor.strides));
    let is_whole = tensor.ndim >= 0 && shape.len() == dimensions;
    let count = count_of(shape, dtype).filter(|_| is_whole).ok_or_else(|| required.impossible(py, shape))?;
    if !strides.is_empty() && !is_contiguous(shape, strides, 1) {
        return Err(required.refused(py, "is not contiguous"));
    }
    let address = (tensor.data as u64).checked_add(tensor.byte_offset);
    let address = address.ok_or_else(|| required.refused(py, "is beyond the end of the address space"))?;
    // The capsule is not consumed: it deletes the tensor when it is dropped.
    Ok(Operand::held_by(&capsule, address, count, dtype))
}
