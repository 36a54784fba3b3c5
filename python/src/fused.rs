//! Allreduces that go on with their sums, or move less than the elements.

use fast_allreduce::{
    Collective, DType, Epilogue, QuantizedTransport, RawQuantizedRows, RawRmsNorm, ScaleLayout, Scaling,
    Transport,
};
use pyo3::prelude::*;

use crate::buffer::Operand;
use crate::calls::Call;
use crate::communicator::Communicator;
use crate::errors::{invalid, raised};

impl Call<'_> {
    /// A residual, and where it goes with the sum.
    fn residuals(
        &self,
        residual: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(Operand, Operand)> {
        match out {
            None => Ok((self.written("residual", residual)?, self.written("residual", residual)?)),
            Some(out) => Ok((self.read("residual", residual)?, self.written("residual_out", out)?)),
        }
    }
}

/// How rows become the numbers of `normed`, which has as many elements as the call.
fn quantized(
    py: Python<'_>,
    (name, scales): (&str, &Operand),
    scaling: Scaling,
    normed: &Operand,
    (count, hidden): (usize, usize),
) -> PyResult<RawQuantizedRows> {
    let needed = scaling.count(count.checked_div(hidden).unwrap_or(0), hidden);
    if normed.count != count {
        let has = normed.count;
        return Err(invalid(py, format!("recvbuf has {has} elements, and the call needs {count}")));
    }
    if scales.dtype != DType::F32 {
        return Err(invalid(py, format!("{name} has elements of type {}, and scales are f32", scales.dtype)));
    }
    if scales.count != needed {
        let has = scales.count;
        let needs = match scaling {
            Scaling::Given => "1".to_owned(),
            _ => format!("{}, one for each row, or {needed}, one for each 128 of it", count / hidden.max(1)),
        };
        return Err(invalid(py, format!("{name} has {has} elements, and the call needs {needs}")));
    }
    Ok(RawQuantizedRows::Bytes { dtype: normed.dtype, scaling, scales: scales.address })
}

/// How rows become nvfp4 in `normed`, two elements in a byte.
fn nvfp4(
    py: Python<'_>,
    (scales, global): (&Operand, &Operand),
    layout: ScaleLayout,
    normed: &Operand,
    (count, hidden): (usize, usize),
) -> PyResult<RawQuantizedRows> {
    let rows = count.checked_div(hidden).unwrap_or(0);
    let (byte, float) = (DType::U8, DType::F32);
    for (name, operand, needed, dtypes) in [
        ("recvbuf", normed, count / 2, [byte, byte]),
        ("scales", scales, layout.count(rows, hidden), [byte, DType::F8E4M3]),
        ("global_scale", global, 1, [float, float]),
    ] {
        if !dtypes.contains(&operand.dtype) {
            let (has, needs) = (operand.dtype, dtypes[0]);
            return Err(invalid(py, format!("{name} has elements of type {has}, and nvfp4 needs {needs}")));
        }
        if operand.count != needed {
            let has = operand.count;
            return Err(invalid(py, format!("{name} has {has} elements, and the call needs {needed}")));
        }
    }
    Ok(RawQuantizedRows::Nvfp4 { scales: scales.address, layout, global: global.address })
}

#[pymethods]
impl Communicator {
    #[pyo3(signature = (sendbuf, recvbuf = None, *, tolerance, transport = "int8", stream = None))]
    fn allreduce_quantized(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        tolerance: f32,
        transport: &str,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let call = self.call(py, stream, &[Some(sendbuf), recvbuf])?;
        let transport: Transport = transport.parse().map_err(|error| raised(py, error))?;
        let collective = Collective::AllReduceQuantized(QuantizedTransport { transport, tolerance });
        let (input, output) = match recvbuf {
            None => (call.written("sendbuf", sendbuf)?, None),
            Some(recvbuf) => (call.read("sendbuf", sendbuf)?, Some(call.written("recvbuf", recvbuf)?)),
        };
        let both = (Some(&input), Some(output.as_ref().unwrap_or(&input)));
        call.carry_out(py, collective, both, input.count)
    }

    #[pyo3(signature = (sendbuf, residual, residual_out = None, *, stream = None))]
    fn allreduce_add(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        residual: &Bound<'_, PyAny>,
        residual_out: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let call = self.call(py, stream, &[Some(sendbuf), Some(residual), residual_out])?;
        let input = call.read("sendbuf", sendbuf)?;
        let (residual, output) = call.residuals(residual, residual_out)?;
        let epilogue = Epilogue { residual: residual.address, residual_out: 0, norm: None };
        call.carry_on(py, &epilogue, (&input, &output), &[("residual", &residual, input.count)])
    }

