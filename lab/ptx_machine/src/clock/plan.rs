//! A kernel's regions (basic blocks, cut at syncs) and the order of their instructions.
//!
//! ptxas reorders the instructions of a block: long operations begin early, as far as operands and possibly
//! aliasing accesses permit. List scheduling reproduces that here, with the latency of a second-level cache
//! for loads.

use std::collections::HashMap;
use std::ops::Range;

use super::costs::{self, Cost};
use crate::errors::LoadResult;
use crate::flow::analysis::Flow;
use crate::ir::{Base, Function, Instr, Op, Reg};
use crate::types::{Order, Space};

/// Latency of loads that the scheduler assumes, in cycles.
const LOAD: f64 = 260.0;
const SHARED: f64 = 29.0;

pub(crate) struct Region {
    pub first: u32,
    pub last: u32,
    /// Whether the region is the last of its block.
    pub ends: bool,
    /// The region's instructions in the order of issue.
    pub order: Vec<u32>,
    /// Registers needed for the address of the region's first look, and the number of instructions before
    /// that look.
    pub look: Option<(Vec<Reg>, u32)>,
}

pub(crate) struct Plan {
    pub regions: Vec<Region>,
    /// The region of each instruction.
    pub region_of: Vec<u32>,
    pub costs: Vec<Cost>,
}

/// Kinds of accesses, by which reorderings are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    None,
    Load(bool),
    Store(bool),
    /// Keeps its place among all accesses.
    Fixed,
}

/// Returns whether an access is to the block's shared memory.
fn shared(space: Space, base: Base) -> bool {
    space == Space::Shared || matches!(base, Base::Shared | Base::Dynamic)
}

fn kind(instr: &Instr) -> Kind {
    let shared =
        |space: Space, base: Base| space == Space::Shared || matches!(base, Base::Shared | Base::Dynamic);
    match &instr.op {
        Op::Ld { access, addr, .. } => match access.space {
            Space::Param | Space::Const => Kind::None,
            _ if access.order.is_strong() => Kind::Fixed,
            space => Kind::Load(shared(space, addr.base)),
        },
        Op::St { access, addr, .. } => match access.space {
            Space::Param => Kind::None,
            _ if access.order.is_strong() => Kind::Fixed,
            space => Kind::Store(shared(space, addr.base)),
        },
        Op::MultimemLd { .. } | Op::MultimemSt { .. } | Op::AliasFence => Kind::Fixed,
        Op::Atom { .. } | Op::Fence { .. } | Op::Bar { .. } | Op::Warp { .. } | Op::Call { .. } => {
            Kind::Fixed
        }
        Op::ClusterBar { .. } => Kind::Fixed,
        Op::Nanosleep | Op::Dependents { .. } => Kind::Fixed,
        _ => Kind::None,
    }
}

/// Returns whether access b must stay after access a, which precedes it.
fn stays(a: Kind, b: Kind) -> bool {
    match (a, b) {
        (Kind::None, _) | (_, Kind::None) | (Kind::Load(_), Kind::Load(_)) => false,
        (Kind::Fixed, _) | (_, Kind::Fixed) => true,
        (Kind::Load(a) | Kind::Store(a), Kind::Load(b) | Kind::Store(b)) => a == b,
    }
}

fn latency(instr: &Instr, cost: Cost) -> f64 {
    match &instr.op {
        Op::Ld { access, addr, .. } => match kind(instr) {
            Kind::None => 0.0,
            _ if shared(access.space, addr.base) => SHARED,
            _ => LOAD,
        },
        Op::Atom { .. } | Op::MultimemLd { .. } => LOAD,
        Op::Warp { .. } => SHARED,
        Op::MovSpecial { .. } => 20.0,
        _ => cost.depth * 4.5,
    }
}

/// Returns whether threads wait there for other threads or for the end of a launch.
fn meets(instr: &Instr) -> bool {
    matches!(
        instr.op,
        Op::Bar { .. } | Op::ClusterBar { .. } | Op::Warp { .. } | Op::Dependents { waits: true }
    )
}

/// Returns whether the instruction looks at stores of threads outside of the block.
pub(crate) fn is_look(instr: &Instr) -> bool {
    let space = match &instr.op {
        Op::Ld { access, .. } if access.order != Order::Weak => access.space,
        Op::Atom { access, .. } => access.space,
        _ => return false,
    };
    matches!(space, Space::Generic | Space::Global | Space::SharedCluster)
}

