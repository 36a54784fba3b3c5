//! The page of shared memory that each rank has for liveness. Only its owner writes it.

use std::sync::atomic::AtomicU32;

use super::exit_futex::ExitFutex;
use super::status_page::StatusPage;
use crate::bootstrap::Announcements;
use crate::device::host::SharedMemory;
use crate::device::sealed::Shared as _;

/// The shared page of a rank; all zeros is the state before its first call.
#[repr(C)]
pub(super) struct Page {
    pub status: StatusPage,
    /// Marked by the kernel when the rank's process ends.
    pub exit_futex: ExitFutex,
    /// The rendezvous of later worlds that the rank serves.
    pub announcements: Announcements,
    /// The rank's [`CloseReport`](super::CloseReport); 0: its mappings are open.
    pub close_report: AtomicU32,
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
