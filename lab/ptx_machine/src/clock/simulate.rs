//! The event loop, in the order of simulated time: launches, warps, arrivals of stores.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

use super::constants::Machine;
use super::fabric::{Fabric, Who};
use super::launches::Rank;
use super::path::{self, Cause};
use super::plan::Plan;
use super::recorder::Recorder;
use super::state::{ClusterMeeting, SimBlock, Sm, Store, Time};
use super::{Chain, Counts, Step, Timing};
use crate::errors::{Fault, LaunchError};
use crate::launch::grid::Grid;
use crate::launch::report;
use crate::launch::run::{Run, Settings};
use crate::program::Program;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// The arrival of a store; at equal times it comes before looks.
    Arrive(usize),
    Launch(usize),
    /// The turn of a block's warp.
    Warp(usize, usize),
}

/// Limit for all calls together. A simulation that exceeds it is considered endless.
const MOST_NS: f64 = 20e6;

pub(crate) struct Simulation<'a> {
    pub run: Run<'a>,
    pub program: &'a Program,
    pub machine: &'a Machine,
    pub chain: &'a Chain<'a>,
    pub plans: HashMap<usize, Arc<Plan>>,
    pub fabric: Fabric,
    pub resident: bool,
    /// Multiprocessors of each rank that have simulated blocks.
    pub sms: Vec<Vec<Sm>>,
    pub blocks: Vec<Option<Box<SimBlock>>>,
    pub stores: Vec<Option<Store>>,
    /// Regions that multiprocessor 0 of rank 0 has executed.
    pub touched: HashSet<u32>,
    /// Index of the current block.
    pub own: usize,
    pub ranks: Vec<Rank>,
    /// By cluster, as numbered in `run`.
    pub clusters: Vec<ClusterMeeting>,
    queue: BinaryHeap<Reverse<(Time, Event, u64)>>,
    pushed: u64,
}

/// Returns the simulated blocks, and the multiprocessor of each. Those of a cluster, which stay together, have
/// neighbouring multiprocessors.
pub(crate) fn sample(chain: &Chain, grid: &Grid, sms: usize) -> Vec<([u32; 3], usize)> {
    let [x, y, z] = grid.launch.grid;
    let mut blocks: Vec<[u32; 3]> = (0..x * y * z).map(|i| [i % x, i / x % y, i / x / y]).collect();
    let size = grid.cluster_blocks() as usize;
    if size > 1 {
        blocks.sort_by_key(|&index| grid.place(index));
    }
    let all = blocks.len() / size;
    let most = if chain.blocks == 0 { all } else { (chain.blocks as usize).div_ceil(size).max(2) };
    let places = (sms / size).max(1);
    // Evenly spaced, since blocks at the end of a grid may have less work: the sample's mean is the grid's.
    let (count, last) = (all.min(places).min(most), all.min(places) - 1);
    let chosen = (0..count).flat_map(|i| {
        let first = i * last / (count - 1).max(1);
        (first..all).step_by(places).flat_map(move |cluster| (0..size).map(move |b| (cluster, i, b)))
    });
    chosen.map(|(cluster, i, b)| (blocks[cluster * size + b], (i * size + b) % sms)).collect()
}

/// Predicts the duration of a chain of calls on a machine.
///
/// # Errors
///
/// Errors of kernels and launches, as in `Program::launch`; and a chain in which all threads wait.
pub fn time(program: &Program, machine: &Machine, chain: &Chain) -> Result<Timing, LaunchError> {
    let invalid = |what: &str| {
        let kernel = chain.calls.first().map_or(String::new(), |call| call.kernel.to_owned());
        LaunchError { fault: Fault::Launch, kernel, what: what.to_owned() }
    };
    if !program.is_timed() {
        return Err(invalid("the program was not loaded for the clock"));
    }
    if chain.calls.is_empty() || chain.turns == 0 {
        return Err(invalid("a chain without calls"));
    }
    let mut plans = HashMap::new();
    let mut grids = Vec::new();
    for call in chain.calls {
        let grid = Grid::new(program, call)?;
        let number = grid.kernel.number;
        if let std::collections::hash_map::Entry::Vacant(entry) = plans.entry(number) {
            let plan =
                Plan::of(&program.module.functions[number]).map_err(|error| invalid(&error.to_string()))?;
            entry.insert(Arc::new(plan));
        }
        grids.push(grid);
    }
    let settings = Settings { tear: false, ..Settings::default() };
    let mut run = Run::new(program, settings, grids);
    run.recorder = Some(Recorder::default());
    let ranks = chain.calls.len();
    let sms = machine.sms.max(1.0) as usize;
    let simulated = sample(chain, run.grid_of(0), sms).len().max(1);
    let scale = f64::from(chain.calls[0].grid.iter().product::<u32>()) / simulated as f64;
    let simulation = Simulation {
        run,
        program,
        machine,
        chain,
        plans,
        fabric: Fabric::new(machine, chain.homes, ranks, scale, chain.resident),
        resident: chain.resident,
        sms: (0..ranks).map(|_| Vec::new()).collect(),
        blocks: Vec::new(),
        stores: Vec::new(),
        touched: HashSet::new(),
        own: 0,
        ranks: (0..ranks).map(|_| Rank::default()).collect(),
        clusters: Vec::new(),
        queue: BinaryHeap::new(),
        pushed: 0,
    };
    simulation.all()
}

