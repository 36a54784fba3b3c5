//! The fused allreduce and reduce-scatter: a residual, a norm of rows and quantised rows in one call; and the
//! all-gather of quantised rows.

use fast_allreduce::{
    Collective, DType, Norm, RawExperts, RawFused, RawGatheredRows, RawQuantizedRows, Scaling,
};
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
    /// Returns a buffer of `count` scales. Bytes can have the type that the format gives them in other libraries.
    fn scales<'py>(
        call: &Call<'_, 'py>,
        (name, scales): (&'static str, &Object<'py>),
        scaling: Scaling,
        count: usize,
        is_written: bool,
    ) -> PyResult<Self> {
        let are_powers = scaling.scale_type() == DType::U8 && !scaling.has_global();
        let are_words = are_powers && scaling.scale_stride(1) != 0;
        let is_scale = |dtype| {
            dtype == scaling.scale_type()
                || dtype == DType::F8E4M3 && scaling.has_global()
                || dtype == DType::I32 && are_words
        };
        let powers = if are_powers { as_bytes(scales)? } else { None };
        let operand = call.operand(name, powers.as_ref().unwrap_or(scales), is_written)?;
        // A word has four scales; formats that take words have whole words.
        let count = if operand.dtype == DType::I32 && are_words { count / 4 } else { count };
        let dtypes = DType::ALL.into_iter().filter(|&dtype| is_scale(dtype)).collect();
        Ok(Self { name, operand, count, dtypes })
    }

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
        let mut extras = vec![
            Extra {
                name: "numbers",
                operand: call.written("numbers", numbers)?,
                count: scaling.number_bytes(count),
                dtypes: types(&|dtype| scaling.takes(dtype)),
            },
            Extra::scales(
                call,
                ("scales", scales),
                scaling,
                scaling.scales(rows, hidden),
                !scaling.is_given(),
            )?,
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

/// The arguments of an input that is computed from experts' rows.
#[derive(Default)]
struct MixtureOfExperts<'a, 'py> {
    table: Option<&'a Object<'py>>,
    weights: Option<&'a Object<'py>>,
    shared: Option<&'a Object<'py>>,
    routed_scale: Option<f32>,
}

impl<'py> MixtureOfExperts<'_, 'py> {
    /// Returns the number of experts of each of `rows` rows with the buffers, or `None` without a table. A message has
    /// `count` elements of type `dtype`.
    fn extras(
        &self,
        call: &Call<'_, 'py>,
        (rows, count): (usize, usize),
        dtype: DType,
    ) -> PyResult<Option<(usize, Vec<Extra>)>> {
        let Some(table) = self.table else {
            return match (self.weights, self.shared, self.routed_scale) {
                (None, None, None) => Ok(None),
                _ => Err(invalid(
                    call.py,
                    "expert_weights, shared_expert and routed_scale need expert_table".to_owned(),
                )),
            };
        };
        let table = call.read("expert_table", table)?;
        let top_k = table.count.checked_div(rows).unwrap_or(1);
        let entries = rows * top_k;
        let mut extras =
            vec![Extra { name: "expert_table", operand: table, count: entries, dtypes: vec![DType::I32] }];
        if let Some(weights) = self.weights {
            let operand = call.read("expert_weights", weights)?;
            let dtypes = vec![DType::F32, dtype];
            extras.push(Extra { name: "expert_weights", operand, count: entries, dtypes });
        }
        if let Some(shared) = self.shared {
            let operand = call.read("shared_expert", shared)?;
            extras.push(Extra { name: "shared_expert", operand, count, dtypes: vec![dtype] });
        }
        Ok(Some((top_k, extras)))
    }
}

