//! Barriers of a block, and instructions that the threads of a warp execute together.

use crate::context::Request;
use crate::ir::{BarKind, BinOp, Instr, Op, ShflKind, VoteKind, WarpOp};
use crate::launch::block::{Block, State};

const COUNT: usize = 16;

/// Threads that have arrived at each barrier.
#[derive(Default)]
pub(crate) struct Barriers {
    arrived: [u32; COUNT],
    /// Expected number of threads, as set by the first to arrive.
    expected: [u32; COUNT],
}

/// Result of a thread's arrival.
pub(crate) enum Met {
    Waits,
    /// Arrived at a barrier without waiting.
    Arrived,
    /// These threads continue, and each sees the others' earlier stores.
    All(Vec<usize>),
}

/// Records a thread's arrival at a barrier or warp instruction; the last arrival releases all.
pub(crate) fn arrive(instr: &Instr, block: &mut Block, thread: usize) -> Result<Met, String> {
    match instr.op {
        Op::Bar { kind, aligned, .. } => at_barrier(kind, aligned, block, thread),
        Op::Warp { op, .. } => in_warp(op, block, thread),
        _ => Err("nothing to wait for".to_owned()),
    }
}

fn at_barrier(kind: BarKind, aligned: bool, block: &mut Block, thread: usize) -> Result<Met, String> {
    let [id, count, ..] = block.requests[thread].args;
    let id = id as usize;
    let threads = block.states.len() as u32;
    if id >= COUNT {
        return Err(format!("there is no barrier {id}"));
    }
    let expected = if count == 0 { threads } else { count as u32 };
    if count != 0 && (expected % 32 != 0 || expected > threads.next_multiple_of(32)) {
        return Err(format!("a barrier for {expected} of {threads} threads"));
    }
    let barriers = &mut block.barriers;
    if barriers.arrived[id] == 0 {
        barriers.expected[id] = expected;
    } else if barriers.expected[id] != expected {
        return Err(format!("barrier {id} is for {} threads and for {expected}", barriers.expected[id]));
    }
    barriers.arrived[id] += 1;
    if aligned {
        check_aligned(block, thread)?;
    }
    if kind == BarKind::Arrive {
        block.states[thread] = State::Ready;
    }
    if block.barriers.arrived[id] == block.barriers.expected[id] {
        return Ok(Met::All(release(block, id, kind)));
    }
    Ok(if kind == BarKind::Arrive { Met::Arrived } else { Met::Waits })
}

/// Checks that all threads of a warp arrive at the same aligned instruction.
fn check_aligned(block: &Block, thread: usize) -> Result<(), String> {
    let first = thread / 32 * 32;
    let last = (first + 32).min(block.states.len());
    let own = block.requests[thread].at;
    for other in first..last {
        if block.states[other] == State::AtBarrier && block.requests[other].at != own {
            return Err(format!("thread {other} of the same warp is at another one"));
        }
    }
    Ok(())
}

fn release(block: &mut Block, id: usize, kind: BarKind) -> Vec<usize> {
    let waits = |&i: &usize| block.states[i] == State::AtBarrier && block.requests[i].args[0] == id as u64;
    let threads: Vec<usize> = (0..block.states.len()).filter(waits).collect();
    let votes = || threads.iter().map(|&i| block.requests[i].args[2] != 0);
    let result = match kind {
        BarKind::RedPopc => votes().filter(|&vote| vote).count() as u64,
        BarKind::RedAnd => votes().all(|vote| vote).into(),
        BarKind::RedOr => votes().any(|vote| vote).into(),
        BarKind::Sync | BarKind::Arrive => 0,
    };
    for &i in &threads {
        block.states[i] = State::Ready;
        block.results[i] = [result, 0];
    }
    block.barriers.arrived[id] = 0;
    threads
}

