//! The calls, by number: each rank draws the same calls from the seed.

use std::fmt;
use std::time::Duration;

use fast_allreduce::{Algorithm, Builder, CallKind, DType, Host, ReduceOp, Result, Settings, Wait};

use crate::arguments::{size, Faults, Form, Setting};
use crate::harness::inputs::{mix, GAMMA};
use crate::harness::work::Work;

/// Communicators that exist at a time.
pub const SLOTS: usize = 8;

/// Types that have an RMSNorm.
const FLOATS: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

/// Rows of this many elements fit every communicator without settings of `--set`.
const SHORT_ROW: usize = 512;

/// Offsets of views are below this many elements.
pub const MOST_OFFSET: u64 = 65;

/// The parameters that calls are drawn from.
#[derive(Debug, Clone, Copy)]
pub struct Parameters {
    pub seed: u64,
    pub ranks: usize,
    pub max_bytes: usize,
    pub faults: Faults,
}

/// A sequence of random numbers.
pub struct Draws(u64);

impl Draws {
    /// Starts the sequence of a seed, a number and a subject.
    pub fn new(seed: u64, number: u64, subject: u64) -> Self {
        let mut draws = Self(seed);
        for word in [number, subject] {
            draws.0 = draws.next().wrapping_add(word);
        }
        draws
    }

    /// Returns the next number of SplitMix64.
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

    /// Returns 0 to `most`, evenly distributed by the number of digits.
    fn size(&mut self, most: usize) -> usize {
        let unit = (self.next() >> 11) as f64 * 0.5f64.powi(53);
        ((most as f64 + 2.0).powf(unit) - 1.0) as usize
    }
}

/// The drawn settings of a communicator.
#[derive(Debug, Clone)]
pub struct DrawnSettings {
    pub algorithm: Option<Algorithm>,
    pub max_bytes: usize,
    pub workers: usize,
    pub check: bool,
    /// The communicator's timeout divided by `--timeout`.
    pub timeout_factor: u32,
    pub wait: Wait,
    /// The epoch before the first launch.
    pub last_epoch: u32,
    pub has_buffer: bool,
}

impl DrawnSettings {
    /// Draws the settings of a slot's communicator that is made for this call.
    pub fn draw(seed: u64, number: u64, slot: usize) -> Self {
        let mut draws = Draws::new(seed, number, 1 + slot as u64);
        // Each algorithm is forced in one slot, and slot 0 always uses the plan.
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
            timeout_factor: draws.pick([1, 2, 4]),
            wait: draws.pick([Wait::Auto, Wait::Auto, Wait::Yield, Wait::Spin]),
            // Some epochs wrap around.
            last_epoch: draws.pick([0, 0, u32::MAX - 20]),
            has_buffer: !draws.one_in(4),
        }
    }

    /// Replaces the drawn `max_bytes` by that of `fixed` settings, if they have one.
    pub fn with_size_of(mut self, fixed: &[Setting]) -> Self {
        let sizes = fixed.iter().filter(|(name, _)| name == "max_bytes");
        let given = sizes.filter_map(|(_, value)| size(value).ok()).next_back();
        self.max_bytes = given.unwrap_or(self.max_bytes);
        self
    }

    /// Returns the device and the builder of the communicator. `fixed` settings replace drawn ones.
    pub fn builder(&self, timeout: Duration, fixed: &[Setting]) -> Result<(Host, Builder)> {
        let Self { algorithm, max_bytes, workers, check, wait, .. } = self;
        let mut settings = Settings::new();
        settings.set("timeout", timeout.as_secs_f64().to_string())?;
        settings.set("max_bytes", max_bytes.to_string())?;
        settings.set("workers", workers.to_string())?;
        settings.set("check", u8::from(*check).to_string())?;
        settings.set("wait", wait.name())?;
        if let Some(algorithm) = algorithm {
            settings.set("algorithm", algorithm.name())?;
        }
        fixed.iter().try_for_each(|(name, value)| settings.set(name, value))?;
        Ok((settings.host()?, settings.builder()?.first_epoch(self.last_epoch)))
    }
}

/// The groups of ranks that make a call.
#[derive(Debug, Clone, Hash)]
pub enum Groups {
    /// By rank: color and key.
    Split(Vec<(Option<u32>, i64)>),
    /// By rank: which of two lists the rank is on.
    Shrink(Vec<bool>),
}