#[pymethods]
impl Communicator {
    #[pyo3(signature = (
        sendbuf, recvbuf = None, *, residual, residual_out = None, norm = None, weight = None, bias = None,
        hidden = None, epsilon = 1e-6, unit_offset = false, sum_out = None, scaling = None, numbers = None,
        scales = None, global_scale = None, expert_table = None, expert_weights = None, shared_expert = None,
        routed_scale = None, stream = None
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
        expert_table: Option<&Object>,
        expert_weights: Option<&Object>,
        shared_expert: Option<&Object>,
        routed_scale: Option<f32>,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let quantized = Quantized { scaling, numbers, scales, global: global_scale };
        let (table, weights, shared) = (expert_table, expert_weights, shared_expert);
        let experts = MixtureOfExperts { table, weights, shared, routed_scale };
        let norm = (norm, epsilon, unit_offset);
        let what =
            Arguments { sendbuf, recvbuf, residual, residual_out, norm, weight, bias, hidden, sum_out };
        self.fused(what, quantized, experts, None, stream)
    }

    #[pyo3(signature = (
        sendbuf, recvbuf = None, counts = None, *, residual, residual_out = None, norm = None, weight = None,
        bias = None, hidden = None, epsilon = 1e-6, unit_offset = false, scaling = None, numbers = None,
        scales = None, global_scale = None, stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn reduce_scatter_fused(
        &self,
        sendbuf: &Object,
        recvbuf: Option<&Object>,
        counts: Option<Vec<Integer>>,
        residual: &Object,
        residual_out: Option<&Object>,
        norm: Option<&str>,
        weight: Option<&Object>,
        bias: Option<&Object>,
        hidden: Option<Integer>,
        epsilon: f32,
        unit_offset: bool,
        scaling: Option<&str>,
        numbers: Option<&Object>,
        scales: Option<&Object>,
        global_scale: Option<&Object>,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let quantized = Quantized { scaling, numbers, scales, global: global_scale };
        let (norm, sum_out) = ((norm, epsilon, unit_offset), None);
        let what =
            Arguments { sendbuf, recvbuf, residual, residual_out, norm, weight, bias, hidden, sum_out };
        let counts = counts.map(|counts| Integer::all_within(&counts, sendbuf.py(), "counts")).transpose()?;
        let form = counts.as_deref().map_or(Shares::Equal, Shares::Counts);
        self.fused(what, quantized, MixtureOfExperts::default(), Some(form), stream)
    }
}

#[pymethods]
impl Communicator {
    #[pyo3(signature = (
        numbers, scales, all_numbers, all_scales, counts = None, *, scaling, hidden, stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn allgather_rows(
        &self,
        numbers: &Object,
        scales: &Object,
        all_numbers: &Object,
        all_scales: &Object,
        counts: Option<Vec<Integer>>,
        scaling: &str,
        hidden: Integer,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let py = numbers.py();
        let buffers = [numbers, scales, all_numbers, all_scales].map(Some);
        let call = self.call(py, stream, &buffers)?;
        let scaling: Scaling = scaling.parse().or_raise(py)?;
        let (input, output) = (call.read("numbers", numbers)?, call.written("all_numbers", all_numbers)?);
        let counts = counts.map(|counts| call.counts("counts", &counts)).transpose()?;
        let hidden = hidden.within(py, "hidden")?;
        let row_bytes = scaling.number_bytes(hidden).max(1);
        let scales_of = |numbers: &Operand| scaling.scales(numbers.count / row_bytes, hidden);
        let extras = [
            Extra::scales(&call, ("scales", scales), scaling, scales_of(&input), false)?,
            Extra::scales(&call, ("all_scales", all_scales), scaling, scales_of(&output), true)?,
        ];
        extras.iter().try_for_each(|extra| extra.check(py))?;
        let [scales, all_scales] = extras.map(|extra| extra.operand.address);
        let rows = RawGatheredRows { scaling, hidden, scales, all_scales };
        let collective = match &counts {
            None => Collective::AllGatherRows(&rows),
            Some(counts) => Collective::AllGatherRowsV(&rows, counts),
        };
        call.run(collective, (Some(&input), Some(&output)), input.count)
    }
}

/// Division of a reduce-scatter.
enum Shares<'a> {
    Equal,
    Counts(&'a [usize]),
}

