//! Messages between pairs of ranks.

use fast_allreduce::{Direction, Transfer};
use pyo3::prelude::*;

use super::group::gathered;
use super::{Call, Object};
use crate::buffers::Operand;
use crate::communicator::Communicator;
use crate::errors::invalid;
use crate::interpreter::in_call;

impl Call<'_, '_> {
    /// Sends or receives a message: now, or when the thread's group ends.
    fn transfer(self, direction: Direction, operand: Operand, peer: i64, tag: i64) -> PyResult<()> {
        let py = self.py;
        let any = self.communicator.live(py)?;
        let stream = self.streams.of_call(py)?;
        let peer = self.communicator.check_rank(py, "peer", peer)?;
        let tag = u32::try_from(tag)
            .map_err(|_| invalid(py, format!("tag is {tag}, and must be an unsigned 32-bit number")))?;
        let Operand { address, count, dtype, .. } = operand;
        let transfer = Transfer { direction, peer, address, count, dtype, tag };
        let Some((_held, streams)) = gathered(&any, stream, transfer, (operand, self.streams)) else {
            return Ok(());
        };
        in_call(py, any, |any| {
            streams.before(any)?;
            // SAFETY: the operand holds the memory, which is on the communicator's device.
            unsafe { any.transfer(stream, &[transfer]) }?;
            streams.after(any)
        })
    }
}

#[pymethods]
impl Communicator {
    #[pyo3(signature = (sendbuf, peer, *, tag = 0, stream = None))]
    fn send(&self, sendbuf: &Object, peer: i64, tag: i64, stream: Option<&Object>) -> PyResult<()> {
        let call = self.call(sendbuf.py(), stream, &[Some(sendbuf)])?;
        let operand = call.read("sendbuf", sendbuf)?;
        call.transfer(Direction::Send, operand, peer, tag)
    }

    #[pyo3(signature = (recvbuf, peer, *, tag = 0, stream = None))]
    fn recv(&self, recvbuf: &Object, peer: i64, tag: i64, stream: Option<&Object>) -> PyResult<()> {
        let call = self.call(recvbuf.py(), stream, &[Some(recvbuf)])?;
        let operand = call.written("recvbuf", recvbuf)?;
        call.transfer(Direction::Recv, operand, peer, tag)
    }
}
