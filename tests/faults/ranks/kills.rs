//! Ranks that are killed, are stopped, end or fork at random moments, in worlds of 2 to 5 processes.

use std::time::{Duration, Instant};

use fast_allreduce::Algorithm;

use crate::fixtures::pool::{Outcome, Pool};
use crate::fixtures::rank::{now_ns, Part};
use crate::fixtures::world::{LIMIT, SOON};
use crate::random::{seed, Random, SEED};
use crate::tier;

/// The limit on calls in rounds that reach it.
const SHORT: Duration = Duration::from_millis(800);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// SIGKILL during calls.
    Kill,
    /// SIGKILL soon after the ranks have met: building a communicator and a buffer takes milliseconds.
    KillSoon,
    /// SIGKILL by the rank itself after a fork, which lives on.
    ForkThenKill,
    /// A normal exit with the communicator open.
    Exit,
    /// SIGSTOP for less than the deadline.
    Pause,
    /// SIGSTOP for longer than the deadline.
    Stop,
}

impl Fault {
    /// Returns the fault of a round. Of every 20 rounds, 11 are kills; the slow fault is rare.
    fn of_round(round: usize) -> Self {
        match round % 20 {
            0 | 2 | 4 | 6 | 8 | 10 => Self::Kill,
            1 | 3 | 5 | 7 | 9 => Self::KillSoon,
            11 => Self::ForkThenKill,
            12 | 13 => Self::Exit,
            14..=18 => Self::Pause,
            _ => Self::Stop,
        }
    }
}

#[derive(Default)]
struct Statistics {
    /// Time from the kill to the survivors' errors, for ranks that were in calls.
    microseconds: Vec<u64>,
    in_setup: usize,
    in_calls: usize,
}

fn rounds(algorithm: Algorithm) {
    // 20 rounds contain every fault.
    let rounds = tier::rounds(&format!("kills, {algorithm}"), 200, 20);
    let mut random = Random::new(&format!("kills, {algorithm}"));
    let (mut pool, mut statistics) = (Pool::default(), Statistics::default());
    for round in 0..rounds {
        let fault = Fault::of_round(round);
        let size = 2 + random.below(4);
        let victim = random.below(size);
        let context =
            format!("{algorithm}, round {round}, {fault:?} of rank {victim} of {size}, {SEED}={}", seed());
        let outcomes = one_round(&mut pool, &mut random, algorithm, fault, size, victim, &mut statistics);
        // A rank that hears from only some ranks may name a rank that waits itself. A rank that waits for the victim
        // names the victim.
        let is_named = outcomes.iter().any(|(_, outcome)| outcome.named.contains(&victim));
        assert!(fault != Fault::Stop || is_named, "{context}: {outcomes:?}");
        for (rank, outcome) in outcomes {
            assert!(
                is_expected(fault, rank == victim, victim, &outcome),
                "{context}: rank {rank}: {outcome:?}"
            );
            assert!(outcome.drop_us < SOON.as_micros() as u64, "{context}: rank {rank}: {outcome:?}");
        }
        if round % 50 == 49 || round + 1 == rounds {
            pool.check_resources();
        }
    }
    report(algorithm, rounds, statistics);
}

