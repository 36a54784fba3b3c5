//! torch's tensors, without torch: its names are looked up once somebody else has imported it.

use fast_allreduce::{DType, DeviceId};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use crate::buffer::{Operand, Wanted};
use crate::interrupt::is_main_thread;
use crate::user_code::{attribute, call, method};
use crate::values::place;

/// torch's names, once torch has been imported by somebody else.
pub struct Torch {
    module: Py<PyAny>,
    tensor: Py<PyType>,
    dtypes: Vec<(Py<PyAny>, DType)>,
    /// Tells the dispatch keys of a tensor, and the one of negations.
    negations: Option<(Py<PyAny>, Py<PyAny>)>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    /// If the object is a tensor.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<&'static Self>> {
        let py = object.py();
        let torch = match TORCH.get(py) {
            Some(torch) => torch,
            None => {
                // Whoever has a tensor has imported torch.
                let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
                let Some(torch) = modules.cast::<PyDict>()?.get_item("torch")? else {
                    return Ok(None);
                };
                // It may be in the middle of being imported.
                let Ok(tensor) = torch.getattr("Tensor") else {
                    return Ok(None);
                };
                let tensor = tensor.cast_into::<PyType>()?.unbind();
                // Old versions of torch have no unsigned types, nor floats of 8 bits.
                let dtypes = DType::ALL
                    .into_iter()
                    .filter_map(|dtype| Some((torch.getattr(dtype.torch_name()).ok()?.unbind(), dtype)));
                let dtypes = dtypes.collect();
                let negations = || {
                    let native = torch.getattr("_C").ok()?;
                    let negative = native.getattr("DispatchKey").ok()?.getattr("Negative").ok()?;
                    Some((native.getattr("_dispatch_keys").ok()?.unbind(), negative.unbind()))
                };
                let negations = negations();
                TORCH.get_or_init(py, || Self { module: torch.unbind(), tensor, dtypes, negations })
            }
        };
        let kind = object.get_type();
        let is_tensor = kind.is(&torch.tensor) || kind.is_subclass(torch.tensor.bind(py))?;
        Ok(is_tensor.then_some(torch))
    }

    fn is_negated(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        match &self.negations {
            // `is_neg` releases the interpreter's lock. A daemon thread that comes back to it while the interpreter ends is ended
            // within torch, before Python 3.14, which aborts the process. The main thread has no such end, and this takes longer.
            Some((keys_of, negative)) if !is_main_thread() => {
                let keys = keys_of.bind(py).call1((tensor,))?;
                keys.call_method1(intern!(py, "has"), (negative,))?.is_truthy()
            }
            _ => method(tensor, intern!(py, "is_neg"))?.is_truthy(),
        }
    }

    /// The stream that torch puts work with a tensor of a GPU on. `None` for one elsewhere.
    pub fn current_stream(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let py = tensor.py();
        let device = attribute(tensor, intern!(py, "device"))?;
        if !matches!(place(py, device.str()?.to_str()?), Ok(DeviceId::Cuda(_))) {
            return Ok(None);
        }
        let cuda = attribute(self.module.bind(py), intern!(py, "cuda"))?;
        let current = attribute(&cuda, intern!(py, "current_stream"))?;
        let stream = call(&current, &PyTuple::new(py, [device])?, None)?;
        attribute(&stream, intern!(py, "cuda_stream"))?.extract().map(Some)
    }

    pub fn operand(&self, tensor: &Bound<'_, PyAny>, wanted: Wanted<'_>) -> PyResult<Operand> {
        let py = tensor.py();
        let on_cpu = attribute(tensor, intern!(py, "is_cpu"))?.is_truthy()?;
        if !on_cpu || wanted.place != DeviceId::Cpu {
            let device = attribute(tensor, intern!(py, "device"))?.str()?;
            let place = place(py, device.to_str()?).map_err(|_| {
                wanted.refused(
                    py,
                    format_args!("is on {device}, the communicator's buffers are on {}", wanted.place),
                )
            })?;
            wanted.check_place(py, place)?;
        }
        let dtype = attribute(tensor, intern!(py, "dtype"))?;
        let Some((_, known)) = self.dtypes.iter().find(|(known, _)| known.is(&dtype)) else {
            return Err(wanted.unsupported(py, dtype));
        };
        // Most sparse tensors have no such method.
        match method(tensor, intern!(py, "is_contiguous")).and_then(|contiguous| contiguous.is_truthy()) {
            Ok(true) => {}
            Ok(false) => return Err(not_dense(tensor, wanted, None)),
            Err(error) => return Err(not_dense(tensor, wanted, Some(error))),
        }
        if self.is_negated(tensor)? {
            return Err(wanted.refused(py, "has a negation that is pending: call its resolve_neg() first"));
        }
        let address = method(tensor, intern!(py, "data_ptr"))
            .map_err(|error| not_dense(tensor, wanted, Some(error)))?;
        let count = method(tensor, intern!(py, "numel"))?.extract()?;
        Ok(Operand::held_by(tensor, address.extract()?, count, *known))
    }
}

/// Why a tensor's elements are not one after the other: its layout, or what it raises itself.
fn not_dense(tensor: &Bound<'_, PyAny>, wanted: Wanted<'_>, cause: Option<PyErr>) -> PyErr {
    let py = tensor.py();
    let layout =
        attribute(tensor, intern!(py, "layout")).and_then(|layout| layout.str()?.extract::<String>());
    let problem = match (layout, &cause) {
        (Ok(layout), _) if layout.starts_with("torch.sparse") => {
            format!("is sparse ({layout}): give its to_dense(), or its values where all ranks have the same indices")
        }
        (Ok(layout), _) if layout != "torch.strided" => {
            format!("has no elements in memory that could be read ({layout}): give its to_dense()")
        }
        (_, None) => "is not contiguous".to_owned(),
        (_, Some(cause)) => format!("cannot be used: {cause}"),
    };
    match cause {
        None => wanted.refused(py, problem),
        Some(cause) => wanted.refused_for(py, problem, cause),
    }
}
