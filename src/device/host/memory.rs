//! Memory that processes share: a sealed memfd, mapped by its owner and, by descriptor, by its peers.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{fcntl, FallocateFlags, FcntlArg, SealFlag};
use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::mman::{
    madvise, mmap, mmap_anonymous, mprotect, mremap, munmap, MRemapFlags, MapFlags, MmapAdvise, ProtFlags,
};
use nix::sys::stat::fstat;

use super::limits::{refuse_data, refuse_file, Limits};
use crate::abi::MAX_RANKS;
use crate::bootstrap::{all_succeeded, exchange_descriptors, Bootstrap};
use crate::device::sealed;
use crate::error::{explained, Error, Result};

/// One rank's allocation and its mappings of the peers' counterparts.
#[derive(Debug)]
pub struct SharedMemory {
    own: Mapping,
    /// A private mapping of the same memory that takes the place of `own` in [`sealed::Shared::make_private`].
    spare: Mutex<Option<Mapping>>,
    private: AtomicBool,
    /// The owner's descriptor, until the peers have it.
    descriptor: Option<OwnedFd>,
    /// By rank; `None` at the own rank.
    peers: Vec<Option<Mapping>>,
}

impl SharedMemory {
    pub(crate) fn allocate(bytes: usize) -> Result<Self> {
        let fail = |reason: String| Error::Allocation { bytes, reason };
        let length = NonZeroUsize::new(bytes).ok_or_else(|| fail("zero bytes".into()))?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let descriptor = memfd_create(c"fast-allreduce", flags)
            .map_err(|errno| fail(format!("memfd_create: {}", explained(errno))))?;
        let take = |start, length| nix::fcntl::fallocate(&descriptor, FallocateFlags::empty(), start, length);
        reserve(bytes, &Limits::of_this_process(), take).map_err(fail)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&descriptor, FcntlArg::F_ADD_SEALS(seals)).map_err(Error::system("fcntl(F_ADD_SEALS)"))?;
        let own = Mapping::of(&descriptor, length)?;
        let (spare, private) = Default::default();
        Ok(Self { own, spare, private, descriptor: Some(descriptor), peers: Vec::new() })
    }

    /// The same, of memory that can be made private. Before the peers are mapped.
    pub(crate) fn with_spare(mut self) -> Result<Self> {
        if let Some(descriptor) = &self.descriptor {
            let bytes = self.own.length.get();
            refuse_data(bytes as u64).map_err(|reason| Error::Allocation { bytes, reason })?;
            self.spare = Mutex::new(Some(Mapping::inaccessible(descriptor, self.own.length)?));
        }
        Ok(self)
    }

    pub(crate) fn map_peers(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        // Taken: once the peers have mapped the memory, nobody needs the descriptor.
        let Some(descriptor) = self.descriptor.take() else {
            return Ok(());
        };
        let descriptors = exchange_descriptors(bootstrap, descriptor.as_fd(), timeout)?;
        let length = self.own.length;
        self.peers = descriptors
            .into_iter()
            .enumerate()
            .map(|(rank, descriptor)| {
                descriptor.map(|descriptor| map_peer(rank, &descriptor, length)).transpose()
            })
            .collect::<Result<_>>()?;
        Ok(())
    }

    /// Unmaps the peers' memory, and when all ranks have, its own.
    pub(crate) fn free(self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        let closed = self.peers.into_iter().flatten().try_for_each(Mapping::unmap);
        all_succeeded(closed, bootstrap, timeout)?;
        self.own.unmap()
    }
}

impl SharedMemory {
    pub(crate) fn own_address(&self) -> u64 {
        self.own.address.as_ptr() as u64
    }
}

impl sealed::Shared for SharedMemory {
    fn address(&self, rank: usize) -> u64 {
        match self.peers.get(rank) {
            Some(Some(peer)) => peer.address.as_ptr() as u64,
            Some(None) => self.own_address(),
            None => 0,
        }
    }

