//! A rank of this crate in the comparison made by `run.py`; `rank.hpp` describes its protocol.

use std::error::Error;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Communicator, Host, ReduceOp, Wait};
use nix::sched::{sched_setaffinity, CpuSet};
use nix::unistd::Pid;

/// Number of calls between checks and refills of the buffers. In place each call doubles the values, from 2^-110 on.
const CHUNK: usize = 190;
const SCALE: i32 = -110;

fn main() -> Result<(), Box<dyn Error>> {
    let rank: usize = std::env::var("PEERS_RANK")?.parse()?;
    let cores = std::env::var("PEERS_CORES")?;
    let mut core = CpuSet::new();
    core.set(cores.split(',').nth(rank).ok_or("fewer cores than ranks")?.parse()?)?;
    sched_setaffinity(Pid::this(), &core)?;

    let mut driver = UnixStream::connect(std::env::var("PEERS_SOCKET")?)?;
    let mut lines = BufReader::new(driver.try_clone()?).lines();
    writeln!(driver, "rank {rank}")?;
    let id = if rank == 0 {
        let id = UniqueId::new()?;
        writeln!(driver, "share {id}")?;
        id
    } else {
        lines.next().ok_or("rank 0 shared nothing")??.parse()?
    };
    let local = Local::connect(&id, rank, 2, Duration::from_secs(60))?;
    // A rank pinned to one core assumes that ranks share it and yields; here each rank has its own core.
    let communicator = Communicator::builder().build(Host::new().wait(Wait::Spin), local)?;
    writeln!(driver, "ready fast-allreduce {}", env!("CARGO_PKG_VERSION"))?;

    for line in lines {
        let line = line?;
        let words: Vec<_> = line.split(' ').collect();
        let ["measure", bytes, calls, place] = words[..] else {
            return Err(format!("not understood: {line}").into());
        };
        let (count, calls) = (bytes.parse::<usize>()? / 4, calls.parse()?);
        let took = measure(&communicator, rank, count, calls, place == "in")?;
        writeln!(driver, "{took}")?;
    }
    Ok(())
}

fn input(rank: usize, i: usize) -> f32 {
    ((i * 13 + rank * 7) % 1021 + 1) as f32 * 2f32.powi(SCALE)
}

fn measure(
    communicator: &Communicator<Host>,
    rank: usize,
    count: usize,
    calls: usize,
    in_place: bool,
) -> fast_allreduce::Result<String> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    let a = aligned(&mut first, count);
    let b = aligned(&mut second, if in_place { 0 } else { count });
    let reduce = |input: &mut [f32], output: &mut [f32]| {
        if in_place {
            communicator.all_reduce_in_place(black_box(input), ReduceOp::Sum)
        } else {
            communicator.all_reduce(black_box(input), output, ReduceOp::Sum)
        }
    };
    let (mut times, mut wrong) = (Vec::new(), 0);
    while times.len() < calls {
        let timed = (calls - times.len()).min(CHUNK);
        let untimed = (timed / 2).clamp(1, 10);
        b.fill(f32::NAN);
        for (i, value) in a.iter_mut().enumerate() {
            *value = input(rank, i);
        }
        for _ in 0..untimed {
            reduce(a, b)?;
        }
        let mut before = Instant::now();
        for _ in 0..timed {
            reduce(a, b)?;
            let now = Instant::now();
            times.push((now - before).as_nanos() as f64);
            before = now;
        }
        let doublings = if in_place { untimed + timed - 1 } else { 0 };
        let output = if in_place { &*a } else { &*b };
        // f64, because an f32 cannot hold the factor; it can hold the products.
        let factor = 2f64.powi(doublings as i32);
        let expected = |i| (f64::from(input(0, i) + input(1, i)) * factor) as f32;
        wrong += (0..count).filter(|&i| output[i] != expected(i)).count();
    }
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    times.sort_by(f64::total_cmp);
    Ok(format!("took {} {mean} {wrong}", times[times.len() / 2]))
}

/// Returns `count` elements aligned to a page, as for the other engines.
fn aligned(memory: &mut Vec<f32>, count: usize) -> &mut [f32] {
    const PAGE: usize = 4096;
    memory.resize(count + PAGE / 4, 0.0);
    let start = memory.as_ptr().align_offset(PAGE);
    &mut memory[start..start + count]
}
