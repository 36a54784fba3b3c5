//! Corrupted handshakes: one rank receives changed data in one gather of communicator setup, for each gather in turn.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Bootstrap, Threads};
use fast_allreduce::{Communicator, Host, ReduceOp, Result};

use crate::fixtures::world::SOON;

/// Limit of waits. It also ends the wait of a rank for a message that the change has removed.
const LIMIT: Duration = Duration::from_millis(400);

#[derive(Debug, Clone, Copy)]
enum Change {
    Flip,
    Truncate,
    Empty,
    Lengthen,
    /// The result of the previous gather.
    Replay,
    /// The ranks' messages in another order.
    Swap,
    /// One rank's message is missing.
    Shorten,
}

const CHANGES: [Change; 7] = [
    Change::Flip,
    Change::Truncate,
    Change::Empty,
    Change::Lengthen,
    Change::Replay,
    Change::Swap,
    Change::Shorten,
];

/// A bootstrap that changes what its rank receives in its `nth` gather.
struct CorruptingBootstrap {
    inner: Threads,
    change: Option<(usize, Change)>,
    gathers: AtomicUsize,
    before: Mutex<Vec<Vec<u8>>>,
}

impl Bootstrap for CorruptingBootstrap {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut gathered = self.inner.all_gather(bytes, timeout)?;
        let now = self.gathers.fetch_add(1, Ordering::Relaxed);
        let before = std::mem::replace(&mut *self.before.lock().unwrap(), gathered.clone());
        let Some((nth, change)) = self.change.filter(|(nth, _)| *nth == now) else { return Ok(gathered) };
        // Rank 0's message: most steps use it.
        match change {
            Change::Flip => {
                let middle = gathered[0].len() / 2;
                gathered[0].get_mut(middle).into_iter().for_each(|byte| *byte ^= 0x41);
            }
            Change::Truncate => {
                let half = gathered[0].len() / 2;
                gathered[0].truncate(half);
            }
            Change::Empty => gathered[0].clear(),
            Change::Lengthen => gathered[0].extend([0xff; 300]),
            Change::Replay if nth > 0 => gathered = before,
            Change::Replay => {}
            Change::Swap => gathered.rotate_left(1),
            Change::Shorten => drop(gathered.pop()),
        }
        Ok(gathered)
    }
}

/// Returns whether each rank built its communicator, and the number of gathers. Ranks that succeeded then make a call.
fn world(size: usize, odd: usize, change: Option<(usize, Change)>) -> (Vec<bool>, usize) {
    let ranks = Threads::world(size).unwrap();
    let results: Vec<(bool, usize)> = std::thread::scope(|scope| {
        let run = |inner: Threads| {
            scope.spawn(move || {
                let change = change.filter(|_| inner.rank() == odd);
                let bootstrap = std::sync::Arc::new(CorruptingBootstrap {
                    inner,
                    change,
                    gathers: AtomicUsize::new(0),
                    before: Mutex::default(),
                });
                let builder = Communicator::builder().timeout(LIMIT).max_bytes(4096);
                let built = builder.build(Host::new(), std::sync::Arc::clone(&bootstrap));
                let gathers = bootstrap.gathers.load(Ordering::Relaxed);
                drop(bootstrap);
                let Ok(communicator) = built else { return (false, gathers) };
                let mut data = [communicator.rank() as u32 + 1; 77];
                if communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).is_ok() {
                    assert_eq!(data, [(size * (size + 1) / 2) as u32; 77], "{change:?}");
                }
                (true, gathers)
            })
        };
        let running: Vec<_> = ranks.into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    });
    (results.iter().map(|(built, _)| *built).collect(), results[odd].1)
}

#[test]
fn every_rank_ends_whichever_message_is_changed() {
    let (built, gathers) = world(3, 1, None);
    assert_eq!(built, [true; 3], "without a change every rank builds its communicator");
    assert!(gathers > 5, "{gathers}");
    let refused = AtomicUsize::new(0);
    let cases: Vec<_> =
        (0..gathers).flat_map(|nth| CHANGES.map(|change| (nth, change))).enumerate().collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| loop {
                let Some((index, case)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                let started = Instant::now();
                let (built, _) = world(2 + index % 2, index % 2, Some(*case));
                assert!(started.elapsed() < 3 * LIMIT + SOON, "{case:?}: {:?}", started.elapsed());
                refused.fetch_add(usize::from(built.contains(&false)), Ordering::Relaxed);
            });
        }
    });
    let refused = refused.into_inner();
    println!("{gathers} gathers, {} changes, refused {refused}", cases.len());
    assert!(refused > cases.len() / 3, "{refused} of {}", cases.len());
}
