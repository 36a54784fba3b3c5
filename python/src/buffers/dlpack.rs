//! Buffers by DLPack: the capsule that most array libraries export (version 0 of the specification), and the table of
//! functions that torch has for faster exchange (version 1.3).

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use fast_allreduce::{DType, DeviceId};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyDictMethods, PyTuple};

use super::interface::{count_of, is_contiguous};
use super::{Operand, Required};
use crate::interpreter::{call, optional_attribute, parking};

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

impl Tensor {
    fn dtype(&self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.dlpack() == (self.code, self.bits) && self.lanes == 1)
    }

    /// Returns the shape and the strides, which may be missing.
    fn dimensions(&self) -> (&[i64], &[i64]) {
        let dimensions = usize::try_from(self.ndim).unwrap_or(0);
        let list = |pointer: *mut i64| match dimensions == 0 || pointer.is_null() {
            true => &[][..],
            // SAFETY: `ndim` numbers, by the specification.
            false => unsafe { std::slice::from_raw_parts(pointer, dimensions) },
        };
        (list(self.shape), list(self.strides))
    }
}

/// The table of functions of an array type (`DLPackExchangeAPI`), of which this crate uses one.
#[repr(C)]
pub struct Exchange {
    major: u32,
    _minor: u32,
    previous: *const Exchange,
    _allocate_and_convert: [*const c_void; 3],
    /// Describes an array without owning it: 0, or -1 with an exception set.
    describe: Option<unsafe extern "C-unwind" fn(*mut ffi::PyObject, *mut Tensor) -> c_int>,
}

// SAFETY: the library that made it never changes it.
unsafe impl Sync for Exchange {}

impl Exchange {
    /// Returns the table of an array type, if it has one of version 1.
    pub fn of(kind: &Bound<'_, PyAny>) -> Option<&'static Self> {
        let capsule = kind.getattr("__dlpack_c_exchange_api__").ok()?;
        // SAFETY: a live object, and a static name.
        let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
        if table.is_null() {
            drop(PyErr::take(kind.py()));
        }
        // SAFETY: a capsule of this name points to a table that lives as long as the process. Older tables follow newer
        // ones, and the first members are the same in all versions.
        let tables = std::iter::successors(unsafe { table.cast::<Self>().as_ref() }, |table| unsafe {
            table.previous.as_ref()
        });
        tables.into_iter().find(|table| table.major == 1)
    }

    /// Returns the address, the number of elements and their type of an array in CPU memory that is contiguous, and
    /// passes its shape to `view`. Returns `None` for every other array.
    ///
    /// # Safety
    ///
    /// `array` has the type that the table belongs to, or one derived from it.
    pub unsafe fn describe(
        &self,
        array: &Bound<'_, PyAny>,
        view: impl FnOnce(&[i64]),
    ) -> Option<(u64, usize, DType)> {
        let describe = self.describe?;
        let mut tensor = MaybeUninit::<Tensor>::uninit();
        // SAFETY: as the caller states.
        if parking(|| unsafe { describe(array.as_ptr(), tensor.as_mut_ptr()) }) != 0 {
            drop(PyErr::take(array.py()));
            return None;
        }
        // SAFETY: 0 means that it has been written.
        let tensor = unsafe { tensor.assume_init() };
        let dtype = tensor.dtype().filter(|_| tensor.device_type == CPU)?;
        let (shape, strides) = tensor.dimensions();
        let count = count_of(shape, dtype)?;
        if !strides.is_empty() && !is_contiguous(shape, strides, 1) || count > 0 && tensor.data.is_null() {
            return None;
        }
        view(shape);
        Some(((tensor.data as u64).checked_add(tensor.byte_offset)?, count, dtype))
    }
}

/// Returns whether an object's `__dlpack_device__` names a GPU.
pub fn is_on_gpu(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    let Some(device) = optional_attribute(object, intern!(py, "__dlpack_device__"))? else {
        return Ok(false);
    };
    let device = call(&device, &PyTuple::empty(py), None)?.extract::<(c_int, i64)>();
    Ok(device.is_ok_and(|(kind, _)| matches!(kind, CUDA | CUDA_MANAGED)))
}

/// Calls an object's `__dlpack__` with the call's stream, and returns the buffer. Exporters refuse read-only memory
/// themselves, because this version of DLPack cannot mark it.
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
    let Some(dtype) = tensor.dtype() else {
        let Tensor { code, bits, lanes, .. } = tensor;
        return Err(required.unsupported(py, format_args!("DLPack {code}, {bits} bits, {lanes} lanes")));
    };
    let (shape, strides) = tensor.dimensions();
    let is_whole = usize::try_from(tensor.ndim) == Ok(shape.len());
    let count = count_of(shape, dtype).filter(|_| is_whole).ok_or_else(|| required.impossible(py, shape))?;
    if !strides.is_empty() && !is_contiguous(shape, strides, 1) {
        return Err(required.refused(py, "is not contiguous"));
    }
    let address = (tensor.data as u64).checked_add(tensor.byte_offset);
    let address = address.ok_or_else(|| required.refused(py, "is beyond the end of the address space"))?;
    // The capsule is not consumed: it deletes the tensor when it is dropped.
    Ok(Operand::held_by(&capsule, address, count, dtype))
}
