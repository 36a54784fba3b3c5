//! What each rank shares with the others for liveness: a page of memory, which only it writes.

use std::sync::atomic::AtomicU32;

use super::life::Life;
use super::status_page::StatusPage;
use crate::bootstrap::Notices;
use crate::device::host::SharedMemory;
use crate::device::sealed::Shared as _;

/// What a rank shares; all zeros is a rank that has made no call.
#[repr(C)]
pub(super) struct Page {
    pub status: StatusPage,
    /// Tells when its process ends.
    pub life: Life,
    /// The meetings for later worlds that it serves.
    pub notices: Notices,
    /// A [`Word`](super::Word) on its mappings; 0: it has them.
    pub closing: AtomicU32,
}

pub(super) fn page(pages: &SharedMemory, rank: usize) -> Option<&Page> {
    let page = pages.address(rank) as *const Page;
    // SAFETY: null, or a mapping of a `Page`'s size and of a memory page's alignment that lives as long as `pages`;
    // it is atomics, for which any bits are values, whoever writes them.
    unsafe { page.as_ref() }
}

pub(super) fn status(pages: &SharedMemory, rank: usize) -> Option<&StatusPage> {
    page(pages, rank).map(|page| &page.status)
}

/// Before the peers are mapped, too.
pub(super) fn own_page(pages: &SharedMemory) -> &Page {
    // SAFETY: as above.
    unsafe { &*(pages.own_address() as *const Page) }
}

pub(super) fn own_status(pages: &SharedMemory) -> &StatusPage {
    &own_page(pages).status
}

/// What each rank can read to prove that it can: private memory of the rank, whose contents its page tells.
#[derive(Debug)]
pub(super) struct ReadProbe(Box<[u8; 16]>);

impl ReadProbe {
    pub fn new(contents: [u8; 16]) -> Self {
        Self(Box::new(contents))
    }

    /// Valid for its life.
    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }
}
