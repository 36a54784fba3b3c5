//! What is done, by number: every rank draws the same calls from the seed, each on its own.

use std::fmt;
use std::time::Duration;

use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp, Wait};

use crate::arguments::Faults;
use crate::harness::inputs::{mix, GAMMA};
use crate::harness::work::Work;

/// Communicators that are alive at a time.
pub const SLOTS: usize = 8;

/// Types that have an RMSNorm.
const FLOATS: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

/// Rows of this many elements fit every communicator.
pub const SHORT_ROW: usize = 512;

/// Offsets of views are below this many elements.
pub const MOST_OFFSET: u64 = 65;

/// What calls are drawn for.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    pub seed: u64,
    pub ranks: usize,
    pub max_bytes: usize,
    pub faults: Faults,
}

/// A sequence of numbers.
pub struct Draws(u64);

impl Draws {
    /// That of a seed, a number and a subject.
    pub fn new(seed: u64, number: u64, subject: u64) -> Self {
        let mut draws = Self(seed);
        for word in [number, subject] {
            draws.0 = draws.next().wrapping_add(word);
        }
        draws
    }

    /// The next number of SplitMix64.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub fn pick<T: Copy, const N: usize>(&mut self, choices: [T; N]) -> T {
        choices[self.below(N as u64) as usize]
    }

    /// 0 to `most`: small numbers as often as large ones, by their number of digits.
    fn size(&mut self, most: usize) -> usize {
        let unit = (self.next() >> 11) as f64 * 0.5f64.powi(53);
        ((most as f64 + 2.0).powf(unit) - 1.0) as usize
    }
}

/// How a communicator is made.
#[derive(Debug, Clone)]
pub struct Settings {
    pub algorithm: Option<Algorithm>,
    pub max_bytes: usize,
    pub workers: usize,
    pub check: bool,
    /// Times the timeout that was asked for.
    pub patience: u32,
    pub wait: Wait,
    /// Launches are numbered from after it.
    pub last_epoch: u32,
    pub has_buffer: bool,
}

impl Settings {
    /// Those of a slot's communicator that is made for this call.
    pub fn draw(seed: u64, number: u64, slot: usize) -> Self {
        let mut draws = Draws::new(seed, number, 1 + slot as u64);
        // Each algorithm is forced somewhere, and one communicator always chooses.
        let algorithm = match slot.checked_sub(1) {
            None => None,
            Some(index) => Algorithm::ALL.get(index).copied().or_else(|| {
                // The planner's choice as often as any direct algorithm.
                let drawn = draws.below(1 + Algorithm::DIRECT.len() as u64) as usize;
                drawn.checked_sub(1).map(|index| Algorithm::DIRECT[index])
            }),
        };
        Self {
            algorithm,
            max_bytes: draws.pick([4 << 10, 64 << 10, 256 << 10, 1 << 20]),
            workers: draws.pick([1, 1, 2, 3]),
            check: draws.one_in(2),
            patience: draws.pick([1, 2, 4]),
            wait: draws.pick([Wait::Auto, Wait::Auto, Wait::Yield, Wait::Spin]),
            // Some pass the wrap-around.
            last_epoch: draws.pick([0, 0, u32::MAX - 20]),
            has_buffer: !draws.one_in(4),
        }
    }
}

/// Groups that a call is made in.
#[derive(Debug, Clone, Hash)]
pub enum Groups {
    /// By rank: color and key.
    Split(Vec<(Option<u32>, i64)>),
    /// By rank: which of two lists it is on.
    Shrink(Vec<bool>),
}

/// One call of all ranks.
#[derive(Debug, Clone, Hash)]
pub struct Call {
    pub number: u64,
    pub slot: usize,
    /// The communicator is dropped and made again first.
    pub renew: bool,
    pub groups: Option<Groups>,
    pub kind: CallKind,
    /// Of those who make the call, modulo their number.
    pub root: usize,
    pub dtype: DType,
    pub op: ReduceOp,
    /// Elements of the larger of the buffers, at most.
    pub count: usize,
    /// Of those, in a row that is normalised; else 0.
    pub hidden: usize,
    /// Of rows that are normalised the sum over ranks is asked for as well.
    pub plain_sum: bool,
    /// How often, on new inputs each.
    pub times: u64,
    /// A rank that is late.
    pub late: Option<(usize, Duration)>,
    /// Each rank has its own idea of where its memory is, and of in place or not.
    pub mixed: bool,
}

