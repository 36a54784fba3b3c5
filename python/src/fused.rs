//! Allreduces that go on with their sums, or move less than the elements.

use fast_allreduce::{
    Collective, DType, Norm, QuantizedTransport, RawFused, RawQuantizedRows, Scaling, Transport,
};
use pyo3::prelude::*;

use crate::buffer::Operand;
use crate::calls::Call;
use crate::communicator::Communicator;
use crate::errors::{invalid, raised};

type Object<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// A buffer that a call has beside its input and output, and what it is to have.
struct Beside {
    name: &'static str,
    operand: Operand,
    count: usize,
    dtypes: Vec<DType>,
}

impl Beside {
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
        match has == needed {
            true => Ok(()),
            false => Err(invalid(py, format!("{name} has {has} elements, and the call needs {needed}"))),
        }
    }
}

/// Buffers of quantised rows, as Python has them.
struct Quantized<'a, 'py> {
    scaling: Option<&'a str>,
    numbers: Object<'a, 'py>,
    scales: Object<'a, 'py>,
    global: Object<'a, 'py>,
}

impl Quantized<'_, '_> {
    /// Numbers, scales, and the global scale if there is one, of a format.
    fn beside(
        &self,
        call: &Call<'_>,
        py: Python<'_>,
        (count, hidden): (usize, usize),
    ) -> PyResult<Option<(Scaling, Vec<Beside>)>> {
        let (scaling, numbers, scales) = match (self.scaling, self.numbers, self.scales) {
            (None, None, None) if self.global.is_none() => return Ok(None),
            (Some(scaling), Some(numbers), Some(scales)) => (scaling, numbers, scales),
            _ => return Err(invalid(py, "scaling, numbers and scales come together")),
        };
        let scaling: Scaling = scaling.parse().map_err(|error| raised(py, error))?;
        if scaling.has_global() != self.global.is_some() {
            let needs = if scaling.has_global() { "needs" } else { "has no" };
            return Err(invalid(py, format!("{scaling} {needs} global_scale")));
        }
        let scales = match scaling.is_given() {
            true => call.read("scales", scales)?,
            false => call.written("scales", scales)?,
        };
        let rows = count.checked_div(hidden).unwrap_or(0);
        let types =
            |takes: &dyn Fn(DType) -> bool| DType::ALL.into_iter().filter(|&one| takes(one)).collect();
        let is_scale = |dtype| {
            dtype == scaling.scale_type() || dtype == DType::F8E4M3 && scaling.scale_type() == DType::U8
        };
        let mut all = vec![
            Beside {
                name: "numbers",
                operand: call.written("numbers", numbers)?,
                count: scaling.number_bytes(count),
                dtypes: types(&|dtype| scaling.takes(dtype)),
            },
            Beside {
                name: "scales",
                operand: scales,
                count: scaling.scales(rows, hidden),
                dtypes: types(&is_scale),
            },
        ];
        if let Some(global) = self.global {
            let operand = call.read("global_scale", global)?;
            all.push(Beside { name: "global_scale", operand, count: 1, dtypes: vec![DType::F32] });
        }
        Ok(Some((scaling, all)))
    }
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

    #[pyo3(signature = (
        sendbuf, recvbuf = None, *, residual, residual_out = None, norm = None, weight = None, bias = None, hidden = None,
        epsilon = 1e-6, unit_offset = false, sum_out = None, scaling = None, numbers = None, scales = None,
        global_scale = None, stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn allreduce_fused(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Object<'_, '_>,
        residual: &Bound<'_, PyAny>,
        residual_out: Object<'_, '_>,
        norm: Option<&str>,
        weight: Object<'_, '_>,
        bias: Object<'_, '_>,
        hidden: Option<usize>,
        epsilon: f32,
        unit_offset: bool,
        sum_out: Object<'_, '_>,
        scaling: Option<&str>,
        numbers: Object<'_, '_>,
        scales: Object<'_, '_>,
        global_scale: Object<'_, '_>,
        stream: Object<'_, '_>,
    ) -> PyResult<()> {
        let residual_out = residual_out.unwrap_or(residual);
        let read = [Some(sendbuf), Some(residual), weight, bias, global_scale];
        let written = [scales, numbers, sum_out, Some(residual_out), recvbuf];
        let call = self.call(py, stream, &[read, written].concat())?;
        let norm = match norm {
            None => Norm::None,
            Some(name) => Norm::of_name(name, epsilon, unit_offset).map_err(|error| raised(py, error))?,
        };
        let is_in_place = recvbuf.map_or(norm != Norm::None && scaling.is_none(), |rows| rows.is(sendbuf));
        let input = match is_in_place {
            true => call.written("sendbuf", sendbuf)?,
            false => call.read("sendbuf", sendbuf)?,
        };
        let vectors = [("weight", weight), ("bias", bias)]
            .map(|(name, one)| one.map(|object| PyResult::Ok((name, call.read(name, object)?))).transpose());
        let [weight, bias] = vectors;
        let (weight, bias) = (weight?, bias?);
        let told = [&weight, &bias].into_iter().flatten().map(|(_, vector)| vector.count).next();
        let hidden = match (hidden.or(told), norm) {
            (Some(hidden), _) => hidden,
            (None, Norm::None) => 0,
            _ => {
                return Err(invalid(
                    py,
                    "hidden is None, and there is no weight that tells the length of a row",
                ))
            }
        };
        let quantized = Quantized { scaling, numbers, scales, global: global_scale };
        let quantized = quantized.beside(&call, py, (input.count, hidden))?;

        let (count, dtypes) = (input.count, vec![input.dtype]);
        let message = |name, operand| Beside { name, operand, count, dtypes: dtypes.clone() };
        let mut beside = vec![
            message("residual", call.read("residual", residual)?),
            message("residual_out", call.written("residual_out", residual_out)?),
        ];
        if let Some(sum) = sum_out {
            beside.push(message("sum_out", call.written("sum_out", sum)?));
        }
        if let Some(recvbuf) = recvbuf.filter(|_| !is_in_place) {
            beside.push(message("recvbuf", call.written("recvbuf", recvbuf)?));
        }
        for (name, operand) in [weight, bias].into_iter().flatten() {
            beside.push(Beside { name, operand, count: hidden, dtypes: dtypes.clone() });
        }
        let scaling = quantized.as_ref().map(|&(scaling, _)| scaling);
        beside.extend(quantized.into_iter().flat_map(|(_, all)| all));
        beside.iter().try_for_each(|one| one.check(py))?;

        let find = |wanted| beside.iter().find(|one| one.name == wanted).map(|one| &one.operand);
        let at = |name| find(name).map_or(0, |operand| operand.address);
        let fused = RawFused {
            residual: at("residual"),
            residual_out: at("residual_out"),
            sum: at("sum_out"),
            norm,
            hidden,
            weight: at("weight"),
            bias: at("bias"),
            rows: if is_in_place { input.address } else { at("recvbuf") },
            quantized: scaling.map(|scaling| RawQuantizedRows {
                scaling,
                dtype: find("numbers").map_or(DType::U8, |numbers| numbers.dtype),
                numbers: at("numbers"),
                scales: at("scales"),
                global: at("global_scale"),
            }),
        };
        let collective = Collective::AllReduceFused(&fused);
        call.carry_out(py, collective, (Some(&input), find("residual_out")), count)
    }
}
