//! The buffer of any object: torch tensors, the buffer protocol, the array interfaces, DLPack, and raw addresses.

use fast_allreduce::{DType, DeviceId};
use pyo3::intern;
use pyo3::prelude::*;

use super::interface::{from_interface, is_ordered};
use super::view::is_exporter;
use super::{dlpack, exporter, Operand, Required, Torch};
use crate::interpreter::optional_attribute;
use crate::values;

/// Memory by its address, for objects without any of the protocols.
#[pyclass(module = "fast_allreduce", frozen)]
pub struct RawBuffer {
    address: u64,
    count: usize,
    dtype: DType,
    device: DeviceId,
    readonly: bool,
}

#[pymethods]
impl RawBuffer {
    #[new]
    #[pyo3(signature = (address, count, dtype, *, device = "cpu", readonly = false))]
    fn new(
        address: values::Integer,
        count: values::Integer,
        dtype: &Bound<'_, PyAny>,
        device: &str,
        readonly: bool,
    ) -> PyResult<Self> {
        let py = dtype.py();
        let (address, count) = (address.within(py, "address")?, count.within(py, "count")?);
        let device = values::device(py, device)?;
        Ok(Self { address, count, dtype: values::dtype(dtype)?, device, readonly })
    }

    fn __repr__(&self) -> String {
        let Self { address, count, dtype, device, .. } = self;
        format!("RawBuffer({address:#x}, {count}, '{dtype}', device='{device}')")
    }
}

impl Operand {
    /// Returns the buffer of an object of any kind.
    pub fn of(object: &Bound<'_, PyAny>, required: Required<'_>) -> PyResult<Self> {
        let py = object.py();
        // Checked first because it is cheapest; tensors do not have it.
        let exports = is_exporter(object);
        if exports && required.device == DeviceId::Cpu {
            return exporter::operand(object, required);
        }
        if let Some(torch) = Torch::of(object)? {
            return torch.operand(object, required);
        }
        if let Ok(raw) = object.cast::<RawBuffer>() {
            let raw = raw.get();
            required.check_device(py, raw.device)?;
            if raw.readonly && required.is_written {
                return Err(required.read_only(py));
            }
            return Ok(Self::held_by(object, raw.address, raw.count, raw.dtype));
        }
        let interface = optional_attribute(object, intern!(py, "__cuda_array_interface__"))?;
        // The types of some arrays have the buffer protocol, which refuses those on a GPU: CuPy's are an example.
        if exports && interface.is_none() && !dlpack::is_on_gpu(object)? {
            return exporter::operand(object, required);
        }
        // An old version of the interface does not name a stream. DLPack is passed the call's.
        if let Some(interface) = interface.as_ref().filter(|interface| is_ordered(interface)) {
            return from_interface(object, interface, required, true);
        }
        if let Some(export) = optional_attribute(object, intern!(py, "__dlpack__"))? {
            return dlpack::operand(&export, required);
        }
        if let Some(interface) = interface {
            return from_interface(object, &interface, required, true);
        }
        if let Some(interface) = optional_attribute(object, intern!(py, "__array_interface__"))? {
            return from_interface(object, &interface, required, false);
        }
        let kind = object.get_type().name()?;
        Err(required.refused(
            py,
            format_args!(
                "is a {kind}, which has none of: the buffer protocol, DLPack, __array_interface__, \
                 __cuda_array_interface__; pass a RawBuffer"
            ),
        ))
    }
}
