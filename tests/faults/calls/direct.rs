//! Direct reads of messages in the memory of the sender's process: refused by the kernel, or cut off by aborts and
//! kills.

use std::ffi::c_void;
use std::time::Duration;

use fast_allreduce::{Algorithm, Collective, Communicator, DType, Host, Result};

use crate::fixtures::pool::{Outcome, Pool};
use crate::fixtures::rank::{say, Part};
use crate::fixtures::world::{threads, LIMIT, SOON};
use crate::random::Random;
use crate::tier::rounds;

const SIZE: usize = 3;

pub const ALWAYS: [(&str, &str); 1] = [("FAST_ALLREDUCE_DIRECT_READS", "1")];

/// Ranks that read all messages directly where the kernel permits it.
fn pool() -> Pool {
    let mut pool = Pool::default();
    pool.environment = ALWAYS.to_vec();
    pool
}

/// Runs a world, and returns the outcomes by rank.
fn outcomes(pool: &mut Pool, seed: usize, parts: &[Part]) -> Vec<Outcome> {
    let ranks = pool.start(Algorithm::TwoShotPull, seed, LIMIT.as_millis() as u64, parts);
    ranks.iter().map(|rank| rank.outcome()).collect()
}

/// Returns the number of messages that a rank has read in other processes, and its statement about which ranks it can
/// read.
fn reads(outcome: &Outcome) -> (u64, &str) {
    let (_, said) = outcome.text.split_once("survivors ").unwrap_or_else(|| panic!("{outcome:?}"));
    let (read, said) = said.split_once("; ").and_then(|(_, said)| said.split_once(" read; ")).unwrap();
    (read.parse().unwrap(), said)
}

/// Elements of a long message: several pieces of a direct read.
const LONG: usize = 300_000;

/// Sends one message after another, each from a new allocation, which is overwritten and unmapped as soon as the call
/// has returned.
pub fn send_long(communicator: &Communicator<Host>, abort_after: usize, calls: &mut usize) -> Result<()> {
    std::thread::scope(|scope| {
        if abort_after > 0 {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(abort_after as u64));
                communicator.abort();
            });
        }
        loop {
            let mut data = vec![*calls as u32; LONG];
            let sent = communicator.send(&data, 1, *calls as u32);
            data.fill(u32::MAX);
            sent?;
            *calls += 1;
        }
    })
}

/// Receives these messages. Each is whole, or the call fails; wrong data ends the process.
pub fn receive_long(communicator: &Communicator<Host>, calls: &mut usize) -> Result<()> {
    let mut data = vec![0; LONG];
    loop {
        communicator.recv(&mut data, 0, *calls as u32)?;
        if let Some(wrong) = data.iter().find(|&&element| element != *calls as u32) {
            say(&format!("wrong message {calls}: {wrong}"));
            std::process::exit(1);
        }
        *calls += 1;
    }
}

/// Gathers shares of `count` elements, in turns in place and not, until a call fails; wrong data ends the process.
pub fn gather(communicator: &Communicator<Host>, count: usize, calls: &mut usize) -> Result<()> {
    let (rank, size) = (communicator.rank(), communicator.world_size());
    loop {
        let element = |rank: usize| (*calls * size + rank) as u32;
        let mut output = vec![u32::MAX; size * count];
        if *calls % 2 == 0 {
            output[rank * count..][..count].fill(element(rank));
            let to: *mut c_void = output.as_mut_ptr().cast();
            let share = to.wrapping_byte_add(size_of_val(&output[..rank * count]));
            // SAFETY: the input is the rank's own share of the output, which is borrowed for the call.
            unsafe { communicator.collective_raw(Collective::AllGather, share, to, count, DType::U32)? };
        } else {
            communicator.all_gather(&vec![element(rank); count], &mut output)?;
        }
        for (rank, share) in output.chunks(count).enumerate() {
            if let Some(wrong) = share.iter().find(|&&found| found != element(rank)) {
                say(&format!("wrong share of rank {rank} in call {calls}: {wrong}"));
                std::process::exit(1);
            }
        }
        *calls += 1;
    }
}

