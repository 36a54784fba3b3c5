//! One rank with one block: the kernels of `csrc`, step by step, on messages of one pack for each rank.

use std::sync::Arc;

use loom::sync::atomic::Ordering::Relaxed;
use loom::thread;

use super::region::{read, write, Count, Head, Packets, Rules, Slot, World};

pub const ABORTED: u32 = 2;
pub const GONE: u32 = 5;
pub const MISMATCH: u32 = 6;

/// With three ranks, two that poll alternately could keep the third from ever running. After this many failed
/// polls of a wait, an execution continues with a fair schedule and does not branch any more.
const POLLS: u32 = 1;

/// The launch failed; the status says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GaveUp;

pub type Outcome = Result<(), GaveUp>;

#[derive(Clone, Copy)]
enum Stage {
    Start,
    Second,
}

/// `core/region.cuh`: the number of the launch.
#[derive(Debug, Clone, Copy)]
pub struct LaunchState {
    pub epoch: u32,
    pub pulls: u32,
}

pub struct Rank {
    world: Arc<World>,
    pub rank: usize,
    /// The identity of its pulls, which ranks compare.
    pub call: u64,
    state: LaunchState,
}

/// Returns a rank's input in a launch. Sums differ between launches, and if any rank is missing.
fn value(epoch: u32, rank: usize) -> u32 {
    epoch << (8 * rank)
}

impl Rank {
    pub fn new(world: &Arc<World>, rank: usize) -> Self {
        Self { world: Arc::clone(world), rank, call: 1, state: LaunchState { epoch: 1, pulls: 0 } }
    }

    fn rules(&self) -> &Rules {
        &self.world.rules
    }

    pub fn size(&self) -> usize {
        self.world.heads.len()
    }

    pub fn head(&self, rank: usize) -> &Head {
        &self.world.heads[rank]
    }

    pub fn own(&self) -> &Head {
        self.head(self.rank)
    }

    fn peers(&self) -> impl Iterator<Item = usize> + Clone {
        let own = self.rank;
        (0..self.size()).filter(move |&rank| rank != own)
    }

    fn sum(&self, epoch: u32) -> u32 {
        (0..self.size()).map(|rank| value(epoch, rank)).sum()
    }

    pub fn begin(&mut self, pull: bool) -> LaunchState {
        self.state = LaunchState { epoch: self.state.epoch + 1, pulls: self.state.pulls + u32::from(pull) };
        self.state
    }

    /// Returns whether two ranks on the host swap staging (one-shot) or reduce in the other's staging (two-shot).
    fn swaps_staging(&self) -> bool {
        self.rules().swap_staging && self.size() == 2
    }

    /// Returns the rank whose region holds the staging of `rank` in a one-shot.
    fn staging_region(&self, rank: usize, state: LaunchState) -> usize {
        match self.swaps_staging() {
            true => rank ^ (state.pulls / 2 % 2) as usize,
            false => rank,
        }
    }

    /// Returns the rank whose staging holds a slice after the reduction, in a two-shot.
    fn holder_of(&self, slice: usize) -> usize {
        match self.swaps_staging() {
            true => 1 - slice,
            false => slice,
        }
    }

    fn staging_generation(&self, state: LaunchState) -> usize {
        let count = match self.rules().staging_by {
            Count::Pulls => state.pulls,
            Count::Epochs => state.epoch,
        };
        (count % self.rules().staging_generations) as usize
    }

    /// `core/barrier.cuh`. Returns the sources of a start barrier.
    fn barrier(&self, stage: Stage, state: LaunchState, source: u64) -> Result<Vec<u64>, GaveUp> {
        let rules = self.rules();
        let generation = (state.pulls % rules.signal_generations) as usize;
        for peer in self.peers() {
            let signal = &self.head(peer).inbox[stage as usize][generation][self.rank];
            if let Stage::Start = stage {
                signal.call.store(self.call, Relaxed);
            }
            match stage {
                Stage::Start if rules.source_first => {
                    signal.source.store(source, Relaxed);
                    signal.epoch.store(state.epoch, rules.flag_store);
                }
                Stage::Start => {
                    signal.epoch.store(state.epoch, rules.flag_store);
                    signal.source.store(source, Relaxed);
                }
                Stage::Second => signal.epoch.store(state.epoch, rules.second_store),
            }
        }
        let (mut sources, mut differ) = (vec![source; self.size()], Ok(()));
        for peer in self.peers() {
            let signal = &self.own().inbox[stage as usize][generation][peer];
            self.wait_until(peer, || signal.epoch.load(rules.flag_load) == state.epoch)?;
            if let Stage::Start = stage {
                sources[peer] = signal.source.load(Relaxed);
                if rules.compares_calls && signal.call.load(Relaxed) != self.call {
                    differ = self.record_failure(MISMATCH, 1 << peer);
                }
            }
        }
        differ.map(|()| sources)
    }

