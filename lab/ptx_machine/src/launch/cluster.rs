//! Clusters: blocks that read and write each other's shared memory, and their barrier.

use crate::context::Context;
use crate::errors::Fault;
use crate::launch::block::{Block, State};
use crate::launch::run::Run;
use crate::runtime::Range;

/// What compiled code asks about an address.
pub(crate) mod what {
    /// The generic address in another block that corresponds to a generic address.
    pub const MAP: u32 = 0;
    /// The same for addresses of `.shared::cluster`.
    pub const MAP_WINDOW: u32 = 1;
    pub const TO_GENERIC: u32 = 2;
    pub const TO_WINDOW: u32 = 3;
    /// The block that a generic address belongs to.
    pub const RANK: u32 = 4;
}

/// An address of `.shared::cluster` is an offset in the thread's own block, or has from this bit on one plus
/// the rank of another block.
const RANK_SHIFT: u32 = 24;

/// The shared memory of a block.
pub(crate) struct Window {
    pub range: Range,
    /// For each byte: whether it has been written.
    pub written: *mut bool,
    pub ended: bool,
}

/// Blocks of a cluster. Each block of a launch without clusters is a cluster.
#[derive(Default)]
pub(crate) struct Cluster {
    /// By rank.
    pub windows: Vec<Window>,
    /// Number of threads that have not ended, and of those that have arrived in this phase of the barrier.
    live: u32,
    arrived: u32,
    /// Number of completed phases.
    phase: u32,
}

/// A thread's use of its cluster's barrier.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Arrivals {
    arrived: u32,
    waited: u32,
}

impl Cluster {
    /// Adds the next block.
    pub fn add(&mut self, block: &mut Block) {
        let range = Range { low: block.shared(), bytes: block.written.len() as u64 };
        self.windows.push(Window { range, written: block.written.as_mut_ptr(), ended: false });
        self.live += block.states.len() as u32;
    }

    /// Returns the rank of the block whose shared memory contains an access.
    pub fn holder(&self, address: u64, bytes: u32) -> Option<usize> {
        self.windows.iter().position(|window| window.range.holds(address, bytes))
    }

    /// Records a thread's arrival. Returns whether it completes the phase.
    pub fn arrive(&mut self, thread: &mut Arrivals) -> Result<bool, String> {
        if thread.arrived != thread.waited {
            return Err("a thread that has not waited since its last arrival arrives".to_owned());
        }
        thread.arrived += 1;
        self.arrived += 1;
        Ok(self.complete())
    }

    /// Records that a thread begins to wait.
    pub fn wait(&self, thread: &mut Arrivals) -> Result<(), String> {
        if thread.arrived == thread.waited {
            return Err("a thread that has not arrived waits".to_owned());
        }
        thread.waited += 1;
        Ok(())
    }

    /// Returns whether the phase in which a thread has arrived last is complete.
    pub fn is_over(&self, thread: Arrivals) -> bool {
        thread.arrived <= self.phase
    }

    /// Records that a thread has ended: the barrier no longer expects it. Returns whether that completes the
    /// phase.
    pub fn leave(&mut self, thread: Arrivals) -> bool {
        self.live -= 1;
        self.arrived -= u32::from(!self.is_over(thread));
        self.complete()
    }

    fn complete(&mut self) -> bool {
        let complete = self.live > 0 && self.arrived == self.live;
        if complete {
            self.arrived = 0;
            self.phase += 1;
        }
        complete
    }
}

/// Answers a question of compiled code. The answer for an address outside of the cluster's shared memory is 0,
/// which no access reaches.
///
/// # Safety
///
/// See `runtime::access`.
pub(crate) unsafe extern "C" fn cluster(context: *mut Context, what: u32, address: u64, rank: u32) -> u64 {
    // SAFETY: see `runtime::access`.
    let context = unsafe { &mut *context };
    // SAFETY: see `runtime::access`.
    let run = unsafe { &mut *context.run.cast::<Run>() };
    let own = context.cluster_rank;
    let cluster = run.own_cluster();
    let window = |rank: u32, offset: u64| {
        let window = cluster.windows.get(rank as usize)?;
        (offset < window.range.bytes).then_some(window.range.low + offset)
    };
    // Rank and offset of an address of `.shared::cluster`.
    let parts = || {
        let rank = (address >> RANK_SHIFT) as u32;
        (rank.checked_sub(1).unwrap_or(own), address & ((1 << RANK_SHIFT) - 1))
    };
    let in_window = |rank: u32, offset: u64| match rank == own {
        true => offset,
        false => u64::from(rank + 1) << RANK_SHIFT | offset,
    };
    let found = || {
        let holder = cluster.holder(address, 1)?;
        Some((holder as u32, address - cluster.windows[holder].range.low))
    };
    let answer = match what {
        what::MAP => found().and_then(|(_, offset)| window(rank, offset)),
        what::MAP_WINDOW => window(rank, parts().1).map(|_| in_window(rank, parts().1)),
        what::TO_GENERIC => window(parts().0, parts().1),
        what::TO_WINDOW => found().map(|(rank, offset)| in_window(rank, offset)),
        _ => found().map(|(rank, _)| rank.into()),
    };
    answer.unwrap_or(0)
}

