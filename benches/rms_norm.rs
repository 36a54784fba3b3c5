//! Times `all_reduce_fused` between two threads of this process, beside the plain allreduce and beside that with an addition and
//! a norm in plain Rust after it, in turns: medians of each. A row of the output is a number of rows.
//!
//! ```sh
//! RUSTFLAGS="-C target-cpu=native" cargo bench --bench rms_norm -- [HIDDEN]
//! ```

use std::hint::black_box;
use std::time::Instant;

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::device::host::Bind;
use fast_allreduce::{Communicator, Fused, Host, Norm, ReduceOp, Result};
use half::bf16;

const EPSILON: f32 = 1e-5;
const ROUNDS: usize = 31;

fn main() {
    let hidden = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(4096);
    println!("# bf16, 2 ranks, rows of {hidden}, us; fused / plain and unfused / fused of the medians");
    println!(
        "# {:>5} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}",
        "rows", "plain", "fused", "unfused", "add", "f/p", "u/f"
    );
    let ranks = Threads::world(2).expect("two threads");
    let ranks: Vec<_> =
        ranks.into_iter().map(|bootstrap| std::thread::spawn(move || rank(bootstrap, hidden))).collect();
    for rank in ranks {
        rank.join().expect("a rank panicked").expect("a rank failed");
    }
}

fn rank(bootstrap: Threads, hidden: usize) -> Result<()> {
    let communicator = Communicator::builder().build(Host::new().bind(Bind::Core), bootstrap)?;
    for rows in [1, 2, 4, 8, 16, 32, 64] {
        let mut medians = [0.0; 4];
        let mut rival = Rival::new(&communicator, rows, hidden);
        rival.compare()?;
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..ROUNDS {
            for (way, times) in times.iter_mut().enumerate() {
                times.push(rival.time(way)?);
            }
        }
        for (median, times) in medians.iter_mut().zip(&mut times) {
            times.sort_by(f64::total_cmp);
            *median = times[ROUNDS / 2];
        }
        let [plain, fused, unfused, add] = medians;
        if communicator.rank() == 0 {
            let (over_plain, gain) = (fused / plain, unfused / fused);
            println!("{rows:>7} {plain:>10.2} {fused:>10.2} {unfused:>10.2} {add:>10.2} {over_plain:>8.2} {gain:>8.2}");
        }
    }
    Ok(())
}

/// A layer's message, and the ways to do it.
struct Rival<'a> {
    communicator: &'a Communicator<Host>,
    hidden: usize,
    input: Vec<bf16>,
    weight: Vec<bf16>,
    first: Vec<bf16>,
    residual: Vec<bf16>,
    sum: Vec<bf16>,
    output: Vec<bf16>,
}

impl<'a> Rival<'a> {
    fn new(communicator: &'a Communicator<Host>, rows: usize, hidden: usize) -> Self {
        let count = rows * hidden;
        let values = |count, step: usize| -> Vec<_> {
            (0..count).map(|i| bf16::from_f32((i * step % 251) as f32 / 64.0 - 2.0)).collect()
        };
        let first = values(count, 7);
        let zeros = vec![bf16::ZERO; count];
        Self {
            communicator,
            hidden,
            input: values(count, 5 + communicator.rank()),
            weight: values(hidden, 3),
            residual: first.clone(),
            first,
            sum: zeros.clone(),
            output: zeros,
        }
    }

    fn call(&mut self, way: usize) -> Result<()> {
        let Self { communicator, hidden, input, weight, residual, sum, output, .. } = self;
        match way {
            0 => communicator.all_reduce(input, sum, ReduceOp::Sum),
            1 => {
                let norm = Norm::Rms { epsilon: EPSILON, unit_offset: false };
                let fused = Fused::on_host(residual).norm(norm, *hidden).weight(weight).rows(output);
                communicator.all_reduce_fused(input, fused)
            }
            2 => {
                communicator.all_reduce(input, sum, ReduceOp::Sum)?;
                add_and_norm(sum, residual, output, weight);
                Ok(())
            }
            _ => communicator.all_reduce_fused(input, Fused::on_host(residual)),
        }
    }

    /// Microseconds of a call.
    fn time(&mut self, way: usize) -> Result<f64> {
        let calls = ((2 << 20) / self.input.len()).clamp(8, 400);
        // Sums that grow from call to call would soon be infinite.
        self.residual.copy_from_slice(&self.first);
        self.communicator.barrier()?;
        let started = Instant::now();
        for _ in 0..calls {
            self.call(way)?;
        }
        black_box(&mut self.output);
        Ok(started.elapsed().as_secs_f64() * 1e6 / calls as f64)
    }

    /// Both ways come to the same, but for the order of a sum of squares.
    fn compare(&mut self) -> Result<()> {
        let mut results = Vec::new();
        for way in [1, 2] {
            self.residual.copy_from_slice(&self.first);
            self.call(way)?;
            results.push((self.residual.clone(), self.output.clone()));
        }
        assert_eq!(results[0].0, results[1].0, "residuals");
        for (fused, unfused) in results[0].1.iter().zip(&results[1].1) {
            let (fused, unfused) = (fused.to_f32(), unfused.to_f32());
            assert!((fused - unfused).abs() <= unfused.abs() / 64.0, "{fused} and not {unfused}");
        }
        Ok(())
    }
}

fn widen(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Of numbers, as `bf16::from_f32`, which the compiler does not vectorise.
fn narrow(value: f32) -> bf16 {
    let bits = value.to_bits();
    bf16::from_bits((bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16)
}

fn add_and_norm(sum: &[bf16], residual: &mut [bf16], output: &mut [bf16], weight: &[bf16]) {
    const LANES: usize = 64;
    let hidden = weight.len();
    let rows = sum.chunks_exact(hidden).zip(residual.chunks_exact_mut(hidden));
    for ((sum, residual), output) in rows.zip(output.chunks_exact_mut(hidden)) {
        let mut squares = [0.0_f32; LANES];
        for (sum, residual) in sum.chunks(LANES).zip(residual.chunks_mut(LANES)) {
            for ((sum, residual), squares) in sum.iter().zip(residual).zip(&mut squares) {
                *residual = narrow(widen(*sum) + widen(*residual));
                *squares += widen(*residual) * widen(*residual);
            }
        }
        let scale = 1.0 / (squares.iter().sum::<f32>() / hidden as f32 + EPSILON).sqrt();
        for ((output, residual), weight) in output.iter_mut().zip(&*residual).zip(weight) {
            *output = narrow(widen(*residual) * scale * widen(*weight));
        }
    }
}
