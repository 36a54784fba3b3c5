//! Faults: episodes of calls in which ranks are aborted and stopped, drawn from the seed like calls.

use std::fmt;
use std::time::Duration;

use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp};

use super::draw::{Call, DrawnSettings, Draws, Parameters};
use crate::arguments::Faults;

/// One in this number of calls has an episode before it.
const SHARE: u64 = 150;

/// One in this number of episodes stops ranks for longer than the timeout.
const LONG_SHARE: u64 = 4;

/// Timeout of a communicator whose ranks are stopped for longer than that.
const SHORT_LIMIT: Duration = Duration::from_millis(500);

/// Timeout of the other communicators.
const LIMIT: Duration = Duration::from_secs(15);

/// Microseconds after the beginning of the round's second call in which faults happen.
const MOMENTS: u64 = 3000;

/// Approximate bytes that the calls of a round reduce.
const ROUND_BYTES: usize = 16 << 20;

const MOST_CALLS: usize = 2000;

/// The rounds of calls and faults on a separate communicator and its successors.
#[derive(Debug, Clone, Hash)]
pub struct Episode {
    /// The call, which is repeated.
    pub call: Call,
    /// The last round has no fault.
    pub rounds: Vec<Round>,
    /// Ranks are stopped for longer than the timeout.
    pub is_long: bool,
    /// Calls of the last round are recorded, and made again from the recording.
    pub is_replayed: bool,
}

/// Calls on one communicator up to the first that fails, and how the ranks recover.
#[derive(Debug, Clone, Hash)]
pub struct Round {
    pub fault: Option<Fault>,
    pub recovery: Recovery,
}

/// A fault of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fault {
    pub kind: FaultKind,
    pub rank: usize,
    /// After the beginning of the round's second call.
    pub moment: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// [`fast_allreduce::Communicator::abort`] from another thread.
    Abort,
    /// SIGSTOP of its process, and SIGCONT after this time.
    Stop(Duration),
}

impl FaultKind {
    /// Returns the name under which it is counted.
    pub fn name(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::Stop(time) if time < SHORT_LIMIT => "short stop",
            Self::Stop(_) => "long stop",
        }
    }
}

/// How the ranks make the communicator of the next round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// All ranks shrink the failed communicator.
    Shrink,
    /// All ranks except this one shrink it, and make the calls of the next round.
    ShrinkWithout(usize),
    /// They make a new communicator.
    New,
    /// They go on with this one. If it works, they suspend and resume it; else they join it again. This rank, if there
    /// is one, leaves its place and takes it again, as a new process would.
    Return(Option<usize>),
}

impl Episode {
    /// Draws the episode before a call, if there is one.
    pub fn draw(parameters: &Parameters, number: u64) -> Option<Self> {
        let Parameters { seed, ranks, max_bytes, faults } = *parameters;
        let mut draws = Draws::new(seed, number, 60);
        // There is always an early one, so that short runs have faults.
        let can_stop = faults != Faults::Abort && ranks > 1;
        let has_faults = match faults {
            Faults::None => false,
            Faults::Stop => can_stop,
            Faults::All | Faults::Abort => true,
        };
        if !has_faults || !(draws.one_in(SHARE) || number == SHARE / 3) {
            return None;
        }
        let is_long = can_stop && draws.one_in(LONG_SHARE);
        let faulty = 1 + if is_long { 0 } else { draws.below(MOST_ROUNDS - 1) };
        let fault = |draws: &mut Draws| {
            let kind = match faults {
                _ if is_long => FaultKind::Stop(SHORT_LIMIT + Duration::from_millis(20 + draws.below(300))),
                Faults::All if can_stop && draws.one_in(6) => short_stop(draws),
                Faults::Stop => short_stop(draws),
                _ => FaultKind::Abort,
            };
            let rank = draws.below(ranks as u64) as usize;
            Fault { kind, rank, moment: Duration::from_micros(draws.below(MOMENTS)) }
        };
        let recovery = |draws: &mut Draws| match draws.below(5) {
            0 => Recovery::New,
            2 | 3 if !is_long => {
                let replaced = draws.below(2 * ranks as u64) as usize;
                Recovery::Return(Some(replaced).filter(|&rank| rank < ranks && ranks > 1))
            }
            1 if ranks > 2 => Recovery::ShrinkWithout(draws.below(ranks as u64) as usize),
            _ => Recovery::Shrink,
        };
        let mut rounds: Vec<_> = (0..faulty)
            .map(|_| Round { fault: Some(fault(&mut draws)), recovery: recovery(&mut draws) })
            .collect();
        // Ranks are left out only before the last round: faults are drawn for all ranks.
        let last = rounds.len() - 1;
        for round in &mut rounds[..last] {
            if matches!(round.recovery, Recovery::ShrinkWithout(_)) {
                round.recovery = Recovery::Shrink;
            }
        }
        rounds.push(Round { fault: None, recovery: Recovery::New });
        // A long call may time out on some ranks, which do not replay it.
        let is_replayed = draws.one_in(3) && !is_long;
        Some(Self { call: call(parameters, number, &mut draws, max_bytes), rounds, is_long, is_replayed })
    }

