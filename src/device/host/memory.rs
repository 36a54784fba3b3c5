//! Memory shared by processes: a memfd, mapped by its owner and, through its descriptor, by the peers.

mod again;

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::mman::{
    madvise, mmap, mmap_anonymous, mprotect, mremap, munmap, MRemapFlags, MapFlags, MmapAdvise, ProtFlags,
};
use nix::sys::stat::fstat;

use self::again::KeptDescriptor;
use super::file;
use super::limits::refuse_data;
use crate::bootstrap::{all_succeeded, exchange_descriptors, Bootstrap};
use crate::device::sealed;
use crate::error::{Error, Result};

/// Allocation of this rank and its mappings of the peers' counterparts.
#[derive(Debug)]
pub struct SharedMemory {
    own: Mapping,
    /// Private mapping of the same memory, which replaces `own` in [`sealed::Shared::make_private`].
    spare: Mutex<Option<Mapping>>,
    private: AtomicBool,
    /// The peers' parts are not mapped.
    closed: AtomicBool,
    /// Descriptor of the memory, until the peers have it.
    descriptor: Option<OwnedFd>,
    /// The files of the ranks may have names.
    may_have_name: bool,
    populate: Populate,
    /// Descriptor of the memory that `own` maps, if it can be shared again with other peers.
    kept: Mutex<Option<KeptDescriptor>>,
    /// By rank; `None` for this rank. The addresses stay, whatever is mapped there.
    peers: Vec<Option<Mapping>>,
    /// The ranks of the whole world that `peers` are, if those are the ranks of one node.
    members: Option<Vec<usize>>,
}

/// When the pages of a mapping are zeroed and entered into the page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Populate {
    /// At once, because otherwise the first calls would fault on each page.
    Now,
    /// When they are first touched. The file has them: that cannot fail.
    AtFirstTouch,
}

impl SharedMemory {
    /// Allocates zeroed memory.
    pub(crate) fn allocate(bytes: usize, populate: Populate) -> Result<Self> {
        let fail = |reason: String| Error::Allocation { bytes, reason };
        let length = NonZeroUsize::new(bytes).ok_or_else(|| fail("zero bytes".into()))?;
        let descriptor = file::create(bytes, c"fast-allreduce").map_err(fail)?;
        Self::of_file(descriptor, length, false, populate)
    }

    /// Maps a file, which may have a name, of `bytes` bytes that the peers are to map.
    pub(crate) fn of(descriptor: OwnedFd, bytes: usize) -> Result<Self> {
        let length = NonZeroUsize::new(bytes)
            .ok_or_else(|| Error::Allocation { bytes, reason: "zero bytes".into() })?;
        Self::of_file(descriptor, length, true, Populate::Now)
    }

    fn of_file(
        descriptor: OwnedFd,
        length: NonZeroUsize,
        may_have_name: bool,
        populate: Populate,
    ) -> Result<Self> {
        let own = Mapping::of(&descriptor, length, populate)?;
        let (spare, private, closed, kept) = Default::default();
        Ok(Self {
            own,
            spare,
            private,
            closed,
            descriptor: Some(descriptor),
            may_have_name,
            populate,
            kept,
            peers: Vec::new(),
            members: None,
        })
    }

    /// Says which ranks of the whole world the ranks that have mapped the memory are. From then on, [`Shared::address`]
    /// takes ranks of the whole world, and has no address for the others.
    ///
    /// [`Shared::address`]: sealed::Shared::address
    pub(crate) fn set_members(&mut self, members: Vec<usize>) {
        self.members = Some(members);
    }

    /// Prepares the memory to be made private, and to be shared again, later. Must be called before the peers are
    /// mapped.
    pub(crate) fn with_spare(mut self) -> Result<Self> {
        if let Some(descriptor) = &self.descriptor {
            let bytes = self.own.length.get();
            refuse_data(bytes as u64).map_err(|reason| Error::Allocation { bytes, reason })?;
            self.spare = Mutex::new(Some(Mapping::inaccessible(descriptor, self.own.length)?));
            self.kept = Mutex::new(KeptDescriptor::of(descriptor));
        }
        Ok(self)
    }

    /// Puts the pages on this NUMA node if it has room.
    pub(crate) fn placed(self, node: Option<usize>) -> Self {
        if let Some(node) = node {
            self.own.move_to(node);
        }
        self
    }

    /// Returns where the pages are; zeros for what the system does not say.
    pub(crate) fn pages(&self) -> Pages {
        Pages { bytes: self.own.length.get(), huge_bytes: self.own.huge_bytes(), nodes: self.own.nodes() }
    }

