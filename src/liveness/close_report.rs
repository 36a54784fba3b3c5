//! Reports of the ranks that they have closed their mappings of the others' memory, so that the others may free it. The
//! reports are in shared memory, so that they also work after the bootstrap has failed.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

use super::page::{own_page, page};
use crate::device::host::SharedMemory;

/// A rank's report about its mappings at the end of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum CloseReport {
    /// The mappings are closed.
    Closed = 1,
    /// The mappings stay open, since kernels may still run and use them.
    Kept = 2,
    /// The device has failed: no kernel runs, but mappings of other processes' memory cannot be closed.
    Lost = 3,
}

const CLOSED: u32 = CloseReport::Closed as u32;
const KEPT: u32 = CloseReport::Kept as u32;
const LOST: u32 = CloseReport::Lost as u32;

/// State of all peers' mappings of this rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerMappings {
    /// No peer has a mapping.
    Closed,
    /// A peer has not reported yet.
    Open,
    /// A peer keeps its mappings until its process ends.
    Kept,
}

/// This rank's report, and those of its peers.
pub(crate) struct CloseReports {
    pages: Arc<SharedMemory>,
    rank: usize,
    world_size: usize,
    /// Mask of the ranks that are threads of this process: they share its mappings, and the last owner closes a
    /// mapping.
    threads: u32,
    /// Pidfds of peers by rank: the end of a process closes its mappings.
    processes: Vec<(usize, Arc<OwnedFd>)>,
}

impl CloseReports {
    pub(super) fn new(
        pages: Arc<SharedMemory>,
        rank: usize,
        world_size: usize,
        threads: u32,
        processes: Vec<(usize, Arc<OwnedFd>)>,
    ) -> Self {
        Self { pages, rank, world_size, threads, processes }
    }

    /// Reports to the peers about this rank's mappings of their memory.
    pub fn publish(&self, report: CloseReport) {
        // Release: after the mappings were closed. Pairs with the load in `mappings`.
        own_page(&self.pages).close_report.store(report as u32, Ordering::Release);
    }

    /// Returns the current state of the peers' mappings, without waiting.
    pub fn mappings(&self) -> PeerMappings {
        let of_peer = |peer: usize| {
            // Acquire: memory is freed only after the peer has closed its mapping.
            // Ranks without a page are on other nodes. They map only memory that stays until they have closed it.
            let report =
                page(&self.pages, peer).map_or(CLOSED, |page| page.close_report.load(Ordering::Acquire));
            match report {
                CLOSED => PeerMappings::Closed,
                LOST if self.threads >> peer & 1 == 1 => PeerMappings::Closed,
                _ if self.has_ended(peer) => PeerMappings::Closed,
                KEPT | LOST => PeerMappings::Kept,
                // No report, or an invalid one.
                _ => PeerMappings::Open,
            }
        };
        let all: Vec<_> = (0..self.world_size).filter(|&peer| peer != self.rank).map(of_peer).collect();
        let any = |which| all.contains(&which).then_some(which);
        any(PeerMappings::Kept).or_else(|| any(PeerMappings::Open)).unwrap_or(PeerMappings::Closed)
    }

    /// Returns whether a peer's process has ended; `false` if the peer has no pidfd.
    fn has_ended(&self, peer: usize) -> bool {
        let process = self.processes.iter().find(|(rank, _)| *rank == peer);
        process.is_some_and(|(_, process)| {
            let mut asked = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
            poll(&mut asked, PollTimeout::ZERO) == Ok(1)
        })
    }
}
