//! The array interfaces, which describe an array in a dictionary, and what its shape and strides come to.

use fast_allreduce::{DType, DeviceId};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::{dtype_of, Operand, Wanted};
use crate::errors::invalid;
use crate::user_code::optional_attribute;

/// The version from which on an interface of a GPU says of streams what there is to say.
const ORDERED: u64 = 3;

/// An entry that is there.
fn entry<'py>(interface: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    interface.cast::<PyDict>()?.get_item(name)
}

/// Whether an interface of a GPU is of a version that tells of streams.
pub fn is_ordered(interface: &Bound<'_, PyAny>) -> bool {
    let version = entry(interface, "version").ok().flatten();
    version.and_then(|version| version.extract::<u64>().ok()).is_some_and(|version| version >= ORDERED)
}

/// The stream that an interface of a GPU names: its owner has work with the memory on it.
pub fn stream_of(interface: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    let py = interface.py();
    let stream = match is_ordered(interface) {
        true => entry(interface, "stream")?.filter(|stream| !stream.is_none()),
        false => None,
    };
    let Some(stream) = stream else { return Ok(None) };
    match stream.extract::<u64>() {
        Ok(handle) if handle != 0 => Ok(Some(handle)),
        _ => Err(invalid(
            py,
            format!(
                "__cuda_array_interface__ names the stream {}: 1 is the legacy default stream, 2 the per-thread one, and others are \
                 their handles",
                stream.repr()?
            ),
        )),
    }
}

/// Whether an interface is of elements that it has no letter for, as those of ml_dtypes are.
pub fn is_extension(interface: &Bound<'_, PyAny>) -> bool {
    let typestr = entry(interface, "typestr").ok().flatten();
    let typestr = typestr.and_then(|typestr| typestr.extract::<String>().ok());
    typestr.is_some_and(|typestr| is_extension_type(&typestr))
}

fn is_extension_type(typestr: &str) -> bool {
    matches!(typestr.get(1..), Some("V1" | "V2" | "f1"))
}

/// By `__array_interface__` or `__cuda_array_interface__`, which hold the memory by the object itself.
pub fn from_interface(
    object: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyAny>,
    wanted: Wanted<'_>,
    on_gpu: bool,
) -> PyResult<Operand> {
    let py = object.py();
    let optional = |name: &str| {
        let found = entry(interface, name);
        found.map_err(|_| wanted.refused(py, "has an array interface that is no dictionary"))
    };
    let entry = |name: &str| {
        let found = optional(name)?;
        found.ok_or_else(|| wanted.refused(py, format_args!("has an array interface without {name:?}")))
    };
    let wrong = |name: &'static str| {
        move |error: PyErr| {
            let problem =
                format!("has an array interface with another {name:?} than the protocol has: {error}");
            wanted.refused_for(py, problem, error)
        }
    };
    let (address, readonly): (u64, bool) = entry("data")?.extract().map_err(wrong("data"))?;
    // The interface names no GPU: the library looks up whose the address is.
    wanted.check_place(
        py,
        if on_gpu && wanted.place != DeviceId::Cpu {
            wanted.place
        } else if on_gpu {
            DeviceId::Cuda(0)
        } else {
            DeviceId::Cpu
        },
    )?;
    if readonly && wanted.written {
        return Err(wanted.refused(py, "is read-only, and would be written"));
    }
    let typestr: String = entry("typestr")?.extract().map_err(wrong("typestr"))?;
    let size = typestr.get(2..).and_then(|size| size.parse().ok()).unwrap_or(0);
    let foreign = if cfg!(target_endian = "little") { '>' } else { '<' };
    let dtype = match typestr.starts_with(foreign) {
        true => None,
        false if is_extension_type(&typestr) => extension(object, size)?,
        false => typestr.chars().nth(1).and_then(|code| dtype_of(code, size)),
    };
    let dtype = dtype.ok_or_else(|| wanted.unsupported(py, &typestr))?;
    let shape: Vec<i64> = entry("shape")?.extract().map_err(wrong("shape"))?;
    let count = count_of(&shape, dtype).ok_or_else(|| wanted.impossible(py, &shape))?;
    if let Some(strides) = optional("strides")?.filter(|strides| !strides.is_none()) {
        let strides: Vec<i64> = strides.extract().map_err(wrong("strides"))?;
        if !is_contiguous(&shape, &strides, size as i64) {
            return Err(wanted.refused(py, "is not contiguous"));
        }
    }
    Ok(Operand::held_by(object, address, count, dtype))
}

/// The type of ml_dtypes that an array's elements have, by its name.
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
