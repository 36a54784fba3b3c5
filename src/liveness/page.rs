//! The page of shared memory that each rank has for liveness. Only its owner writes it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::exit_futex::ExitFutex;
use super::flight::FlightPage;
use super::status_page::StatusPage;
use crate::abi::MAX_RANKS;
use crate::bootstrap::Announcements;
use crate::device::host::SharedMemory;
use crate::device::sealed::Shared as _;

/// The shared page of a rank; all zeros is the state before its first call.
#[repr(C)]
pub(super) struct Page {
    pub header: Header,
    pub status: StatusPage,
    /// Marked by the kernel when the rank's process ends.
    pub exit_futex: ExitFutex,
    /// The rendezvous of later worlds that the rank serves.
    pub announcements: Announcements,
    /// The rank's [`CloseReport`](super::CloseReport); 0: its mappings are open.
    pub close_report: AtomicU32,
    pub flight: FlightPage,
}

/// Ending of the names of files with pages.
pub(super) const EXTENSION: &str = "flight";

/// Name of the memory that a page is in, unless its file has a name.
pub(super) const MEMORY: &std::ffi::CStr = c"fast-allreduce-flight";

/// What a page is, for readers outside of the world. Its place and its fields are the same in all versions.
#[repr(C)]
pub(super) struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    bytes: AtomicU32,
    world: AtomicU64,
    rank: AtomicU32,
    world_size: AtomicU32,
    process: AtomicU32,
    /// When the process started, as the kernel tells it; 0 if it does not.
    started: AtomicU64,
    /// Process ids of the ranks in other processes, in this process's namespace; 0 where it does not know them.
    peers: [AtomicU32; MAX_RANKS],
}

const MAGIC: u64 = u64::from_le_bytes(*b"FAflight");

/// Version of the layout of a [`Page`]: raise it with each change.
const VERSION: u32 = 1;

impl Header {
    /// Fills it in, before the page is shared.
    pub fn set(&self, world: u64, rank: usize, world_size: usize) {
        self.version.store(VERSION, Ordering::Relaxed);
        self.bytes.store(size_of::<Page>() as u32, Ordering::Relaxed);
        self.world.store(world, Ordering::Relaxed);
        self.rank.store(rank as u32, Ordering::Relaxed);
        self.world_size.store(world_size as u32, Ordering::Relaxed);
        self.process.store(std::process::id(), Ordering::Relaxed);
        self.started.store(started(std::process::id()).unwrap_or(0), Ordering::Relaxed);
        // Release: a reader that finds it also finds the other fields.
        self.magic.store(MAGIC, Ordering::Release);
    }

    pub fn set_peer(&self, rank: usize, process: u32) {
        self.peers[rank].store(process, Ordering::Relaxed);
    }

    /// Checks that a file of `length` bytes has a page of this version. Any bytes are valid input.
    pub fn check(&self, length: u64) -> Result<(), String> {
        let [version, bytes] = [&self.version, &self.bytes].map(|word| word.load(Ordering::Relaxed));
        match self.magic.load(Ordering::Acquire) {
            MAGIC => {}
            0 => return Err("a rank is writing it, or never has".into()),
            _ => return Err("it is no flight record".into()),
        }
        if version != VERSION {
            return Err(format!(
                "its layout has version {version}, and this program reads version {VERSION}"
            ));
        }
        if bytes as usize != size_of::<Page>() || length < bytes.into() {
            return Err(format!("it has {length} bytes, and should have {}", size_of::<Page>()));
        }
        match self.rank() < self.world_size() && self.world_size() <= MAX_RANKS {
            true => Ok(()),
            false => Err(format!("it is of rank {} of {}", self.rank(), self.world_size())),
        }
    }

    pub fn world(&self) -> u64 {
        self.world.load(Ordering::Relaxed)
    }

    pub fn rank(&self) -> usize {
        self.rank.load(Ordering::Relaxed) as usize
    }

    pub fn world_size(&self) -> usize {
        self.world_size.load(Ordering::Relaxed) as usize
    }

    pub fn process(&self) -> u32 {
        self.process.load(Ordering::Relaxed)
    }

    /// Returns whether the owner's process runs, if this process is in its namespace.
    pub fn is_alive(&self) -> bool {
        // Another process may have got its number.
        started(self.process()).is_some_and(|started| match self.started.load(Ordering::Relaxed) {
            0 => true,
            expected => started == expected,
        })
    }

    pub fn peers(&self) -> [u32; MAX_RANKS] {
        std::array::from_fn(|rank| self.peers[rank].load(Ordering::Relaxed))
    }
}

/// Returns when a process started, in ticks since the machine's start; `None` if it has ended or is not visible here.
fn started(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The fields after the name, which may have any letters, begin with the third.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let has_ended = matches!(*fields.first()?, "Z" | "X");
    fields.get(19).filter(|_| !has_ended)?.parse().ok()
}

pub(super) fn page(pages: &SharedMemory, rank: usize) -> Option<&Page> {
    let page = pages.address(rank) as *const Page;
    // SAFETY: null, or a mapping of the size of a `Page`, aligned to a memory page, that lives as long as `pages`. A
    // `Page` consists of atomics, for which any bits that a peer writes are valid.
    unsafe { page.as_ref() }
}

pub(super) fn status(pages: &SharedMemory, rank: usize) -> Option<&StatusPage> {
    page(pages, rank).map(|page| &page.status)
}

/// Returns this rank's page. Also works before the peers are mapped.
pub(super) fn own_page(pages: &SharedMemory) -> &Page {
    // SAFETY: as in `page`; this rank's own mapping always exists.
    unsafe { &*(pages.own_address() as *const Page) }
}

pub(super) fn own_status(pages: &SharedMemory) -> &StatusPage {
    &own_page(pages).status
}

pub(super) fn flight(pages: &SharedMemory, rank: usize) -> Option<&FlightPage> {
    page(pages, rank).map(|page| &page.flight)
}

/// Private memory of this rank that peers try to read, to find out whether they can. This rank's page has its address
/// and its expected contents.
#[derive(Debug)]
pub(super) struct ReadProbe(Box<[u8; 16]>);

impl ReadProbe {
    pub fn new(contents: [u8; 16]) -> Self {
        Self(Box::new(contents))
    }

    /// Returns its address, which is valid while this exists.
    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }
}
