//! RMSNorm of rows whose elements are divided among the ranks.

use fast_allreduce::{Collective, RawShardedRows};
use pyo3::prelude::*;

use super::Object;
use crate::communicator::Communicator;
use crate::errors::invalid;
use crate::values::Integer;

#[pymethods]
impl Communicator {
    #[pyo3(signature = (
        sendbuf, recvbuf = None, *, width, columns, totals, weights = None, epsilon = 1e-6, unit_offset = false,
        stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn sharded_rms_norm(
        &self,
        sendbuf: &Object,
        recvbuf: Option<&Object>,
        width: Integer,
        columns: Vec<(Integer, Integer)>,
        totals: Vec<Integer>,
        weights: Option<Vec<Option<Object>>>,
        epsilon: f32,
        unit_offset: bool,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let py = sendbuf.py();
        let width: usize = width.within(py, "width")?;
        let totals = Integer::all_within(&totals, py, "totals")?;
        let columns = columns
            .into_iter()
            .map(|(first, end)| Ok((first.within(py, "columns")?, end.within(py, "columns")?)))
            .collect::<PyResult<Vec<(usize, usize)>>>()?;
        let weights = weights.unwrap_or_else(|| vec![None; columns.len()]);
        if totals.len() != columns.len() || weights.len() != columns.len() {
            return Err(invalid(py, "columns, totals and weights do not have one item for each part"));
        }
        let output = recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf));
        let given: Vec<_> = weights.iter().map(Option::as_ref).collect();
        let call = self.call(py, stream, &[&given[..], &[Some(sendbuf), output]].concat())?;
        let input = call.operand("sendbuf", sendbuf, output.is_none())?;
        let output = output.map(|output| call.written("recvbuf", output)).transpose()?;
        let output = output.as_ref().unwrap_or(&input);
        if (output.count, output.dtype) != (input.count, input.dtype) {
            return Err(invalid(py, "sendbuf and recvbuf differ in length or type"));
        }
        if width == 0 || input.count % width != 0 {
            return Err(invalid(
                py,
                format!("sendbuf has {} elements: no whole rows of {width}", input.count),
            ));
        }
        let (mut parts, mut held) = (Vec::new(), Vec::new());
        for ((&(first, end), &total), weight) in columns.iter().zip(&totals).zip(given) {
            if first > end || end > width {
                return Err(invalid(py, format!("columns are {first} to {end} of rows of {width}")));
            }
            let weight = weight.map(|weight| call.read("weights", weight)).transpose()?;
            if weight
                .as_ref()
                .is_some_and(|weight| (weight.count, weight.dtype) != (end - first, input.dtype))
            {
                return Err(invalid(
                    py,
                    "weights do not have the type of sendbuf and one element for each column",
                ));
            }
            let skipped = (first * input.dtype.size()) as u64;
            parts.push(RawShardedRows {
                input: input.address + skipped,
                output: output.address + skipped,
                input_stride: width,
                output_stride: width,
                columns: end - first,
                total,
                weight: weight.as_ref().map_or(0, |weight| weight.address),
                epsilon,
                unit_offset,
            });
            held.extend(weight);
        }
        call.run_of(Collective::ShardedRmsNorm(&parts), [0; 2], input.count / width, input.dtype)
    }
}