    /// A private mapping of the same memory takes the place of the shared one, in one step for every thread: this rank finds
    /// what was there, and its writes go to copies of the pages. The peers' mappings keep the pages as they are. Where memory is
    /// locked the copies are made here, all at once, so that a write of another thread would be lost.
    fn make_private(&self) {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(spare) = spare else { return };
        self.private.store(true, Ordering::Relaxed);
        if let Err(errno) = spare.replace(&self.own) {
            // The process has no mapping to spare, or may not make private memory. A fault is better than data that peers may be
            // reading.
            tracing::error!(%errno, "a registered buffer is read-only after a failed call");
            // SAFETY: the range is an own mapping. Whoever borrows it may still read it.
            let read_only =
                unsafe { mprotect(self.own.address, self.own.length.get(), ProtFlags::PROT_READ) };
            if let Err(errno) = read_only.or_else(|_| self.own.detach()) {
                tracing::error!(%errno, "a registered buffer is still shared after a failed call");
            }
        }
    }

    fn is_private(&self) -> bool {
        self.private.load(Ordering::Relaxed)
    }
}

/// Maps a peer's descriptor after checking that it is what this crate makes: of the same size, and sealed, so that the
/// peer cannot shrink it under this process.
fn map_peer(rank: usize, descriptor: &OwnedFd, length: NonZeroUsize) -> Result<Mapping> {
    let malformed = |reason: String| Error::Malformed { rank, reason };
    let size = fstat(descriptor).map_err(Error::system("fstat of a peer's memory"))?.st_size;
    if usize::try_from(size) != Ok(length.get()) {
        return Err(malformed(format!("its shared memory has {size} bytes, this rank's has {length}")));
    }
    let seals = fcntl(descriptor, FcntlArg::F_GET_SEALS)
        .map_err(|errno| malformed(format!("its descriptor is no memfd: {errno}")))?;
    if seals & SealFlag::F_SEAL_SHRINK.bits() == 0 {
        return Err(malformed("its shared memory is not sealed against shrinking".into()));
    }
    Mapping::of(descriptor, length)
}

/// A mapping of a whole memfd.
#[derive(Debug)]
struct Mapping {
    address: NonNull<libc::c_void>,
    length: NonZeroUsize,
}

// SAFETY: the mapping is plain memory, valid until drop whichever thread uses it; what is in it is accessed only
// through raw pointers by the kernels, which order their accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared Mapping only gives out its address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Shared and writable.
    fn of(descriptor: &OwnedFd, length: NonZeroUsize) -> Result<Self> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // Pages are in place before the first call, which would fault on each otherwise.
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice; `length` is the size of the file, which is sealed.
        let address = unsafe { mmap(None, length, protection, flags, descriptor, 0) }
            .map_err(|errno| Error::Allocation { bytes: length.get(), reason: format!("mmap: {errno}") })?;
        // SAFETY: the range was mapped above. Huge pages are a wish; a kernel without them for shared memory says no.
        let _ = unsafe { madvise(address, length.get(), MmapAdvise::MADV_HUGEPAGE) };
        Ok(Self { address, length })
    }

    /// Private, for later: it takes address space only.
    fn inaccessible(descriptor: &OwnedFd, length: NonZeroUsize) -> Result<Self> {
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice; `length` is the size of the file, which is sealed.
        let address = unsafe { mmap(None, length, ProtFlags::PROT_NONE, flags, descriptor, 0) }
            .map_err(|errno| Error::Allocation { bytes: length.get(), reason: format!("mmap: {errno}") })?;
        Ok(Self { address, length })
    }

    /// Makes it writable and moves it to where `other` is, a mapping of the same memory, which it replaces there.
    fn replace(self, other: &Self) -> nix::Result<()> {
        let length = self.length.get();
        let writable = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the range is this mapping's, which nobody uses yet.
        unsafe { mprotect(self.address, length, writable) }?;
        let flags = MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED;
        // SAFETY: both ranges are mappings of this process, of the same length and contents. The kernel replaces the one by
        // the other while it holds the lock of the address space, so that a thread which reads there sees either of the two.
        unsafe { mremap(self.address, length, length, flags, Some(other.address)) }?;
        // It is `other` now, which unmaps it.
        std::mem::forget(self);
        Ok(())
    }

    /// Has memory of this process's own take its place, with the same in it, where a sandbox permits neither of the other ways. Not
    /// in one step: a thread that reads there meanwhile may find zeros.
    fn detach(&self) -> nix::Result<()> {
        let bytes = self.length.get();
        let mut copy: Vec<u8> = Vec::new();
        copy.try_reserve_exact(bytes).map_err(|_| nix::errno::Errno::ENOMEM)?;
        // SAFETY: the range is an own mapping, the copy has room for all of it, and u8 may be any byte that others write meanwhile.
        unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(self.address.as_ptr().cast(), bytes) };
        let writable = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
        // SAFETY: the range is an own mapping, which the new one replaces.
        let address = unsafe {
            mmap_anonymous(NonZeroUsize::new(self.address.as_ptr() as usize), self.length, writable, flags)
        }?;
        // SAFETY: the new mapping is as long as the copy, of which the bytes were written above.
        unsafe { copy.as_ptr().copy_to_nonoverlapping(address.as_ptr().cast(), bytes) };
        Ok(())
    }

    /// Drops it, and says whether that worked.
    fn unmap(self) -> Result<()> {
        let mapping = std::mem::ManuallyDrop::new(self);
        // SAFETY: as in `drop`, which does not run.
        unsafe { munmap(mapping.address, mapping.length.get()) }.map_err(Error::system("munmap"))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `of`, and nothing borrows from it: kernels run to their end within a call.
        let unmapped = unsafe { munmap(self.address, self.length.get()) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping: {unmapped:?}");
    }
}

