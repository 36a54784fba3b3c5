//! Messages between pairs, and the calls that have no buffers.

use fast_allreduce::{Collective, DeviceId, Direction, Transfer};
use pyo3::prelude::*;

use crate::buffer::Operand;
use crate::calls::Call;
use crate::communicator::Communicator;
use crate::errors::invalid;
use crate::group::gathered;
use crate::interrupt::in_call;

impl Call<'_> {
    /// A message, now or with the thread's group.
    fn message(
        self,
        py: Python<'_>,
        direction: Direction,
        operand: Operand,
        peer: i64,
        tag: i64,
    ) -> PyResult<()> {
        let any = self.communicator.live(py)?;
        let stream = self.streams.of_call(py)?;
        let peer = self.communicator.rank_named(py, "peer", peer)?;
        let tag = u32::try_from(tag)
            .map_err(|_| invalid(py, format!("tag is {tag}, and has 32 bits without a sign")))?;
        let Operand { address, count, dtype, .. } = operand;
        let transfer = Transfer { direction, peer, address, count, dtype, tag };
        let Some((_held, streams)) = gathered(&any, stream, transfer, (operand, self.streams)) else {
            return Ok(());
        };
        in_call(py, any, |any| {
            streams.before(any)?;
            // SAFETY: the operand holds the memory, which is of the communicator's device.
            unsafe { any.transfer(stream, &[transfer]) }?;
            streams.after(any)
        })
    }
}

#[pymethods]
impl Communicator {
    #[pyo3(signature = (sendbuf, peer, *, tag = 0, stream = None))]
    fn send(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        peer: i64,
        tag: i64,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let call = self.call(py, stream, &[Some(sendbuf)])?;
        let operand = call.read("sendbuf", sendbuf)?;
        call.message(py, Direction::Send, operand, peer, tag)
    }

    #[pyo3(signature = (recvbuf, peer, *, tag = 0, stream = None))]
    fn recv(
        &self,
        py: Python<'_>,
        recvbuf: &Bound<'_, PyAny>,
        peer: i64,
        tag: i64,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let call = self.call(py, stream, &[Some(recvbuf)])?;
        let operand = call.written("recvbuf", recvbuf)?;
        call.message(py, Direction::Recv, operand, peer, tag)
    }

    #[pyo3(signature = (*, stream = None))]
    fn barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        if self.place != DeviceId::Cpu && stream.is_none() {
            return in_call(py, self.live(py)?, |any| any.barrier());
        }
        self.call(py, stream, &[])?.carry_out(py, Collective::Barrier, (None, None), 0)
    }

    #[pyo3(signature = (*, stream = None))]
    fn synchronize(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = self.call(py, stream, &[])?.streams.of_call(py)?;
        // SAFETY: the caller has said that it is a stream.
        in_call(py, self.live(py)?, |any| unsafe { any.synchronize(stream) })
    }
}