    /// Reserves the addresses of the peers' parts, which [`SharedMemory::share_again`] maps.
    pub(crate) fn with_places(mut self, rank: usize, world_size: usize) -> Result<Self> {
        self.descriptor = None;
        if self.kept().is_none() {
            return Err(Error::Allocation {
                bytes: self.own.length.get(),
                reason: "this process has as much memory that can be shared again as it may have".into(),
            });
        }
        let place = |peer| (peer != rank).then(|| Mapping::of_nothing(self.own.length)).transpose();
        self.peers = (0..world_size).map(place).collect::<Result<_>>()?;
        Ok(self)
    }

    fn kept(&self) -> MutexGuard<'_, Option<KeptDescriptor>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exchanges descriptors and maps the peers' memory. Collective.
    pub(crate) fn map_peers(&mut self, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<()> {
        // Once the peers have mapped the memory, the descriptor is not needed any more.
        let Some(descriptor) = self.descriptor.take() else {
            return Ok(());
        };
        let descriptors = exchange_descriptors(bootstrap, descriptor.as_fd(), timeout)?;
        let (length, populate) = (self.own.length, self.populate);
        let check = if self.may_have_name { file::check_named } else { file::check };
        self.peers = descriptors
            .into_iter()
            .enumerate()
            .map(|(rank, descriptor)| {
                descriptor.map(|descriptor| map_peer(rank, &descriptor, length, check, populate)).transpose()
            })
            .collect::<Result<_>>()?;
        Ok(())
    }

    /// Unmaps the peers' memory and, after all ranks have done so, this rank's memory. Collective.
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
        let rank = match &self.members {
            Some(members) => members.iter().position(|&member| member == rank).unwrap_or(usize::MAX),
            None => rank,
        };
        match self.peers.get(rank) {
            Some(Some(peer)) => peer.address.as_ptr() as u64,
            Some(None) => self.own_address(),
            None => 0,
        }
    }

    /// Replaces the shared mapping by one of a copy or, if the memory is large, by a private one of the same memory,
    /// atomically for all threads: this rank sees the old contents, and its writes go elsewhere. The peers' mappings
    /// keep the old pages. A concurrent write of another thread could be lost.
    fn make_private(&self) {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(spare) = spare else { return };
        self.private.store(true, Ordering::Relaxed);
        if self.renew().is_ok() {
            return;
        }
        if let Err(errno) = spare.replace(&self.own) {
            // The process has too many mappings, or a sandbox forbids private writable memory. A fault is better than
            // data that peers may be reading.
            tracing::error!(%errno, "a registered buffer is read-only after a failed call");
            // SAFETY: the range is a mapping of self. Borrowers can still read it.
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

    fn can_be_shared_again(&self) -> bool {
        self.kept().is_some()
    }

    fn has_peers(&self) -> bool {
        !self.closed.load(Ordering::Relaxed)
    }

    /// Maps nothing at the addresses of the peers' parts: zeros, which take no memory until they are written.
    fn close_peers(&self) -> Result<()> {
        self.closed.store(true, Ordering::Relaxed);
        self.peers.iter().flatten().try_for_each(Mapping::map_nothing_here)
    }

    fn own_bytes(&self) -> usize {
        self.own.length.get()
    }
}

/// Maps a peer's descriptor, after checking it.
fn map_peer(
    rank: usize,
    descriptor: &OwnedFd,
    length: NonZeroUsize,
    check: fn(&OwnedFd) -> Result<(), String>,
    populate: Populate,
) -> Result<Mapping> {
    check_peer(rank, descriptor, length, check)?;
    Mapping::of(descriptor, length, populate)
}

/// Checks that a peer's descriptor is a file as this crate creates them, of the same size.
fn check_peer(
    rank: usize,
    descriptor: &OwnedFd,
    length: NonZeroUsize,
    check: fn(&OwnedFd) -> Result<(), String>,
) -> Result<()> {
    let malformed = |reason: String| Error::Malformed { rank, reason };
    let size = fstat(descriptor).map_err(Error::system("fstat of a peer's memory"))?.st_size;
    if usize::try_from(size) != Ok(length.get()) {
        return Err(malformed(format!("its shared memory has {size} bytes, this rank's has {length}")));
    }
    check(descriptor).map_err(malformed)
}

/// Where the pages of a rank's region are.
///
/// `Display` writes it as text: `5.5 MiB, 4.0 of it in huge pages, on node 0`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pages {
    /// Size of the region.
    pub bytes: usize,
    /// Bytes in huge pages.
    pub huge_bytes: usize,
    /// Bytes on each NUMA node, by node; empty if the system does not say.
    pub nodes: BTreeMap<usize, usize>,
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        write!(f, "{:.1} MiB, {:.1} of it in huge pages", mib(self.bytes), mib(self.huge_bytes))?;
        let nodes: Vec<_> = self.nodes.keys().map(usize::to_string).collect();
        match nodes.len() {
            0 => Ok(()),
            1 => write!(f, ", on node {}", nodes[0]),
            _ => write!(f, ", on nodes {}", nodes.join(", ")),
        }
    }
}

