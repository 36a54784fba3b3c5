//! Which faults there are, and when: episodes of calls in which ranks are aborted and stopped, drawn from the seed as
//! calls are.

use std::fmt;
use std::time::Duration;

use fast_allreduce::{Algorithm, CallKind, DType, ReduceOp};

use super::draw::{Call, Draws, Range, Settings};
use crate::arguments::Faults;

/// Calls of which one has an episode before it.
const SHARE: u64 = 150;

/// Episodes of which one stops ranks for longer than the limit, which takes that long.
const LONG_SHARE: u64 = 4;

/// The longest wait of a communicator whose ranks are stopped for longer.
const SHORT_LIMIT: Duration = Duration::from_millis(500);

/// The longest wait of one whose ranks are not.
const LIMIT: Duration = Duration::from_secs(15);

/// Of these are the moments of faults, from the round's second call on.
const MOMENTS: u64 = 3000;

/// Bytes that the calls of a round reduce, about.
const ROUND_BYTES: usize = 16 << 20;

const MOST_CALLS: usize = 2000;

/// A communicator of its own, and what its ranks go through, round after round.
#[derive(Debug, Clone, Hash)]
pub struct Episode {
    /// What all calls are.
    pub call: Call,
    /// The last has no fault.
    pub rounds: Vec<Round>,
    /// Its ranks are stopped for longer than it waits.
    pub is_long: bool,
}

/// Calls on one communicator up to the first that fails, and how the ranks go on.
#[derive(Debug, Clone, Hash)]
pub struct Round {
    pub fault: Option<Fault>,
    pub recovery: Recovery,
}

/// What happens to one rank.
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
    /// SIGSTOP of its process for so long, then SIGCONT.
    Stop(Duration),
}

impl FaultKind {
    /// As it is counted.
    pub fn name(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::Stop(time) if time < SHORT_LIMIT => "short stop",
            Self::Stop(_) => "long stop",
        }
    }
}

/// How the ranks come by the communicator of the next round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// All of them shrink the one that has failed.
    Shrink,
    /// All but one do, and only they make the next round's calls.
    ShrinkWithout(usize),
    /// They meet anew.
    New,
}

impl Episode {
    /// That before the call of a number, if there is one.
    pub fn draw(range: &Range, number: u64) -> Option<Self> {
        let Range { seed, ranks, max_bytes, faults } = *range;
        let mut draws = Draws::new(seed, number, 60);
        // There is always one early on, so that short runs have some.
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
        let recovery = |draws: &mut Draws| match draws.below(3) {
            0 => Recovery::New,
            1 if ranks > 2 => Recovery::ShrinkWithout(draws.below(ranks as u64) as usize),
            _ => Recovery::Shrink,
        };
        let mut rounds: Vec<_> = (0..faulty)
            .map(|_| Round { fault: Some(fault(&mut draws)), recovery: recovery(&mut draws) })
            .collect();
        // Fewer ranks are no world for faults that were drawn for all.
        let last = rounds.len() - 1;
        for round in &mut rounds[..last] {
            if matches!(round.recovery, Recovery::ShrinkWithout(_)) {
                round.recovery = Recovery::Shrink;
            }
        }
        rounds.push(Round { fault: None, recovery: Recovery::New });
        Some(Self { call: call(range, number, &mut draws, max_bytes), rounds, is_long })
    }

    /// The longest wait of the communicator.
    pub fn limit(&self) -> Duration {
        if self.is_long {
            SHORT_LIMIT
        } else {
            LIMIT
        }
    }

    /// Those of the episode's communicators.
    pub fn settings(&self, seed: u64) -> Settings {
        let mut draws = Draws::new(seed, self.call.number, 61);
        let [one, two] = [Algorithm::OneShotPull, Algorithm::TwoShotPull].map(Some);
        let any = Algorithm::ALL.map(Some)[draws.below(Algorithm::ALL.len() as u64) as usize];
        Settings {
            // Those that read peers' memory, mostly.
            algorithm: draws.pick([None, one, one, two, two, any]),
            max_bytes: draws.pick([64 << 10, 1 << 20, 4 << 20]),
            has_buffer: !draws.one_in(8),
            ..Settings::draw(seed, self.call.number, 0)
        }
    }

    /// Calls of a round, if none fails.
    pub fn calls(&self) -> usize {
        let bytes = self.call.count * self.call.dtype.size();
        (ROUND_BYTES / bytes.max(1)).clamp(4, MOST_CALLS)
    }
}

const MOST_ROUNDS: u64 = 12;

fn short_stop(draws: &mut Draws) -> FaultKind {
    FaultKind::Stop(Duration::from_micros(500 + draws.below(40_000)))
}

/// The call of all rounds: large enough, mostly, for a fault to come in the middle of it.
fn call(range: &Range, number: u64, draws: &mut Draws, max_bytes: usize) -> Call {
    let any = Call::draw(range, number);
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
        let range = Range { seed: 5, ranks, max_bytes: 4 << 20, faults };
        (0..30_000).filter_map(|number| Episode::draw(&range, number)).collect()
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
        for recovery in [Recovery::Shrink, Recovery::New, Recovery::ShrinkWithout(1)] {
            assert!(rounds().any(|round| round.recovery == recovery), "{recovery:?}");
        }
        assert!(CallKind::MEASURED
            .iter()
            .all(|kind| episodes.iter().any(|episode| episode.call.kind == *kind)));
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
