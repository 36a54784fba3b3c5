//! The fused allreduce: a residual, a norm of rows and quantised rows in one call.

use fast_allreduce::{Collective, DType, Norm, RawFused, RawQuantizedRows, Scaling};
use pyo3::intern;
use pyo3::prelude::*;

use super::{Call, Object};
use crate::buffers::Operand;
use crate::communicator::Communicator;
use crate::errors::{invalid, OrRaise};
use crate::interpreter::optional_attribute;
use crate::values::Integer;

/// A buffer of a call besides its input and output, with the length and types that the call needs.
struct Extra {
    name: &'static str,
    operand: Operand,
    count: usize,
    dtypes: Vec<DType>,
}

impl Extra {
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let &Self { name, ref operand, count: needed, ref dtypes } = self;
        let (has, dtype) = (operand.count, operand.dtype);
        if !dtypes.contains(&dtype) {
            let needs = dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ");
            return Err(invalid(
                py,
                format!("{name} has elements of type {dtype}, and the call needs {needs}"),
            ));
        }
        // Words of four bytes.
        let has = if dtype == DType::I32 { has * 4 } else { has };
        match has == needed {
            true => Ok(()),
            false => Err(invalid(py, format!("{name} has {has} elements, and the call needs {needed}"))),
        }
    }
}

/// The arguments of quantised rows.
struct Quantized<'a, 'py> {
    scaling: Option<&'a str>,
    numbers: Option<&'a Object<'py>>,
    scales: Option<&'a Object<'py>>,
    global: Option<&'a Object<'py>>,
}

impl<'py> Quantized<'_, 'py> {
    /// Returns the format with its buffers (numbers, scales, and the global scale if it has one), or `None` without a
    /// format.
    fn extras(
        &self,
        call: &Call<'_, 'py>,
        count: usize,
        hidden: usize,
    ) -> PyResult<Option<(Scaling, Vec<Extra>)>> {
        let py = call.py;
        let (scaling, numbers, scales) = match (self.scaling, self.numbers, self.scales) {
            (None, None, None) if self.global.is_none() => return Ok(None),
            (Some(scaling), Some(numbers), Some(scales)) => (scaling, numbers, scales),
            _ => return Err(invalid(py, "scaling, numbers and scales come together")),
        };
        let scaling: Scaling = scaling.parse().or_raise(py)?;
        if scaling.has_global() != self.global.is_some() {
            let needs = if scaling.has_global() { "needs" } else { "has no" };
            return Err(invalid(py, format!("{scaling} {needs} global_scale")));
        }
        let rows = count.checked_div(hidden).unwrap_or(0);
        let types =
            |takes: &dyn Fn(DType) -> bool| DType::ALL.into_iter().filter(|&dtype| takes(dtype)).collect();
        let are_powers = scaling.scale_type() == DType::U8 && !scaling.has_global();
        let are_words = are_powers && scaling.scale_stride(1) != 0;
        let is_scale = |dtype| {
            dtype == scaling.scale_type()
                || dtype == DType::F8E4M3 && scaling.has_global()
                || dtype == DType::I32 && are_words
        };
        let powers = if are_powers { as_bytes(scales)? } else { None };
        let scales = powers.as_ref().unwrap_or(scales);
        let mut extras = vec![
            Extra {
                name: "numbers",
                operand: call.written("numbers", numbers)?,
                count: scaling.number_bytes(count),
                dtypes: types(&|dtype| scaling.takes(dtype)),
            },
            Extra {
                name: "scales",
                operand: call.operand("scales", scales, !scaling.is_given())?,
                count: scaling.scales(rows, hidden),
                dtypes: types(&is_scale),
            },
        ];
        if let Some(global) = self.global {
            let operand = call.read("global_scale", global)?;
            extras.push(Extra { name: "global_scale", operand, count: 1, dtypes: vec![DType::F32] });
        }
        Ok(Some((scaling, extras)))
    }
}

/// Returns a tensor of torch's type of powers of two, which is no element type, as bytes; `None` for other objects.
fn as_bytes<'py>(scales: &Object<'py>) -> PyResult<Option<Object<'py>>> {
    let py = scales.py();
    match optional_attribute(scales, intern!(py, "dtype"))?.map(|dtype| dtype.str()).transpose()? {
        Some(dtype) if dtype == "torch.float8_e8m0fnu" => {
            let bytes = py.import(intern!(py, "torch"))?.getattr(intern!(py, "uint8"))?;
            scales.call_method1(intern!(py, "view"), (bytes,)).map(Some)
        }
        _ => Ok(None),
    }
}