/// The arguments of a fused call, except those of quantised rows.
struct Arguments<'a, 'py> {
    sendbuf: &'a Object<'py>,
    recvbuf: Option<&'a Object<'py>>,
    residual: &'a Object<'py>,
    residual_out: Option<&'a Object<'py>>,
    /// Name, epsilon, and whether the weight has a unit offset.
    norm: (Option<&'a str>, f32, bool),
    weight: Option<&'a Object<'py>>,
    bias: Option<&'a Object<'py>>,
    hidden: Option<Integer>,
    sum_out: Option<&'a Object<'py>>,
}

impl Communicator {
    /// Runs a fused allreduce, or a reduce-scatter with `shares`.
    fn fused<'py>(
        &self,
        what: Arguments<'_, 'py>,
        quantized: Quantized<'_, 'py>,
        experts: MixtureOfExperts<'_, 'py>,
        shares: Option<Shares<'_>>,
        stream: Option<&Object<'py>>,
    ) -> PyResult<()> {
        let Arguments { sendbuf, recvbuf, residual, weight, bias, hidden, sum_out, .. } = what;
        let py = sendbuf.py();
        let residual_out = what.residual_out.unwrap_or(residual);
        let read = [Some(sendbuf), Some(residual), weight, bias, quantized.global];
        let written = [quantized.scales, quantized.numbers, sum_out, Some(residual_out), recvbuf];
        let of_experts = [experts.table, experts.weights, experts.shared];
        let call = self.call(py, stream, &[&read[..], &written, &of_experts].concat())?;
        let (name, epsilon, unit_offset) = what.norm;
        let norm = match name {
            None => Norm::None,
            Some(name) => Norm::of_name(name, epsilon, unit_offset).or_raise(py)?,
        };
        let (has_experts, routed_scale) = (experts.table.is_some(), experts.routed_scale);
        let has_rows = norm != Norm::None && quantized.scaling.is_none();
        let is_in_place =
            shares.is_none() && !has_experts && recvbuf.map_or(has_rows, |rows| rows.is(sendbuf));
        let input = call.operand("sendbuf", sendbuf, is_in_place)?;
        if let Some(Shares::Counts(counts)) = shares {
            call.check_counts("counts", counts)?;
        }
        // Elements of the message, or of the own share.
        let count = match shares {
            None => input.count,
            Some(Shares::Equal) => call.share("sendbuf", &input)?,
            Some(Shares::Counts(counts)) => counts[self.rank],
        };
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
        let residual = call.read("residual", residual)?;
        // With experts, the input is their rows.
        let count = if has_experts { residual.count } else { count };
        let quantized = quantized.extras(&call, count, hidden)?;
        let rows = count.checked_div(hidden).unwrap_or(0);
        let experts = experts.extras(&call, (rows, count), input.dtype)?;
        if has_experts && (hidden == 0 || input.count % hidden != 0) {
            return Err(invalid(py, format!("sendbuf has {} elements, and rows of {hidden}", input.count)));
        }

        let dtypes = vec![input.dtype];
        let whole = |name, operand| Extra { name, operand, count, dtypes: dtypes.clone() };
        let mut extras = vec![whole("residual", residual)];
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
        let top_k = experts.as_ref().map(|&(top_k, _)| top_k);
        extras.extend(experts.into_iter().flat_map(|(_, extras)| extras));
        extras.iter().try_for_each(|extra| extra.check(py))?;

        let find = |name| extras.iter().find(|extra| extra.name == name).map(|extra| &extra.operand);
        // An empty tensor has no address, but it is there: ranks agree on what is there.
        const OF_EMPTY: u64 = align_of::<u128>() as u64;
        let address = |name| {
            find(name).map_or(0, |operand| if operand.count == 0 { OF_EMPTY } else { operand.address })
        };
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
            experts: top_k.map(|top_k| RawExperts {
                table: address("expert_table"),
                top_k,
                rows: input.count / hidden,
                weights: address("expert_weights"),
                weights_dtype: find("expert_weights").map_or(DType::F32, |weights| weights.dtype),
                shared: address("shared_expert"),
                routed_scale: routed_scale.unwrap_or(1.0),
            }),
        };
        let collective = match shares {
            None => Collective::AllReduceFused(&fused),
            Some(Shares::Equal) => Collective::ReduceScatterFused(&fused),
            Some(Shares::Counts(counts)) => Collective::ReduceScatterFusedV(&fused, counts),
        };
        call.run(collective, (Some(&input), find("residual_out")), count)
    }
}
