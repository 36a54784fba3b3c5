//! The calls of a communicator: collectives, and messages between pairs.

use std::sync::Arc;

use fast_allreduce::{
    Collective, DType, Direction, Epilogue, Error, QuantizedTransport, RawQuantizedRows, RawRmsNorm,
    ReduceOp, ScaleLayout, Scaling, Transfer, Transport,
};
use pyo3::prelude::*;

use crate::buffer::{Operand, Wanted};
use crate::communicator::Communicator;
use crate::errors::{invalid, raised};
use crate::group::gathered;
use crate::interrupt::{waiting, Wait};
use crate::values::{self, Op};

impl Communicator {
    fn read<'py>(&self, name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Operand> {
        Operand::of(object, Wanted { name, place: self.place, written: false })
    }

    fn written<'py>(&self, name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Operand> {
        Operand::of(object, Wanted { name, place: self.place, written: true })
    }

    /// A residual, and where it goes with the sum.
    fn residuals<'py>(
        &self,
        residual: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Operand, Operand)> {
        match out {
            None => Ok((self.written("residual", residual)?, self.written("residual", residual)?)),
            Some(out) => Ok((self.read("residual", residual)?, self.written("residual_out", out)?)),
        }
    }

    /// Carries out a collective between two buffers, which may be one. Without one there are no elements on that side.
    fn carry_out(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        collective: Collective<'_>,
        (input, output): (Option<&Operand>, Option<&Operand>),
        count: usize,
    ) -> PyResult<()> {
        let any = self.live(py)?;
        let dtype = match (input, output) {
            (Some(input), Some(output)) if input.dtype != output.dtype => {
                let (input, output) = (input.dtype, output.dtype);
                return Err(invalid(
                    py,
                    format!("sendbuf has elements of type {input}, recvbuf of type {output}"),
                ));
            }
            (Some(operand), _) | (_, Some(operand)) => operand.dtype,
            (None, None) => DType::U8,
        };
        let (rank, world_size) = (self.rank, self.world_size);
        let sides = [
            ("sendbuf", input, collective.input_len(count, rank, world_size)),
            ("recvbuf", output, collective.output_len(count, rank, world_size)),
        ];
        for (name, operand, expected) in sides {
            let has = operand.map_or(0, |operand| operand.count);
            if operand.is_some() && has != expected {
                return Err(invalid(
                    py,
                    format!("{name} has {has} elements, and {} needs {expected}", collective.name()),
                ));
            }
            if operand.is_none() && expected != 0 {
                return Err(invalid(
                    py,
                    format!("{name} is None, and {} needs {expected} elements", collective.name()),
                ));
            }
        }
        let address = |operand: Option<&Operand>| operand.map_or(0, |operand| operand.address);
        let addresses = [address(input), address(output)];
        let stream = values::stream(stream)?;
        let call = || {
            // SAFETY: the operands hold memory of the communicator's device with as many elements as the collective
            // reads and writes, which has just been compared; Python's caller leaves it alone meanwhile.
            unsafe { any.collective(stream, collective, addresses, count, dtype) }
        };
        let done = waiting(py, || Wait::Call(Arc::clone(&any)), call)?;
        done.map_err(|error| raised(py, error))
    }

    /// A message, now or with the thread's group.
    fn message(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        direction: Direction,
        operand: Operand,
        peer: usize,
        tag: u32,
    ) -> PyResult<()> {
        let any = self.live(py)?;
        let stream = values::stream(stream)?;
        let world_size = self.world_size;
        if peer >= world_size {
            return Err(raised(py, Error::RankOutOfRange { rank: peer, world_size }));
        }
        let Operand { address, count, dtype, .. } = operand;
        let transfer = Transfer { direction, peer, address, count, dtype, tag };
        let Some(_held) = gathered(&any, stream, transfer, operand) else {
            return Ok(());
        };
        let call = || {
            // SAFETY: the operand holds the memory, which is of the communicator's device.
            unsafe { any.transfer(stream, &[transfer]) }
        };
        let done = waiting(py, || Wait::Call(Arc::clone(&any)), call)?;
        done.map_err(|error| raised(py, error))
    }

    /// An equal share of a buffer for each rank.
    fn share(&self, py: Python<'_>, name: &str, operand: &Operand) -> PyResult<usize> {
        let (count, world_size) = (operand.count, self.world_size);
        match count % world_size {
            0 => Ok(count / world_size),
            _ => Err(invalid(
                py,
                format!("{name} has {count} elements, which {world_size} ranks cannot share equally"),
            )),
        }
    }

    fn counts(&self, py: Python<'_>, name: &str, counts: &[usize]) -> PyResult<()> {
        match counts.len() == self.world_size {
            true => Ok(()),
            false => {
                Err(invalid(py, format!("{name} has {} numbers for {} ranks", counts.len(), self.world_size)))
            }
        }
    }

    /// An allreduce that goes on. `others` are what it reads and writes beside, with the elements of each.
    fn carry_on(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        epilogue: &Epilogue,
        (input, output): (&Operand, &Operand),
        others: &[(&str, &Operand, usize)],
    ) -> PyResult<()> {
        for &(name, operand, expected) in others {
            let (has, dtype) = (operand.count, operand.dtype);
            if dtype != input.dtype {
                let theirs = input.dtype;
                let problem = format!("{name} has elements of type {dtype}, sendbuf of type {theirs}");
                return Err(invalid(py, problem));
            }
            if has != expected {
                return Err(invalid(py, format!("{name} has {has} elements, and the call needs {expected}")));
            }
        }
        let collective = Collective::AllReduceEpilogue(epilogue);
        self.carry_out(py, stream, collective, (Some(input), Some(output)), input.count)
    }

    fn root(&self, py: Python<'_>, root: usize) -> PyResult<()> {
        let world_size = self.world_size;
        match root < world_size {
            true => Ok(()),
            false => Err(raised(py, Error::RankOutOfRange { rank: root, world_size })),
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
    layout: &str,
    normed: &Operand,
    (count, hidden): (usize, usize),
) -> PyResult<RawQuantizedRows> {
    let layout = match layout {
        "tiled" => ScaleLayout::Tiled,
        "row_major" => ScaleLayout::RowMajor,
        _ => return Err(invalid(py, format!("scale_layout is {layout:?}, and is to be tiled or row_major"))),
    };
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
    #[pyo3(signature = (sendbuf, recvbuf = None, op = Op(ReduceOp::Sum), *, stream = None))]
    fn allreduce(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        op: Op,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let collective = Collective::AllReduce(op.0);
        match recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf)) {
            None => {
                let data = self.written("sendbuf", sendbuf)?;
                self.carry_out(py, stream, collective, (Some(&data), Some(&data)), data.count)
            }
            Some(recvbuf) => {
                let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
                self.carry_out(py, stream, collective, (Some(&input), Some(&output)), input.count)
            }
        }
    }

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
        let transport: Transport = transport.parse().map_err(|error| raised(py, error))?;
        let collective = Collective::AllReduceQuantized(QuantizedTransport { transport, tolerance });
        let (input, output) = match recvbuf {
            None => (self.written("sendbuf", sendbuf)?, None),
            Some(recvbuf) => (self.read("sendbuf", sendbuf)?, Some(self.written("recvbuf", recvbuf)?)),
        };
        let both = (Some(&input), Some(output.as_ref().unwrap_or(&input)));
        self.carry_out(py, stream, collective, both, input.count)
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
        let input = self.read("sendbuf", sendbuf)?;
        let (residual, output) = self.residuals(residual, residual_out)?;
        let epilogue = Epilogue { residual: residual.address, residual_out: 0, norm: None };
        self.carry_on(py, stream, &epilogue, (&input, &output), &[("residual", &residual, input.count)])
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
        let (input, normed) = match recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf)) {
            None => (self.written("sendbuf", sendbuf)?, None),
            Some(recvbuf) => (self.read("sendbuf", sendbuf)?, Some(self.written("recvbuf", recvbuf)?)),
        };
        let (residual, output) = self.residuals(residual, residual_out)?;
        let weight = weight.map(|weight| self.read("weight", weight)).transpose()?;
        let of_weight = weight.as_ref().map(|weight| weight.count);
        let Some(hidden) = hidden.or(of_weight) else {
            return Err(invalid(py, "hidden is None, and there is no weight that tells the length of a row"));
        };
        let scale = scale.map(|scale| self.read("scale", scale)).transpose()?;
        let scales = scales.map(|scales| self.written("scales", scales)).transpose()?;
        let global = global_scale.map(|global| self.read("global_scale", global)).transpose()?;
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
        let sum = sum_out.map(|sum| self.written("sum_out", sum)).transpose()?;
        let residual_out = if sum.is_some() { output.address } else { 0 };
        others.extend(sum.as_ref().map(|_| ("residual_out", &output, input.count)));
        let epilogue = Epilogue { residual: residual.address, residual_out, norm: Some(norm) };
        self.carry_on(py, stream, &epilogue, (&input, sum.as_ref().unwrap_or(&output)), &others)
    }

    #[pyo3(signature = (sendbuf, recvbuf, *, stream = None))]
    fn allgather(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        self.carry_out(py, stream, Collective::AllGather, (Some(&input), Some(&output)), input.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, counts, *, stream = None))]
    fn allgather_v(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        counts: Vec<usize>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.counts(py, "counts", &counts)?;
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        self.carry_out(py, stream, Collective::AllGatherV(&counts), (Some(&input), Some(&output)), 0)
    }

    #[pyo3(signature = (sendbuf, recvbuf, op = Op(ReduceOp::Sum), *, stream = None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        op: Op,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        self.carry_out(
            py,
            stream,
            Collective::ReduceScatter(op.0),
            (Some(&input), Some(&output)),
            output.count,
        )
    }

    #[pyo3(signature = (sendbuf, recvbuf, counts, op = Op(ReduceOp::Sum), *, stream = None))]
    fn reduce_scatter_v(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        counts: Vec<usize>,
        op: Op,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.counts(py, "counts", &counts)?;
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        self.carry_out(
            py,
            stream,
            Collective::ReduceScatterV(op.0, &counts),
            (Some(&input), Some(&output)),
            0,
        )
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, root = 0, *, stream = None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        root: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.root(py, root)?;
        let collective = Collective::Broadcast { root };
        let target = recvbuf.unwrap_or(sendbuf);
        let output = self.written(if recvbuf.is_some() { "recvbuf" } else { "sendbuf" }, target)?;
        if self.rank != root || target.is(sendbuf) {
            let input = (self.rank == root).then_some(&output);
            return self.carry_out(py, stream, collective, (input, Some(&output)), output.count);
        }
        let input = self.read("sendbuf", sendbuf)?;
        self.carry_out(py, stream, collective, (Some(&input), Some(&output)), output.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, op = Op(ReduceOp::Sum), root = 0, *, stream = None))]
    fn reduce(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        op: Op,
        root: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.root(py, root)?;
        let collective = Collective::Reduce { op: op.0, root };
        if self.rank != root {
            let input = self.read("sendbuf", sendbuf)?;
            return self.carry_out(py, stream, collective, (Some(&input), None), input.count);
        }
        match recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf)) {
            None => {
                let data = self.written("sendbuf", sendbuf)?;
                self.carry_out(py, stream, collective, (Some(&data), Some(&data)), data.count)
            }
            Some(recvbuf) => {
                let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
                self.carry_out(py, stream, collective, (Some(&input), Some(&output)), input.count)
            }
        }
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, root = 0, *, stream = None))]
    fn gather(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        root: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.root(py, root)?;
        let input = self.read("sendbuf", sendbuf)?;
        let recvbuf = recvbuf.filter(|_| self.rank == root);
        let output = recvbuf.map(|recvbuf| self.written("recvbuf", recvbuf)).transpose()?;
        self.carry_out(py, stream, Collective::Gather { root }, (Some(&input), output.as_ref()), input.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, root = 0, *, stream = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        sendbuf: Option<&Bound<'_, PyAny>>,
        recvbuf: &Bound<'_, PyAny>,
        root: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.root(py, root)?;
        let output = self.written("recvbuf", recvbuf)?;
        let sendbuf = sendbuf.filter(|_| self.rank == root);
        let input = sendbuf.map(|sendbuf| self.read("sendbuf", sendbuf)).transpose()?;
        self.carry_out(
            py,
            stream,
            Collective::Scatter { root },
            (input.as_ref(), Some(&output)),
            output.count,
        )
    }

    #[pyo3(signature = (sendbuf, recvbuf, *, stream = None))]
    fn alltoall(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        let share = self.share(py, "sendbuf", &input)?;
        self.carry_out(py, stream, Collective::AllToAll, (Some(&input), Some(&output)), share)
    }

    #[pyo3(signature = (sendbuf, sendcounts, recvbuf, recvcounts, *, stream = None))]
    fn alltoall_v(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        sendcounts: Vec<usize>,
        recvbuf: &Bound<'_, PyAny>,
        recvcounts: Vec<usize>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.counts(py, "sendcounts", &sendcounts)?;
        self.counts(py, "recvcounts", &recvcounts)?;
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        let collective = Collective::AllToAllV { send: &sendcounts, receive: &recvcounts };
        self.carry_out(py, stream, collective, (Some(&input), Some(&output)), 0)
    }

    #[pyo3(signature = (sendbuf, peer, *, tag = 0, stream = None))]
    fn send(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.message(py, stream, Direction::Send, self.read("sendbuf", sendbuf)?, peer, tag)
    }

    #[pyo3(signature = (recvbuf, peer, *, tag = 0, stream = None))]
    fn recv(
        &self,
        py: Python<'_>,
        recvbuf: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.message(py, stream, Direction::Recv, self.written("recvbuf", recvbuf)?, peer, tag)
    }

    #[pyo3(signature = (*, stream = None))]
    fn barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.carry_out(py, stream, Collective::Barrier, (None, None), 0)
    }
}