#[test]
fn messages_are_read_where_they_are() {
    let mut pool = pool();
    for seed in 0..4 {
        for (rank, outcome) in outcomes(&mut pool, seed, &[Part::Calls(60); SIZE]).iter().enumerate() {
            assert_eq!((outcome.kind.as_str(), outcome.calls), ("ok", 60), "{outcome:?}");
            let (read, said) = reads(outcome);
            let others: Vec<_> =
                (0..SIZE).filter(|&other| other != rank).map(|other| other.to_string()).collect();
            assert_eq!(said, format!("direct reads from ranks {}", others.join(", ")));
            assert!(read > 10, "{outcome:?}");
        }
    }
}

/// One rank, or all, may not read from the start: senders do not offer it direct reads.
#[test]
fn what_a_sandbox_refuses_goes_through_the_channel() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        for refused in [1, SIZE] {
            let mut pool = pool();
            (0..refused).for_each(|rank| pool.forbid(rank, libc::SYS_process_vm_readv, errno));
            for (rank, outcome) in outcomes(&mut pool, 7, &[Part::Calls(60); SIZE]).iter().enumerate() {
                assert_eq!((outcome.kind.as_str(), outcome.calls), ("ok", 60), "{outcome:?}");
                let (read, said) = reads(outcome);
                assert_eq!(read == 0, rank < refused, "{outcome:?}");
                assert_eq!(said.starts_with("no direct reads; not from rank"), rank < refused, "{outcome:?}");
            }
        }
    }
}

/// A rank announces that it can read, then loses the permission: it receives those messages through the channel.
#[test]
fn messages_that_can_no_longer_be_read_use_the_channel() {
    for seed in 0..4 {
        for affected in [1, SIZE] {
            let mut parts = [Part::Calls(60); SIZE];
            parts[..affected].fill(Part::LoseReads(30));
            for outcome in outcomes(&mut pool(), seed, &parts) {
                assert_eq!((outcome.kind.as_str(), outcome.calls), ("ok", 60), "{outcome:?}");
                assert!(reads(&outcome).0 > 0, "{outcome:?}");
            }
        }
    }
}

/// Without a robust futex, peers would not notice that the rank's process has been replaced.
#[test]
fn a_rank_whose_end_would_not_show_is_not_read() {
    let mut pool = pool();
    pool.forbid(1, libc::SYS_set_robust_list, libc::EPERM);
    for (rank, outcome) in outcomes(&mut pool, 3, &[Part::Calls(60); SIZE]).iter().enumerate() {
        assert_eq!(outcome.kind, "ok", "{outcome:?}");
        let is_told = reads(outcome).1.contains("not from rank 1: the end of its process");
        assert_eq!(is_told, rank != 1, "{outcome:?}");
    }
}

/// The sender owns its message when its call returns, and unmaps it; the receiver gets the message that was sent, or an
/// error.
#[test]
fn a_sender_that_aborts_owns_its_message() {
    let (mut pool, mut received) = (pool(), 0);
    for seed in 0..rounds("direct reads, aborts of senders", 200, 30) as u64 {
        let wait = 1 + Random::fixed(seed).below(20_000);
        let [sender, receiver] = &outcomes(&mut pool, 0, &[Part::Sends(wait), Part::Receives(0)])[..] else {
            panic!("two ranks")
        };
        assert_eq!(sender.kind, "other", "{sender:?}");
        assert_eq!((receiver.kind.as_str(), &receiver.named[..]), ("failed", &[0][..]), "{receiver:?}");
        assert!(reads(receiver).0 >= receiver.calls as u64, "{receiver:?}");
        received += receiver.calls;
    }
    println!("{received} messages");
    assert!(received > 0);
}