    /// Returns the timeout of the communicator.
    pub fn limit(&self) -> Duration {
        if self.is_long {
            SHORT_LIMIT
        } else {
            LIMIT
        }
    }

    /// Draws the settings of the episode's communicators.
    pub fn settings(&self, seed: u64) -> DrawnSettings {
        let mut draws = Draws::new(seed, self.call.number, 61);
        let [one, two] = [Algorithm::OneShotPull, Algorithm::TwoShotPull].map(Some);
        let any = Algorithm::ALL.map(Some)[draws.below(Algorithm::ALL.len() as u64) as usize];
        DrawnSettings {
            // Mostly algorithms that read peers' memory.
            algorithm: draws.pick([None, one, one, two, two, any]),
            max_bytes: draws.pick([64 << 10, 1 << 20, 4 << 20]),
            has_buffer: !draws.one_in(8),
            ..DrawnSettings::draw(seed, self.call.number, 0)
        }
    }

    /// Returns the number of calls of a round in which none fails.
    pub fn calls(&self) -> usize {
        let bytes = self.call.count * self.call.dtype.size();
        (ROUND_BYTES / bytes.max(1)).clamp(4, MOST_CALLS)
    }
}

const MOST_ROUNDS: u64 = 12;

fn short_stop(draws: &mut Draws) -> FaultKind {
    FaultKind::Stop(Duration::from_micros(500 + draws.below(40_000)))
}

/// Draws the call of all rounds: usually large enough for a fault in the middle of it.
fn call(parameters: &Parameters, number: u64, draws: &mut Draws, max_bytes: usize) -> Call {
    let any = Call::draw(parameters, number);
    let dtype = draws.pick(DType::ALL);
    let bytes = match draws.below(4) {
        0 => any.count * any.dtype.size(),
        _ => (32 << 10) + draws.below(640 << 10) as usize,
    };
    Call {
        renew: false,
        groups: None,
        late: None,
        times: 1,
        kind: if draws.one_in(2) { CallKind::AllReduce } else { draws.pick(CallKind::MEASURED) },
        dtype,
        op: draws.pick(ReduceOp::ARITHMETIC),
        count: bytes.min(max_bytes) / dtype.size(),
        hidden: 0,
        form: None,
        ..any
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, rank, moment } = self;
        match kind {
            FaultKind::Abort => write!(f, "abort of rank {rank} after {moment:?}"),
            FaultKind::Stop(time) => write!(f, "stop of rank {rank} after {moment:?} for {time:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn episodes(faults: Faults, ranks: usize) -> Vec<Episode> {
        let parameters = Parameters { seed: 5, ranks, max_bytes: 4 << 20, faults };
        (0..30_000).filter_map(|number| Episode::draw(&parameters, number)).collect()
    }

    #[test]
    fn everything_is_drawn() {
        let episodes = episodes(Faults::All, 3);
        assert!((100..400).contains(&episodes.len()), "{}", episodes.len());
        let faults: Vec<_> =
            episodes.iter().flat_map(|episode| &episode.rounds).filter_map(|round| round.fault).collect();
        for name in ["abort", "short stop", "long stop"] {
            assert!(
                (0..3).all(|rank| faults.iter().any(|f| f.kind.name() == name && f.rank == rank)),
                "{name}"
            );
        }
        let rounds = || episodes.iter().flat_map(|episode| &episode.rounds);
        for recovery in [
            Recovery::Shrink,
            Recovery::New,
            Recovery::ShrinkWithout(1),
            Recovery::Return(None),
            Recovery::Return(Some(2)),
        ] {
            assert!(rounds().any(|round| round.recovery == recovery), "{recovery:?}");
        }
        assert!(CallKind::MEASURED
            .iter()
            .all(|kind| episodes.iter().any(|episode| episode.call.kind == *kind)));
        assert!([false, true].iter().all(|is| episodes.iter().any(|one| one.is_replayed == *is)));
        for Episode { rounds, is_long, .. } in &episodes {
            assert!(rounds.len() as u64 <= MOST_ROUNDS && rounds.last().unwrap().fault.is_none());
            let long = |round: &Round| round.fault.is_some_and(|fault| fault.kind.name() == "long stop");
            assert_eq!(rounds.iter().any(long), *is_long);
        }
    }

    #[test]
    fn only_what_is_asked_for_is_drawn() {
        assert!(episodes(Faults::None, 3).is_empty() && episodes(Faults::Stop, 1).is_empty());
        let names = |faults, ranks| {
            let of = |episode: Episode| episode.rounds.into_iter().filter_map(|round| round.fault);
            let mut names: Vec<_> =
                episodes(faults, ranks).into_iter().flat_map(of).map(|fault| fault.kind.name()).collect();
            names.sort_unstable();
            names.dedup();
            names
        };
        assert_eq!(names(Faults::Abort, 3), ["abort"]);
        assert_eq!(names(Faults::Stop, 3), ["long stop", "short stop"]);
        assert_eq!(names(Faults::All, 1), ["abort"]);
    }
}