impl Run<'_> {
    /// Records that a thread has ended.
    pub(super) fn leave_cluster(&mut self, block: &mut Block, thread: u32) {
        let cluster = &mut self.clusters[block.cluster];
        let complete = cluster.leave(block.arrivals[thread as usize]);
        if block.left == 0 {
            self.end_in_cluster(block);
        }
        if let (true, Some(races)) = (complete, &mut self.races) {
            races.complete(block.cluster);
        }
    }

    /// Records that a block has ended.
    pub(crate) fn end_in_cluster(&mut self, block: &mut Block) {
        let low = block.shared();
        let windows = self.clusters[block.cluster].windows.iter_mut();
        windows.filter(|own| own.range.low == low).for_each(|own| own.ended = true);
    }

    /// Brings a thread to its cluster's barrier.
    pub(super) fn meet_cluster(
        &mut self,
        block: &mut Block,
        thread: u32,
        waits: bool,
        releases: bool,
    ) -> Result<(), String> {
        let i = thread as usize;
        let cluster = &mut self.clusters[block.cluster];
        if waits {
            cluster.wait(&mut block.arrivals[i])?;
            block.states[i] = State::InCluster;
            return Ok(());
        }
        let complete = cluster.arrive(&mut block.arrivals[i])?;
        block.states[i] = State::Ready;
        if let Some(races) = &mut self.races {
            races.arrive_in_cluster(block.first_thread + thread, releases);
            if complete {
                races.complete(block.cluster);
            }
        }
        Ok(())
    }

    /// Lets a thread go on if its cluster's barrier is complete.
    pub(super) fn leave_cluster_barrier(&mut self, block: &mut Block, thread: u32) {
        let i = thread as usize;
        if block.states[i] == State::InCluster && self.clusters[block.cluster].is_over(block.arrivals[i]) {
            block.states[i] = State::Ready;
            if let Some(races) = &mut self.races {
                races.leave_cluster_barrier(block.first_thread + thread);
            }
        }
    }

    pub(crate) fn own_cluster(&self) -> &Cluster {
        &self.clusters[self.cluster]
    }

    /// Checks a generic access to the shared memory of another block of the cluster; None: it is elsewhere.
    pub(crate) fn use_cluster(
        &mut self,
        own: u32,
        address: u64,
        bytes: u32,
        writes_only: bool,
    ) -> Option<Option<Fault>> {
        let cluster = self.own_cluster();
        let rank = cluster.holder(address, bytes).filter(|&rank| rank != own as usize)?;
        let window = &cluster.windows[rank];
        if window.ended {
            return Some(Some(Fault::EndedBlock));
        }
        let offset = (address - window.range.low) as usize;
        // SAFETY: the block has not ended, so that its memory exists; `written` has an entry for each byte
        // of the range, and nothing else refers to it during a step.
        let written = unsafe { std::slice::from_raw_parts_mut(window.written.add(offset), bytes as usize) };
        if !writes_only && written.contains(&false) {
            return Some(Some(Fault::UndefinedShared));
        }
        written.fill(true);
        Some(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(threads: u32) -> Cluster {
        let mut cluster = Cluster::default();
        cluster.add(&mut Block::new(0, [0; 3], 0, threads, 16, 32));
        cluster
    }

    #[test]
    fn a_phase_completes_when_all_threads_that_are_left_have_arrived() {
        let mut cluster = cluster(3);
        let mut threads = [Arrivals::default(); 3];
        assert_eq!(cluster.arrive(&mut threads[0]), Ok(false));
        assert_eq!(cluster.wait(&mut threads[0]), Ok(()));
        assert!(!cluster.is_over(threads[0]));
        assert_eq!(cluster.arrive(&mut threads[1]), Ok(false));
        assert!(cluster.leave(threads[2]));
        assert!(cluster.is_over(threads[0]) && cluster.is_over(threads[1]));
        // A thread that ends after its arrival is no longer counted as arrived.
        assert_eq!(cluster.wait(&mut threads[1]), Ok(()));
        assert_eq!(cluster.arrive(&mut threads[1]), Ok(false));
        assert!(!cluster.leave(threads[1]));
        assert_eq!(cluster.arrive(&mut threads[0]), Ok(true));
    }

    #[test]
    fn arrivals_and_waits_alternate() {
        let mut cluster = cluster(2);
        let mut thread = Arrivals::default();
        assert!(cluster.wait(&mut thread).unwrap_err().contains("has not arrived"));
        assert_eq!(cluster.arrive(&mut thread), Ok(false));
        assert!(cluster.arrive(&mut thread).unwrap_err().contains("has not waited"));
    }
}
