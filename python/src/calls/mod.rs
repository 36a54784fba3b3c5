//! Calls of a communicator: their buffers, the streams they are enqueued on, and how they run.

mod collectives;
mod direct;
mod fused;
mod group;
mod messages;
mod sharded;
mod streams;

use fast_allreduce::{Collective, DType, Error};
use pyo3::prelude::*;

pub use self::direct::{direct_allreduce, direct_allreduce_rms_norm};
pub use self::group::Group;
use crate::buffers::{Operand, Required};
use crate::communicator::Communicator;
use crate::errors::{invalid, raised};
use crate::interpreter::in_call;
use crate::streams::Streams;
use crate::values::Integer;

/// An argument of any kind: a buffer or a stream.
type Object<'py> = Bound<'py, PyAny>;

/// A call with its streams.
struct Call<'a, 'py> {
    py: Python<'py>,
    communicator: &'a Communicator,
    streams: Streams,
}

impl Communicator {
    /// Begins a call on a stream, or on the one that its buffers name. Buffers that the call writes come last in the
    /// list.
    fn call<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Object<'py>>,
        buffers: &[Option<&Object<'py>>],
    ) -> PyResult<Call<'_, 'py>> {
        let streams = streams::of_buffers(py, self.device, stream, buffers)?;
        Ok(Call { py, communicator: self, streams })
    }

    /// Begins a call that reads one buffer and writes another.
    fn call_between<'py>(
        &self,
        sendbuf: &Object<'py>,
        recvbuf: &Object<'py>,
        stream: Option<&Object<'py>>,
    ) -> PyResult<(Call<'_, 'py>, Operand, Operand)> {
        let call = self.call(sendbuf.py(), stream, &[Some(sendbuf), Some(recvbuf)])?;
        let (input, output) = (call.read("sendbuf", sendbuf)?, call.written("recvbuf", recvbuf)?);
        Ok((call, input, output))
    }

    /// Checks a rank that an argument names.
    fn check_rank(&self, py: Python<'_>, name: &str, rank: i64) -> PyResult<usize> {
        let world_size = self.world_size;
        let Ok(rank) = usize::try_from(rank) else {
            return Err(invalid(py, format!("{name} is {rank}, and ranks are 0 to {}", world_size - 1)));
        };
        match rank < world_size {
            true => Ok(rank),
            false => Err(raised(py, Error::RankOutOfRange { rank, world_size })),
        }
    }
}

impl<'py> Call<'_, 'py> {
    fn operand(&self, name: &'static str, object: &Object<'py>, is_written: bool) -> PyResult<Operand> {
        let (device, streams) = (self.communicator.device, Some(&self.streams));
        Operand::of(object, Required { name, device, is_written, streams })
    }

    /// Returns the operand of a buffer that the call reads.
    fn read(&self, name: &'static str, object: &Object<'py>) -> PyResult<Operand> {
        self.operand(name, object, false)
    }

    /// Returns the operand of a buffer that the call writes.
    fn written(&self, name: &'static str, object: &Object<'py>) -> PyResult<Operand> {
        self.operand(name, object, true)
    }

    /// Returns the counts of an argument that has one for each rank.
    fn counts(&self, name: &str, counts: &[Integer]) -> PyResult<Vec<usize>> {
        let counts = Integer::all_within(counts, self.py, name)?;
        self.check_counts(name, &counts)?;
        Ok(counts)
    }

    fn check_counts(&self, name: &str, counts: &[usize]) -> PyResult<()> {
        let world_size = self.communicator.world_size;
        match counts.len() == world_size {
            true => Ok(()),
            false => {
                Err(invalid(self.py, format!("{name} has {} numbers for {world_size} ranks", counts.len())))
            }
        }
    }

    /// Returns the number of elements of an equal share of a buffer for each rank.
    fn share(&self, name: &str, operand: &Operand) -> PyResult<usize> {
        let (count, world_size) = (operand.count, self.communicator.world_size);
        match count % world_size {
            0 => Ok(count / world_size),
            _ => Err(invalid(
                self.py,
                format!("{name} has {count} elements, which {world_size} ranks cannot share equally"),
            )),
        }
    }

    /// Runs a collective that reduces `sendbuf` into `recvbuf`, or in place without one or if both are the same object.
    fn reduce(
        &self,
        collective: Collective<'_>,
        sendbuf: &Object<'py>,
        recvbuf: Option<&Object<'py>>,
    ) -> PyResult<()> {
        let output = recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf));
        let input = self.operand("sendbuf", sendbuf, output.is_none())?;
        let output = output.map(|recvbuf| self.written("recvbuf", recvbuf)).transpose()?;
        self.run(collective, (Some(&input), Some(output.as_ref().unwrap_or(&input))), input.count)
    }

    /// Runs a collective between two buffers, which may be the same. `None` means that this rank has
    /// no elements on that side.
    fn run(
        &self,
        collective: Collective<'_>,
        (input, output): (Option<&Operand>, Option<&Operand>),
        count: usize,
    ) -> PyResult<()> {
        let py = self.py;
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
            if has != expected {
                let has = operand.map_or("is None".into(), |_| format!("has {has} elements"));
                return Err(invalid(py, format!("{name} {has}, and {} needs {expected}", collective.name())));
            }
        }
        let addresses = [input, output].map(|operand| operand.map_or(0, |operand| operand.address));
        self.run_of(collective, addresses, count, dtype)
    }

    /// Runs a collective whose memory has been checked, by addresses. Its operands are held by the caller.
    fn run_of(
        &self,
        collective: Collective<'_>,
        addresses: [u64; 2],
        count: usize,
        dtype: DType,
    ) -> PyResult<()> {
        let py = self.py;
        let any = self.communicator.live(py)?;
        let (stream, streams) = (self.streams.of_call(py)?, &self.streams);
        in_call(py, any, |any| {
            streams.before(any)?;
            // SAFETY: the operands hold memory of the communicator's device, with as many elements as the collective
            // reads and writes, as checked above. The Python caller does not access them until the
            // call ends.
            unsafe { any.collective(stream, collective, addresses, count, dtype) }?;
            streams.after(any)
        })
    }
}
