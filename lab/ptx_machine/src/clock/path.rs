//! The critical path: records what each warp waited for, and follows it from the end of a call back to its
//! beginning.

use std::collections::HashMap;

use super::fabric::Who;

/// What time is spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// From the end of the previous kernel to the first instruction.
    Launch,
    /// Instruction issue, including waiting for other warps of the multiprocessor.
    Issue,
    /// Results of arithmetic, special registers, branches.
    Arithmetic,
    /// Parameters.
    Constant,
    /// Shared memory, shuffles and votes.
    Shared,
    /// Loads from the GPU's own memory.
    Local,
    /// Loads from a peer.
    Remote,
    /// A store in flight.
    Flight,
    /// From the arrival of a store until a poll has seen it.
    Poll,
    /// Fences, and the stores that they wait for.
    Fence,
    /// Syncs.
    Sync,
    /// Contention for links and caches.
    Bandwidth,
    /// Stores that the end of a kernel waits for.
    Drain,
    /// Waiting for the rank that begins last, in addition to two ranks.
    Skew,
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 14] = [
        Self::Launch,
        Self::Issue,
        Self::Arithmetic,
        Self::Constant,
        Self::Shared,
        Self::Local,
        Self::Remote,
        Self::Flight,
        Self::Poll,
        Self::Fence,
        Self::Sync,
        Self::Bandwidth,
        Self::Drain,
        Self::Skew,
    ];

    /// Returns the name of the cause.
    pub fn name(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Issue => "issue",
            Self::Arithmetic => "arithmetic",
            Self::Constant => "constant",
            Self::Shared => "shared",
            Self::Local => "local load",
            Self::Remote => "remote load",
            Self::Flight => "store flight",
            Self::Poll => "poll",
            Self::Fence => "fence",
            Self::Sync => "sync",
            Self::Bandwidth => "bandwidth",
            Self::Drain => "drain",
            Self::Skew => "skew",
        }
    }
}

/// An interval of a warp's time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    pub start: f64,
    pub end: f64,
    pub cause: Cause,
    /// Part of the interval, at its end, that was spent waiting for a shared link.
    pub queue: f64,
    /// Number of the instruction.
    pub at: u32,
}

/// An event of another warp that was waited for: the issue and arrival of a store, or the arrival at a
/// sync.
#[derive(Debug, Clone, Copy)]
pub(crate) struct After {
    pub who: Who,
    pub issued: f64,
    pub arrived: f64,
    /// Part of the store's travel time spent waiting for shared links.
    pub queue: f64,
}

/// A warp's segments. Those of launches whose path is not requested are dropped.
#[derive(Debug)]
pub(crate) struct Log {
    segments: Vec<Segment>,
    /// Events that segments waited for, by index of the segment.
    afters: HashMap<u32, After>,
    is_kept: bool,
}

/// The first segments, up to this number, are one per instruction; later ones merge consecutive
/// instructions.
const FINE: usize = 4096;

impl Log {
    pub fn new(is_kept: bool) -> Self {
        Self { segments: Vec::new(), afters: HashMap::new(), is_kept }
    }

    pub fn add(&mut self, segment: Segment, after: Option<After>) {
        if segment.end <= segment.start || !self.is_kept {
            return;
        }
        let number = self.segments.len() as u32;
        if let Some(last) = self.segments.last_mut() {
            let own = matches!(last.cause, Cause::Issue | Cause::Arithmetic)
                && matches!(segment.cause, Cause::Issue | Cause::Arithmetic);
            let is_same = last.cause == segment.cause && last.at == segment.at;
            let plain = after.is_none() && segment.queue == 0.0 && last.queue == 0.0;
            let fits = is_same || (own && number as usize > FINE);
            if plain && fits && last.end == segment.start && !self.afters.contains_key(&(number - 1)) {
                last.end = segment.end;
                return;
            }
        }
        self.afters.extend(after.map(|after| (number, after)));
        self.segments.push(segment);
    }
}

/// A step of the critical path, which is followed from its end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub who: Who,
    pub at: u32,
    pub cause: Cause,
    pub start: f64,
    pub end: f64,
}

/// Follows the path from a warp's end back to the beginning of its launch, or of the launch that it waited
/// for.
pub(crate) fn back<'a>(log_of: impl Fn(Who) -> Option<&'a Log>, mut who: Who, end: f64) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut time = end;
    let Some(mut log) = log_of(who) else { return steps };
    let mut i = log.segments.len();
    loop {
        while i > 0 && log.segments[i - 1].start >= time {
            i -= 1;
        }
        let Some(segment) = i.checked_sub(1).map(|i| log.segments[i]) else { return steps };
        let mut step = |cause, start: f64, end: f64| {
            if end > start {
                steps.push(Step { who, at: segment.at, cause, start, end });
            }
        };
        // Gaps between two segments are the warp's own time.
        step(Cause::Issue, segment.end, time);
        time = time.min(segment.end);
        let jump = log.afters.get(&(i as u32 - 1)).copied().filter(|after| after.issued < time);
        match jump.and_then(|after| Some((after, log_of(after.who)?))) {
            Some((after, other)) => {
                let seen = after.arrived.clamp(after.issued, time);
                let (late, way) = match segment.cause {
                    Cause::Sync => (Cause::Sync, Cause::Sync),
                    _ => (Cause::Poll, Cause::Flight),
                };
                step(late, seen, time);
                let own = seen - after.queue.min(seen - after.issued);
                step(Cause::Bandwidth, own, seen);
                step(way, after.issued, own);
                (who, log, time) = (after.who, other, after.issued);
                i = log.segments.len();
            }
            None => {
                let queue = segment.queue.min(time - segment.start);
                step(Cause::Bandwidth, time - queue, time);
                step(segment.cause, segment.start, time - queue);
                time = segment.start;
                i -= 1;
            }
        }
    }
}
