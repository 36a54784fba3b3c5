//! Operators of compiled graphs without Python code around the call, which takes longer than the call itself.
//!
//! These functions take contiguous torch tensors in CPU memory, where torch records no gradients. All other arguments
//! are passed on to the operators in Python, which also raise the errors.

use fast_allreduce::{Collective, DeviceId, Norm, RawFused};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::Object;
use crate::buffers::{Operand, Torch};
use crate::communicator::named;
use crate::interpreter::{call, in_call};
use crate::values::Op;

/// The input of a call, with new tensors of its shape and type.
struct Input<'py> {
    torch: &'static Torch,
    operand: Operand,
    sizes: Bound<'py, PyTuple>,
    strides: Bound<'py, PyTuple>,
}

impl<'py> Input<'py> {
    fn of(tensor: &Object<'py>) -> PyResult<Option<Self>> {
        let py = tensor.py();
        let Some(torch) = Torch::of(tensor)? else { return Ok(None) };
        // Copied before Python allocates anything: its garbage collector may run code that changes the tensor.
        let mut shape = Vec::new();
        let Some(operand) = torch.plain(tensor, |of| shape = of.to_vec())? else { return Ok(None) };
        if torch.records_gradients(py)? {
            return Ok(None);
        }
        let mut strides = vec![1; shape.len()];
        for (index, &length) in shape.iter().enumerate().skip(1).rev() {
            strides[index - 1] = strides[index] * length.max(1);
        }
        let (sizes, strides) = (PyTuple::new(py, shape)?, PyTuple::new(py, strides)?);
        Ok(Some(Self { torch, operand, sizes, strides }))
    }

    /// Returns the operand of another tensor, if it has the same type.
    fn other(&self, tensor: &Object<'py>) -> PyResult<Option<Operand>> {
        let other = match Torch::of(tensor)? {
            Some(torch) => torch.plain(tensor, |_| ())?,
            None => None,
        };
        Ok(other.filter(|other| other.dtype == self.operand.dtype))
    }

    /// Makes a tensor like the input. Returns it with its address.
    fn like(&self) -> PyResult<Option<(Object<'py>, u64)>> {
        let made = self.torch.empty(&self.sizes, &self.strides, self.operand.dtype)?;
        Ok(made.map(|(tensor, operand)| (tensor, operand.address)))
    }

    /// Runs a call from the input to an output.
    fn run(&self, name: &str, collective: Collective<'_>, output: u64) -> PyResult<Option<()>> {
        let py = self.sizes.py();
        let Some(any) = named::live(name).filter(|any| any.device_id() == DeviceId::Cpu) else {
            return Ok(None);
        };
        let Operand { address, count, dtype, .. } = self.operand;
        // SAFETY: the tensors are in CPU memory, have as many elements as the collective reads and writes, and are held
        // until it ends.
        in_call(py, any, |any| unsafe { any.collective(0, collective, [address, output], count, dtype) })
            .map(Some)
    }
}

fn reduced<'py>(input: &Object<'py>, communicator: &str, op: &Object<'py>) -> PyResult<Option<Object<'py>>> {
    let Some(input) = Input::of(input)? else { return Ok(None) };
    let (Ok(Op(op)), Some((output, address))) = (op.extract(), input.like()?) else { return Ok(None) };
    Ok(input.run(communicator, Collective::AllReduce(op), address)?.map(|()| output))
}

/// The operator `allreduce`.
#[pyfunction]
#[pyo3(signature = (input, communicator, op = None))]
pub fn direct_allreduce<'py>(
    input: &Object<'py>,
    communicator: &str,
    op: Option<Object<'py>>,
) -> PyResult<Object<'py>> {
    let py = input.py();
    let op = op.unwrap_or_else(|| intern!(py, "sum").clone().into_any());
    match reduced(input, communicator, &op)? {
        Some(output) => Ok(output),
        None => operator("allreduce", (input, communicator, op).into_pyobject(py)?),
    }
}

fn normed<'py>(
    (input, residual, weight): (&Object<'py>, &Object<'py>, &Object<'py>),
    communicator: &str,
    norm: Norm,
) -> PyResult<Option<(Object<'py>, Object<'py>)>> {
    let Some(input) = Input::of(input)? else { return Ok(None) };
    let (Some(residual), Some(weight)) = (input.other(residual)?, input.other(weight)?) else {
        return Ok(None);
    };
    if residual.count != input.operand.count {
        return Ok(None);
    }
    let (Some((rows, rows_address)), Some((total, total_address))) = (input.like()?, input.like()?) else {
        return Ok(None);
    };
    let fused = RawFused {
        residual: residual.address,
        residual_out: total_address,
        norm,
        hidden: weight.count,
        weight: weight.address,
        rows: rows_address,
        ..RawFused::default()
    };
    Ok(input.run(communicator, Collective::AllReduceFused(&fused), total_address)?.map(|()| (rows, total)))
}

/// The operator `allreduce_rms_norm`.
#[pyfunction]
#[pyo3(signature = (input, residual, weight, communicator, epsilon = 1e-6, unit_offset = false))]
pub fn direct_allreduce_rms_norm<'py>(
    input: &Object<'py>,
    residual: &Object<'py>,
    weight: &Object<'py>,
    communicator: &str,
    epsilon: f32,
    unit_offset: bool,
) -> PyResult<Object<'py>> {
    let py = input.py();
    match normed((input, residual, weight), communicator, Norm::Rms { epsilon, unit_offset })? {
        Some(outputs) => Ok(outputs.into_pyobject(py)?.into_any()),
        None => {
            let arguments = (input, residual, weight, communicator, epsilon, unit_offset);
            operator("allreduce_rms_norm", arguments.into_pyobject(py)?)
        }
    }
}

/// Calls an operator in Python.
fn operator<'py>(name: &str, arguments: Bound<'py, PyTuple>) -> PyResult<Object<'py>> {
    let operators = arguments.py().import("fast_allreduce.operators.definitions")?.getattr("KERNELS")?;
    call(&operators.cast::<PyDict>()?.as_any().get_item(name)?, &arguments, None)
}
