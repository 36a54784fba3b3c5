//! DLPack: the capsule that most array libraries give, as its specification lays it out (version 0).

use std::ffi::{c_int, c_void};

use fast_allreduce::{DType, DeviceId};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyDictMethods, PyTuple};

use crate::buffer::{Operand, Wanted};
use crate::interface::{count_of, is_contiguous};
use crate::user_code::call;

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

/// The buffer that an object's `__dlpack__` exports, in the order of the call's stream. An exporter refuses what may not be written, as
/// this version cannot tell.
pub fn operand(export: &Bound<'_, PyAny>, wanted: Wanted<'_>) -> PyResult<Operand> {
    /// No order is asked for.
    const UNORDERED: i64 = -1;
    let py = export.py();
    let arguments = PyDict::new(py);
    if wanted.place != DeviceId::Cpu {
        let stream = wanted.streams.map_or(Ok(UNORDERED), |streams| streams.of_dlpack(py))?;
        arguments.set_item("stream", stream)?;
    }
    let capsule = call(export, &PyTuple::empty(py), Some(&arguments)).map_err(|refusal| {
        let problem = format!("cannot be exported by DLPack: {refusal}");
        wanted.refused_for(py, problem, refusal)
    })?;
    // SAFETY: a live object, and a name that is static.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dltensor".as_ptr()) };
    if managed.is_null() {
        return Err(wanted.refused(py, format_args!("gives no capsule of DLPack: {}", PyErr::fetch(py))));
    }
    // SAFETY: DLPack has the tensor first in what a capsule of this name points to; it lives as long as the capsule.
    let tensor = unsafe { &*managed.cast::<Tensor>() };
    let place = match tensor.device_type {
        CPU => DeviceId::Cpu,
        CUDA => DeviceId::Cuda(usize::try_from(tensor.device_id).unwrap_or(usize::MAX)),
        CUDA_HOST if wanted.place == DeviceId::Cpu => DeviceId::Cpu,
        CUDA_MANAGED => wanted.place,
        other => return Err(wanted.refused(py, format_args!("is on a device of DLPack's type {other}"))),
    };
    wanted.check_place(py, place)?;
    let Some(dtype) = dtype_of(tensor.code, tensor.bits, tensor.lanes) else {
        let Tensor { code, bits, lanes, .. } = tensor;
        return Err(wanted.unsupported(py, format_args!("DLPack {code}, {bits} bits, {lanes} lanes")));
    };
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |pointer: *mut i64| match dimensions == 0 || pointer.is_null() {
        true => &[][..],
        // SAFETY: as many numbers as the tensor has dimensions.
        false => unsafe { std::slice::from_raw_parts(pointer, dimensions) },
    };
    let (shape, strides) = (list(tensor.shape), list(tensor.strides));
    let whole = tensor.ndim >= 0 && shape.len() == dimensions;
    let count = count_of(shape, dtype).filter(|_| whole).ok_or_else(|| wanted.impossible(py, shape))?;
    if !strides.is_empty() && !is_contiguous(shape, strides, 1) {
        return Err(wanted.refused(py, "is not contiguous"));
    }
    let address = (tensor.data as u64).checked_add(tensor.byte_offset);
    let address = address.ok_or_else(|| wanted.refused(py, "is beyond the end of the address space"))?;
    // The capsule is not consumed: it deletes the tensor when it goes.
    Ok(Operand::held_by(&capsule, address, count, dtype))
}
