//! The ranks, as threads: their communicators and vectors, and a path run by all of them.

use std::thread;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{Algorithm, Communicator, Host, ReduceOp, Result};

use crate::arguments::Options;
use crate::inputs::gradient;
use crate::judge::Outcome;
use crate::path::Path;
use crate::traffic::Traffic;

pub struct Ranks(Vec<Rank>);

struct Rank {
    communicator: Communicator<Host>,
    gradient: Vec<f32>,
}

impl Ranks {
    pub fn new(options: &Options) -> Result<Self, String> {
        let bootstraps = Threads::world(options.ranks).map_err(|error| error.to_string())?;
        let ranks = bootstraps.into_iter().enumerate().map(|(rank, bootstrap)| {
            move || {
                // A direct algorithm, whatever the environment says: it adds in rank order, as the paths do.
                let builder = Communicator::builder().algorithm(Algorithm::TwoShotPull);
                let communicator = builder.build(Host::new(), bootstrap)?;
                Ok(Rank { communicator, gradient: gradient(options.seed, rank, options.count) })
            }
        });
        at_the_same_time(ranks).map(Self)
    }

    /// What each rank has of a path.
    pub fn run(&self, path: &Path, options: &Options) -> Result<Vec<Outcome>, String> {
        at_the_same_time(self.0.iter().map(|rank| move || rank.run(path, options)))
    }
}

impl Rank {
    fn run(&self, path: &Path, options: &Options) -> Result<Outcome> {
        let k = options.kept();
        let mut selecting = Vec::new();
        let mut reducing = Vec::new();
        let mut output = vec![0.0; self.gradient.len()];
        let mut last = None;
        for _ in 0..options.iterations {
            let started = Instant::now();
            let kept = (path.select)(&self.gradient, k);
            selecting.push(started.elapsed());
            output.fill(0.0);
            let traffic = Traffic::new(&self.communicator);
            self.communicator.barrier()?;
            let started = Instant::now();
            (path.reduce)(&traffic, &kept, k, &mut output)?;
            reducing.push(started.elapsed());
            last = Some((kept, traffic.sent()));
        }
        let (kept, sent) = last.unwrap_or_default();
        let mut dense = vec![0.0; output.len()];
        kept.add_to(&mut dense);
        self.communicator.all_reduce_in_place(&mut dense, ReduceOp::Sum)?;
        Ok(Outcome { kept, output, dense, selecting: median(selecting), reducing: median(reducing), sent })
    }
}

/// Runs each in a thread, and says whose error came first by rank.
fn at_the_same_time<T: Send>(
    ranks: impl Iterator<Item = impl FnOnce() -> Result<T> + Send>,
) -> Result<Vec<T>, String> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(rank)).collect();
        let results = threads.into_iter().enumerate().map(|(rank, thread)| match thread.join() {
            Ok(result) => result.map_err(|error| format!("rank {rank}: {error}")),
            Err(_) => Err(format!("rank {rank} has panicked")),
        });
        results.collect::<Vec<_>>().into_iter().collect()
    })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