/// One call of all ranks.
#[derive(Debug, Clone, Hash)]
pub struct Call {
    pub number: u64,
    pub slot: usize,
    /// The communicator is first dropped and made again.
    pub renew: bool,
    pub groups: Option<Groups>,
    pub kind: CallKind,
    /// Modulo the number of ranks that make the call.
    pub root: usize,
    pub dtype: DType,
    pub op: ReduceOp,
    /// Most elements of the larger buffer.
    pub count: usize,
    /// Elements of a row that is normalised; 0 without rows.
    pub hidden: usize,
    /// The sum over ranks of normalised rows is requested too.
    pub plain_sum: bool,
    /// Another call with rows in place of an allreduce with an RMSNorm.
    pub form: Option<&'static Form>,
    /// Number of repetitions, each on new inputs.
    pub times: u64,
    /// A rank that sleeps first.
    pub late: Option<(usize, Duration)>,
    /// Each rank draws its own layout, in place or not.
    pub mixed: bool,
}

impl Call {
    pub fn draw(parameters: &Parameters, number: u64) -> Self {
        let Parameters { seed, ranks, max_bytes, .. } = *parameters;
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
        // Every size, and more often powers of two and their neighbours, at the limits of packs and pieces.
        let count = match draws.below(4) {
            0 => (draws.size(most).next_power_of_two() + draws.below(3) as usize).saturating_sub(1).min(most),
            _ => draws.size(most),
        };
        // Allreduces, which have several algorithms, as often as all others.
        let kind = if draws.one_in(2) { CallKind::AllReduce } else { draws.pick(CallKind::MEASURED) };
        let hidden = (FLOATS.contains(&dtype) && draws.one_in(3)).then(|| {
            // A few are so long that some communicators refuse them.
            let most_hidden = if draws.one_in(3) { 16 << 10 } else { SHORT_ROW };
            1 + draws.size(most_hidden.min(most).saturating_sub(1))
        });
        let call = Self {
            kind: if hidden.is_some() { CallKind::AllReduceFused } else { kind },
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
            form: None,
            times: draws.pick([1, 1, 2, 3]),
            late: draws.one_in(16).then(|| {
                (draws.below(ranks as u64) as usize, Duration::from_micros(draws.size(20_000) as u64))
            }),
            mixed: draws.one_in(2),
        };
        let Some(hidden) = hidden else { return call };
        let (plain_sum, count) = (draws.one_in(3), count / hidden * hidden);
        let form = draws.one_in(2).then(|| &Form::all()[draws.below(Form::all().len() as u64) as usize]);
        Self { hidden, plain_sum, form, count, op: ReduceOp::Sum, ..call }
    }

    /// Returns the work of one rank. Shares that may differ are drawn, some of them empty.
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

    /// Draws where `rank`'s buffers are.
    pub fn layout(&self, seed: u64, rank: usize) -> Layout {
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
        Layout { input, output: (!draws.one_in(3)).then_some(output) }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, slot, kind, dtype, op, count, hidden, plain_sum, form, times, .. } = self;
        write!(f, "call {number}: {} ", kind.name())?;
        if kind.reduces() {
            write!(f, "{op} ")?;
        }
        write!(f, "of {count} {dtype}, communicator {slot}")?;
        if *hidden > 0 {
            write!(f, ", rows of {hidden}{}", if *plain_sum { ", and the plain sum" } else { "" })?;
        }
        if let Some(form) = form {
            write!(f, ", as {form}")?;
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

/// Where a buffer is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct View {
    /// In registered memory, if the communicator has some; else in private memory.
    pub is_registered: bool,
    /// In elements.
    pub offset: usize,
}

/// Where a rank's input and output are. Without an output the call is in place, if the collective allows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub input: View,
    pub output: Option<View>,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = |view: &View| {
            let kind = if view.is_registered { "registered" } else { "private" };
            format!("{kind} memory + {}", view.offset)
        };
        match &self.output {
            Some(output) => write!(f, "from {} to {}", said(&self.input), said(output)),
            None => write!(f, "in place, if possible, in {}", said(&self.input)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: Parameters = Parameters { seed: 5, ranks: 3, max_bytes: 1 << 16, faults: Faults::All };

    #[test]
    fn a_seed_draws_the_same_calls_and_another_others() {
        let drawn = |seed| {
            let calls = (0..100).map(|number| Call::draw(&Parameters { seed, ..RANGE }, number));
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
        let forms: Vec<_> = (0..20_000).filter_map(|number| Call::draw(&RANGE, number).form).collect();
        for form in Form::all() {
            assert!(forms.iter().any(|is| is.name() == form.name()), "{form}");
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
                let layout = call.layout(5, 1);
                layout.input.is_registered == input
                    && layout.output.map(|view| view.is_registered) == output
                    && layout.input.offset % 4 == 3
            });
        }
        any(&|call| call.layout(5, 0) != call.layout(5, 1));
        any(&|call| !call.mixed && call.layout(5, 0) == call.layout(5, 1));
    }
}