fn in_warp(op: WarpOp, block: &mut Block, thread: usize) -> Result<Met, String> {
    let first = thread / 32 * 32;
    let own = block.requests[thread];
    let mask = own.args[0] as u32;
    if mask >> (thread - first) & 1 == 0 {
        return Err(format!("the thread is not in its mask {mask:#x}"));
    }
    let lanes: Vec<usize> = (0..32).filter(|lane| mask >> lane & 1 != 0).collect();
    for &lane in &lanes {
        let Some(&state) = block.states.get(first + lane) else {
            return Err(format!("the mask {mask:#x} has threads that the block does not have"));
        };
        let request = block.requests[first + lane];
        match state {
            State::InWarp if request.at == own.at && request.args[0] == own.args[0] => {}
            State::InWarp if request.at == own.at => {
                return Err(format!("masks {mask:#x} and {:#x}", request.args[0]))
            }
            State::Ended => return Err(format!("thread {} of the mask has ended", first + lane)),
            // The thread is running, or waits at another instruction from which it can still arrive.
            _ => return Ok(Met::Waits),
        }
    }
    let requests: Vec<(usize, Request)> =
        lanes.iter().map(|&lane| (lane, block.requests[first + lane])).collect();
    for &(lane, request) in &requests {
        block.results[first + lane] = result(op, &requests, lane, request)?;
        block.states[first + lane] = State::Ready;
    }
    // Among these only bar.warp.sync orders memory.
    Ok(match op {
        WarpOp::Sync => Met::All(lanes.iter().map(|lane| first + lane).collect()),
        _ => Met::Waits,
    })
}

/// Returns the result register and predicate of one lane.
fn result(op: WarpOp, all: &[(usize, Request)], lane: usize, own: Request) -> Result<[u64; 2], String> {
    let votes = || all.iter().map(|(_, request)| request.args[1] != 0);
    let ballot = |f: &dyn Fn(&Request) -> bool| {
        all.iter().filter(|(_, request)| f(request)).fold(0u64, |ballot, (lane, _)| ballot | 1 << lane)
    };
    Ok(match op {
        WarpOp::Sync => [0, 0],
        WarpOp::Vote(kind) => match kind {
            VoteKind::Ballot => [ballot(&|request| request.args[1] != 0), 0],
            VoteKind::All => [0, votes().all(|vote| vote).into()],
            VoteKind::Any => [0, votes().any(|vote| vote).into()],
            VoteKind::Uni => [0, (votes().all(|vote| vote) || !votes().any(|vote| vote)).into()],
        },
        WarpOp::Shfl(kind) => shuffle(kind, all, lane, own)?,
        WarpOp::MatchAny => [ballot(&|request| request.args[1] == own.args[1]), 0],
        WarpOp::MatchAll => {
            let same = all.iter().all(|(_, request)| request.args[1] == own.args[1]);
            [if same { own.args[0] } else { 0 }, same.into()]
        }
        WarpOp::Redux(op, signed) => {
            let values = all.iter().map(|(_, request)| request.args[1] as u32);
            let value = values.reduce(|a, b| reduce(op, signed, a, b)).unwrap_or(0);
            [value.into(), 0]
        }
        WarpOp::Elect => {
            let leader = own.args[0].trailing_zeros();
            [leader.into(), u64::from(lane as u32 == leader)]
        }
    })
}

fn reduce(op: BinOp, signed: bool, a: u32, b: u32) -> u32 {
    match (op, signed) {
        (BinOp::Min, true) => (a as i32).min(b as i32) as u32,
        (BinOp::Max, true) => (a as i32).max(b as i32) as u32,
        (BinOp::Min, false) => a.min(b),
        (BinOp::Max, false) => a.max(b),
        (BinOp::And, _) => a & b,
        (BinOp::Or, _) => a | b,
        (BinOp::Xor, _) => a ^ b,
        _ => a.wrapping_add(b),
    }
}

/// Follows the pseudocode of the PTX ISA: bits 0 to 4 of c are the clamp, bits 8 to 12 the segment mask.
fn shuffle(kind: ShflKind, all: &[(usize, Request)], lane: usize, own: Request) -> Result<[u64; 2], String> {
    let lane = lane as i64;
    let (b, c) = (own.args[2] as i64 & 31, own.args[3] as i64);
    let (clamp, segment) = (c & 31, c >> 8 & 31);
    let most = (lane & segment) | (clamp & !segment);
    let least = lane & segment;
    let (from, inside) = match kind {
        ShflKind::Up => (lane - b, lane - b >= most),
        ShflKind::Down => (lane + b, lane + b <= most),
        ShflKind::Bfly => (lane ^ b, (lane ^ b) <= most),
        ShflKind::Idx => (least | (b & !segment), (least | (b & !segment)) <= most),
    };
    let from = if inside { from } else { lane };
    match all.iter().find(|&&(lane, _)| lane as i64 == from) {
        Some((_, request)) => Ok([request.args[1], inside.into()]),
        None => Err(format!("lane {from}, which is not in the mask, is read")),
    }
}
