//! Ranks that are all stopped for longer than their limit, like a paused container, and continue.

use std::time::Duration;

use fast_allreduce::Algorithm;

use crate::fixtures::pool::Pool;
use crate::fixtures::rank::Part;

/// Limit of waits: far longer than the late rank needs.
const LIMIT: Duration = Duration::from_secs(4);

const PAUSE: Duration = Duration::from_secs(6);

/// An algorithm, the word that each rank reports before all are stopped, and the parts by rank.
type Scenario<'a> = (Algorithm, &'a str, &'a [Part]);

/// Stops all ranks after each has reported the word, while some wait for the late one. All must then continue normally.
fn paused_in(&(algorithm, word, parts): &Scenario) {
    let mut pool = Pool::default();
    let ranks = pool.start(algorithm, 3, LIMIT.as_millis() as u64, parts);
    ranks.iter().for_each(|rank| drop(rank.await_line(word)));
    std::thread::sleep(Duration::from_millis(150));
    ranks.iter().for_each(|rank| rank.signal(libc::SIGSTOP));
    std::thread::sleep(PAUSE);
    ranks.iter().for_each(|rank| rank.signal(libc::SIGCONT));
    for (rank, process) in ranks.iter().enumerate() {
        let outcome = process.outcome();
        assert_eq!(outcome.kind, "ok", "{parts:?}, rank {rank}: {outcome:?}");
        assert!(outcome.calls >= 3, "{outcome:?}");
    }
}

/// Ranks are stopped in set-up, in a shrink and in calls. The scenarios run concurrently, since they mostly sleep.
#[test]
fn stopped_ranks_continue_normally() {
    let calling = [Part::Half(8), Part::LateHalf(8), Part::Half(8)];
    let scenarios: [Scenario; 6] = [
        (Algorithm::TwoShotPull, "met", &[Part::Calls(3), Part::Late(3)]),
        (Algorithm::TwoShotPull, "met", &[Part::Late(3), Part::Calls(3), Part::Calls(3)]),
        // The first rank serves the rendezvous.
        (Algorithm::TwoShotPull, "shrinking", &[Part::Shrink(3), Part::LateShrink(3), Part::Shrink(3)]),
        (Algorithm::TwoShotPull, "shrinking", &[Part::LateShrink(3), Part::Shrink(3)]),
        // Calls as drawn from the seed: mostly allreduces, but also gathers and messages.
        (Algorithm::OneShotPull, "half", &calling),
        (Algorithm::OneShotPush, "half", &calling),
    ];
    std::thread::scope(|scope| {
        scenarios.iter().for_each(|scenario| drop(scope.spawn(|| paused_in(scenario))))
    });
}

/// The waiting ranks ask each other before they name a missing rank, and may not sleep meanwhile.
#[test]
fn a_rank_that_stands_still_is_named_where_sleep_is_refused() {
    let mut pool = Pool::default();
    for rank in 0..2 {
        pool.forbid(rank, libc::SYS_clock_nanosleep, libc::EPERM);
        pool.forbid(rank, libc::SYS_nanosleep, libc::EPERM);
    }
    let ranks = pool.start(Algorithm::TwoShotPull, 3, 500, &[Part::Endless; 3]);
    ranks.iter().for_each(|rank| drop(rank.await_line("ready")));
    ranks[2].signal(libc::SIGSTOP);
    for rank in &ranks[..2] {
        let outcome = rank.outcome();
        assert_eq!((outcome.kind.as_str(), &outcome.named[..]), ("timeout", &[2][..]), "{outcome:?}");
    }
    ranks[2].signal(libc::SIGCONT);
    ranks[2].outcome();
}
