//! The collectives.

use fast_allreduce::{Collective, ReduceOp};
use pyo3::prelude::*;

use crate::communicator::Communicator;
use crate::values::Op;

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
        let call = self.call(py, stream, &[Some(sendbuf), recvbuf])?;
        let collective = Collective::AllReduce(op.0);
        match recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf)) {
            None => {
                let data = call.written("sendbuf", sendbuf)?;
                call.carry_out(py, collective, (Some(&data), Some(&data)), data.count)
            }
            Some(recvbuf) => {
                let (input, output) = (call.read("sendbuf", sendbuf)?, call.written("recvbuf", recvbuf)?);
                call.carry_out(py, collective, (Some(&input), Some(&output)), input.count)
            }
        }
    }

    #[pyo3(signature = (sendbuf, recvbuf, *, stream = None))]
    fn allgather(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let call = self.call(py, stream, &[Some(sendbuf), Some(recvbuf)])?;
        let (input, output) = (call.read("sendbuf", sendbuf)?, call.written("recvbuf", recvbuf)?);
        call.carry_out(py, Collective::AllGather, (Some(&input), Some(&output)), input.count)
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
        let call = self.call(py, stream, &[Some(sendbuf), Some(recvbuf)])?;
        self.counts(py, "counts", &counts)?;
        let (input, output) = (call.read("sendbuf", sendbuf)?, call.written("recvbuf", recvbuf)?);
        call.carry_out(py, Collective::AllGatherV(&counts), (Some(&input), Some(&output)), 0)
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
        let call = self.call(py, stream, &[Some(sendbuf), Some(recvbuf)])?;
        let (input, output) = (call.read("sendbuf", sendbuf)?, call.written("recvbuf", recvbuf)?);
        call.carry_out(py, Collective::ReduceScatter(op.0), (Some(&input), Some(&output)), output.count)
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
        let call = self.call(py, stream, &[Some(sendbuf), Some(recvbuf)])?;
        self.counts(py, "counts", &counts)?;
        let (input, output) = (call.read("sendbuf", sendbuf)?, call.written("recvbuf", recvbuf)?);
        call.carry_out(py, Collective::ReduceScatterV(op.0, &counts), (Some(&input), Some(&output)), 0)
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, root = 0, *, stream = None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        root: i64,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let root = self.rank_named(py, "root", root)?;
        let is_read = self.rank == root || recvbuf.is_none();
        let call = self.call(py, stream, &[is_read.then_some(sendbuf), recvbuf])?;
        let collective = Collective::Broadcast { root };
        let target = recvbuf.unwrap_or(sendbuf);
        let output = call.written(if recvbuf.is_some() { "recvbuf" } else { "sendbuf" }, target)?;
        if self.rank != root || target.is(sendbuf) {
            let input = (self.rank == root).then_some(&output);
            return call.carry_out(py, collective, (input, Some(&output)), output.count);
        }
        let input = call.read("sendbuf", sendbuf)?;
        call.carry_out(py, collective, (Some(&input), Some(&output)), output.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, op = Op(ReduceOp::Sum), root = 0, *, stream = None))]
    fn reduce(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        op: Op,
        root: i64,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let root = self.rank_named(py, "root", root)?;
        let recvbuf = recvbuf.filter(|_| self.rank == root);
        let call = self.call(py, stream, &[Some(sendbuf), recvbuf])?;
        let collective = Collective::Reduce { op: op.0, root };
        if self.rank != root {
            let input = call.read("sendbuf", sendbuf)?;
            return call.carry_out(py, collective, (Some(&input), None), input.count);
        }
        match recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf)) {
            None => {
                let data = call.written("sendbuf", sendbuf)?;
                call.carry_out(py, collective, (Some(&data), Some(&data)), data.count)
            }
            Some(recvbuf) => {
                let (input, output) = (call.read("sendbuf", sendbuf)?, call.written("recvbuf", recvbuf)?);
                call.carry_out(py, collective, (Some(&input), Some(&output)), input.count)
            }
        }
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, root = 0, *, stream = None))]
    fn gather(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        root: i64,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let root = self.rank_named(py, "root", root)?;
        let recvbuf = recvbuf.filter(|_| self.rank == root);
        let call = self.call(py, stream, &[Some(sendbuf), recvbuf])?;
        let input = call.read("sendbuf", sendbuf)?;
        let output = recvbuf.map(|recvbuf| call.written("recvbuf", recvbuf)).transpose()?;
        call.carry_out(py, Collective::Gather { root }, (Some(&input), output.as_ref()), input.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, root = 0, *, stream = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        sendbuf: Option<&Bound<'_, PyAny>>,
        recvbuf: &Bound<'_, PyAny>,
        root: i64,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let root = self.rank_named(py, "root", root)?;
        let sendbuf = sendbuf.filter(|_| self.rank == root);
        let call = self.call(py, stream, &[sendbuf, Some(recvbuf)])?;
        let output = call.written("recvbuf", recvbuf)?;
        let input = sendbuf.map(|sendbuf| call.read("sendbuf", sendbuf)).transpose()?;
        call.carry_out(py, Collective::Scatter { root }, (input.as_ref(), Some(&output)), output.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, *, stream = None))]
    fn alltoall(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let call = self.call(py, stream, &[Some(sendbuf), Some(recvbuf)])?;
        let (input, output) = (call.read("sendbuf", sendbuf)?, call.written("recvbuf", recvbuf)?);
        let share = self.share(py, "sendbuf", &input)?;
        call.carry_out(py, Collective::AllToAll, (Some(&input), Some(&output)), share)
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
        let call = self.call(py, stream, &[Some(sendbuf), Some(recvbuf)])?;
        self.counts(py, "sendcounts", &sendcounts)?;
        self.counts(py, "recvcounts", &recvcounts)?;
        let (input, output) = (call.read("sendbuf", sendbuf)?, call.written("recvbuf", recvbuf)?);
        let collective = Collective::AllToAllV { send: &sendcounts, receive: &recvcounts };
        call.carry_out(py, collective, (Some(&input), Some(&output)), 0)
    }
}
