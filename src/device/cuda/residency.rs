//! How many blocks each communicator may launch, so that the grids of all communicators of this process fit onto a GPU together.
//!
//! Blocks of a call wait for those of other ranks, and no block makes way for another. Where two communicators are in use on
//! streams of their own, one GPU may run a call of the first, and another GPU one of the second: without room for both on
//! each, both wait until they give up. So a communicator has blocks of its own from when it is made until it is dropped, and
//! its plan uses no more. What takes up multiprocessors without waiting for other ranks only delays them.
//!
//! Blocks are counted as multiprocessors. The largest, of 512 threads with up to 128 registers each, fills one, and smaller ones
//! may keep it from any. A communicator has one grid at a time on a GPU, since its calls are ordered.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::abi::FA_MAX_BLOCKS;

/// Names a communicator: a process, and a number that it gives no other one.
pub(super) type CommunicatorId = ([u8; 16], u64);

static RESERVED: Mutex<Vec<Weak<Reservation>>> = Mutex::new(Vec::new());

/// The blocks of a communicator's ranks on one GPU, as long as one of them in this process has it.
#[derive(Debug)]
pub(super) struct Reservation {
    gpu: [u8; 16],
    communicator: CommunicatorId,
    ranks: usize,
    /// Of each of the ranks. Read and written where `RESERVED` is locked, which orders that.
    blocks: AtomicUsize,
}

/// What there is room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    /// For each rank; 0: none.
    pub blocks: usize,
    /// That have blocks on the GPU in this process already.
    pub communicators: usize,
}

/// The ranks of a communicator that share a GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sharers {
    pub gpu: [u8; 16],
    pub multiprocessors: usize,
    pub communicator: CommunicatorId,
    /// Those in other processes, too: the GPU may run them side by side (MPS).
    pub ranks: usize,
}

impl Reservation {
    /// Takes a part of what is left of the GPU, at most so many blocks for each rank and at least one if there is one: a half, or an
    /// eighth where several ranks share the GPU, as tests have them, which use many communicators. Ranks of one communicator
    /// take the same blocks.
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

    /// Gives back all but what all ranks of the communicator can have.
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
        // Another GPU is not concerned.
        assert_eq!(Reservation::take(sharers(2, 0, 1), NO_LIMIT).1.blocks, 64);
        // What one had, another has.
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
        // Another GPU's ranks have less: what is too much goes back, once.
        taken.iter().for_each(|(own, _)| own.keep(1));
        assert_eq!(Reservation::take(sharers(3, 0, 4), NO_LIMIT).1.blocks, 1);
        assert_eq!(Reservation::take(sharers(3, 2, 1), NO_LIMIT).1.blocks, 56);
    }
}