fn page_size() -> usize {
    // SAFETY: no memory is passed.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4 << 10)
}

/// Mapping of a whole file, unmapped on drop.
#[derive(Debug)]
struct Mapping {
    address: NonNull<libc::c_void>,
    length: NonZeroUsize,
}

// SAFETY: the mapping is plain memory, valid in any thread until drop; its contents are accessed only through raw
// pointers by the kernels, which order their accesses.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; a shared `Mapping` only returns its address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file shared and writable.
    fn of(descriptor: &OwnedFd, length: NonZeroUsize, populate: Populate) -> Result<Self> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = match populate {
            Populate::Now => MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE,
            Populate::AtFirstTouch => MapFlags::MAP_SHARED,
        };
        // SAFETY: a new mapping at an address that the kernel chooses; `length` is the size of the file, which cannot
        // change (see `file`).
        let address = unsafe { mmap(None, length, protection, flags, descriptor, 0) }
            .map_err(|errno| Error::Allocation { bytes: length.get(), reason: format!("mmap: {errno}") })?;
        // SAFETY: the range was mapped above. Huge pages are a hint: kernels without them for shared memory refuse
        // it.
        let _ = unsafe { madvise(address, length.get(), MmapAdvise::MADV_HUGEPAGE) };
        Ok(Self { address, length })
    }

    /// Moves the pages to a NUMA node, and has later ones allocated there. A hint: the node may be full, and containers
    /// may forbid it.
    fn move_to(&self, node: usize) {
        const BITS: usize = usize::BITS as usize;
        const MPOL_MF_MOVE: libc::c_uint = 1 << 1;
        let mut nodes = vec![0_usize; node / BITS + 1];
        nodes[node / BITS] = 1 << (node % BITS);
        // SAFETY: the range is this mapping, and the mask has the given number of bits. (The kernel takes one less.)
        let moved = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.address.as_ptr(),
                self.length.get(),
                libc::MPOL_PREFERRED,
                nodes.as_ptr(),
                nodes.len() * BITS + 1,
                MPOL_MF_MOVE,
            )
        };
        if moved != 0 {
            let error = std::io::Error::last_os_error();
            tracing::debug!(%error, node, "a rank's memory is not bound to its NUMA node");
        }
    }

    /// Returns the bytes on each NUMA node, by node.
    fn nodes(&self) -> BTreeMap<usize, usize> {
        let page = page_size();
        let mut nodes = BTreeMap::new();
        let start = self.address.as_ptr() as usize;
        let pages: Vec<usize> = (start..start + self.length.get()).step_by(page).collect();
        let mut status = vec![-1_i32; pages.len()];
        // SAFETY: both arrays have an entry for each page. Without an array of nodes nothing is moved.
        let asked = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                pages.len(),
                pages.as_ptr(),
                std::ptr::null::<i32>(),
                status.as_mut_ptr(),
                0,
            )
        };
        let known = status.into_iter().filter_map(|node| usize::try_from(node).ok()).filter(|_| asked == 0);
        known.for_each(|node| *nodes.entry(node).or_default() += page);
        nodes
    }

    /// Returns how many bytes are mapped by huge pages.
    fn huge_bytes(&self) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let start = format!("{:x}-", self.address.as_ptr() as usize);
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let huge = lines.find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap_or_default();
        huge.trim().trim_end_matches(" kB").parse().map_or(0, |kib: usize| kib << 10)
    }

    /// Maps a file privately and without access, for later use: it only occupies address space.
    fn inaccessible(descriptor: &OwnedFd, length: NonZeroUsize) -> Result<Self> {
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses; `length` is the size of the file, which cannot
        // change (see `file`).
        let address = unsafe { mmap(None, length, ProtFlags::PROT_NONE, flags, descriptor, 0) }
            .map_err(|errno| Error::Allocation { bytes: length.get(), reason: format!("mmap: {errno}") })?;
        Ok(Self { address, length })
    }

    /// Maps memory that is not shared, and has no pages until it is written.
    fn of_nothing(length: NonZeroUsize) -> Result<Self> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address = unsafe { mmap_anonymous(None, length, protection, flags) }
            .map_err(|errno| Error::Allocation { bytes: length.get(), reason: format!("mmap: {errno}") })?;
        Ok(Self { address, length })
    }

    /// [`Mapping::of_nothing`] at the same address.
    fn map_nothing_here(&self) -> Result<()> {
        Self::of_nothing(self.length)?.replace(self).map_err(Error::system("mremap of a peer's memory"))
    }

    /// Makes the mapping writable and moves it to the address of `other`, a mapping of the same length, which it
    /// replaces.
    fn replace(self, other: &Self) -> nix::Result<()> {
        let length = self.length.get();
        let writable = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the range is this mapping, which nobody uses yet.
        unsafe { mprotect(self.address, length, writable) }?;
        let flags = MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED;
        // SAFETY: both ranges are mappings of this process, of the same length. The kernel replaces one
        // by the other while it holds the lock of the address space, so a concurrent reader sees either of the two.
        unsafe { mremap(self.address, length, length, flags, Some(other.address)) }?;
        // `other` now unmaps this range.
        std::mem::forget(self);
        Ok(())
    }

    /// Replaces the mapping by anonymous memory with the same contents, where a sandbox forbids the other two ways.
    /// Not atomic: a concurrent reader may find zeros.
    fn detach(&self) -> nix::Result<()> {
        let bytes = self.length.get();
        let mut copy: Vec<u8> = Vec::new();
        copy.try_reserve_exact(bytes).map_err(|_| nix::errno::Errno::ENOMEM)?;
        // SAFETY: the range is a mapping of self, the copy has room for all of it, and u8 may be any byte that others
        // write meanwhile.
        unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(self.address.as_ptr().cast(), bytes) };
        let writable = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
        // SAFETY: the range is a mapping of self, which the new one replaces.
        let address = unsafe {
            mmap_anonymous(NonZeroUsize::new(self.address.as_ptr() as usize), self.length, writable, flags)
        }?;
        // SAFETY: the new mapping is as long as the copy, whose bytes were written above.
        unsafe { copy.as_ptr().copy_to_nonoverlapping(address.as_ptr().cast(), bytes) };
        Ok(())
    }

    /// Unmaps the range and returns whether that succeeded, which drop cannot.
    fn unmap(self) -> Result<()> {
        let mapping = std::mem::ManuallyDrop::new(self);
        // SAFETY: as in `drop`, which does not run.
        unsafe { munmap(mapping.address, mapping.length.get()) }.map_err(Error::system("munmap"))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `of`, and nothing borrows from it: kernels end within a call.
        let unmapped = unsafe { munmap(self.address, self.length.get()) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::Threads;
    use crate::device::host::cores;
    use crate::device::sealed::Shared as _;
    use crate::topology::Cpus;

    const BYTES: usize = 3 << 20;

    fn fill(memory: &SharedMemory, byte: u8) {
        // SAFETY: this rank's part, which nobody else writes.
        unsafe { std::ptr::write_bytes(memory.own_address() as *mut u8, byte, BYTES) };
    }

    /// Returns the byte that fills a rank's part.
    fn byte_of(memory: &SharedMemory, rank: usize) -> Option<u8> {
        // SAFETY: a mapping of `BYTES` bytes, which nobody writes meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts(memory.address(rank) as *const u8, BYTES) };
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    #[test]
    fn private_memory_is_seen_by_its_rank_alone() {
        is_seen_by_its_rank_alone(|memory| {
            memory.make_private();
            memory.make_private();
            assert!(memory.is_private());
        });
        // The way where a sandbox permits nothing else.
        is_seen_by_its_rank_alone(|memory| memory.own.detach().unwrap());
    }

    /// The system may have no huge page to give, and a sandbox may hide nodes.
    #[test]
    fn pages_are_placed() {
        let nodes = Cpus::read("/sys".as_ref(), Some(&[]));
        let node = nodes.node(cores::listed(&cores::of_this_thread())[0]);
        let pages = SharedMemory::allocate(BYTES, Populate::Now).unwrap().placed(Some(node)).pages();
        assert_eq!(pages.bytes, BYTES);
        assert!(pages.huge_bytes <= BYTES, "{pages}");
        assert!(pages.nodes.is_empty() || pages.nodes == BTreeMap::from([(node, BYTES)]), "{pages}");
        // A node that does not exist is a hint that is not followed.
        let elsewhere = SharedMemory::allocate(BYTES + 1, Populate::Now).unwrap().placed(Some(1000)).pages();
        assert!(elsewhere.nodes.values().sum::<usize>() <= BYTES + page_size(), "{elsewhere}");
        assert_eq!(SharedMemory::allocate(5, Populate::Now).unwrap().placed(None).pages().huge_bytes, 0);
    }

    fn is_seen_by_its_rank_alone(take: fn(&SharedMemory)) {
        const LIMIT: Duration = Duration::from_secs(20);
        let ranks = Threads::world(2).unwrap().into_iter().map(|bootstrap| {
            std::thread::spawn(move || {
                let memory = SharedMemory::allocate(BYTES, Populate::Now).and_then(SharedMemory::with_spare);
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
