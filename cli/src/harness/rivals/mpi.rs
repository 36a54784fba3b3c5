//! MPI's collectives on the host's memory.

use std::ffi::{c_int, c_void};

use fast_allreduce::{bootstrap, CallKind, DType, ReduceOp, MAX_RANKS};
use mpi::environment::is_initialized;
use mpi::ffi;

use super::mpi_names::{datatype, operation};
use crate::failure::Failure;
use crate::harness::contender::{Placement, Rival};
use crate::harness::device::host::{Cpu, Memory};
use crate::harness::work::Work;

/// The world that an MPI launcher started: the same ranks as this crate's.
pub struct Mpi {
    /// `MPI_IN_PLACE`.
    in_place: *const c_void,
}

impl Mpi {
    /// Fails if there is no MPI world, and says how to start one.
    pub fn new() -> Result<Self, String> {
        if !is_initialized() {
            return Err("this run has no world of MPI: start it under mpirun, as in \
                 `mpirun -np 4 fast-allreduce compare --vs mpi`"
                .into());
        }
        // A macro of mpi.h that the bindings lack.
        let library = bootstrap::Mpi::library();
        let address = match &library {
            name if name.starts_with("Open MPI") => 1,
            name if name.starts_with("MPICH") => usize::MAX,
            _ => {
                return Err(format!(
                    "the value of MPI_IN_PLACE in {library} is unknown: use Open MPI or MPICH"
                ))
            }
        };
        Ok(Self { in_place: address as *const c_void })
    }

    /// # Safety
    ///
    /// `input` points to the elements that this call reads, and `output` to those that it writes, which nothing
    /// else uses; one of them may be `MPI_IN_PLACE` as the standard allows it for the collective.
    unsafe fn call(&self, work: &Work, input: *const c_void, output: *mut c_void) -> Result<(), Failure> {
        let refuse = |what: String| Failure::Usage(format!("MPI's {} {what}", work.kind.name()));
        let elements = work.elements();
        if i32::try_from(elements).is_err() {
            return Err(refuse(format!("takes no {elements} elements: give a smaller --maxbytes")));
        }
        let missing = || refuse(format!("has no {} of {}", work.op, work.dtype));
        let dtype = datatype(work.dtype).ok_or_else(missing)?;
        let op = operation(if work.kind.reduces() { work.op } else { ReduceOp::Sum }).ok_or_else(missing)?;
        // All of these are at most `elements`, which fits.
        let (count, root) = (work.shares[0] as c_int, work.root as c_int);
        let shares = counts(work.shares.iter().copied());
        let starts = counts((0..work.world_size()).map(|rank| work.before(rank)));
        let (sends, receives) = (counts(work.sends.iter().copied()), counts(work.receives.iter().copied()));
        let (send_starts, receive_starts) = (running(&sends), running(&receives));
        // SAFETY: the caller guarantees the pointers, `dtype` is their type, and all arrays have a number for each
        // rank. `new` checked that MPI is initialised, it is finalised with this process, and only this thread
        // calls it.
        let status = unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            match work.kind {
                CallKind::AllReduce => ffi::MPI_Allreduce(input, output, count, dtype, op, world),
                CallKind::AllGather => ffi::MPI_Allgather(input, count, dtype, output, count, dtype, world),
                CallKind::AllGatherV => ffi::MPI_Allgatherv(
                    input,
                    shares[work.rank],
                    dtype,
                    output,
                    shares.as_ptr(),
                    starts.as_ptr(),
                    dtype,
                    world,
                ),
                CallKind::ReduceScatter => {
                    ffi::MPI_Reduce_scatter_block(input, output, count, dtype, op, world)
                }
                CallKind::ReduceScatterV => {
                    ffi::MPI_Reduce_scatter(input, output, shares.as_ptr(), dtype, op, world)
                }
                CallKind::Broadcast => ffi::MPI_Bcast(output, count, dtype, root, world),
                CallKind::Reduce => ffi::MPI_Reduce(input, output, count, dtype, op, root, world),
                CallKind::Gather => ffi::MPI_Gather(input, count, dtype, output, count, dtype, root, world),
                CallKind::Scatter => ffi::MPI_Scatter(input, count, dtype, output, count, dtype, root, world),
                CallKind::AllToAll => ffi::MPI_Alltoall(input, count, dtype, output, count, dtype, world),
                CallKind::AllToAllV => ffi::MPI_Alltoallv(
                    input,
                    sends.as_ptr(),
                    send_starts.as_ptr(),
                    dtype,
                    output,
                    receives.as_ptr(),
                    receive_starts.as_ptr(),
                    dtype,
                    world,
                ),
                CallKind::SendRecv => {
                    const TAG: c_int = 0;
                    let (to, from) = (work.right() as c_int, work.left() as c_int);
                    let status = ffi::RSMPI_STATUS_IGNORE;
                    ffi::MPI_Sendrecv(
                        input, count, dtype, to, TAG, output, count, dtype, from, TAG, world, status,
                    )
                }
                _ => return Err(refuse("is not called here".into())),
            }
        };
        match status {
            0 => Ok(()),
            status => Err(refuse(format!("answered {status}"))),
        }
    }
}