    #[pyo3(signature = (
        sendbuf, residual, weight = None, recvbuf = None, residual_out = None, *,
        hidden = None, epsilon = 1e-6, unit_offset = false, scale = None, scales = None, global_scale = None,
        scale_layout = "tiled", sum_out = None, stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn allreduce_rms_norm(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        residual: &Bound<'_, PyAny>,
        weight: Option<&Bound<'_, PyAny>>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        residual_out: Option<&Bound<'_, PyAny>>,
        hidden: Option<usize>,
        epsilon: f32,
        unit_offset: bool,
        scale: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        global_scale: Option<&Bound<'_, PyAny>>,
        scale_layout: &str,
        sum_out: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let call = self.call(
            py,
            stream,
            &[
                Some(sendbuf),
                Some(residual),
                weight,
                scale,
                global_scale,
                scales,
                sum_out,
                residual_out,
                recvbuf,
            ],
        )?;
        let scale_layout = match scale_layout {
            "tiled" => ScaleLayout::Tiled,
            "row_major" => ScaleLayout::RowMajor,
            other => {
                return Err(invalid(
                    py,
                    format!("scale_layout is {other:?}, and is to be tiled or row_major"),
                ))
            }
        };
        let (input, normed) = match recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf)) {
            None => (call.written("sendbuf", sendbuf)?, None),
            Some(recvbuf) => (call.read("sendbuf", sendbuf)?, Some(call.written("recvbuf", recvbuf)?)),
        };
        let (residual, output) = call.residuals(residual, residual_out)?;
        let weight = weight.map(|weight| call.read("weight", weight)).transpose()?;
        let of_weight = weight.as_ref().map(|weight| weight.count);
        let Some(hidden) = hidden.or(of_weight) else {
            return Err(invalid(py, "hidden is None, and there is no weight that tells the length of a row"));
        };
        let scale = scale.map(|scale| call.read("scale", scale)).transpose()?;
        let scales = scales.map(|scales| call.written("scales", scales)).transpose()?;
        let global = global_scale.map(|global| call.read("global_scale", global)).transpose()?;
        let quantized = match (&scale, &scales, &global, &normed) {
            (None, Some(scales), Some(global), Some(normed)) => {
                Some(nvfp4(py, (scales, global), scale_layout, normed, (input.count, hidden))?)
            }
            (_, _, Some(_), _) => {
                return Err(invalid(py, "global_scale comes with scales and recvbuf, and without scale"))
            }
            (None, None, None, _) => None,
            (Some(scale), None, None, Some(normed)) => {
                Some(quantized(py, ("scale", scale), Scaling::Given, normed, (input.count, hidden))?)
            }
            (None, Some(scales), None, Some(normed)) => {
                let rows = input.count.checked_div(hidden).unwrap_or(0);
                let scaling = if scales.count == rows { Scaling::PerRow } else { Scaling::PerGroup };
                Some(quantized(py, ("scales", scales), scaling, normed, (input.count, hidden))?)
            }
            (Some(_), Some(_), None, _) => {
                return Err(invalid(py, "scale is given, and scales are written: one of both"))
            }
            (_, _, None, None) => {
                return Err(invalid(py, "recvbuf is None, and numbers with scales need one"))
            }
        };
        let norm = RawRmsNorm {
            hidden,
            epsilon,
            weight: weight.as_ref().map_or(0, |weight| weight.address),
            unit_offset,
            output: normed.as_ref().unwrap_or(&input).address,
            quantized,
        };
        let mut others = vec![("residual", &residual, input.count)];
        // What is quantised has a type of its own.
        let same = normed.as_ref().filter(|_| quantized.is_none());
        others.extend(same.map(|normed| ("recvbuf", normed, input.count)));
        others.extend(weight.as_ref().map(|weight| ("weight", weight, hidden)));
        let sum = sum_out.map(|sum| call.written("sum_out", sum)).transpose()?;
        let residual_out = if sum.is_some() { output.address } else { 0 };
        others.extend(sum.as_ref().map(|_| ("residual_out", &output, input.count)));
        let epilogue = Epilogue { residual: residual.address, residual_out, norm: Some(norm) };
        call.carry_on(py, &epilogue, (&input, sum.as_ref().unwrap_or(&output)), &others)
    }
}
