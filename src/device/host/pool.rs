//! The caller's threads that run the blocks of a launch, instead of worker threads.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use super::isa::Entry;
use crate::abi::FaLaunch;
use crate::error::{Error, Result};

/// Thread pool of the calling program that runs the blocks of calls: threads of the program's runtime, which would
/// otherwise be idle during a call, so that no additional threads compete with them for cores. See
/// [`Host::thread_pool`](super::Host::thread_pool).
///
/// ```
/// use std::sync::Arc;
///
/// use fast_allreduce::device::host::ThreadPool;
/// use fast_allreduce::Host;
///
/// /// Threads that live as long as a call. A real pool would run the blocks on its own threads.
/// struct Scoped(usize);
///
/// impl ThreadPool for Scoped {
///     fn threads(&self) -> usize {
///         self.0
///     }
///
///     fn run(&self, blocks: usize, block: &(dyn Fn(usize) + Sync)) {
///         std::thread::scope(|scope| {
///             (1..blocks).for_each(|number| drop(scope.spawn(move || block(number))));
///             block(0);
///         });
///     }
/// }
///
/// let device = Host::new().thread_pool(Arc::new(Scoped(2)))?;
/// # Ok::<_, fast_allreduce::Error>(())
/// ```
pub trait ThreadPool: Send + Sync {
    /// Returns the number of threads that run concurrently, including the calling thread: 1 to 64, the same on all
    /// ranks.
    fn threads(&self) -> usize;

    /// Calls `block` once with each number below `blocks`, which is at most [`ThreadPool::threads`], and returns when
    /// all calls have returned.
    ///
    /// A block waits for the block of the same number on the other ranks. So blocks must run concurrently; if a
    /// thread is busy with other work, blocks must be started in ascending order. Until this returns, nothing may
    /// call the same communicator: on the calling thread that is an error, and on another thread it deadlocks, as the
    /// two calls wait for each other. A panic, or a block that is left out, ends the communicator.
    fn run(&self, blocks: usize, block: &(dyn Fn(usize) + Sync));
}

/// The caller's pool.
#[derive(Clone)]
pub(super) struct Pool(pub Arc<dyn ThreadPool>);

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.0.threads()).finish()
    }
}

impl Pool {
    /// Runs all blocks of a launch. Each block runs at most once, whatever the pool does.
    ///
    /// # Safety
    ///
    /// As for `entry`, with every block in `0..arguments.blocks`.
    pub(super) unsafe fn run(&self, entry: Entry, arguments: &FaLaunch) -> Result<()> {
        /// Kernels only read it, and write through its pointers.
        struct Arguments<'a>(&'a FaLaunch);
        // SAFETY: all blocks read the launch concurrently; what its pointers lead to is shared by the kernels'
        // protocols.
        unsafe impl Sync for Arguments<'_> {}

