//! Buffers of any library: torch's tensors, the buffer protocol, the array interfaces, DLPack, and raw addresses.

use fast_allreduce::{DType, DeviceId};
use pyo3::intern;
use pyo3::prelude::*;

use crate::buffer::{Operand, Wanted};
use crate::interface::{from_interface, is_ordered};
use crate::torch::Torch;
use crate::user_code::optional_attribute;
use crate::view::is_exporter;
use crate::{buffer_protocol, dlpack, values};

/// Memory by its address, for what has none of the protocols.
#[pyclass(module = "fast_allreduce", frozen)]
pub struct RawBuffer {
    address: u64,
    count: usize,
    dtype: DType,
    place: DeviceId,
    readonly: bool,
}

#[pymethods]
impl RawBuffer {
    #[new]
    #[pyo3(signature = (address, count, dtype, *, device = "cpu", readonly = false))]
    fn new(
        py: Python<'_>,
        address: u64,
        count: usize,
        dtype: &Bound<'_, PyAny>,
        device: &str,
        readonly: bool,
    ) -> PyResult<Self> {
        let dtype = values::dtype(py, dtype.str()?.to_str()?)?;
        Ok(Self { address, count, dtype, place: values::place(py, device)?, readonly })
    }

    fn __repr__(&self) -> String {
        let Self { address, count, dtype, place, .. } = self;
        format!("RawBuffer({address:#x}, {count}, '{dtype}', device='{place}')")
    }
}

impl Operand {
    /// The buffer of whatever kind of object.
    pub fn of(object: &Bound<'_, PyAny>, wanted: Wanted<'_>) -> PyResult<Self> {
        let py = object.py();
        // First, since it takes least to ask; tensors do not have it.
        if is_exporter(object) {
            return buffer_protocol::operand(object, wanted);
        }
        if let Some(torch) = Torch::of(object)? {
            return torch.operand(object, wanted);
        }
        if let Ok(raw) = object.cast::<RawBuffer>() {
            let raw = raw.get();
            wanted.check_place(py, raw.place)?;
            if raw.readonly && wanted.written {
                return Err(wanted.refused(py, "is read-only, and would be written"));
            }
            return Ok(Self::held_by(object, raw.address, raw.count, raw.dtype));
        }
        let interface = optional_attribute(object, intern!(py, "__cuda_array_interface__"))?;
        // One of an old version says nothing of streams, which DLPack does.
        if let Some(interface) = interface.as_ref().filter(|interface| is_ordered(interface)) {
            return from_interface(object, interface, wanted, true);
        }
        if let Some(export) = optional_attribute(object, intern!(py, "__dlpack__"))? {
            return dlpack::operand(&export, wanted);
        }
        if let Some(interface) = interface {
            return from_interface(object, &interface, wanted, true);
        }
        if let Some(interface) = optional_attribute(object, intern!(py, "__array_interface__"))? {
            return from_interface(object, &interface, wanted, false);
        }
        let kind = object.get_type().name()?;
        Err(wanted.refused(
            py,
            format_args!(
                "is a {kind}, which has none of: the buffer protocol, DLPack, __array_interface__, \
                 __cuda_array_interface__; give a RawBuffer"
            ),
        ))
    }
}
