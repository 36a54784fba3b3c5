//! Buffers of torch tensors. This crate does not import torch: an object can only be a tensor if the program has.

use fast_allreduce::{DType, DeviceId};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use super::dlpack::Exchange;
use super::{Operand, Required};
use crate::interpreter::{attribute, call, is_main_thread, method};
use crate::values::device;

/// Names of torch, looked up once the program has imported it.
pub struct Torch {
    module: Py<PyAny>,
    tensor: Py<PyType>,
    dtypes: Vec<(Py<PyAny>, DType)>,
    /// torch's function that returns a tensor's dispatch keys, and the key of lazy negation.
    negations: Option<(Py<PyAny>, Py<PyAny>)>,
    exchange: Option<&'static Exchange>,
    /// The functions by which compiled code makes tensors in CPU memory, and asks whether gradients are recorded.
    of_graphs: Option<[Py<PyAny>; 2]>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    /// Returns torch's names if the object is a tensor.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<&'static Self>> {
        let py = object.py();
        let torch = match TORCH.get(py) {
            Some(torch) => torch,
            None => {
                let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
                let Some(torch) = modules.cast::<PyDict>()?.get_item("torch")? else {
                    return Ok(None);
                };
                // A partly imported torch has no tensors yet.
                let Ok(tensor) = torch.getattr("Tensor") else {
                    return Ok(None);
                };
                let tensor = tensor.cast_into::<PyType>()?.unbind();
                // Old versions of torch lack unsigned types and 8-bit floats.
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
                let exchange = Exchange::of(tensor.bind(py).as_any());
                let module = torch.unbind();
                let of_graphs = of_graphs(module.bind(py).as_any());
                TORCH.get_or_init(py, || Self { module, tensor, dtypes, negations, exchange, of_graphs })
            }
        };
        // SAFETY: both are types. Unlike `issubclass`, this asks no metaclass.
        let is_tensor = unsafe {
            ffi::PyType_IsSubtype(ffi::Py_TYPE(object.as_ptr()), torch.tensor.as_ptr().cast()) != 0
        };
        Ok(is_tensor.then_some(torch))
    }

    fn is_negated(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        match &self.negations {
            // `is_neg` releases the GIL. A daemon thread that takes it again while the interpreter ends is ended inside
            // torch before Python 3.14, which aborts the process. The main thread cannot end this way, and the dispatch
            // keys take longer.
            Some((keys_of, negative)) if !is_main_thread() => {
                let keys = keys_of.bind(py).call1((tensor,))?;
                keys.call_method1(intern!(py, "has"), (negative,))?.is_truthy()
            }
            _ => method(tensor, intern!(py, "is_neg"))?.is_truthy(),
        }
    }

    /// Returns torch's current stream of a tensor's GPU, or `None` for a tensor that is not on a GPU.
    pub fn current_stream(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let py = tensor.py();
        let on = attribute(tensor, intern!(py, "device"))?;
        if !matches!(device(py, on.str()?.to_str()?), Ok(DeviceId::Cuda(_))) {
            return Ok(None);
        }
        let cuda = attribute(self.module.bind(py), intern!(py, "cuda"))?;
        let current = attribute(&cuda, intern!(py, "current_stream"))?;
        let stream = call(&current, &PyTuple::new(py, [on])?, None)?;
        attribute(&stream, intern!(py, "cuda_stream"))?.extract().map(Some)
    }

    /// Returns the operand of a contiguous tensor in CPU memory, and passes its shape to `view`. Returns `None` for
    /// every other tensor, and if this torch has no table for fast exchange.
    pub fn plain(&self, tensor: &Bound<'_, PyAny>, view: impl FnOnce(&[i64])) -> PyResult<Option<Operand>> {
        let operand = self.described(tensor, view);
        // The table says nothing of a negation.
        Ok(match operand {
            Some(operand) => (!self.is_negated(tensor)?).then_some(operand),
            None => None,
        })
    }

    fn described(&self, tensor: &Bound<'_, PyAny>, view: impl FnOnce(&[i64])) -> Option<Operand> {
        // SAFETY: the object is a tensor, and the table belongs to `torch.Tensor`.
        let (address, count, dtype) = unsafe { self.exchange?.describe(tensor, view) }?;
        Some(Operand::held_by(tensor, address, count, dtype))
    }

    /// Returns whether torch records gradients in this thread.
    pub fn records_gradients(&self, py: Python<'_>) -> PyResult<bool> {
        match &self.of_graphs {
            Some([_, is_enabled]) => is_enabled.bind(py).call0()?.is_truthy(),
            None => Ok(true),
        }
    }

    /// Makes a tensor in CPU memory, whose elements are not set. Returns `None` if this torch has no function for it.
    pub fn empty<'py>(
        &self,
        sizes: &Bound<'py, PyTuple>,
        strides: &Bound<'py, PyTuple>,
        dtype: DType,
    ) -> PyResult<Option<(Bound<'py, PyAny>, Operand)>> {
        let dtype = self.dtypes.iter().find(|(_, known)| *known == dtype);
        let (Some([empty, _]), Some((dtype, _))) = (&self.of_graphs, dtype) else { return Ok(None) };
        let made = empty.bind(sizes.py()).call1((sizes, strides, dtype))?;
        Ok(self.described(&made, |_| ()).map(|operand| (made, operand)))
    }

    pub fn operand(&self, tensor: &Bound<'_, PyAny>, required: Required<'_>) -> PyResult<Operand> {
        if required.device == DeviceId::Cpu {
            if let Some(operand) = self.plain(tensor, |_| ())? {
                return Ok(operand);
            }
        }
        let py = tensor.py();
        let on_cpu = attribute(tensor, intern!(py, "is_cpu"))?.is_truthy()?;
        if !on_cpu || required.device != DeviceId::Cpu {
            let name = attribute(tensor, intern!(py, "device"))?.str()?;
            let on = device(py, name.to_str()?).map_err(|_| required.on_other_device(py, &name))?;
            required.check_device(py, on)?;
        }
        let dtype = attribute(tensor, intern!(py, "dtype"))?;
        let Some((_, known)) = self.dtypes.iter().find(|(known, _)| known.is(&dtype)) else {
            return Err(required.unsupported(py, dtype));
        };
        // Most sparse layouts raise here.
        match method(tensor, intern!(py, "is_contiguous")).and_then(|contiguous| contiguous.is_truthy()) {
            Ok(true) => {}
            Ok(false) => return Err(not_dense(tensor, required, None)),
            Err(error) => return Err(not_dense(tensor, required, Some(error))),
        }
        if self.is_negated(tensor)? {
            return Err(required.refused(py, "has a pending negation: call its resolve_neg() first"));
        }
        let address = method(tensor, intern!(py, "data_ptr"))
            .map_err(|error| not_dense(tensor, required, Some(error)))?;
        let count = method(tensor, intern!(py, "numel"))?.extract()?;
        Ok(Operand::held_by(tensor, address.extract()?, count, *known))
    }
}