/// Converts a number for each rank, all of which fit.
fn counts(numbers: impl Iterator<Item = usize>) -> [c_int; MAX_RANKS] {
    let mut counts = [0; MAX_RANKS];
    counts.iter_mut().zip(numbers).for_each(|(count, number)| *count = number as c_int);
    counts
}

/// Returns for each rank the sum of the counts before it.
fn running(counts: &[c_int; MAX_RANKS]) -> [c_int; MAX_RANKS] {
    let mut sum = 0;
    counts.map(|count| {
        sum += count;
        sum - count
    })
}

impl Rival<Cpu> for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn library(&self) -> String {
        bootstrap::Mpi::library()
    }

    fn refusal(&self, kind: CallKind, dtype: DType, op: ReduceOp) -> Option<&'static str> {
        match (datatype(dtype), operation(op)) {
            (None, _) => Some("MPI has no such type"),
            (_, None) if kind.reduces() => Some("MPI has no such operation"),
            _ => None,
        }
    }

    fn has(&self, kind: CallKind, placement: Placement) -> bool {
        match kind {
            // It has one buffer: the root's input and the others' output.
            CallKind::Broadcast => placement == Placement::InPlace,
            // In place, its result is at the start of the buffer, not at the rank's share.
            CallKind::ReduceScatter | CallKind::ReduceScatterV => placement == Placement::OutOfPlace,
            _ => true,
        }
    }

    fn start(&self, _: &Cpu, work: &Work, input: &Memory, output: &mut Memory) -> Result<(), Failure> {
        let input = &input[..work.bytes(work.input_len())];
        let output = &mut output[..work.bytes(work.output_len())];
        // SAFETY: two slices of the elements that are read and written, borrowed for the call, which is blocking.
        unsafe { self.call(work, input.as_ptr().cast(), output.as_mut_ptr().cast()) }
    }

    fn start_in_place(&self, _: &Cpu, work: &Work, data: &mut Memory) -> Result<(), Failure> {
        let Some((from, to)) = work.in_place() else {
            return Ok(());
        };
        let base = data[..work.bytes(work.elements())].as_mut_ptr();
        let is_root = work.rank == work.root;
        // SAFETY: input and output are within a slice, which is borrowed for the call. `MPI_IN_PLACE` replaces the
        // input, and in a scatter the output; in collectives with a root, only the root passes it.
        unsafe {
            let (input, output) = (base.add(work.bytes(from)), base.add(work.bytes(to)));
            let (input, output): (*const c_void, *mut c_void) = match work.kind {
                CallKind::Scatter if is_root => (input.cast(), self.in_place.cast_mut()),
                CallKind::Reduce | CallKind::Gather | CallKind::Scatter if !is_root => {
                    (input.cast(), output.cast())
                }
                _ => (self.in_place, output.cast()),
            };
            self.call(work, input, output)
        }
    }
}