/// Has a file `take` its pages, so that a lack of memory is an error here and not a signal at first touch.
///
/// The kernel would rather kill a process than refuse it, so it is asked for no more than the limits leave. Other
/// ranks may take from the same limits at this moment: unless there is room for all, pages are taken piece by piece
/// and the limits looked at before each, with a piece for every rank to spare.
fn reserve(
    bytes: usize,
    limits: &Limits,
    take: impl Fn(libc::off_t, libc::off_t) -> nix::Result<()>,
) -> Result<(), String> {
    const PIECE_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=16 << 20;
    /// A call that a signal interrupts gives its pages back; the next one is half as long, so that some end between
    /// two signals.
    const MAX_INTERRUPTIONS: u32 = 1000;
    let (bytes, ranks) = (bytes as u64, MAX_RANKS as u64);
    // It would be a signal as well.
    refuse_file(bytes)?;
    let piece = (bytes / 64).clamp(*PIECE_BYTES.start(), *PIECE_BYTES.end());
    let spare = piece * ranks;
    let (mut done, mut longest, mut interruptions) = (0, bytes, 0);
    while done < bytes {
        let left = bytes - done;
        let plenty = left.saturating_mul(ranks);
        let length = match limits.least_room(plenty) {
            Some(room) if room.bytes < left.saturating_add(spare) => {
                return Err(format!("{room}; {left} are to be taken, and {spare} more to stay free"));
            }
            Some(room) if room.bytes < plenty => left.min(piece),
            _ => left,
        };
        let length = length.min(longest);
        let range = (libc::off_t::try_from(done), libc::off_t::try_from(length));
        let (Ok(start), Ok(size)) = range else { return Err("too large for a file".into()) };
        match take(start, size) {
            Ok(()) => (done, interruptions) = (done + length, 0),
            Err(Errno::EINTR) if interruptions < MAX_INTERRUPTIONS => {
                interruptions += 1;
                longest = (length / 2).max(*PIECE_BYTES.start());
            }
            Err(errno) => return Err(format!("fallocate: {}", explained(errno))),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::Path;

    use super::*;
    use crate::bootstrap::Threads;
    use crate::device::sealed::Shared as _;

    /// Takes so many bytes under these limits, each call as `take` says, given its number and its length; the calls
    /// that succeeded.
    fn reserved(
        bytes: usize,
        limits: &Limits,
        take: impl Fn(usize, i64) -> nix::Result<()>,
    ) -> (Result<(), String>, Vec<(i64, i64)>, usize) {
        let (taken, calls) = (RefCell::new(Vec::new()), RefCell::new(0));
        let result = reserve(bytes, limits, |start, length| {
            *calls.borrow_mut() += 1;
            take(*calls.borrow(), length).inspect(|()| taken.borrow_mut().push((start, length)))
        });
        (result, taken.into_inner(), calls.into_inner())
    }

    /// Each call begins where the one before ended, up to the last byte.
    fn is_whole(bytes: usize, taken: &[(i64, i64)]) -> bool {
        let end = taken.iter().try_fold(0, |end, &(start, length)| (start == end).then_some(end + length));
        end == Some(bytes as i64)
    }

    #[test]
    fn interrupted_calls_are_made_again_and_shorter() {
        let unlimited = Limits::below(Path::new("/nowhere"));
        let bytes = (40 << 20) + 1;
        let (result, taken, calls) = reserved(bytes, &unlimited, |_, _| Ok(()));
        assert_eq!((result, taken, calls), (Ok(()), vec![(0, bytes as i64)], 1));
        // None that takes longer than the time between two signals comes to an end.
        let interrupted = |call, length| match length > 1 << 20 || call % 3 == 0 {
            true => Err(Errno::EINTR),
            false => Ok(()),
        };
        let (result, taken, _) = reserved(bytes, &unlimited, interrupted);
        assert!(result.is_ok() && is_whole(bytes, &taken), "{result:?} {taken:?}");
    }

    #[test]
    fn interruptions_without_end_are_an_error() {
        let unlimited = Limits::below(Path::new("/nowhere"));
        let (result, taken, calls) = reserved(1 << 20, &unlimited, |_, _| Err(Errno::EINTR));
        assert!(result.unwrap_err().contains("EINTR"));
        assert!(taken.is_empty() && calls < 2000, "{calls}");
    }

    /// Another rank takes as much at the same time: what is left is looked at again and again, and not used up.
    #[test]
    fn pieces_stop_short_of_a_limit() {
        let root = std::env::temp_dir().join(format!("fast-allreduce-pieces-{}", std::process::id()));
        std::fs::create_dir_all(root.join("proc")).unwrap();
        let left = RefCell::new(0);
        let leave = |bytes: i64| {
            left.replace(bytes);
            let text = format!("MemAvailable: {} kB\n", bytes / 1024);
            std::fs::write(root.join("proc/meminfo"), text).unwrap();
        };
        let limits = Limits::below(&root);
        let take_both = |_, length: i64| {
            let before = *left.borrow();
            leave(before - 2 * length);
            Ok(())
        };
        for (mib, fits) in [(4000, true), (150, true), (105, false), (80, false), (60, false)] {
            leave(mib << 20);
            let (result, taken, _) = reserved(50 << 20, &limits, take_both);
            assert!(*left.borrow() >= 0, "{mib}: {result:?} {taken:?}");
            assert_eq!((result.is_ok(), is_whole(50 << 20, &taken)), (fits, fits), "{mib}: {result:?}");
        }
        std::fs::remove_dir_all(&root).unwrap();
    }

    const BYTES: usize = 3 << 20;

    fn fill(memory: &SharedMemory, byte: u8) {
        // SAFETY: the rank's own part, which nobody else writes.
        unsafe { std::ptr::write_bytes(memory.own_address() as *mut u8, byte, BYTES) };
    }

    /// The one byte that all of a rank's part holds.
    fn byte_of(memory: &SharedMemory, rank: usize) -> Option<u8> {
        // SAFETY: a mapping of so many bytes, which nobody writes meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts(memory.address(rank) as *const u8, BYTES) };
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    #[test]
    fn what_is_made_private_is_seen_by_its_rank_alone() {
        is_seen_by_its_rank_alone(|memory| {
            memory.make_private();
            memory.make_private();
            assert!(memory.is_private());
        });
        // Where nothing else is permitted.
        is_seen_by_its_rank_alone(|memory| memory.own.detach().unwrap());
    }

    fn is_seen_by_its_rank_alone(take: fn(&SharedMemory)) {
        const LIMIT: Duration = Duration::from_secs(20);
        let ranks = Threads::world(2).unwrap().into_iter().map(|bootstrap| {
            std::thread::spawn(move || {
                let memory = SharedMemory::allocate(BYTES).and_then(SharedMemory::with_spare);
                let mut memory = memory.unwrap();
                memory.map_peers(&bootstrap, LIMIT).unwrap();
                let (rank, peer) = (bootstrap.rank(), 1 - bootstrap.rank());
                fill(&memory, 1 + rank as u8);
                bootstrap.barrier(LIMIT).unwrap();
                assert_eq!(byte_of(&memory, peer), Some(1 + peer as u8));
                bootstrap.barrier(LIMIT).unwrap();
                if rank == 0 {
                    let before = memory.own_address();
                    take(&memory);
                    assert_eq!(memory.own_address(), before);
                    assert_eq!(byte_of(&memory, 0), Some(1), "what was there");
                    fill(&memory, 9);
                    assert_eq!(byte_of(&memory, 0), Some(9), "what was written");
                }
                bootstrap.barrier(LIMIT).unwrap();
                assert_eq!(byte_of(&memory, peer), Some(1 + peer as u8), "the peer's part");
                bootstrap.barrier(LIMIT).unwrap();
            })
        });
        ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
    }
}
