//! Consecutive launches of a rank: sequential, or overlapping by programmatic dependent launch.

use super::fabric::Who;
use super::path::{Cause, Segment};
use super::simulate::{sample, Event, Simulation};
use super::state::{SimBlock, Sm, Stop, Warp};
use crate::launch::block::Block;

/// State of a launch.
#[derive(Default)]
pub(crate) struct Turn {
    pub start: f64,
    /// Number of blocks that have not ended, and of those that have not allowed the next launch to begin.
    pub left: usize,
    pub silent: usize,
    /// When the next launch may begin.
    next: f64,
    /// Latest end of its blocks so far, and whether all blocks have ended.
    pub end: f64,
    pub ended: bool,
    /// Warps of the next launch that wait for the end of this one.
    waiting: Vec<Who>,
}

/// Launches of a rank.
#[derive(Default)]
pub(crate) struct Rank {
    pub turns: Vec<Turn>,
    /// Last warp to end in the last launch, and when it ended.
    pub last: (Who, f64),
}

impl Simulation<'_> {
    pub(crate) fn launch(&mut self, rank: usize, at: f64) {
        let sms = self.machine.sms.max(1.0) as usize;
        let chosen = sample(self.chain, self.run.grid_of(rank), sms);
        let call = &self.chain.calls[rank];
        let threads = call.block.iter().product::<u32>();
        let number = self.run.kernel_of(rank);
        let registers = self.program.module.functions[number].registers.len();
        let frame = self.run.frame_of(rank);
        let turn = self.ranks[rank].turns.len();
        let is_last = turn + 1 == self.chain.turns;
        let left = chosen.len();
        self.ranks[rank].turns.push(Turn { start: at, left, silent: left, ..Turn::default() });
        let grid = self.run.grid_of(rank);
        let (cluster_blocks, shared_bytes) = (grid.cluster_blocks() as usize, grid.shared_bytes);
        for (i, (index, sm)) in chosen.into_iter().enumerate() {
            while self.sms[rank].len() <= sm {
                self.sms[rank].push(Sm::new(self.machine));
            }
            // A kernel begins with an empty first-level cache and with new parameters.
            self.sms[rank][sm].l1.clear();
            self.sms[rank][sm].lines.clear();
            let number = self.blocks.len();
            let mut block = Block::new(rank, index, 0, threads, frame, shared_bytes);
            self.join_cluster(&mut block, number, i % cluster_blocks == 0);
            let warps: Vec<Warp> = (0..threads.div_ceil(32))
                .map(|w| Warp::new(at, (threads - w * 32).min(32) as usize, registers, is_last))
                .collect();
            let left = warps.len();
            self.blocks.push(Some(Box::new(SimBlock {
                block,
                rank,
                turn,
                sm,
                warps,
                meetings: [None; 16],
                gone: vec![false; threads as usize],
                acks: 0.0,
                pending: Vec::new(),
                left,
                told: false,
                end: at,
                last: 0,
            })));
            (0..left).for_each(|warp| self.push(at, Event::Warp(number, warp)));
        }
    }

    pub(crate) fn block_ended(&mut self, number: usize, sim: &mut SimBlock) {
        let rank = &mut self.ranks[sim.rank];
        let end = sim.end.max(sim.acks);
        let turn = &mut rank.turns[sim.turn];
        if turn.end == 0.0 || end >= rank.last.1 {
            rank.last = ((number, sim.last), end);
        }
        turn.end = turn.end.max(end);
        turn.left -= 1;
        turn.ended = turn.left == 0;
        let (ended, end) = (turn.ended, turn.end);
        self.allow_next(sim, end, self.machine.cycles(self.chain.gap_ns));
        // Each block ends once. Its state is no longer needed.
        sim.end = -1.0;
        self.run.end_in_cluster(&mut sim.block);
        sim.block = Block::new(sim.rank, sim.block.index, 0, 0, 0, 0);
        for warp in &mut sim.warps {
            (warp.values, warp.lanes) = (Vec::new(), Vec::new());
            warp.looked.clear();
        }
        if ended {
            let waiting = std::mem::take(&mut self.ranks[sim.rank].turns[sim.turn].waiting);
            waiting.into_iter().for_each(|who| self.wait_is_over(who, end));
        }
    }

    /// Records that a block has ended, or allows the next launch to begin.
    fn allow_next(&mut self, sim: &mut SimBlock, at: f64, gap: f64) {
        if std::mem::replace(&mut sim.told, true) {
            return;
        }
        let turn = &mut self.ranks[sim.rank].turns[sim.turn];
        turn.silent -= 1;
        turn.next = turn.next.max(at + gap);
        if turn.silent == 0 && sim.turn + 1 < self.chain.turns {
            let next = turn.next;
            self.push(next, Event::Launch(sim.rank));
        }
    }

    /// Executes `griddepcontrol`. After its wait, all stores of the previous launch are visible.
    pub(crate) fn depend(&mut self, sim: &mut SimBlock, w: usize, at: u32, lanes: &[usize], waits: bool) {
        if lanes.is_empty() {
            return;
        }
        if !waits {
            // No thread stops here: their states are those of later stops.
            if self.chain.programmatic {
                let now = sim.warps[w].now;
                self.allow_next(sim, now, self.dependent());
            }
            return;
        }
        if !self.chain.programmatic {
            return lanes.iter().for_each(|&lane| sim.warps[w].lanes[lane].stop = Stop::Run);
        }
        let before = sim.turn.checked_sub(1).map(|turn| &mut self.ranks[sim.rank].turns[turn]);
        let end = match before {
            None => None,
            Some(turn) if turn.ended => Some(turn.end),
            Some(turn) => {
                lanes.iter().for_each(|&lane| sim.warps[w].lanes[lane].stop = Stop::Depends);
                sim.warps[w].depends = at;
                turn.waiting.push((self.own, w));
                return;
            }
        };
        lanes.iter().for_each(|&lane| sim.warps[w].lanes[lane].stop = Stop::Run);
        let ready = end.map_or(0.0, |end| end + self.dependent());
        let late = ready - sim.warps[w].now;
        if late > 0.0 {
            self.pass_time(sim, w, at, late, Cause::Launch);
        }
    }

    /// Returns the time from the end of a launch until a dependent launch's wait returns, at most the time
    /// between two sequential launches.
    fn dependent(&self) -> f64 {
        self.machine.cycles(self.machine.dependent_ns.min(self.chain.gap_ns))
    }

    fn wait_is_over(&mut self, (block, w): Who, end: f64) {
        let Some(mut sim) = self.blocks[block].take() else { return };
        let end = end + self.dependent();
        let warp = &mut sim.warps[w];
        for lane in warp.lanes.iter_mut().filter(|lane| lane.stop == Stop::Depends) {
            lane.stop = Stop::Run;
        }
        let (start, at) = (warp.now, warp.depends);
        warp.log.add(Segment { start, end, cause: Cause::Launch, queue: 0.0, at }, None);
        warp.now = warp.now.max(end);
        let own = std::mem::replace(&mut self.own, block);
        let now = sim.warps[w].now;
        self.schedule(&mut sim, w, now);
        self.own = own;
        self.blocks[block] = Some(sim);
    }
}
