//! A call of a communicator: its buffers, the streams that it goes on, and how it is carried out. The collectives are in
//! `collectives.rs` and `fused.rs`, messages in `messages.rs`.

use fast_allreduce::{Collective, DType, Error};
use pyo3::prelude::*;

use crate::buffer::{Operand, Wanted};
use crate::communicator::Communicator;
use crate::errors::{invalid, raised};
use crate::interrupt::in_call;
use crate::streams::Streams;

/// A call with its streams.
pub struct Call<'a> {
    pub communicator: &'a Communicator,
    pub streams: Streams,
}

impl Communicator {
    /// A call that was `given` a stream, or none, with these buffers, of which the last are written.
    pub fn call<'py>(
        &self,
        py: Python<'py>,
        given: Option<&Bound<'py, PyAny>>,
        buffers: &[Option<&Bound<'py, PyAny>>],
    ) -> PyResult<Call<'_>> {
        let streams = Streams::of(py, self.place, given, buffers)?;
        Ok(Call { communicator: self, streams })
    }

    /// The rank that an argument names.
    pub fn rank_named(&self, py: Python<'_>, name: &str, rank: i64) -> PyResult<usize> {
        let world_size = self.world_size;
        let Ok(rank) = usize::try_from(rank) else {
            return Err(invalid(py, format!("{name} is {rank}, and ranks are 0 to {}", world_size - 1)));
        };
        match rank < world_size {
            true => Ok(rank),
            false => Err(raised(py, Error::RankOutOfRange { rank, world_size })),
        }
    }

    pub fn counts(&self, py: Python<'_>, name: &str, counts: &[usize]) -> PyResult<()> {
        match counts.len() == self.world_size {
            true => Ok(()),
            false => {
                Err(invalid(py, format!("{name} has {} numbers for {} ranks", counts.len(), self.world_size)))
            }
        }
    }

    /// An equal share of a buffer for each rank.
    pub fn share(&self, py: Python<'_>, name: &str, operand: &Operand) -> PyResult<usize> {
        let (count, world_size) = (operand.count, self.world_size);
        match count % world_size {
            0 => Ok(count / world_size),
            _ => Err(invalid(
                py,
                format!("{name} has {count} elements, which {world_size} ranks cannot share equally"),
            )),
        }
    }
}

impl Call<'_> {
    fn operand(&self, name: &'static str, object: &Bound<'_, PyAny>, written: bool) -> PyResult<Operand> {
        let (place, streams) = (self.communicator.place, Some(&self.streams));
        Operand::of(object, Wanted { name, place, written, streams })
    }

    pub fn read(&self, name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Operand> {
        self.operand(name, object, false)
    }

    pub fn written(&self, name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Operand> {
        self.operand(name, object, true)
    }

    /// Carries out a collective between two buffers, which may be one. Without one there are no elements on that side.
    pub fn carry_out(
        &self,
        py: Python<'_>,
        collective: Collective<'_>,
        (input, output): (Option<&Operand>, Option<&Operand>),
        count: usize,
    ) -> PyResult<()> {
        let any = self.communicator.live(py)?;
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
        let (rank, world_size) = (self.communicator.rank, self.communicator.world_size);
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
        let (stream, streams) = (self.streams.of_call(py)?, &self.streams);
        in_call(py, any, |any| {
            streams.before(any)?;
            // SAFETY: the operands hold memory of the communicator's device with as many elements as the collective
            // reads and writes, which has just been compared; Python's caller leaves it alone meanwhile.
            unsafe { any.collective(stream, collective, addresses, count, dtype) }?;
            streams.after(any)
        })
    }
}
