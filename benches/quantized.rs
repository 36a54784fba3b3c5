//! Compares `all_reduce_quantized` with the plain allreduce of the same elements, between two threads of this process.
//! The calls alternate. Prints medians, one row for each size.
//!
//! ```sh
//! cargo bench --bench quantized
//! ```

use std::hint::black_box;
use std::time::Instant;

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::device::host::Bind;
use fast_allreduce::{Communicator, Element, Host, ReduceOp, Result, Transport};
use half::bf16;

const ROUNDS: usize = 31;
const WAYS: usize = 1 + Transport::ALL.len();

fn main() {
    println!("# 2 ranks; times in us, and their ratios to the plain allreduce");
    println!("# {:>8} {:>5} {:>10} {:>10} {:>10}", "bytes", "type", "plain", "int8", "f8e4m3");
    let ranks = Threads::world(2).expect("two threads");
    let ranks: Vec<_> =
        ranks.into_iter().map(|bootstrap| std::thread::spawn(move || rank(bootstrap))).collect();
    for rank in ranks {
        rank.join().expect("a rank panicked").expect("a rank failed");
    }
}

fn rank(bootstrap: Threads) -> Result<()> {
    let communicator = Communicator::builder().build(Host::new().bind(Bind::Core), bootstrap)?;
    for kib in [4, 64, 1024, 8192] {
        row::<bf16>(&communicator, kib << 10, bf16::from_f32)?;
        row::<f32>(&communicator, kib << 10, |x| x)?;
    }
    Ok(())
}

fn row<T: Element>(communicator: &Communicator<Host>, bytes: usize, of: fn(f32) -> T) -> Result<()> {
    let count = bytes / size_of::<T>();
    let input: Vec<T> = (0..count).map(|i| of((i * 37 % 251) as f32 / 64.0 - 2.0)).collect();
    let mut output = input.clone();
    let calls = ((4 << 20) / bytes).clamp(4, 400);
    let mut times = [const { Vec::new() }; WAYS];
    for _ in 0..ROUNDS {
        for (way, times) in times.iter_mut().enumerate() {
            communicator.barrier()?;
            let started = Instant::now();
            for _ in 0..calls {
                match way.checked_sub(1) {
                    None => communicator.all_reduce(&input, &mut output, ReduceOp::Sum),
                    Some(way) => {
                        let transport = Transport::ALL[way];
                        communicator.all_reduce_quantized(&input, &mut output, transport, f32::INFINITY)
                    }
                }?;
            }
            black_box(&mut output);
            times.push(started.elapsed().as_secs_f64() * 1e6 / calls as f64);
        }
    }
    let medians = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    });
    if communicator.rank() == 0 {
        let [plain, int8, f8e4m3] = medians;
        let (dtype, ratios) = (T::DTYPE, [int8, f8e4m3].map(|time| time / plain));
        println!(
            "{bytes:>10} {dtype:>5} {plain:>10.2} {int8:>10.2} {f8e4m3:>10.2} {:>6.2} {:>6.2}",
            ratios[0], ratios[1]
        );
    }
    Ok(())
}