/// Either rank is killed, at any moment.
#[test]
fn a_rank_that_is_killed_is_named() {
    let mut pool = pool();
    for round in 0..rounds("direct reads, kills", 100, 16) {
        let victim = round % 2;
        let ranks = pool.start(
            Algorithm::TwoShotPull,
            0,
            LIMIT.as_millis() as u64,
            &[Part::Sends(0), Part::Receives(0)],
        );
        ranks.iter().for_each(|rank| _ = rank.await_line("ready"));
        std::thread::sleep(Duration::from_micros(Random::fixed(round as u64).below(20_000) as u64));
        ranks[victim].signal(libc::SIGKILL);
        let outcome = ranks[1 - victim].outcome();
        assert_eq!((outcome.kind.as_str(), &outcome.named[..]), ("lost", &[victim][..]), "{outcome:?}");
        assert!(outcome.drop_us < SOON.as_micros() as u64, "{outcome:?}");
        pool.remove_ended(victim);
    }
}

/// Shares of an all-gather are read where they are; a rank that is killed meanwhile is named.
#[test]
fn a_rank_that_is_killed_in_a_gather_is_named() {
    let (mut pool, mut gathered) = (pool(), 0);
    for round in 0..rounds("direct reads, kills in gathers", 60, 9) {
        let victim = round % SIZE;
        let ranks =
            pool.start(Algorithm::TwoShotPull, 0, LIMIT.as_millis() as u64, &[Part::Gathers(LONG / 4); SIZE]);
        ranks.iter().for_each(|rank| _ = rank.await_line("ready"));
        std::thread::sleep(Duration::from_micros(Random::fixed(round as u64).below(20_000) as u64));
        ranks[victim].signal(libc::SIGKILL);
        for (_, rank) in ranks.iter().enumerate().filter(|&(rank, _)| rank != victim) {
            let outcome = rank.outcome();
            assert_eq!((outcome.kind.as_str(), &outcome.named[..]), ("lost", &[victim][..]), "{outcome:?}");
            let (read, _) = reads(&outcome);
            assert!(read >= ((SIZE - 1) * outcome.calls) as u64, "{outcome:?}");
            gathered += outcome.calls;
        }
        pool.remove_ended(victim);
    }
    println!("{gathered} gathers");
}

/// Ranks that gather different shares, or make another call, are told so.
#[test]
fn a_gather_of_another_size_is_a_disagreement() {
    let mut pool = pool();
    for other in [Part::Gathers(101), Part::Calls(1)] {
        for outcome in outcomes(&mut pool, 0, &[Part::Gathers(100), other, Part::Gathers(100)]) {
            assert!(outcome.text.contains("all_gather of 100 u32"), "{outcome:?}");
            assert_eq!((outcome.kind.as_str(), outcome.calls), ("other", 0), "{outcome:?}");
        }
    }
}

/// Threads of one process read each other's memory without a system call.
#[test]
fn threads_read_each_other_without_the_kernel() {
    let read = |communicator: Communicator<Host>| {
        let (rank, mut data) = (communicator.rank(), vec![0_u32; 100_000]);
        communicator.send_recv(&vec![rank as u32; 100_000], 1 - rank, &mut data, 1 - rank, 0).unwrap();
        assert!(data.iter().all(|&element| element == 1 - rank as u32));
        let direct = communicator.direct_reads().unwrap();
        assert!(direct.readable().next().is_none() && direct.refused().is_empty(), "{direct}");
        communicator.counters().direct_reads
    };
    assert_eq!(threads(2, |_| crate::fixtures::world::builder().direct_reads(true), read), [0, 0]);
}

/// Direct reads are switched off on one rank.
#[test]
fn direct_reads_can_be_switched_off() {
    let mut pool = Pool::default();
    pool.environment = vec![("FAST_ALLREDUCE_DIRECT_READS", "0")];
    pool.add();
    pool.environment = ALWAYS.to_vec();
    for (rank, outcome) in outcomes(&mut pool, 5, &[Part::Calls(60); SIZE]).iter().enumerate() {
        assert_eq!(outcome.kind, "ok", "{outcome:?}");
        let (read, said) = reads(outcome);
        assert_eq!(read == 0, rank == 0, "{outcome:?}");
        assert_eq!(said.contains("switched off"), rank == 0, "{outcome:?}");
    }
}
