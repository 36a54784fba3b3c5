//! Buffers by Python's buffer protocol.

use fast_allreduce::DeviceId;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

use super::interface::{from_interface, is_extension};
use super::{dlpack, dtype_of, Operand, Required, View};
use crate::interpreter::optional_attribute;

pub fn operand(object: &Bound<'_, PyAny>, required: Required<'_>) -> PyResult<Operand> {
    let py = object.py();
    required.check_device(py, DeviceId::Cpu)?;
    let view = match View::export(object, required.is_written) {
        Ok(view) => view,
        Err(refusal) => {
            // The protocol has no format for the types of ml_dtypes.
            let interface = optional_attribute(object, intern!(py, "__array_interface__"))?;
            if let Some(interface) = interface.filter(is_extension) {
                return from_interface(object, &interface, required, false);
            }
            // The type's other arrays are on a GPU.
            if let Some(interface) = optional_attribute(object, intern!(py, "__cuda_array_interface__"))? {
                return from_interface(object, &interface, required, true);
            }
            // Some exporters refuse their other types too. DLPack does not say whether memory may be written.
            if refusal.is_instance_of::<PyBufferError>(py) && !required.is_written {
                if let Some(export) = optional_attribute(object, intern!(py, "__dlpack__"))? {
                    return dlpack::operand(&export, required);
                }
            }
            let problem = match refusal.is_instance_of::<PyValueError>(py) || required.is_written {
                true => format!(
                    "cannot be used: {refusal} (it must be contiguous, and writable where it is written)"
                ),
                false => format!("is not contiguous: {refusal}"),
            };
            return Err(required.refused_for(py, problem, refusal));
        }
    };
    let (format, size) = view.format();
    let native = ['@', '=', if cfg!(target_endian = "little") { '<' } else { '>' }];
    let dtype = match format.trim_start_matches(native) {
        code if code.len() == 1 => code.chars().next().and_then(|code| dtype_of(code, size)),
        _ => None,
    };
    let dtype = dtype.ok_or_else(|| required.unsupported(py, format_args!("{format:?} of {size} bytes")))?;
    let (address, bytes) = view.memory();
    Ok(Operand::viewed(view, address, bytes / size, dtype))
}