    /// `algorithms/one_shot_pull.cuh`. `registered`: the input is in the rank's registered buffer; otherwise
    /// it is staged.
    pub fn one_shot_pull(&mut self, registered: bool) -> Outcome {
        let state = self.begin(true);
        let generation = self.staging_generation(state);
        // The caller writes its input; peers read a registered one where it is.
        let staging = |rank| &self.head(self.staging_region(rank, state)).staging[generation][0];
        let input = if registered { &self.own().buffer } else { staging(self.rank) };
        write(input, value(state.epoch, self.rank));
        let sources = self.barrier(Stage::Start, state, u64::from(registered))?;
        let from = |(rank, &source): (usize, &u64)| match source {
            0 => read(staging(rank)),
            _ => read(&self.head(rank).buffer),
        };
        assert_eq!(sources.iter().enumerate().map(from).sum::<u32>(), self.sum(state.epoch), "wrong sum");
        if self.rules().end_barrier && sources.iter().any(|&source| source != 0) {
            self.barrier(Stage::Second, state, 0)?;
        }
        Ok(())
    }

    /// `algorithms/two_shot_pull.cuh`, with staged inputs.
    pub fn two_shot_pull(&mut self) -> Outcome {
        let state = self.begin(true);
        let generation = self.staging_generation(state);
        for slice in self.peers() {
            write(&self.own().staging[generation][slice], value(state.epoch, self.rank));
        }
        self.barrier(Stage::Start, state, 0)?;
        let theirs = self.peers().map(|peer| read(&self.head(peer).staging[generation][self.rank]));
        let reduced = value(state.epoch, self.rank) + theirs.sum::<u32>();
        write(&self.head(self.holder_of(self.rank)).staging[generation][self.rank], reduced);
        self.barrier(Stage::Second, state, 0)?;
        for peer in self.peers() {
            let gathered = read(&self.head(self.holder_of(peer)).staging[generation][peer]);
            assert_eq!(gathered, self.sum(state.epoch), "wrong sum");
        }
        Ok(())
    }

    fn slot(&self, owner: usize, epoch: u32, from: usize, section: usize) -> &Slot {
        &self.head(owner).mailbox[(epoch % self.rules().mailbox_generations) as usize][from][section]
    }

    /// `core/packet.cuh`.
    fn store_packet(&self, slot: &Slot, pack: u32, epoch: u32) {
        match self.rules().packets {
            Packets::Lines => {
                write(&slot.line, pack);
                slot.tag.store(epoch, self.rules().flag_store);
            }
            Packets::Words => slot.word.store(u64::from(epoch) << 32 | u64::from(pack), Relaxed),
            Packets::TornWords => {
                slot.word.store(u64::from(pack), Relaxed);
                slot.tag.store(epoch, Relaxed);
            }
        }
    }

    fn wait_packet(&self, slot: &Slot, from: usize, epoch: u32) -> Result<u32, GaveUp> {
        match self.rules().packets {
            Packets::Lines => {
                self.wait_until(from, || slot.tag.load(self.rules().flag_load) == epoch)?;
                Ok(read(&slot.line))
            }
            Packets::Words => {
                let mut word = 0;
                self.wait_until(from, || {
                    word = slot.word.load(Relaxed);
                    word >> 32 == u64::from(epoch)
                })?;
                Ok(word as u32)
            }
            Packets::TornWords => {
                self.wait_until(from, || slot.tag.load(Relaxed) == epoch)?;
                Ok(slot.word.load(Relaxed) as u32)
            }
        }
    }

    /// `algorithms/one_shot_push.cuh`.
    pub fn one_shot_push(&mut self) -> Outcome {
        let LaunchState { epoch, .. } = self.begin(false);
        self.push(epoch)?;
        self.collect(epoch)
    }

