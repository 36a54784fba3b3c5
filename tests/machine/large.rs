//! More than 4 GiB in one call: no count, offset or number of pieces is cut to 32 bits.

use fast_allreduce::{Communicator, Host, ReduceOp};

use crate::launch::threads;
use crate::runner::{Found, Missing};
use crate::tier::is_full;

tests! {
    memory => more_than_four_gibibytes_in_one_call;
}

const ELEMENTS: usize = (4 << 30) + (100 << 20) + 77;

/// A prime, so that elements 4 GiB apart have different values.
const PERIOD: usize = 1_048_573;

/// Memory for the elements and regions of two ranks, with a reserve for other processes.
const NEEDED_KIB: usize = 12 << 20;

/// Memory of the machine or of the container, whichever is less.
fn available_kib() -> usize {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    let available: usize = line.trim().trim_end_matches("kB").trim().parse().unwrap();
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    limits.into_iter().filter_map(number).map(|bytes| bytes >> 10).fold(available, usize::min)
}

/// A rank's elements, repeated.
fn period(rank: usize) -> Vec<u8> {
    (0..PERIOD).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 13) as u8 ^ (83 * rank) as u8).collect()
}

fn memory() -> Found<()> {
    if !is_full() {
        return Err(Missing::new("full", "FAST_ALLREDUCE_TEST_FULL=1, as it takes ten seconds"));
    }
    match available_kib() {
        available if available < NEEDED_KIB => {
            Err(Missing::new("memory", format!("{NEEDED_KIB} KiB of memory, and {available} are available")))
        }
        _ => Ok(()),
    }
}

fn more_than_four_gibibytes_in_one_call() {
    let [mut expected, other] = [0, 1].map(period);
    expected.iter_mut().zip(other).for_each(|(sum, other)| *sum = sum.wrapping_add(other));
    threads(2, |rank| {
        let own = period(rank.rank());
        let communicator = Communicator::builder().max_bytes(1 << 20).build(Host::new(), rank).unwrap();
        let mut data = vec![0; ELEMENTS];
        data.chunks_mut(PERIOD).for_each(|chunk| chunk.copy_from_slice(&own[..chunk.len()]));
        communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
        for (number, chunk) in data.chunks(PERIOD).enumerate() {
            // Every element is checked; only the first wrong one is reported.
            if *chunk != expected[..chunk.len()] {
                let at = chunk.iter().zip(&expected).position(|(is, must)| is != must).unwrap();
                panic!("element {} is {} and not {}", number * PERIOD + at, chunk[at], expected[at]);
            }
        }
        assert_eq!(communicator.counters().bytes, ELEMENTS as u64);
    });
}
