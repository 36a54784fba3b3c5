//! Worlds of ranks as threads.

use std::time::Duration;

use fast_allreduce::bootstrap::{Local, Threads, UniqueId};
use fast_allreduce::{Builder, Communicator, Host, Result};

/// A limit that nothing reaches unless something hangs.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Within which a rank hears that another has gone: 100 ms, and more for a machine that does other things.
pub const SOON: Duration = Duration::from_secs(2);

pub fn builder() -> Builder {
    Communicator::builder().timeout(LIMIT)
}

/// Makes and drops a communicator of this process's ranks; what came of it, by rank.
pub fn build(world_size: usize, max_bytes: usize) -> Vec<Result<()>> {
    let ranks = Threads::world(world_size).unwrap();
    let meeting = std::sync::Barrier::new(world_size);
    std::thread::scope(|scope| {
        let run = |bootstrap: Threads| {
            let meeting = &meeting;
            scope.spawn(move || {
                let built = builder().max_bytes(max_bytes).build(Host::new(), bootstrap);
                // All are there at once, or none.
                meeting.wait();
                built.map(drop)
            })
        };
        let running: Vec<_> = ranks.into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs `body` on each rank of a new world; what it returned, by rank.
pub fn threads<R: Send>(
    world_size: usize,
    builder: impl Fn(usize) -> Builder + Sync,
    body: impl Fn(Communicator<Host>) -> R + Sync,
) -> Vec<R> {
    threads_on(Host::new, world_size, builder, body)
}

/// The same, on such devices.
pub fn threads_on<R: Send>(
    device: impl Fn() -> Host + Sync,
    world_size: usize,
    builder: impl Fn(usize) -> Builder + Sync,
    body: impl Fn(Communicator<Host>) -> R + Sync,
) -> Vec<R> {
    let ranks = Threads::world(world_size).unwrap();
    std::thread::scope(|scope| {
        let run = |(rank, bootstrap): (usize, Threads)| {
            let (device, builder, body) = (&device, &builder, &body);
            scope.spawn(move || body(builder(rank).build(device(), bootstrap).unwrap()))
        };
        let running: Vec<_> = ranks.into_iter().enumerate().map(run).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A rank as one of another process would meet the others.
pub fn local(id: &UniqueId, rank: usize, world_size: usize) -> Communicator<Host> {
    builder().build(Host::new(), Local::connect(id, rank, world_size, LIMIT).unwrap()).unwrap()
}
