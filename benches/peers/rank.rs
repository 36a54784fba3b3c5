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

/// Exponent of the first values of calls in place. Each such call multiplies the values by the number of ranks, a power
/// of two; the buffers are checked and filled again before the exponent has grown by 200.
const SCALE: i32 = -110;
const GROWTH: usize = 200;

/// Inputs repeat with this period.
const PERIOD: usize = 1021;

fn main() -> Result<(), Box<dyn Error>> {
    let rank: usize = std::env::var("PEERS_RANK")?.parse()?;
    let ranks: usize = std::env::var("PEERS_RANKS")?.parse()?;
    let list = std::env::var("PEERS_CORES")?;
    let cores: Vec<usize> = list.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let mut core = CpuSet::new();
    core.set(cores[rank % cores.len()])?;
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
    let local = Local::connect(&id, rank, ranks, Duration::from_secs(60))?;
    let wait = if ranks <= cores.len() { Wait::Spin } else { Wait::Auto };
    let communicator = Communicator::builder().build(Host::new().wait(wait), local)?;
    writeln!(driver, "ready fast-allreduce {}", env!("CARGO_PKG_VERSION"))?;

    for line in lines {
        let line = line?;
        let words: Vec<_> = line.split(' ').collect();
        let ["measure", bytes, calls, place] = words[..] else {
            return Err(format!("not understood: {line}").into());
        };
        let (count, calls) = (bytes.parse::<usize>()? / 4, calls.parse()?);
        let took = measure(&communicator, count, calls, place == "in")?;
        writeln!(driver, "{took}")?;
    }
    Ok(())
}

fn input(rank: usize, i: usize) -> f32 {
    ((i * 13 + rank * 7) % PERIOD + 1) as f32 * 2f32.powi(SCALE)
}

fn measure(
    communicator: &Communicator<Host>,
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
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let own: Vec<f32> = (0..PERIOD).map(|i| input(rank, i)).collect();
    let total: Vec<f32> = (0..PERIOD).map(|i| (0..ranks).map(|of| input(of, i)).sum()).collect();
    let doublings = ranks.ilog2() as usize;
    let (mut times, mut wrong) = (Vec::new(), 0);
    while times.len() < calls {
        let timed = (calls - times.len()).min(GROWTH / doublings - 10);
        let untimed = (timed / 2).clamp(1, 10);
        b.fill(f32::NAN);
        for (i, value) in a.iter_mut().enumerate() {
            *value = own[i % PERIOD];
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
        let doubled = if in_place { doublings * (untimed + timed - 1) } else { 0 };
        let output = if in_place { &*a } else { &*b };
        // f64, because an f32 cannot hold the factor; it can hold the products.
        let factor = 2f64.powi(doubled as i32);
        let expected = |i: usize| (f64::from(total[i % PERIOD]) * factor) as f32;
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
