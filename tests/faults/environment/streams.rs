//! Ranks in processes whose standard input, output and error are closed, and which print and read nevertheless.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fast_allreduce::bootstrap::Local;
use fast_allreduce::{Host, ReduceOp};

use crate::calls::direct::ALWAYS;
use crate::fixtures::world::{builder, LIMIT};
use crate::temporary::Folder;

/// Set in rank processes: the rank and a directory.
const RANK: &str = "FAST_ALLREDUCE_TEST_CLOSED_STREAMS";

const SIZE: usize = 3;

#[test]
fn what_a_rank_without_streams_prints_goes_nowhere() {
    let directory = Folder::new();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "environment::streams::rank_without_streams", "--ignored", "--test-threads=1"])
            .env(RANK, format!("{rank} {}", directory.path().display()))
            .envs(ALWAYS)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<Child> = (0..SIZE).map(start).collect();
    let statuses: Vec<_> = ranks.into_iter().map(|mut rank| rank.wait().unwrap()).collect();
    let said: Vec<_> = (0..SIZE).map(|rank| std::fs::read_to_string(said(directory.path(), rank))).collect();
    assert!(statuses.iter().all(|status| status.success()), "{statuses:?} {said:#?}");
    assert!(said.iter().all(|said| matches!(said.as_deref(), Ok("right"))), "{said:#?}");
}

fn said(directory: &Path, rank: usize) -> PathBuf {
    directory.join(format!("said-by-{rank}"))
}

/// Not a test: the main function of a rank process.
#[test]
#[ignore = "a process of other tests"]
fn rank_without_streams() {
    let Ok(who) = std::env::var(RANK) else { return };
    let (rank, directory) = who.split_once(' ').unwrap();
    let (rank, directory) = (rank.parse().unwrap(), Path::new(directory));
    for stream in 0..3 {
        // SAFETY: only the standard library uses these descriptors, and it tolerates that they are closed.
        assert_eq!(unsafe { libc::close(stream) }, 0);
    }
    let is_over = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                chat();
                std::thread::yield_now();
            }
        });
        let outcome = std::panic::catch_unwind(|| take_part(directory, rank));
        is_over.store(true, Ordering::Relaxed);
        outcome
    });
    let text = match &outcome {
        Ok(()) => "right".to_owned(),
        Err(panic) => {
            panic.downcast_ref::<String>().map_or("a panic without text", String::as_str).to_owned()
        }
    };
    std::fs::write(said(directory, rank), text).unwrap();
    std::process::exit(i32::from(outcome.is_err()));
}

/// Prints and reads like a program that does not know that its streams are closed.
fn chat() {
    let text = b"a stray warning\n";
    let mut read = [0_u8; 64];
    // SAFETY: both calls access buffers of the given length. If the library had a descriptor of its own here, they
    // would disturb it: that is what this tests.
    unsafe {
        libc::write(1, text.as_ptr().cast(), text.len());
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::read(0, read.as_mut_ptr().cast(), read.len());
    }
}

/// Waits until the standard streams' numbers are unused: a thread of the library may use one for a moment when it opens
/// a file.
fn streams_are_closed() {
    let started = Instant::now();
    // SAFETY: only asks for the flags of a number.
    while (0..3).any(|stream| unsafe { libc::fcntl(stream, libc::F_GETFD) } != -1) {
        assert!(started.elapsed() < LIMIT, "the library occupies the descriptor of a standard stream");
        std::thread::yield_now();
    }
}

fn take_part(directory: &Path, rank: usize) {
    let local = Local::in_directory(directory, rank, SIZE, LIMIT).unwrap();
    streams_are_closed();
    let communicator = builder().build(Host::new(), local).unwrap();
    streams_are_closed();
    let mut buffer = communicator.alloc::<u32>(10_000).unwrap();
    streams_are_closed();
    let parts = communicator.split(Some(0), -(rank as i64)).unwrap().unwrap();
    let again = parts.shrink(&[0, 1, 2]).unwrap();
    streams_are_closed();
    for round in 0..200 {
        let sum = |index: usize| ((0..SIZE).map(|rank| rank + index).sum::<usize>() * round) as u32;
        let own = |index: usize| ((rank + index) * round) as u32;
        let count = [1, 500, 10_000][round % 3];
        (0..count).for_each(|index| buffer[index] = own(index));
        let mut output = vec![0_u32; count];
        communicator.all_reduce(&buffer[..count], &mut output, ReduceOp::Sum).unwrap();
        assert!((0..count).all(|index| output[index] == sum(index)), "round {round}");
        let (next, last) = ((rank + 1) % SIZE, (rank + SIZE - 1) % SIZE);
        let input: Vec<u32> = (0..count).map(own).collect();
        communicator.send_recv(&input, next, &mut output, last, 0).unwrap();
        assert!((0..count).all(|index| output[index] == ((last + index) * round) as u32), "round {round}");
        again.all_reduce(&input, &mut output, ReduceOp::Sum).unwrap();
        assert!((0..count).all(|index| output[index] == sum(index)), "round {round}");
    }
    streams_are_closed();
}
