//! A simple allreduce: each rank copies its input to shared memory, waits for the others, reduces all inputs, and
//! waits again. Messages that are longer than a slot are cut into pieces.

use std::fs::{File, OpenOptions};
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fast_allreduce::{CallKind, DType, ReduceOp};
use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::mman::{mmap, munmap, MapFlags, ProtFlags};

use crate::failure::Failure;
use crate::harness::contender::{Placement, Rival};
use crate::harness::device::host::{Cpu, Memory};
use crate::harness::elements::elements;
use crate::harness::session::Session;
use crate::harness::work::Work;

/// Bytes of each rank's slot.
const SLOT_BYTES: usize = 4 << 20;

/// Bytes before the slots, which keep them aligned.
const HEADER_BYTES: usize = 4 << 10;

/// A barrier: the number of ranks that have arrived, and how often all had.
#[repr(C)]
struct Barrier {
    arrived: AtomicUsize,
    generation: AtomicUsize,
}

/// A rank of the naive allreduce.
pub struct Naive {
    memory: NonNull<u8>,
    bytes: NonZeroUsize,
    rank: usize,
    world_size: usize,
    limit: Duration,
    /// Kept open: the other ranks open the first rank's file by its path in /proc.
    _file: File,
}

impl Naive {
    /// Maps the shared memory, which has no name in the file system. Collective.
    pub fn new(session: &Session) -> Result<Self, String> {
        let (rank, world_size) = (session.rank(), session.world_size());
        let bytes = HEADER_BYTES + world_size * SLOT_BYTES;
        let own = if rank == 0 { create(bytes as u64).map(Some) } else { Ok(None) };
        let path = match &own {
            Ok(Some(file)) => format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()),
            _ => String::new(),
        };
        let paths = session.exchange(path.as_bytes()).map_err(|failure| failure.to_string())?;
        let file = match own? {
            Some(file) => file,
            None if paths[0].is_empty() => return Err("rank 0 has no shared memory".into()),
            None => {
                let path = String::from_utf8_lossy(&paths[0]);
                let file = OpenOptions::new().read(true).write(true).open(&*path);
                file.map_err(|error| format!("{path}: {error}"))?
            }
        };
        let bytes = NonZeroUsize::new(bytes).ok_or("nothing to map")?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping of a file whose size the first rank has set.
        let memory = unsafe { mmap(None, bytes, protection, MapFlags::MAP_SHARED, &file, 0) };
        let memory = memory.map_err(|errno| format!("mmap of {bytes} bytes failed: {errno}"))?.cast();
        Ok(Self { memory, bytes, rank, world_size, limit: session.limit(), _file: file })
    }

    fn barrier(&self) -> &Barrier {
        // SAFETY: the start of a mapping that lives as long as self; it is zero at first, which is a valid value of
        // atomics.
        unsafe { self.memory.cast().as_ref() }
    }

    /// Returns the start of a rank's slot.
    fn slot(&self, rank: usize) -> *mut u8 {
        // SAFETY: within the mapping, which has a slot for each rank.
        unsafe { self.memory.as_ptr().add(HEADER_BYTES + rank * SLOT_BYTES) }
    }

    /// Waits until all ranks have arrived. Their earlier writes are visible afterwards.
    fn wait(&self) -> Result<(), Failure> {
        const SPINS: u32 = 1000;
        let Barrier { arrived, generation } = self.barrier();
        // It cannot change before this rank has arrived.
        let before = generation.load(Ordering::Relaxed);
        // The last rank to arrive acquires what all others released, and passes it on by its release of `generation`.
        if arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.world_size {
            arrived.store(0, Ordering::Relaxed);
            generation.store(before.wrapping_add(1), Ordering::Release);
            return Ok(());
        }
        let start = Instant::now();
        loop {
            for _ in 0..SPINS {
                if generation.load(Ordering::Acquire) != before {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > self.limit {
                return Err(Failure::Ranks(format!("naive: not all ranks arrived within {:?}", self.limit)));
            }
            std::thread::yield_now();
        }
    }

    /// Reduces the message at `input` to `output`, which may be the same.
    ///
    /// # Safety
    ///
    /// `input` is valid for reads, and `output` for writes, of the message's bytes, aligned for its elements, which
    /// nothing else uses.
    unsafe fn all_reduce(&self, work: &Work, input: *const u8, output: *mut u8) -> Result<(), Failure> {
        let (elements, bytes) = (elements(work.dtype)?, work.bytes(work.shares[0]));
        for first in (0..bytes).step_by(SLOT_BYTES) {
            let length = SLOT_BYTES.min(bytes - first);
            // SAFETY: the caller guarantees `input`; the slot is long enough, and other ranks read it only between
            // the two barriers.
            unsafe { input.add(first).copy_to_nonoverlapping(self.slot(self.rank), length) };
            self.wait()?;
            // SAFETY: as above: no rank writes a slot until this rank has passed the next barrier.
            unsafe {
                let output = output.add(first);
                self.slot(0).copy_to_nonoverlapping(output, length);
                let output = std::slice::from_raw_parts_mut(output, length);
                for rank in 1..self.world_size {
                    // A slot is aligned for any element.
                    elements.combine(work.op, output, std::slice::from_raw_parts(self.slot(rank), length));
                }
            }
            self.wait()?;
        }
        Ok(())
    }
}

impl Drop for Naive {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; there are no references to it any more.
        let _ = unsafe { munmap(self.memory.cast(), self.bytes.get()) };
    }
}

fn create(bytes: u64) -> Result<File, String> {
    let memory = memfd_create(c"fast-allreduce-naive", MFdFlags::MFD_CLOEXEC);
    let file = File::from(memory.map_err(|errno| format!("memfd_create failed: {errno}"))?);
    file.set_len(bytes).map_err(|error| format!("{bytes} bytes of shared memory: {error}"))?;
    Ok(file)
}

impl Rival<Cpu> for Naive {
    fn name(&self) -> &'static str {
        "naive"
    }

    fn library(&self) -> String {
        "copy to shared memory, barrier, reduce, barrier".into()
    }

    fn refusal(&self, kind: CallKind, _: DType, op: ReduceOp) -> Option<&'static str> {
        match op {
            _ if kind != CallKind::AllReduce => Some("it has only an allreduce"),
            op if !ReduceOp::ARITHMETIC.contains(&op) => Some("it has no such operation"),
            ReduceOp::Avg => Some("it has no averages"),
            _ => None,
        }
    }

    fn has(&self, kind: CallKind, _: Placement) -> bool {
        kind == CallKind::AllReduce
    }

    fn start(&self, _: &Cpu, work: &Work, input: &Memory, output: &mut Memory) -> Result<(), Failure> {
        let bytes = work.bytes(work.elements());
        let (input, output) = (&input[..bytes], &mut output[..bytes]);
        // SAFETY: two slices of the message's length, borrowed for the call.
        unsafe { self.all_reduce(work, input.as_ptr(), output.as_mut_ptr()) }
    }

    fn start_in_place(&self, _: &Cpu, work: &Work, data: &mut Memory) -> Result<(), Failure> {
        let address = data[..work.bytes(work.elements())].as_mut_ptr();
        // SAFETY: a slice of the message's length, borrowed for the call.
        unsafe { self.all_reduce(work, address, address) }
    }
}