impl Call {
    pub fn draw(range: &Range, number: u64) -> Self {
        let Range { seed, ranks, max_bytes, .. } = *range;
        let mut draws = Draws::new(seed, number, 0);
        let dtype = draws.pick(DType::ALL);
        let groups = draws.one_in(50).then(|| {
            if draws.one_in(2) {
                let color = |draws: &mut Draws| draws.pick([Some(0), Some(0), Some(1), Some(7), None]);
                return Groups::Split((0..ranks).map(|_| (color(&mut draws), draws.next() as i64)).collect());
            }
            Groups::Shrink((0..ranks).map(|_| draws.one_in(3)).collect())
        });
        let most = max_bytes / dtype.size();
        // Every size, but also those that fill packs and pieces and those next to them.
        let count = match draws.below(4) {
            0 => (draws.size(most).next_power_of_two() + draws.below(3) as usize).saturating_sub(1).min(most),
            _ => draws.size(most),
        };
        // Those with algorithms to choose from as often as all others.
        let kind = if draws.one_in(2) { CallKind::AllReduce } else { draws.pick(CallKind::MEASURED) };
        if FLOATS.contains(&dtype) && draws.one_in(3) {
            // Few are so long that some communicators refuse them.
            let most_hidden = if draws.one_in(3) { 16 << 10 } else { SHORT_ROW };
            let hidden = 1 + draws.size(most_hidden.min(most).saturating_sub(1));
            let call = Self::with(&mut draws, range, number, CallKind::AllReduceFused, dtype, groups, count);
            let plain_sum = draws.one_in(3);
            return Self { hidden, plain_sum, count: count / hidden * hidden, op: ReduceOp::Sum, ..call };
        }
        Self::with(&mut draws, range, number, kind, dtype, groups, count)
    }

    /// The rest of it.
    fn with(
        draws: &mut Draws,
        range: &Range,
        number: u64,
        kind: CallKind,
        dtype: DType,
        groups: Option<Groups>,
        count: usize,
    ) -> Self {
        let ranks = range.ranks;
        Self {
            kind,
            root: draws.below(ranks as u64) as usize,
            number,
            slot: draws.below(SLOTS as u64) as usize,
            renew: draws.one_in(50),
            groups,
            dtype,
            op: draws.pick(ReduceOp::ARITHMETIC),
            count,
            hidden: 0,
            plain_sum: false,
            times: draws.pick([1, 1, 2, 3]),
            late: draws.one_in(16).then(|| {
                (draws.below(ranks as u64) as usize, Duration::from_micros(draws.size(20_000) as u64))
            }),
            mixed: draws.one_in(2),
        }
    }

    /// What it is for one of so many ranks. Shares that may differ are drawn, some of them empty.
    pub fn work(&self, seed: u64, rank: usize, world_size: usize) -> Work {
        let root = self.root % world_size;
        if self.kind == CallKind::AllReduceFused {
            return Work::new(CallKind::AllReduce, self.dtype, self.op, root, self.count, rank, world_size);
        }
        if !self.kind.has_counts() {
            return Work::new(self.kind, self.dtype, self.op, root, self.count, rank, world_size);
        }
        let mut draws = Draws::new(seed, self.number, 50);
        let mut left = self.count;
        let share = |_| {
            let share = if draws.one_in(6) { 0 } else { draws.size(left) };
            left -= share;
            share
        };
        Work::of_shares(self.kind, self.dtype, self.op, root, (0..world_size).map(share).collect(), rank)
    }