impl Simulation<'_> {
    pub(crate) fn push(&mut self, at: f64, event: Event) {
        self.pushed += 1;
        self.queue.push(Reverse((Time(at), event, self.pushed)));
    }

    fn all(mut self) -> Result<Timing, LaunchError> {
        (0..self.ranks.len()).for_each(|rank| self.push(0.0, Event::Launch(rank)));
        while let Some(Reverse((Time(at), event, _))) = self.queue.pop() {
            if self.machine.ns(at) > MOST_NS {
                return Err(self.stuck(Fault::Limit));
            }
            match event {
                Event::Arrive(store) => self.arrive(store)?,
                Event::Launch(rank) => self.launch(rank, at),
                Event::Warp(block, warp) => self.go_on(block, warp, at)?,
            }
        }
        let ended = |rank: &Rank| rank.turns.iter().filter(|turn| turn.ended).count();
        if self.ranks.iter().any(|rank| ended(rank) < self.chain.turns) {
            return Err(self.stuck(Fault::Sync));
        }
        Ok(self.timing())
    }

    fn stuck(&self, fault: Fault) -> LaunchError {
        let left = self.blocks.iter().flatten().filter(|sim| sim.left > 0);
        let texts: Vec<String> = left
            .map(|sim| format!("rank {}, {}", sim.rank, report::waiting(self.program, &sim.block)))
            .collect();
        LaunchError { fault, kernel: self.chain.calls[0].kernel.to_owned(), what: texts.join("; ") }
    }

    fn go_on(&mut self, block: usize, warp: usize, at: f64) -> Result<(), LaunchError> {
        let Some(mut sim) = self.blocks[block].take() else { return Ok(()) };
        self.own = block;
        let result = if sim.warps[warp].next == Some(at) {
            sim.warps[warp].next = None;
            self.warp(&mut sim, warp, at)
        } else {
            Ok(())
        };
        if sim.warps[warp].ended && sim.left == 0 && sim.end >= 0.0 {
            self.block_ended(block, &mut sim);
        }
        self.blocks[block] = Some(sim);
        result
    }

    fn timing(self) -> Timing {
        let turns = self.chain.turns;
        let end = |turn: usize| self.ranks.iter().map(|rank| rank.turns[turn].end).fold(0.0, f64::max);
        // In the first call all ranks begin at the same instant.
        let gap = self.machine.cycles(self.chain.gap_ns);
        let call = if turns > 1 { (end(turns - 1) - end(0)) / (turns - 1) as f64 } else { end(0) + gap };
        let skew = self.machine.skew_ns(self.ranks.len());
        let last = self.ranks.iter().max_by(|a, b| a.last.1.total_cmp(&b.last.1));
        let (who, finish) = last.map_or(((0, 0), 0.0), |rank| rank.last);
        let of = |who: Who| self.blocks[who.0].as_deref().filter(|sim| sim.turn + 1 == turns);
        let log_of = |who: Who| of(who).map(|sim| &sim.warps[who.1].log);
        let steps = path::back(log_of, who, self.warp_end(who).min(finish));
        // A launch that began before the end of the previous one counts from that end.
        let first =
            steps.last().map_or(0, |step| self.blocks[step.who.0].as_deref().map_or(0, |sim| sim.rank));
        let before = turns.checked_sub(2).map_or(f64::MIN, |turn| self.ranks[first].turns[turn].end);
        let start = self.ranks[first].turns[turns - 1].start;
        let steps: Vec<path::Step> = steps
            .into_iter()
            .filter(|step| step.end > before)
            .map(|step| path::Step { start: step.start.max(before), ..step })
            .collect();
        let begin = steps.last().map_or(finish, |step| step.start);
        let ns = |cycles: f64| self.machine.ns(cycles);
        let mut causes: BTreeMap<Cause, f64> = BTreeMap::new();
        let mut add = |cause, cycles: f64| *causes.entry(cause).or_insert(0.0) += ns(cycles);
        add(Cause::Launch, if turns > 1 { (start - before).max(0.0) } else { gap });
        steps.iter().for_each(|step| add(step.cause, step.end - step.start));
        add(Cause::Drain, finish - self.warp_end(who).min(finish));
        causes.insert(Cause::Skew, skew);
        causes.retain(|_, &mut ns| ns > 0.0);
        let path = steps.iter().rev().filter_map(|step| {
            let sim = of(step.who)?;
            let kernel = self.run.kernel_of(sim.rank) as u64;
            Some(Step {
                rank: sim.rank,
                warp: (sim.block.index[0], step.who.1),
                cause: step.cause,
                start_ns: ns(step.start - begin),
                end_ns: ns(step.end - begin),
                place: report::place(self.program, kernel << 32 | u64::from(step.at)),
            })
        });
        let path: Vec<Step> = path.collect();
        let plan = &self.plans[&self.run.kernel_of(0)];
        let issues = |region: &u32| {
            let region = &plan.regions[*region as usize];
            (region.first..region.last).map(|at| f64::from(plan.costs[at as usize].issues)).sum::<f64>()
        };
        let whole: f64 = (0..plan.regions.len() as u32).map(|region| issues(&region)).sum();
        Timing {
            call_ns: ns(call) + skew,
            round_trips: runs(&path, Cause::Remote),
            flights: runs(&path, Cause::Flight),
            causes,
            path,
            counts: self.counts(),
            code_executed: self.touched.iter().map(issues).sum::<f64>() / whole.max(1.0),
            evenness: self.evenness(),
        }
    }

    fn evenness(&self) -> f64 {
        let stored = |sim: &SimBlock| -> f64 {
            sim.warps.iter().flat_map(|warp| warp.counts.stores.values()).map(|traffic| traffic.bytes).sum()
        };
        let of_rank = |rank: usize| {
            let own = self.blocks.iter().flatten();
            let own = own.filter(|sim| sim.rank == rank && sim.turn + 1 == self.chain.turns);
            let (least, most) = own
                .map(|sim| stored(sim))
                .fold((f64::MAX, 0.0), |(least, most), own| (f64::min(least, own), f64::max(most, own)));
            if most > 0.0 {
                least / most
            } else {
                1.0
            }
        };
        match self.fabric.scale > 1.0 {
            true => (0..self.ranks.len()).map(of_rank).fold(1.0, f64::min),
            false => 1.0,
        }
    }

    fn warp_end(&self, who: Who) -> f64 {
        self.blocks[who.0].as_deref().map_or(0.0, |sim| sim.warps[who.1].now)
    }

    /// Returns rank 0's activity in its last launch, scaled to all blocks.
    fn counts(&self) -> Counts {
        let mut all = Counts::default();
        let scale = self.fabric.scale;
        let own =
            self.blocks.iter().flatten().filter(|sim| sim.rank == 0 && sim.turn + 1 == self.chain.turns);
        for warp in own.flat_map(|sim| &sim.warps) {
            let counts = &warp.counts;
            all.instructions += counts.instructions * scale;
            all.most_instructions = all.most_instructions.max(counts.instructions);
            all.warps += scale;
            all.syncs = all.syncs.max(counts.syncs);
            all.fences = all.fences.max(counts.fences);
            all.looks += counts.looks * scale;
            for (to, from) in [(&mut all.loads, &counts.loads), (&mut all.stores, &counts.stores)] {
                for (&device, traffic) in from {
                    let scaled = super::Traffic {
                        bytes: traffic.bytes * scale,
                        sectors: traffic.sectors * scale,
                        partial: traffic.partial * scale,
                        wire: traffic.wire * scale,
                    };
                    to.entry(device).or_default().add(&scaled);
                }
            }
        }
        all
    }

    /// Returns address and size of a block's shared memory.
    pub(crate) fn shared_of(&self, sim: &mut SimBlock) -> (u64, u64) {
        (sim.block.shared(), self.run.grid_of(sim.rank).shared_bytes.into())
    }

    pub(crate) fn fault(&self, sim: &SimBlock, fault: Fault, what: String) -> LaunchError {
        let kernel = self.chain.calls[sim.rank].kernel.to_owned();
        LaunchError { fault, kernel, what: format!("rank {}: {what}", sim.rank) }
    }
}

/// Returns the number of runs of consecutive steps with this cause.
fn runs(path: &[Step], cause: Cause) -> usize {
    let is = |step: &Step| step.cause == cause;
    path.iter()
        .enumerate()
        .filter(|(i, step)| is(step) && !i.checked_sub(1).is_some_and(|i| is(&path[i])))
        .count()
}
