//! Buffers by Python's buffer protocol.

use fast_allreduce::DeviceId;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

use crate::buffer::{dtype_of, Operand, Wanted};
use crate::dlpack;
use crate::interface::{from_interface, is_extension};
use crate::user_code::optional_attribute;
use crate::view::View;

pub fn operand(object: &Bound<'_, PyAny>, wanted: Wanted<'_>) -> PyResult<Operand> {
    let py = object.py();
    wanted.check_place(py, DeviceId::Cpu)?;
    let view = match View::export(object, wanted.written) {
        Ok(view) => view,
        Err(refusal) => {
            // The protocol has no format for the types of ml_dtypes.
            let interface = optional_attribute(object, intern!(py, "__array_interface__"))?;
            if let Some(interface) = interface.filter(is_extension) {
                return from_interface(object, &interface, wanted, false);
            }
            // Nor do some exporters have one. What they export by DLPack does not say whether it may be written.
            if refusal.is_instance_of::<PyBufferError>(py) && !wanted.written {
                if let Some(export) = optional_attribute(object, intern!(py, "__dlpack__"))? {
                    return dlpack::operand(&export, wanted);
                }
            }
            let problem = match refusal.is_instance_of::<PyValueError>(py) || wanted.written {
                true => format!(
                    "cannot be used: {refusal} (it must be contiguous, and writable where it is written)"
                ),
                false => format!("is not contiguous: {refusal}"),
            };
            return Err(wanted.refused_for(py, problem, refusal));
        }
    };
    let (format, size) = view.format();
    let native = ['@', '=', if cfg!(target_endian = "little") { '<' } else { '>' }];
    let dtype = match format.trim_start_matches(native) {
        code if code.len() == 1 => code.chars().next().and_then(|code| dtype_of(code, size)),
        _ => None,
    };
    let dtype = dtype.ok_or_else(|| wanted.unsupported(py, format_args!("{format:?} of {size} bytes")))?;
    let (address, bytes) = view.memory();
    Ok(Operand::viewed(view, address, bytes / size, dtype))
}