        let (blocks, shared) = (arguments.blocks, Arguments(arguments));
        let all = u64::MAX >> (64 - blocks.clamp(1, 64));
        // Relaxed: it only counts. The blocks' writes are ordered by the pool, whose `run` returns after them.
        let begun = AtomicU64::new(0);
        let block = |number: usize| {
            let shared = &shared;
            let bit = 1u64.checked_shl(number as u32).unwrap_or(0) & all;
            if bit != 0 && begun.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
                // SAFETY: by the caller's contract, for this block, which no other thread runs: its bit was not set.
                unsafe { entry(shared.0, number as u32) };
            }
        };
        // A panic may have left blocks out, so it ends the communicator, as below.
        let run = || self.0.run(blocks as usize, &block);
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        if let Err(panic) = ran {
            let message =
                panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
            return Err(Error::Unavailable {
                what: "the program's thread pool".into(),
                reason: format!("it panicked: {}", message.unwrap_or("with no text")),
            });
        }
        match all & !begun.load(Ordering::Relaxed) {
            0 => Ok(()),
            missing => Err(Error::Unavailable {
                what: "the program's thread pool".into(),
                reason: format!("of {blocks} blocks it did not run {}", missing.count_ones()),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::bootstrap::Threads;
    use crate::plan::{Choice, DeviceKind, Table};
    use crate::{Algorithm, Communicator, DType, Host, ReduceOp};

    /// Starts `most` blocks, some of them twice, and counts the requested blocks.
    struct Scoped {
        threads: usize,
        most: usize,
        asked: AtomicUsize,
        panics: bool,
    }

    impl ThreadPool for Scoped {
        fn threads(&self) -> usize {
            self.threads
        }

        fn run(&self, blocks: usize, block: &(dyn Fn(usize) + Sync)) {
            self.asked.fetch_add(blocks, Ordering::Relaxed);
            std::thread::scope(|scope| {
                (0..blocks.min(self.most)).for_each(|number| drop(scope.spawn(move || block(number))));
                // Neither runs: block 0 has started already, and block 1000 does not exist.
                [0, 1000].into_iter().for_each(block);
            });
            assert!(!self.panics, "a pool that panics");
        }
    }

    fn reduced(most: usize) -> Vec<(Result<Vec<f32>>, usize)> {
        reduced_by(most, false)
    }

    fn reduced_by(most: usize, panics: bool) -> Vec<(Result<Vec<f32>>, usize)> {
        let ranks = Threads::world(2).unwrap().into_iter().map(|bootstrap| {
            std::thread::spawn(move || {
                let pool = Arc::new(Scoped { threads: 3, most, asked: AtomicUsize::new(0), panics });
                let choice = Choice::host(Algorithm::TwoShotPull, 3, 4096, 65536);
                let communicator = Communicator::builder()
                    .table(Table::uniform(DeviceKind::Host, choice).unwrap())
                    .timeout(std::time::Duration::from_secs(5))
                    .build(Host::new().thread_pool(Arc::clone(&pool) as _).unwrap(), bootstrap)
                    .unwrap();
                assert_eq!(communicator.plan(100_000, DType::F32).blocks, 3);
                let mut data = vec![communicator.rank() as f32 + 1.0; 100_000];
                let result = communicator.all_reduce_in_place(&mut data, ReduceOp::Sum);
                (result.map(|()| data), pool.asked.load(Ordering::Relaxed))
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn a_pool_that_panics_is_an_error() {
        for (result, _) in reduced_by(3, true) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("a pool that panics"), "{error}");
        }
    }

    /// Calls the communicator that uses it.
    struct Reentrant {
        communicator: Arc<std::sync::OnceLock<std::sync::Weak<Communicator<Host>>>>,
        said: std::sync::Mutex<Vec<Error>>,
    }

    impl ThreadPool for Reentrant {
        fn threads(&self) -> usize {
            2
        }

        fn run(&self, blocks: usize, block: &(dyn Fn(usize) + Sync)) {
            if let Some(communicator) = self.communicator.get().and_then(std::sync::Weak::upgrade) {
                self.said.lock().unwrap().extend(communicator.barrier().err());
            }
            std::thread::scope(|scope| {
                (0..blocks).for_each(|number| drop(scope.spawn(move || block(number))))
            });
        }
    }

    #[test]
    fn a_call_from_within_a_call_is_an_error() {
        let ranks = Threads::world(2).unwrap().into_iter().map(|bootstrap| {
            std::thread::spawn(move || {
                let communicator = Arc::default();
                let pool = Arc::new(Reentrant {
                    communicator: Arc::clone(&communicator),
                    said: std::sync::Mutex::default(),
                });
                let choice = Choice::host(Algorithm::TwoShotPull, 2, 4096, 65536);
                let made = Communicator::builder()
                    .table(Table::uniform(DeviceKind::Host, choice).unwrap())
                    .build(Host::new().thread_pool(Arc::clone(&pool) as _).unwrap(), bootstrap)
                    .unwrap();
                let made = Arc::new(made);
                communicator.set(Arc::downgrade(&made)).unwrap();
                let mut data = vec![1.0f32; 100_000];
                made.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, vec![2.0; 100_000]);
                // The refused calls had no effect.
                made.barrier().unwrap();
                let said = pool.said.lock().unwrap();
                assert!(!said.is_empty());
                assert!(
                    said.iter().all(|error| error.to_string().contains("from within another")),
                    "{said:?}"
                );
            })
        });
        ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
    }

    #[test]
    fn blocks_run_on_the_callers_threads() {
        for (result, asked) in reduced(3) {
            assert_eq!(result.unwrap(), vec![3.0; 100_000]);
            assert!(asked >= 3 && asked % 3 == 0, "{asked}");
        }
    }

    #[test]
    fn a_pool_that_leaves_out_blocks_is_an_error() {
        for (result, _) in reduced(2) {
            let error = result.unwrap_err();
            assert!(error.to_string().contains("pool"), "{error}");
        }
    }

    #[test]
    fn a_pool_has_1_to_64_threads() {
        for threads in [0, 65] {
            let pool = Arc::new(Scoped { threads, most: 0, asked: AtomicUsize::new(0), panics: false });
            let error = Host::new().thread_pool(pool).unwrap_err();
            assert!(matches!(error, Error::InvalidSetting { name: "threads of a pool", .. }), "{error}");
        }
    }
}
