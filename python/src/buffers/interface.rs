//! Buffers by `__array_interface__` and `__cuda_array_interface__`: dictionaries that describe an array.

use fast_allreduce::{DType, DeviceId};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{dtype_of, Operand, Required};
use crate::errors::invalid;
use crate::interpreter::optional_attribute;

/// The first version in which a GPU's interface names its stream.
const ORDERED: u64 = 3;

/// Returns an entry, or `None` if it is missing.
fn entry<'py>(interface: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    interface.cast::<PyDict>()?.get_item(name)
}

/// Returns whether a GPU's interface has a version that names streams.
pub fn is_ordered(interface: &Bound<'_, PyAny>) -> bool {
    let version = entry(interface, "version").ok().flatten();
    version.and_then(|version| version.extract::<u64>().ok()).is_some_and(|version| version >= ORDERED)
}

/// Returns the stream that a GPU's interface names, on which the memory is in use.
pub fn stream_of(interface: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    let stream = match is_ordered(interface) {
        true => entry(interface, "stream")?.filter(|stream| !stream.is_none()),
        false => None,
    };
    let Some(stream) = stream else { return Ok(None) };
    match stream.extract::<u64>() {
        Ok(handle) if handle != 0 => Ok(Some(handle)),
        _ => Err(invalid(
            interface.py(),
            format!(
                "__cuda_array_interface__ names the stream {}: 1 is the legacy default stream, 2 the per-thread one, \
                 and others are their handles",
                stream.repr()?
            ),
        )),
    }
}

/// Returns whether an interface has elements without a type letter, as arrays of ml_dtypes have.
pub fn is_extension(interface: &Bound<'_, PyAny>) -> bool {
    let typestr = entry(interface, "typestr").ok().flatten();
    let typestr = typestr.and_then(|typestr| typestr.extract::<String>().ok());
    typestr.is_some_and(|typestr| is_extension_type(&typestr))
}

fn is_extension_type(typestr: &str) -> bool {
    matches!(typestr.get(1..), Some("V1" | "V2" | "f1"))
}

/// Returns the buffer that an interface describes. The object itself keeps the memory in place.
pub fn from_interface(
    object: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyAny>,
    required: Required<'_>,
    on_gpu: bool,
) -> PyResult<Operand> {
    let py = object.py();
    let optional = |name: &str| {
        let found = entry(interface, name);
        found.map_err(|_| required.refused(py, "has an array interface that is no dictionary"))
    };
    let entry = |name: &str| {
        let found = optional(name)?;
        found.ok_or_else(|| required.refused(py, format_args!("has an array interface without {name:?}")))
    };
    let wrong = |name: &'static str| {
        move |error: PyErr| {
            let problem = format!("has an array interface with an invalid {name:?}: {error}");
            required.refused_for(py, problem, error)
        }
    };
    let (address, readonly): (u64, bool) = entry("data")?.extract().map_err(wrong("data"))?;
    // The interface names no GPU. The library looks up the address's.
    let device = match (on_gpu, required.device) {
        (false, _) => DeviceId::Cpu,
        (true, DeviceId::Cpu) => DeviceId::Cuda(0),
        (true, gpu) => gpu,
    };
    required.check_device(py, device)?;
    if readonly && required.is_written {
        return Err(required.read_only(py));
    }
    let typestr: String = entry("typestr")?.extract().map_err(wrong("typestr"))?;
    let size = typestr.get(2..).and_then(|size| size.parse().ok()).unwrap_or(0);
    let foreign = if cfg!(target_endian = "little") { '>' } else { '<' };
    let dtype = match typestr.starts_with(foreign) {
        true => None,
        false if is_extension_type(&typestr) => extension(object, size)?,
        false => typestr.chars().nth(1).and_then(|code| dtype_of(code, size)),
    };
    let dtype = dtype.ok_or_else(|| required.unsupported(py, &typestr))?;
    let shape: Vec<i64> = entry("shape")?.extract().map_err(wrong("shape"))?;
    let count = count_of(&shape, dtype).ok_or_else(|| required.impossible(py, &shape))?;
    if let Some(strides) = optional("strides")?.filter(|strides| !strides.is_none()) {
        let strides: Vec<i64> = strides.extract().map_err(wrong("strides"))?;
        if !is_contiguous(&shape, &strides, size as i64) {
            return Err(required.refused(py, "is not contiguous"));
        }
    }
    Ok(Operand::held_by(object, address, count, dtype))
}

/// Returns the ml_dtypes type of an array's elements, by its name.
fn extension(object: &Bound<'_, PyAny>, size: usize) -> PyResult<Option<DType>> {
    let Some(dtype) = optional_attribute(object, intern!(object.py(), "dtype"))? else { return Ok(None) };
    let found = match dtype.str()?.to_str()? {
        "bfloat16" => Some(DType::Bf16),
        "float8_e4m3fn" => Some(DType::F8E4M3),
        "float8_e5m2" => Some(DType::F8E5M2),
        _ => None,
    };
    Ok(found.filter(|dtype| dtype.size() == size))
}

/// Returns the number of elements of a shape, or `None` if a length is negative or the bytes exceed the address space.
pub fn count_of(shape: &[i64], dtype: DType) -> Option<usize> {
    if shape.iter().any(|&length| length < 0) {
        return None;
    }
    // Avoids an overflow in a product that ends in zero.
    if shape.contains(&0) {
        return Some(0);
    }
    let count = shape.iter().try_fold(1_usize, |count, &length| count.checked_mul(length as usize))?;
    count.checked_mul(dtype.size()).filter(|&bytes| bytes <= isize::MAX as usize).map(|_| count)
}

/// Returns whether elements are contiguous in C order, `step` apart. `count_of` must have accepted the shape.
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
