//! The cost of the flight record: three communicators of two threads, which time no call, every 127th, and all. Their
//! calls alternate in short blocks. Prints medians of the time of a call in ns, and their ratios to the first.
//!
//! ```sh
//! cargo bench --bench flight
//! ```

use std::hint::black_box;
use std::time::Instant;

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::device::host::Bind;
use fast_allreduce::{Communicator, Flight, Host, ReduceOp, Result};

const ROUNDS: usize = 1501;
/// More than one timed call in each block.
const CALLS: usize = 254;
const LEVELS: [Flight; 3] = [Flight::Off, Flight::Sampled, Flight::All];

fn main() {
    println!("# 2 ranks; ns of an all_reduce, with ratios to off");
    println!("# {:>8} {:>9} {:>9} {:>9} {:>9} {:>9}", "bytes", "off", "sampled", "ratio", "all", "ratio");
    let mut worlds = LEVELS.map(|_| Threads::world(2).expect("two threads").into_iter());
    let ranks: Vec<_> = (0..2)
        .map(|_| {
            let bootstraps = worlds.each_mut().map(|world| world.next().expect("two threads"));
            std::thread::spawn(move || rank(bootstraps))
        })
        .collect();
    for rank in ranks {
        rank.join().expect("a rank panicked").expect("a rank failed");
    }
}

fn rank(bootstraps: [Threads; 3]) -> Result<()> {
    let made = bootstraps.into_iter().zip(LEVELS).map(|(bootstrap, level)| {
        Communicator::builder().check(false).flight(level).build(Host::new().bind(Bind::Core), bootstrap)
    });
    let communicators = made.collect::<Result<Vec<_>>>()?;
    for bytes in [256, 1024] {
        let input = vec![1.0_f32; bytes / size_of::<f32>()];
        let mut output = input.clone();
        let mut times = LEVELS.map(|_| Vec::new());
        for _ in 0..ROUNDS {
            for (communicator, times) in communicators.iter().zip(&mut times) {
                communicator.barrier()?;
                let started = Instant::now();
                for _ in 0..CALLS {
                    communicator.all_reduce(&input, &mut output, ReduceOp::Sum)?;
                    black_box(&mut output);
                }
                times.push(started.elapsed().as_secs_f64() * 1e9 / CALLS as f64);
            }
        }
        if communicators[0].rank() == 0 {
            let [off, sampled, all] = times.map(|mut times| {
                times.sort_unstable_by(f64::total_cmp);
                times[ROUNDS / 2]
            });
            let ratios = [sampled / off, all / off];
            println!("  {bytes:8} {off:9.1} {sampled:9.1} {:9.3} {all:9.1} {:9.3}", ratios[0], ratios[1]);
        }
    }
    Ok(())
}
