//! The array interfaces, which describe an array in a dictionary, and what its shape and strides come to.

use fast_allreduce::DType;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::buffer::{dtype_of, Operand, Place, Wanted};

/// By `__array_interface__` or `__cuda_array_interface__`, which hold the memory by the object itself.
pub fn from_interface(
    object: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyAny>,
    wanted: Wanted,
    on_gpu: bool,
) -> PyResult<Operand> {
    let py = object.py();
    let interface = interface.cast::<PyDict>()?;
    let entry = |name: &str| {
        interface
            .get_item(name)?
            .ok_or_else(|| wanted.refused(py, format_args!("has an array interface without {name:?}")))
    };
    let (address, readonly): (u64, bool) = entry("data")?.extract()?;
    // The interface names no GPU: the library looks up whose the address is.
    wanted.check_place(
        py,
        if on_gpu && wanted.place != Place::Cpu {
            wanted.place
        } else if on_gpu {
            Place::Cuda(0)
        } else {
            Place::Cpu
        },
    )?;
    if readonly && wanted.written {
        return Err(wanted.refused(py, "is read-only, and would be written"));
    }
    let typestr: String = entry("typestr")?.extract()?;
    let size = typestr.get(2..).and_then(|size| size.parse().ok()).unwrap_or(0);
    let foreign = if cfg!(target_endian = "little") { '>' } else { '<' };
    let code = typestr.chars().nth(1).filter(|_| !typestr.starts_with(foreign));
    let dtype = code.and_then(|code| dtype_of(code, size)).ok_or_else(|| wanted.unsupported(py, &typestr))?;
    let shape: Vec<i64> = entry("shape")?.cast::<PyTuple>()?.extract()?;
    let count = count_of(&shape, dtype).ok_or_else(|| wanted.impossible(py, &shape))?;
    if let Some(strides) = interface.get_item("strides")?.filter(|strides| !strides.is_none()) {
        let strides: Vec<i64> = strides.extract()?;
        if !is_contiguous(&shape, &strides, size as i64) {
            return Err(wanted.refused(py, "is not contiguous"));
        }
    }
    Ok(Operand::held_by(object, address, count, dtype))
}

/// Elements of an array of that shape, if its lengths are lengths and its bytes could be in memory.
pub fn count_of(shape: &[i64], dtype: DType) -> Option<usize> {
    if shape.iter().any(|&length| length < 0) {
        return None;
    }
    // Without this one that has no elements could still overflow on the way.
    if shape.contains(&0) {
        return Some(0);
    }
    let count = shape.iter().try_fold(1_usize, |count, &length| count.checked_mul(length as usize))?;
    count.checked_mul(dtype.size()).filter(|&bytes| bytes <= isize::MAX as usize).map(|_| count)
}

/// Whether elements follow each other in C's order, `step` apart. The shape is one that `count_of` has a count for.
pub fn is_contiguous(shape: &[i64], strides: &[i64], step: i64) -> bool {
    let mut expected = step;
    for (&length, &stride) in shape.iter().zip(strides).rev() {
        if length > 1 && stride != expected {
            return shape.contains(&0);
        }
        expected = expected.saturating_mul(length);
    }
    shape.len() == strides.len()
}