fn of_graphs(torch: &Bound<'_, PyAny>) -> Option<[Py<PyAny>; 2]> {
    let native = torch.getattr("_C").ok()?;
    let empty = native.getattr("_dynamo").ok()?.getattr("guards").ok()?.getattr("_empty_strided_cpu").ok()?;
    Some([empty.unbind(), native.getattr("is_grad_enabled").ok()?.unbind()])
}

/// Makes the error of a tensor whose elements are not contiguous, from its layout or the exception that it raised.
fn not_dense(tensor: &Bound<'_, PyAny>, required: Required<'_>, cause: Option<PyErr>) -> PyErr {
    let py = tensor.py();
    let layout =
        attribute(tensor, intern!(py, "layout")).and_then(|layout| layout.str()?.extract::<String>());
    let problem = match (layout, &cause) {
        (Ok(layout), _) if layout.starts_with("torch.sparse") => format!(
            "is sparse ({layout}): pass its to_dense(), or its values if all ranks have the same indices"
        ),
        (Ok(layout), _) if layout != "torch.strided" => {
            format!("has no readable memory ({layout}): pass its to_dense()")
        }
        (_, None) => "is not contiguous".to_owned(),
        (_, Some(cause)) => format!("cannot be used: {cause}"),
    };
    match cause {
        None => required.refused(py, problem),
        Some(cause) => required.refused_for(py, problem, cause),
    }
}
