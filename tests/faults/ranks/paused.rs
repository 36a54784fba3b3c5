//! Ranks that are stopped together for longer than their limit, as in a container that is paused, and go on.

use std::time::Duration;

use fast_allreduce::Algorithm;

use crate::fixtures::pool::Pool;
use crate::fixtures::rank::Part;

/// Of waits: far longer than a rank is late by.
const LIMIT: Duration = Duration::from_secs(4);

const PAUSE: Duration = Duration::from_secs(6);

/// An algorithm, what each rank tells before it is stopped, and the parts by rank.
type World<'a> = (Algorithm, &'a str, &'a [Part]);

/// Stops all ranks once each has told its word and some wait for the one that is late; all go on as if nothing had
/// been.
fn paused_in(&(algorithm, word, parts): &World) {
    let mut pool = Pool::default();
    let ranks = pool.start(algorithm, 3, LIMIT.as_millis() as u64, parts);
    ranks.iter().for_each(|rank| drop(rank.told(word)));
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

/// While they make a communicator, shrink one, and call: worlds side by side, as they sleep most of the time.
#[test]
fn ranks_go_on_as_if_nothing_had_been() {
    let calling = [Part::Half(8), Part::LateHalf(8), Part::Half(8)];
    let worlds: [World; 6] = [
        (Algorithm::TwoShotPull, "met", &[Part::Calls(3), Part::Late(3)]),
        (Algorithm::TwoShotPull, "met", &[Part::Late(3), Part::Calls(3), Part::Calls(3)]),
        // The first serves the meeting.
        (Algorithm::TwoShotPull, "shrinking", &[Part::Shrink(3), Part::LateShrink(3), Part::Shrink(3)]),
        (Algorithm::TwoShotPull, "shrinking", &[Part::LateShrink(3), Part::Shrink(3)]),
        // Allreduces mostly, gathers and messages too: what the seed draws.
        (Algorithm::OneShotPull, "half", &calling),
        (Algorithm::OneShotPush, "half", &calling),
    ];
    std::thread::scope(|scope| worlds.iter().for_each(|world| drop(scope.spawn(|| paused_in(world)))));
}

/// The ranks that wait hear each other out before they name one, and may not sleep meanwhile.
#[test]
fn a_rank_that_stands_still_is_named_where_sleep_is_refused() {
    let mut pool = Pool::default();
    for rank in 0..2 {
        pool.forbid(rank, libc::SYS_clock_nanosleep, libc::EPERM);
        pool.forbid(rank, libc::SYS_nanosleep, libc::EPERM);
    }
    let ranks = pool.start(Algorithm::TwoShotPull, 3, 500, &[Part::Endless; 3]);
    ranks.iter().for_each(|rank| drop(rank.told("ready")));
    ranks[2].signal(libc::SIGSTOP);
    for rank in &ranks[..2] {
        let outcome = rank.outcome();
        assert_eq!((outcome.kind.as_str(), &outcome.named[..]), ("timeout", &[2][..]), "{outcome:?}");
    }
    ranks[2].signal(libc::SIGCONT);
    ranks[2].outcome();
}