/// Runs one round, and returns the outcomes of the ranks that are left.
fn one_round(
    pool: &mut Pool,
    random: &mut Random,
    algorithm: Algorithm,
    fault: Fault,
    size: usize,
    victim: usize,
    statistics: &mut Statistics,
) -> Vec<(usize, Outcome)> {
    let (common, odd) = match fault {
        Fault::Kill | Fault::KillSoon | Fault::Stop => (Part::Endless, Part::Endless),
        Fault::ForkThenKill => (Part::Endless, Part::Fork(random.below(30))),
        Fault::Exit => (Part::Endless, Part::Exit(random.below(30))),
        Fault::Pause => (Part::Calls(40), Part::Calls(40)),
    };
    let mut parts = vec![common; size];
    parts[victim] = odd;
    let timeout = if fault == Fault::Stop { SHORT } else { LIMIT };
    let seed = random.below(1 << 30);
    let ranks = pool.start(algorithm, seed, timeout.as_millis() as u64, &parts);
    let moment = Duration::from_micros(random.below(20_000) as u64);
    let mut killed_at = None;
    match fault {
        Fault::Kill | Fault::KillSoon => {
            ranks[victim].await_line("met");
            if fault == Fault::KillSoon {
                std::thread::sleep(moment / 5);
            } else {
                ranks[victim].await_line("ready");
                std::thread::sleep(moment / 2);
            }
            killed_at = Some(now_ns());
            ranks[victim].signal(libc::SIGKILL);
        }
        Fault::ForkThenKill => {
            let line = ranks[victim].await_line("child");
            let (child, at) = line.split_once(' ').unwrap();
            killed_at = Some(at.parse().unwrap());
            let outcomes = others(size, victim).map(|rank| (rank, ranks[rank].outcome())).collect();
            // SAFETY: the fork ends by itself only after 30 s, so its process id has not been reused.
            assert_eq!(unsafe { libc::kill(child.parse().unwrap(), libc::SIGKILL) }, 0, "the fork has ended");
            pool.remove_ended(victim);
            return record(outcomes, killed_at, statistics);
        }
        Fault::Exit => {}
        Fault::Pause => {
            std::thread::sleep(moment);
            ranks[victim].signal(libc::SIGSTOP);
            std::thread::sleep(Duration::from_millis(5 + random.below(30) as u64));
            ranks[victim].signal(libc::SIGCONT);
        }
        Fault::Stop => {
            ranks.iter().for_each(|rank| drop(rank.await_line("ready")));
            std::thread::sleep(moment);
            ranks[victim].signal(libc::SIGSTOP);
            let outcomes: Vec<_> = others(size, victim).map(|rank| (rank, ranks[rank].outcome())).collect();
            ranks[victim].signal(libc::SIGCONT);
            let last = ranks[victim].outcome();
            return outcomes.into_iter().chain([(victim, last)]).collect();
        }
    }
    let left = (0..size).filter(|&rank| fault == Fault::Pause || rank != victim);
    let outcomes = left.map(|rank| (rank, ranks[rank].outcome())).collect();
    if fault != Fault::Pause {
        pool.remove_ended(victim);
    }
    record(outcomes, killed_at, statistics)
}

fn others(size: usize, victim: usize) -> impl Iterator<Item = usize> {
    (0..size).filter(move |&rank| rank != victim)
}

fn record(
    outcomes: Vec<(usize, Outcome)>,
    killed_at: Option<u64>,
    statistics: &mut Statistics,
) -> Vec<(usize, Outcome)> {
    for (_, outcome) in &outcomes {
        if let Some(killed_at) = killed_at {
            if outcome.built {
                statistics.in_calls += 1;
                statistics.microseconds.push(outcome.at_ns.saturating_sub(killed_at) / 1000);
            } else {
                statistics.in_setup += 1;
            }
        }
    }
    outcomes
}

fn is_expected(fault: Fault, is_victim: bool, victim: usize, outcome: &Outcome) -> bool {
    match fault {
        Fault::Pause => outcome.kind == "ok" && outcome.calls == 40,
        // The victim may find that it timed out itself, or only that the others are gone.
        Fault::Stop if is_victim => outcome.kind != "ok" && outcome.built,
        Fault::Stop => outcome.kind == "timeout" && outcome.built,
        Fault::Kill | Fault::KillSoon | Fault::ForkThenKill | Fault::Exit if outcome.built => {
            outcome.kind == "lost" && outcome.named == [victim]
        }
        // During setup another rank may fail first because of the victim. Then that rank is named, with this reason.
        Fault::Kill | Fault::KillSoon | Fault::ForkThenKill | Fault::Exit => {
            outcome.text.contains(&format!("rank {victim}"))
        }
    }
}

