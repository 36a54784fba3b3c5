//! Reservation of blocks: each communicator has a limit of blocks per launch, so that the grids of all communicators
//! of this process are resident on a GPU together.
//!
//! Blocks of a call wait for blocks of other ranks, and a running block is not preempted. If two communicators are
//! used on different streams, one GPU may run a call of the first while another GPU runs a call of the second:
//! without room for both on each GPU, both wait until they time out. So a communicator reserves blocks from its
//! creation until it is dropped, and its plans use no more. Other work that occupies multiprocessors without waiting
//! for ranks only delays calls.
//!
//! A block counts as one multiprocessor. The largest block, of 512 threads with up to 128 registers each, fills a
//! multiprocessor, and smaller blocks on it may leave no room for a large one. A communicator has one grid at a time
//! on a GPU, since its calls are ordered.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::abi::FA_MAX_BLOCKS;

/// Identity of a communicator: a process, and an ID that is unique in it.
pub(crate) type CommunicatorId = ([u8; 16], u64);

static RESERVED: Mutex<Vec<Weak<Reservation>>> = Mutex::new(Vec::new());

/// Blocks reserved on one GPU for the ranks of a communicator in this process. Released on drop.
#[derive(Debug)]
pub(crate) struct Reservation {
    gpu: [u8; 16],
    communicator: CommunicatorId,
    ranks: usize,
    /// Blocks of each rank. Accessed only while `RESERVED` is locked, which orders the accesses.
    blocks: AtomicUsize,
}

/// Result of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Blocks of each rank; 0 if there is no room.
    pub blocks: usize,
    /// Number of other communicators of this process with blocks on the GPU.
    pub communicators: usize,
}

/// The ranks of a communicator that share a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sharers {
    pub gpu: [u8; 16],
    pub multiprocessors: usize,
    pub communicator: CommunicatorId,
    /// Number of ranks on the GPU, also in other processes: the GPU may run them concurrently (MPS).
    pub ranks: usize,
}

impl Reservation {
    /// Reserves a part of the blocks that are left on the GPU: a half or, if several ranks share the GPU, an eighth,
    /// divided among them (tests do that, and use many communicators). Each rank gets at most `most_blocks`, and at
    /// least one if one is left for it. Ranks of one communicator share the reservation.
    pub fn take(sharers: Sharers, most_blocks: usize) -> (Arc<Self>, Room) {
        let Sharers { gpu, multiprocessors, communicator, ranks } = sharers;
        let mut reserved = reserved();
        reserved.retain(|other| other.strong_count() > 0);
        let others: Vec<_> =
            reserved.iter().filter_map(Weak::upgrade).filter(|other| other.gpu == gpu).collect();
        let communicators = others.iter().filter(|other| other.communicator != communicator).count();
        if let Some(own) = others.iter().find(|other| other.communicator == communicator) {
            let blocks = own.blocks.load(Ordering::Relaxed).min(most_blocks);
            return (Arc::clone(own), Room { blocks, communicators });
        }
        let taken: usize =
            others.iter().map(|other| other.blocks.load(Ordering::Relaxed) * other.ranks).sum();
        let left = multiprocessors.saturating_sub(taken) / ranks;
        let part = if ranks == 1 { 2 } else { 8 };
        let blocks = left.div_ceil(part).min(most_blocks).min(FA_MAX_BLOCKS as usize);
        let own = Arc::new(Self { gpu, communicator, ranks, blocks: AtomicUsize::new(blocks) });
        reserved.push(Arc::downgrade(&own));
        (own, Room { blocks, communicators })
    }

    /// Reduces the reservation to the number of blocks that all ranks of the communicator have.
    pub fn keep(&self, blocks: usize) {
        let _reserved = reserved();
        self.blocks.fetch_min(blocks, Ordering::Relaxed);
    }
}

fn reserved() -> MutexGuard<'static, Vec<Weak<Reservation>>> {
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_LIMIT: usize = usize::MAX;

    fn sharers(gpu: u8, number: u64, ranks: usize) -> Sharers {
        Sharers { gpu: [gpu; 16], multiprocessors: 132, communicator: ([7; 16], number), ranks }
    }

    #[test]
    fn communicators_fit_together_until_there_is_no_room() {
        let (mut all, mut blocks) = (Vec::new(), Vec::new());
        loop {
            let (own, room) = Reservation::take(sharers(1, all.len() as u64, 1), NO_LIMIT);
            assert_eq!(room.communicators, all.len());
            if room.blocks == 0 {
                break;
            }
            all.push(own);
            blocks.push(room.blocks);
        }
        assert_eq!(blocks, [64, 34, 17, 9, 4, 2, 1, 1]);
        assert_eq!(blocks.iter().sum::<usize>(), 132);
        // Another GPU is not affected.
        assert_eq!(Reservation::take(sharers(2, 0, 1), NO_LIMIT).1.blocks, 64);
        // Released blocks are reserved again.
        all.remove(1);
        assert_eq!(Reservation::take(sharers(1, 100, 1), NO_LIMIT).1, Room { blocks: 17, communicators: 7 });
        assert_eq!(Reservation::take(sharers(1, 100, 1), 3).1.blocks, 3);
    }

    #[test]
    fn ranks_of_one_communicator_share_what_it_has() {
        let taken: Vec<_> = (0..4).map(|_| Reservation::take(sharers(3, 0, 4), NO_LIMIT)).collect();
        assert!(taken.iter().all(|(_, room)| *room == Room { blocks: 5, communicators: 0 }));
        let (_other, room) = Reservation::take(sharers(3, 1, 4), NO_LIMIT);
        assert_eq!(room, Room { blocks: 4, communicators: 1 });
        // Another GPU's ranks have fewer blocks: the excess is released, once.
        taken.iter().for_each(|(own, _)| own.keep(1));
        assert_eq!(Reservation::take(sharers(3, 0, 4), NO_LIMIT).1.blocks, 1);
        assert_eq!(Reservation::take(sharers(3, 2, 1), NO_LIMIT).1.blocks, 56);
    }
}