#[pymethods]
impl Communicator {
    #[pyo3(signature = (
        sendbuf, recvbuf = None, *, residual, residual_out = None, norm = None, weight = None, bias = None,
        hidden = None, epsilon = 1e-6, unit_offset = false, sum_out = None, scaling = None, numbers = None,
        scales = None, global_scale = None, stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn allreduce_fused(
        &self,
        sendbuf: &Object,
        recvbuf: Option<&Object>,
        residual: &Object,
        residual_out: Option<&Object>,
        norm: Option<&str>,
        weight: Option<&Object>,
        bias: Option<&Object>,
        hidden: Option<Integer>,
        epsilon: f32,
        unit_offset: bool,
        sum_out: Option<&Object>,
        scaling: Option<&str>,
        numbers: Option<&Object>,
        scales: Option<&Object>,
        global_scale: Option<&Object>,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let py = sendbuf.py();
        let residual_out = residual_out.unwrap_or(residual);
        let read = [Some(sendbuf), Some(residual), weight, bias, global_scale];
        let written = [scales, numbers, sum_out, Some(residual_out), recvbuf];
        let call = self.call(py, stream, &[read, written].concat())?;
        let norm = match norm {
            None => Norm::None,
            Some(name) => Norm::of_name(name, epsilon, unit_offset).or_raise(py)?,
        };
        let is_in_place = recvbuf.map_or(norm != Norm::None && scaling.is_none(), |rows| rows.is(sendbuf));
        let input = call.operand("sendbuf", sendbuf, is_in_place)?;
        let vectors = [("weight", weight), ("bias", bias)]
            .into_iter()
            .filter_map(|(name, vector)| Some((name, call.read(name, vector?))))
            .map(|(name, operand)| Ok((name, operand?)))
            .collect::<PyResult<Vec<_>>>()?;
        let hidden = hidden.map(|hidden| hidden.within(py, "hidden")).transpose()?;
        let hidden = match (hidden.or(vectors.first().map(|(_, vector)| vector.count)), norm) {
            (Some(hidden), _) => hidden,
            (None, Norm::None) => 0,
            _ => return Err(invalid(py, "hidden is None, and no weight gives the length of a row")),
        };
        let quantized = Quantized { scaling, numbers, scales, global: global_scale };
        let quantized = quantized.extras(&call, input.count, hidden)?;

        let dtypes = vec![input.dtype];
        let whole = |name, operand| Extra { name, operand, count: input.count, dtypes: dtypes.clone() };
        let mut extras = vec![whole("residual", call.read("residual", residual)?)];
        let outputs = [
            ("residual_out", Some(residual_out)),
            ("sum_out", sum_out),
            ("recvbuf", recvbuf.filter(|_| !is_in_place)),
        ];
        for (name, output) in outputs {
            if let Some(output) = output {
                extras.push(whole(name, call.written(name, output)?));
            }
        }
        for (name, operand) in vectors {
            extras.push(Extra { name, operand, count: hidden, dtypes: dtypes.clone() });
        }
        let scaling = quantized.as_ref().map(|&(scaling, _)| scaling);
        extras.extend(quantized.into_iter().flat_map(|(_, extras)| extras));
        extras.iter().try_for_each(|extra| extra.check(py))?;

        let find = |name| extras.iter().find(|extra| extra.name == name).map(|extra| &extra.operand);
        let address = |name| find(name).map_or(0, |operand| operand.address);
        let fused = RawFused {
            residual: address("residual"),
            residual_out: address("residual_out"),
            sum: address("sum_out"),
            norm,
            hidden,
            weight: address("weight"),
            bias: address("bias"),
            rows: if is_in_place { input.address } else { address("recvbuf") },
            quantized: scaling.map(|scaling| RawQuantizedRows {
                scaling,
                dtype: find("numbers").map_or(DType::U8, |numbers| numbers.dtype),
                numbers: address("numbers"),
                scales: address("scales"),
                global: address("global_scale"),
            }),
        };
        call.run(Collective::AllReduceFused(&fused), (Some(&input), find("residual_out")), input.count)
    }
}