impl Plan {
    pub fn of(function: &Function) -> LoadResult<Self> {
        let flow = Flow::of(function)?;
        let costs: Vec<Cost> = function.code.iter().map(costs::of).collect();
        let mut regions = Vec::new();
        let mut region_of = vec![0; function.code.len()];
        for block in &flow.blocks {
            let mut first = block.first;
            for at in block.first..block.last {
                let cuts = meets(&function.code[at]);
                if cuts || at + 1 == block.last {
                    region_of[first..=at].fill(regions.len() as u32);
                    regions.push(region(&function.code, &costs, first..at + 1, at + 1 == block.last));
                    first = at + 1;
                }
            }
        }
        Ok(Self { regions, region_of, costs })
    }
}

fn region(code: &[Instr], costs: &[Cost], range: Range<usize>, ends: bool) -> Region {
    let Range { start: first, end: last } = range;
    let order = schedule(code, costs, first, last);
    let look = (first..last).find(|&at| is_look(&code[at])).map(|at| before(code, costs, first, at));
    Region { first: first as u32, last: last as u32, ends, order, look }
}

/// Returns the registers from outside of the region that an instruction needs, and how many of the region's
/// instructions it depends on.
fn before(code: &[Instr], costs: &[Cost], first: usize, at: usize) -> (Vec<Reg>, u32) {
    let mut needs = Vec::new();
    code[at].reads(&mut |reg| needs.push(reg));
    let mut issues = 0;
    for i in (first..at).rev() {
        let mut gives = false;
        code[i].writes(&mut |reg| gives |= needs.contains(&reg));
        if gives {
            code[i].writes(&mut |reg| needs.retain(|&need| need != reg));
            code[i].reads(&mut |reg| needs.push(reg));
            issues += costs[i].issues;
        }
    }
    (needs, issues)
}

/// Orders instructions by the longest path to the end of the region.
fn schedule(code: &[Instr], costs: &[Cost], first: usize, last: usize) -> Vec<u32> {
    let count = last - first;
    let mut next: Vec<Vec<(usize, f64)>> = vec![Vec::new(); count];
    let mut left = vec![0u32; count];
    let mut edge = |from: usize, to: usize, takes: f64| {
        next[from].push((to, takes));
        left[to] += 1;
    };
    let mut written: HashMap<Reg, usize> = HashMap::new();
    let mut read: HashMap<Reg, Vec<usize>> = HashMap::new();
    let mut accesses: Vec<(usize, Kind)> = Vec::new();
    for i in 0..count {
        let instr = &code[first + i];
        instr.reads(&mut |reg| {
            if let Some(&from) = written.get(&reg) {
                edge(from, i, latency(&code[first + from], costs[first + from]));
            }
            read.entry(reg).or_default().push(i);
        });
        instr.writes(&mut |reg| {
            let before = written.get(&reg).into_iter().chain(read.get(&reg).into_iter().flatten());
            before.filter(|&&from| from != i).for_each(|&from| edge(from, i, 0.0));
        });
        instr.writes(&mut |reg| {
            written.insert(reg, i);
            read.remove(&reg);
        });
        let own = kind(instr);
        if own != Kind::None {
            // The last fixed access is already ordered after all accesses before it.
            let from = accesses.iter().rposition(|&(_, kind)| kind == Kind::Fixed).unwrap_or(0);
            let kept = accesses[from..].iter().filter(|&&(_, kind)| stays(kind, own));
            kept.for_each(|&(at, _)| edge(at, i, 0.0));
            accesses.push((i, own));
        }
        let ends = instr.ends_block() || meets(instr);
        if ends && i + 1 == count {
            (0..i).for_each(|from| edge(from, i, 0.0));
        }
    }
    let mut height = vec![0.0f64; count];
    for i in (0..count).rev() {
        let below = next[i].iter().map(|&(to, takes)| height[to] + takes.max(1.0)).fold(0.0, f64::max);
        height[i] = below;
    }
    let mut ready: Vec<usize> = (0..count).filter(|&i| left[i] == 0).collect();
    let mut earliest = vec![0.0f64; count];
    let mut now = 0.0f64;
    let mut order = Vec::with_capacity(count);
    while !ready.is_empty() {
        // Takes the highest priority among ready instructions; otherwise the one that is ready first.
        let can = |i: usize| earliest[i] <= now;
        let better = |a: usize, b: usize| match (can(a), can(b)) {
            (true, true) => height[a] > height[b] || (height[a] == height[b] && a < b),
            (false, false) => earliest[a] < earliest[b] || (earliest[a] == earliest[b] && a < b),
            (a, _) => a,
        };
        let mut best = 0;
        for i in 1..ready.len() {
            if better(ready[i], ready[best]) {
                best = i;
            }
        }
        let i = ready.swap_remove(best);
        now = now.max(earliest[i]) + f64::from(costs[first + i].issues);
        order.push((first + i) as u32);
        for &(to, takes) in &next[i] {
            earliest[to] = earliest[to].max(now + takes);
            left[to] -= 1;
            if left[to] == 0 {
                ready.push(to);
            }
        }
    }
    order
}