    /// The first half of a one-shot push: sends the packets to all peers.
    pub fn push(&self, epoch: u32) -> Outcome {
        for peer in self.peers() {
            self.store_packet(self.slot(peer, epoch, self.rank, 0), value(epoch, self.rank), epoch);
        }
        Ok(())
    }

    /// The second half of a one-shot push: waits for the peers' packets and sums them.
    pub fn collect(&self, epoch: u32) -> Outcome {
        let mut sum = value(epoch, self.rank);
        for peer in self.peers() {
            sum += self.wait_packet(self.slot(self.rank, epoch, peer, 0), peer, epoch)?;
        }
        assert_eq!(sum, self.sum(epoch), "wrong sum");
        Ok(())
    }

    /// `algorithms/two_shot_push.cuh`: the first half reduces this rank's slice.
    pub fn two_shot_push(&mut self) -> Outcome {
        let LaunchState { epoch, .. } = self.begin(false);
        self.push(epoch)?;
        self.collect(epoch)?;
        for peer in self.peers() {
            self.store_packet(self.slot(peer, epoch, self.rank, 1), self.sum(epoch), epoch);
        }
        for peer in self.peers() {
            let result = self.wait_packet(self.slot(self.rank, epoch, peer, 1), peer, epoch)?;
            assert_eq!(result, self.sum(epoch), "wrong sum");
        }
        Ok(())
    }

    /// `core/check.cuh`. Returns the peers' calls that differ.
    pub fn same_call(&self, epoch: u32, what: u64) -> Result<(), Vec<(usize, u64)>> {
        let rules = self.rules();
        let generation = (epoch % rules.announcement_generations) as usize;
        for peer in self.peers() {
            let announced = &self.head(peer).announced[generation][self.rank];
            announced.what.store(what, Relaxed);
            announced.epoch.store(epoch, rules.flag_store);
        }
        let mut others = Vec::new();
        for peer in self.peers() {
            let announced = &self.own().announced[generation][peer];
            // On the host a block compares with every peer, even after one that makes a different call.
            if self.wait_until(peer, || announced.epoch.load(rules.flag_load) == epoch).is_err() {
                continue;
            }
            let theirs = announced.what.load(Relaxed);
            if theirs != what {
                others.push((peer, theirs));
                let _ = self.record_failure(MISMATCH, 1 << peer);
            }
        }
        if others.is_empty() {
            Ok(())
        } else {
            Err(others)
        }
    }

    /// `core/wait.cuh`.
    pub fn wait_until(&self, peer: usize, mut ready: impl FnMut() -> bool) -> Outcome {
        let mut last_poll = false;
        let mut polls = 0;
        while !ready() {
            polls += 1;
            if self.size() > 2 && polls > POLLS {
                loom::skip_branch();
            }
            if self.rules().limits {
                self.within_limits(peer, &mut last_poll)?;
            }
            // In loom, a thread that has yielded does not read old values; the last poll must not depend on
            // that.
            if !last_poll {
                thread::yield_now();
            }
        }
        Ok(())
    }

    fn within_limits(&self, peer: usize, last_poll: &mut bool) -> Outcome {
        let (rules, status) = (self.rules(), &self.own().status);
        if *last_poll {
            return self.record_failure(GONE, 1 << peer);
        }
        let gone = status.gone.load(rules.gone_load);
        if gone >> peer & 1 != 0 || (!rules.gone_by_rank && gone != 0) {
            if !rules.last_poll {
                return self.record_failure(GONE, 1 << peer);
            }
            *last_poll = true;
            return Ok(());
        }
        if status.abort.load(Relaxed) != 0 {
            return self.record_failure(ABORTED, 0);
        }
        if rules.failure_ends_waits && status.failure.load(Relaxed) != 0 {
            return Err(GaveUp);
        }
        Ok(())
    }

    pub fn record_failure(&self, failure: u32, missing: u32) -> Outcome {
        let status = &self.own().status;
        status.missing.fetch_or(missing, Relaxed);
        if !self.rules().first_failure_stands || status.failure.load(Relaxed) == 0 {
            status.failure.store(failure, Relaxed);
        }
        Err(GaveUp)
    }
}