    /// Where `rank`'s memory is.
    pub fn placement(&self, seed: u64, rank: usize) -> Placement {
        let rank = if self.mixed { rank as u64 } else { 0 };
        let mut draws = Draws::new(seed, self.number, 100 + rank);
        let mut view = || {
            let is_registered = draws.one_in(2);
            View {
                is_registered,
                offset: if draws.one_in(2) { 0 } else { draws.below(MOST_OFFSET) as usize },
            }
        };
        let (input, output) = (view(), view());
        Placement { input, output: (!draws.one_in(3)).then_some(output) }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, slot, kind, dtype, op, count, hidden, plain_sum, times, .. } = self;
        write!(f, "call {number}: {} ", kind.name())?;
        if kind.reduces() {
            write!(f, "{op} ")?;
        }
        write!(f, "of {count} {dtype}, communicator {slot}")?;
        if *hidden > 0 {
            write!(f, ", rows of {hidden}{}", if *plain_sum { ", and the plain sum" } else { "" })?;
        }
        if *times > 1 {
            write!(f, ", {times} times")?;
        }
        match &self.groups {
            Some(Groups::Split(_)) => f.write_str(", in groups of split"),
            Some(Groups::Shrink(_)) => f.write_str(", in groups of shrink"),
            None => Ok(()),
        }
    }
}

/// A place in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Where the communicator has a buffer; else private.
    pub is_registered: bool,
    /// In elements.
    pub offset: usize,
}

/// Where a rank's input and output are; in place without an output, where the collective has that form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    pub input: View,
    pub output: Option<View>,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = |view: &View| {
            let kind = if view.is_registered { "registered" } else { "private" };
            format!("{kind} memory + {}", view.offset)
        };
        match &self.output {
            Some(output) => write!(f, "from {} to {}", said(&self.input), said(output)),
            None => write!(f, "in place, if it can, in {}", said(&self.input)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: Range = Range { seed: 5, ranks: 3, max_bytes: 1 << 16, faults: Faults::All };

    #[test]
    fn a_seed_draws_the_same_calls_and_another_others() {
        let drawn = |seed| {
            let calls = (0..100).map(|number| Call::draw(&Range { seed, ..RANGE }, number));
            calls.map(|call| format!("{call:?}")).collect::<Vec<_>>()
        };
        assert_eq!(drawn(5), drawn(5));
        assert!(drawn(5).iter().zip(drawn(6)).all(|(a, b)| *a != b));
    }

    #[test]
    fn everything_is_drawn() {
        let calls: Vec<_> = (0..5000).map(|number| Call::draw(&RANGE, number)).collect();
        let any = |what: &dyn Fn(&Call) -> bool| assert!(calls.iter().any(what));
        for dtype in DType::ALL {
            any(&|call| call.dtype == dtype && call.count == 0);
            any(&|call| call.dtype == dtype && call.count * dtype.size() > RANGE.max_bytes / 2);
            any(&|call| call.dtype == dtype && call.count % 16 == 5);
        }
        assert!(calls.iter().all(|call| call.count * call.dtype.size() <= RANGE.max_bytes));
        ReduceOp::ARITHMETIC.iter().for_each(|op| any(&|call| call.op == *op));
        for kind in CallKind::MEASURED {
            (0..3).for_each(|root| any(&|call| call.kind == kind && call.root == root));
        }
        for dtype in FLOATS {
            let is_norm = |call: &Call| call.dtype == dtype && call.kind == CallKind::AllReduceFused;
            any(&|call| is_norm(call) && call.count > call.hidden && call.hidden > 100);
            any(&|call| is_norm(call) && call.hidden > SHORT_ROW);
            any(&|call| is_norm(call) && call.count == 0);
        }
        assert!(calls.iter().all(|call| call.hidden == 0 || call.count % call.hidden == 0));
        let shares = |call: &Call| call.work(5, 1, 3).shares;
        any(&|call| call.kind.has_counts() && shares(call).contains(&0) && shares(call)[0] > 100);
        assert!(calls.iter().all(|call| call.work(5, 1, 3).elements() <= call.count));
        (0..SLOTS).for_each(|slot| any(&|call| call.slot == slot && call.renew));
        any(&|call| matches!(call.groups, Some(Groups::Split(_))));
        any(&|call| matches!(call.groups, Some(Groups::Shrink(_))));
        (0..3).for_each(|rank| any(&|call| call.late.is_some_and(|(late, _)| late == rank)));
        for (input, output) in [(false, None), (true, None), (false, Some(true)), (true, Some(false))] {
            any(&|call| {
                let placement = call.placement(5, 1);
                placement.input.is_registered == input
                    && placement.output.map(|view| view.is_registered) == output
                    && placement.input.offset % 4 == 3
            });
        }
        any(&|call| call.placement(5, 0) != call.placement(5, 1));
        any(&|call| !call.mixed && call.placement(5, 0) == call.placement(5, 1));
    }
}
