//! Products by rayon between allreduces, like those by OpenMP in the library's `benches/openmp.c`: what waiting threads
//! of both cost each other. Each rank, a process, computes half of a layer with its pool, to which its calling thread
//! belongs, then sums 4 KiB with the other ranks.
//!
//!     FAST_ALLREDUCE_WAIT=yield FAST_ALLREDUCE_BIND=none cargo bench \
//!       --manifest-path examples/tensor_parallel_llm/Cargo.toml --bench rayon -- RANKS THREADS TIMES
//!
//! It prints rank 0's median and p99 of an iteration and of the call in it, in microseconds.

use std::error::Error;
use std::process::Command;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{ReduceOp, Settings};
use rayon::prelude::*;

const SIDE: usize = 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let numbers: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let [ranks, threads, times] = numbers[..] else {
        return Err("usage: rayon RANKS THREADS TIMES".into());
    };
    if let Some(bootstrap) = Local::from_env()? {
        return run(bootstrap, threads, times);
    }
    let id = UniqueId::new()?;
    let start = |rank: usize| {
        Command::new(std::env::current_exe()?)
            .args(numbers.iter().map(usize::to_string))
            .env("FAST_ALLREDUCE_UNIQUE_ID", id.to_string())
            .env("FAST_ALLREDUCE_RANK", rank.to_string())
            .env("FAST_ALLREDUCE_WORLD_SIZE", ranks.to_string())
            .spawn()
    };
    let processes = (0..ranks).map(start).collect::<Result<Vec<_>, _>>()?;
    for mut process in processes {
        if !process.wait()?.success() {
            return Err("a rank failed".into());
        }
    }
    Ok(())
}

fn run(bootstrap: Local, threads: usize, times: usize) -> Result<(), Box<dyn Error>> {
    rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build_global()?;
    let settings = Settings::new();
    let communicator = settings.builder()?.build(settings.host()?, bootstrap)?;
    let matrix: Vec<f32> = (0..SIDE * SIDE).map(|i| (i % 7) as f32).collect();
    let (input, mut sums) = (vec![1.0_f32; SIDE], vec![0.0_f32; SIDE]);
    // Each thread has one run of rows, as OpenMP's static schedule has it.
    let rows = SIDE.div_ceil(threads);
    let (mut iterations, mut calls) = (Vec::with_capacity(times), Vec::with_capacity(times));
    for time in 0..times + times / 15 {
        let start = Instant::now();
        sums.par_chunks_mut(rows).zip(matrix.par_chunks(rows * SIDE)).for_each(|(sums, matrix)| {
            sums.iter_mut().zip(matrix.chunks_exact(SIDE)).for_each(|(sum, row)| *sum = product(row, &input));
        });
        let computed = Instant::now();
        communicator.all_reduce_in_place(&mut sums, ReduceOp::Sum)?;
        if time >= times / 15 {
            calls.push(computed.elapsed());
            iterations.push(start.elapsed());
        }
    }
    if communicator.rank() == 0 {
        println!(
            "{} ranks of {threads} threads: iteration {}  call {}",
            communicator.world_size(),
            summary(&mut iterations),
            summary(&mut calls)
        );
    }
    Ok(())
}

/// Many partial sums, so that the compiler vectorises.
fn product(row: &[f32], input: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 64];
    for (row, input) in row.chunks_exact(64).zip(input.chunks_exact(64)) {
        sums.iter_mut().zip(row).zip(input).for_each(|((sum, a), b)| *sum += a * b);
    }
    sums.iter().sum()
}

fn summary(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    format!("{:.2} (p99 {:.1})", us(times[times.len() / 2]), us(times[times.len() * 99 / 100]))
}
