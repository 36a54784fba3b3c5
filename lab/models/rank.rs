//! One rank, with one block: the kernels of `csrc`, step by step, on messages of one pack for each rank.

use std::sync::Arc;

use loom::sync::atomic::Ordering::Relaxed;
use loom::thread;

use super::region::{read, write, Count, Head, Packets, Rules, Slot, World};

pub const ABORTED: u32 = 2;
pub const GONE: u32 = 5;
pub const MISMATCH: u32 = 6;

/// Of three ranks two that poll in turn could keep the third from running for ever. After so many polls of one wait in vain an
/// execution goes on by a fair schedule and branches no more.
const POLLS: u32 = 1;

/// The launch gave up; why is in the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GaveUp;

pub type Outcome = Result<(), GaveUp>;

#[derive(Clone, Copy)]
enum Stage {
    Start,
    Second,
}

/// `core/region.cuh`: which launch this is.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    pub epoch: u32,
    pub pulls: u32,
}

pub struct Rank {
    world: Arc<World>,
    pub rank: usize,
    /// What it takes its pulls for, as ranks compare it.
    pub call: u64,
    turn: Turn,
}

/// What a rank brings to a slice in a launch; sums differ from launch to launch and with each rank left out.
fn value(epoch: u32, rank: usize) -> u32 {
    epoch << (8 * rank)
}

impl Rank {
    pub fn new(world: &Arc<World>, rank: usize) -> Self {
        Self { world: Arc::clone(world), rank, call: 1, turn: Turn { epoch: 1, pulls: 0 } }
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

    pub fn begin(&mut self, pull: bool) -> Turn {
        self.turn = Turn { epoch: self.turn.epoch + 1, pulls: self.turn.pulls + u32::from(pull) };
        self.turn
    }

    /// Two ranks of the host trade lines, by the rules of the two kernels of pulls.
    fn trades_lines(&self) -> bool {
        self.rules().two_trade_lines && self.size() == 2
    }

    /// Whose region has the staging of `rank` in a one-shot.
    fn traded(&self, rank: usize, turn: Turn) -> usize {
        match self.trades_lines() {
            true => rank ^ (turn.pulls / 2 % 2) as usize,
            false => rank,
        }
    }

    /// The rank in whose staging a slice lies reduced, in a two-shot.
    fn keeper_of(&self, slice: usize) -> usize {
        match self.trades_lines() {
            true => 1 - slice,
            false => slice,
        }
    }

    fn staging_generation(&self, turn: Turn) -> usize {
        let count = match self.rules().staging_by {
            Count::Pulls => turn.pulls,
            Count::Epochs => turn.epoch,
        };
        (count % self.rules().staging_generations) as usize
    }

    /// `core/barrier.cuh`. Returns the sources of a start barrier.
    fn barrier(&self, stage: Stage, turn: Turn, source: u64) -> Result<Vec<u64>, GaveUp> {
        let rules = self.rules();
        let generation = (turn.pulls % rules.signal_generations) as usize;
        for peer in self.peers() {
            let signal = &self.head(peer).inbox[stage as usize][generation][self.rank];
            if let Stage::Start = stage {
                signal.call.store(self.call, Relaxed);
            }
            match stage {
                Stage::Start if rules.source_first => {
                    signal.source.store(source, Relaxed);
                    signal.epoch.store(turn.epoch, rules.flag_store);
                }
                Stage::Start => {
                    signal.epoch.store(turn.epoch, rules.flag_store);
                    signal.source.store(source, Relaxed);
                }
                Stage::Second => signal.epoch.store(turn.epoch, rules.second_store),
            }
        }
        let (mut sources, mut differ) = (vec![source; self.size()], Ok(()));
        for peer in self.peers() {
            let signal = &self.own().inbox[stage as usize][generation][peer];
            self.wait_until(peer, || signal.epoch.load(rules.flag_load) == turn.epoch)?;
            if let Stage::Start = stage {
                sources[peer] = signal.source.load(Relaxed);
                if rules.compares_calls && signal.call.load(Relaxed) != self.call {
                    differ = self.record_failure(MISMATCH, 1 << peer);
                }
            }
        }
        differ.map(|()| sources)
    }

    /// `algorithms/one_shot_pull.cuh`. `registered`: from the rank's buffer, else staged.
    pub fn one_shot_pull(&mut self, registered: bool) -> Outcome {
        let turn = self.begin(true);
        let generation = self.staging_generation(turn);
        // The caller writes its input; where it is registered, peers read it there.
        let staging = |rank| &self.head(self.traded(rank, turn)).staging[generation][0];
        let input = if registered { &self.own().buffer } else { staging(self.rank) };
        write(input, value(turn.epoch, self.rank));
        let sources = self.barrier(Stage::Start, turn, u64::from(registered))?;
        let from = |(rank, &source): (usize, &u64)| match source {
            0 => read(staging(rank)),
            _ => read(&self.head(rank).buffer),
        };
        assert_eq!(sources.iter().enumerate().map(from).sum::<u32>(), self.sum(turn.epoch), "wrong sum");
        if self.rules().end_barrier && sources.iter().any(|&source| source != 0) {
            self.barrier(Stage::Second, turn, 0)?;
        }
        Ok(())
    }

    /// `algorithms/two_shot_pull.cuh`, staged.
    pub fn two_shot_pull(&mut self) -> Outcome {
        let turn = self.begin(true);
        let generation = self.staging_generation(turn);
        for slice in self.peers() {
            write(&self.own().staging[generation][slice], value(turn.epoch, self.rank));
        }
        self.barrier(Stage::Start, turn, 0)?;
        let theirs = self.peers().map(|peer| read(&self.head(peer).staging[generation][self.rank]));
        let reduced = value(turn.epoch, self.rank) + theirs.sum::<u32>();
        write(&self.head(self.keeper_of(self.rank)).staging[generation][self.rank], reduced);
        self.barrier(Stage::Second, turn, 0)?;
        for peer in self.peers() {
            let gathered = read(&self.head(self.keeper_of(peer)).staging[generation][peer]);
            assert_eq!(gathered, self.sum(turn.epoch), "wrong sum");
        }
        Ok(())
    }

    fn slot(&self, owner: usize, epoch: u32, from: usize, part: usize) -> &Slot {
        &self.head(owner).mailbox[(epoch % self.rules().mailbox_generations) as usize][from][part]
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
        let Turn { epoch, .. } = self.begin(false);
        self.push(epoch)?;
        self.collect(epoch)
    }

    /// Its first half: the packets for everybody.
    pub fn push(&self, epoch: u32) -> Outcome {
        for peer in self.peers() {
            self.store_packet(self.slot(peer, epoch, self.rank, 0), value(epoch, self.rank), epoch);
        }
        Ok(())
    }

    /// Its second half.
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
        let Turn { epoch, .. } = self.begin(false);
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

    /// `core/check.cuh`. The calls that peers make, where they are others.
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
            // On the host a block compares with every peer, also after one that makes another call.
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
            // For loom a thread that has yielded reads nothing old; the last poll must not owe what it sees to that.
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