fn report(algorithm: Algorithm, rounds: usize, mut statistics: Statistics) {
    let times = &mut statistics.microseconds;
    times.sort_unstable();
    assert!(times.len() > rounds / 4, "too few kills met a call: {}", times.len());
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
    println!(
        "{algorithm}: SIGKILL to error, ms: median {:.2}, 90% {:.2}, 99% {:.2}, worst {:.2}; \
         {} survivors in calls, {} in setup",
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0),
        statistics.in_calls,
        statistics.in_setup
    );
    assert!(at(0.5) < 100.0, "the median time is too long");
    assert!(at(1.0) < LIMIT.as_millis() as f64 / 2.0, "the longest time is near the timeout");
}

#[test]
fn one_shot_pull() {
    rounds(Algorithm::OneShotPull);
}

#[test]
fn two_shot_pull() {
    rounds(Algorithm::TwoShotPull);
}

#[test]
fn one_shot_push() {
    rounds(Algorithm::OneShotPush);
}

#[test]
fn two_shot_push() {
    rounds(Algorithm::TwoShotPush);
}

#[test]
fn ring() {
    rounds(Algorithm::Ring);
}

#[test]
fn halving_doubling() {
    rounds(Algorithm::HalvingDoubling);
}

/// The fork holds the connection to the rendezvous, over which ranks allocate.
#[test]
fn a_killed_rank_whose_fork_lives_is_lost_to_ranks_that_allocate() {
    let mut pool = Pool::default();
    for victim in 0..3 {
        let mut parts = [Part::Allocates(3); 3];
        parts[victim] = Part::Fork(3);
        let ranks = pool.start(Algorithm::TwoShotPull, 1, LIMIT.as_millis() as u64, &parts);
        let line = ranks[victim].await_line("child");
        let child = line.split(' ').next().unwrap().parse().unwrap();
        let started = Instant::now();
        let outcomes: Vec<_> = others(3, victim).map(|rank| ranks[rank].outcome()).collect();
        assert!(started.elapsed() < LIMIT / 3, "{:?}: {outcomes:?}", started.elapsed());
        // SAFETY: the fork ends by itself only after 30 s, so its process id has not been reused.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0, "the fork has ended");
        pool.remove_ended(victim);
        let is_lost = |outcome: &Outcome| outcome.kind == "lost" && outcome.named == [victim];
        assert!(outcomes.iter().all(is_lost), "{victim}: {outcomes:?}");
    }
}

/// One rank may open from 39 further descriptors down to none: all ranks get an error at once, or the world works.
#[test]
fn a_rank_without_descriptors_fails_all_at_once() {
    let mut pool = Pool::default();
    let mut worked = Vec::new();
    for spare in (0..40).rev() {
        let victim = spare % 3;
        let mut parts = [Part::Calls(spare); 3];
        parts[victim] = Part::FewDescriptors(spare);
        let started = Instant::now();
        let ranks = pool.start(Algorithm::TwoShotPull, 1, LIMIT.as_millis() as u64, &parts);
        let outcomes: Vec<_> = ranks.iter().map(|rank| rank.outcome()).collect();
        assert!(started.elapsed() < LIMIT / 6, "{spare} descriptors: {:?}: {outcomes:?}", started.elapsed());
        let built = outcomes.iter().filter(|outcome| outcome.built).count();
        assert!(built == 0 || built == 3, "{spare} descriptors: {outcomes:?}");
        assert!(outcomes.iter().all(|outcome| (outcome.kind == "ok") == (built == 3)), "{outcomes:?}");
        if built == 0 {
            assert!(outcomes[victim].text.contains("EMFILE"), "{spare} descriptors: {outcomes:?}");
        }
        worked.push(built == 3);
        if spare == 39 {
            pool.check_resources();
        }
    }
    pool.check_resources();
    assert!(worked[0] && !worked[39], "{worked:?}");
    println!(
        "descriptors that a rank of 3 needs to make a communicator: {}",
        40 - worked.iter().position(|worked| !worked).unwrap()
    );
}
