//! Measures the processor time that a launching thread spends in `all_reduce`, without the kernels' time, on a GPU or
//! on the stand-in driver. Two threads of this process are the ranks. Prints medians over blocks of calls, in
//! nanoseconds.
//!
//! ```sh
//! cargo bench --features cuda-12000 --bench launch
//! ```

use fast_allreduce::bootstrap::{Bootstrap as _, Threads};
use fast_allreduce::{Communicator, Cuda, ReduceOp};

const BLOCKS: usize = 301;
const CALLS: usize = 16;
const COUNT: usize = 256;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() {
    let ranks = Threads::world(2).expect("two threads");
    let ranks: Vec<_> =
        ranks.into_iter().map(|bootstrap| std::thread::spawn(move || rank(bootstrap))).collect();
    for (number, rank) in ranks.into_iter().enumerate() {
        match rank.join().expect("a rank panicked") {
            Ok([out_of_place, in_place]) => {
                println!("rank {number}: out of place {out_of_place:.0} ns, in place {in_place:.0} ns");
            }
            Err(failure) => println!("rank {number}: {failure}"),
        }
    }
}

fn rank(bootstrap: Threads) -> Result<[f64; 2], Failure> {
    let device = Cuda::open(bootstrap.rank())?;
    let stream = device.context().new_stream()?;
    let communicator = Communicator::builder().build(device, bootstrap)?;
    let input = stream.clone_htod(&[1.0f32; COUNT])?;
    let mut output = stream.clone_htod(&[0.0f32; COUNT])?;
    let mut medians = [0.0; 2];
    for (in_place, median) in medians.iter_mut().enumerate() {
        let mut times = Vec::with_capacity(BLOCKS);
        for _ in 0..BLOCKS {
            let start = thread_seconds();
            for _ in 0..CALLS {
                match in_place {
                    0 => communicator.all_reduce(&stream, &input, &mut output, ReduceOp::Sum)?,
                    _ => communicator.all_reduce_in_place(&stream, &mut output, ReduceOp::Max)?,
                }
            }
            times.push((thread_seconds() - start) * 1e9 / CALLS as f64);
            // Keeps few launches outstanding: with a full queue a call would wait.
            communicator.synchronize(&stream)?;
        }
        times.sort_unstable_by(f64::total_cmp);
        *median = times[BLOCKS / 2];
    }
    Ok(medians)
}

/// Returns the processor time of this thread.
fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which is valid.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "every Linux has this clock");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
