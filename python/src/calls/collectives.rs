//! The collectives.

use fast_allreduce::{Collective, DeviceId, QuantizedTransport, ReduceOp, Transport};
use pyo3::prelude::*;

use super::Object;
use crate::communicator::Communicator;
use crate::errors::OrRaise;
use crate::interpreter::in_call;
use crate::values::{Integer, Op};

#[pymethods]
impl Communicator {
    #[pyo3(signature = (sendbuf, recvbuf = None, op = Op(ReduceOp::Sum), *, stream = None))]
    fn allreduce(
        &self,
        sendbuf: &Object,
        recvbuf: Option<&Object>,
        op: Op,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let call = self.call(sendbuf.py(), stream, &[Some(sendbuf), recvbuf])?;
        call.reduce(Collective::AllReduce(op.0), sendbuf, recvbuf)
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, *, tolerance, transport = "int8", stream = None))]
    fn allreduce_quantized(
        &self,
        sendbuf: &Object,
        recvbuf: Option<&Object>,
        tolerance: f32,
        transport: &str,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let call = self.call(sendbuf.py(), stream, &[Some(sendbuf), recvbuf])?;
        let transport: Transport = transport.parse().or_raise(sendbuf.py())?;
        let quantized = QuantizedTransport { transport, tolerance };
        call.reduce(Collective::AllReduceQuantized(quantized), sendbuf, recvbuf)
    }

    #[pyo3(signature = (sendbuf, recvbuf, *, stream = None))]
    fn allgather(&self, sendbuf: &Object, recvbuf: &Object, stream: Option<&Object>) -> PyResult<()> {
        let (call, input, output) = self.call_between(sendbuf, recvbuf, stream)?;
        call.run(Collective::AllGather, (Some(&input), Some(&output)), input.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, counts, *, stream = None))]
    fn allgather_v(
        &self,
        sendbuf: &Object,
        recvbuf: &Object,
        counts: Vec<Integer>,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let (call, input, output) = self.call_between(sendbuf, recvbuf, stream)?;
        let counts = call.counts("counts", &counts)?;
        call.run(Collective::AllGatherV(&counts), (Some(&input), Some(&output)), 0)
    }

    #[pyo3(signature = (sendbuf, recvbuf, op = Op(ReduceOp::Sum), *, stream = None))]
    fn reduce_scatter(
        &self,
        sendbuf: &Object,
        recvbuf: &Object,
        op: Op,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let (call, input, output) = self.call_between(sendbuf, recvbuf, stream)?;
        call.run(Collective::ReduceScatter(op.0), (Some(&input), Some(&output)), output.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, counts, op = Op(ReduceOp::Sum), *, stream = None))]
    fn reduce_scatter_v(
        &self,
        sendbuf: &Object,
        recvbuf: &Object,
        counts: Vec<Integer>,
        op: Op,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let (call, input, output) = self.call_between(sendbuf, recvbuf, stream)?;
        let counts = call.counts("counts", &counts)?;
        call.run(Collective::ReduceScatterV(op.0, &counts), (Some(&input), Some(&output)), 0)
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, root = 0, *, stream = None))]
    fn broadcast(
        &self,
        sendbuf: &Object,
        recvbuf: Option<&Object>,
        root: i64,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let root = self.check_rank(sendbuf.py(), "root", root)?;
        let is_read = self.rank == root || recvbuf.is_none();
        let call = self.call(sendbuf.py(), stream, &[is_read.then_some(sendbuf), recvbuf])?;
        let collective = Collective::Broadcast { root };
        if self.rank == root {
            return call.reduce(collective, sendbuf, recvbuf);
        }
        let output = match recvbuf {
            Some(recvbuf) => call.written("recvbuf", recvbuf)?,
            None => call.written("sendbuf", sendbuf)?,
        };
        call.run(collective, (None, Some(&output)), output.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, op = Op(ReduceOp::Sum), root = 0, *, stream = None))]
    fn reduce(
        &self,
        sendbuf: &Object,
        recvbuf: Option<&Object>,
        op: Op,
        root: i64,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let root = self.check_rank(sendbuf.py(), "root", root)?;
        let recvbuf = recvbuf.filter(|_| self.rank == root);
        let call = self.call(sendbuf.py(), stream, &[Some(sendbuf), recvbuf])?;
        let collective = Collective::Reduce { op: op.0, root };
        if self.rank == root {
            return call.reduce(collective, sendbuf, recvbuf);
        }
        let input = call.read("sendbuf", sendbuf)?;
        call.run(collective, (Some(&input), None), input.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, root = 0, *, stream = None))]
    fn gather(
        &self,
        sendbuf: &Object,
        recvbuf: Option<&Object>,
        root: i64,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let root = self.check_rank(sendbuf.py(), "root", root)?;
        let recvbuf = recvbuf.filter(|_| self.rank == root);
        let call = self.call(sendbuf.py(), stream, &[Some(sendbuf), recvbuf])?;
        let input = call.read("sendbuf", sendbuf)?;
        let output = recvbuf.map(|recvbuf| call.written("recvbuf", recvbuf)).transpose()?;
        call.run(Collective::Gather { root }, (Some(&input), output.as_ref()), input.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, root = 0, *, stream = None))]
    fn scatter(
        &self,
        sendbuf: Option<&Object>,
        recvbuf: &Object,
        root: i64,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let root = self.check_rank(recvbuf.py(), "root", root)?;
        let sendbuf = sendbuf.filter(|_| self.rank == root);
        let call = self.call(recvbuf.py(), stream, &[sendbuf, Some(recvbuf)])?;
        let output = call.written("recvbuf", recvbuf)?;
        let input = sendbuf.map(|sendbuf| call.read("sendbuf", sendbuf)).transpose()?;
        call.run(Collective::Scatter { root }, (input.as_ref(), Some(&output)), output.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, *, stream = None))]
    fn alltoall(&self, sendbuf: &Object, recvbuf: &Object, stream: Option<&Object>) -> PyResult<()> {
        let (call, input, output) = self.call_between(sendbuf, recvbuf, stream)?;
        let share = call.share("sendbuf", &input)?;
        call.run(Collective::AllToAll, (Some(&input), Some(&output)), share)
    }

    #[pyo3(signature = (sendbuf, sendcounts, recvbuf, recvcounts, *, stream = None))]
    fn alltoall_v(
        &self,
        sendbuf: &Object,
        sendcounts: Vec<Integer>,
        recvbuf: &Object,
        recvcounts: Vec<Integer>,
        stream: Option<&Object>,
    ) -> PyResult<()> {
        let (call, input, output) = self.call_between(sendbuf, recvbuf, stream)?;
        let sendcounts = call.counts("sendcounts", &sendcounts)?;
        let recvcounts = call.counts("recvcounts", &recvcounts)?;
        let collective = Collective::AllToAllV { send: &sendcounts, receive: &recvcounts };
        call.run(collective, (Some(&input), Some(&output)), 0)
    }

    #[pyo3(signature = (*, stream = None))]
    fn barrier(&self, py: Python<'_>, stream: Option<&Object>) -> PyResult<()> {
        if self.device != DeviceId::Cpu && stream.is_none() {
            return in_call(py, self.live(py)?, |any| any.barrier());
        }
        self.call(py, stream, &[])?.run(Collective::Barrier, (None, None), 0)
    }

    #[pyo3(signature = (*, stream = None))]
    fn synchronize(&self, py: Python<'_>, stream: Option<&Object>) -> PyResult<()> {
        let stream = self.call(py, stream, &[])?.streams.of_call(py)?;
        // SAFETY: the caller states that it is a stream.
        in_call(py, self.live(py)?, |any| unsafe { any.synchronize(stream) })
    }
}
