//! A fork of a rank's process is not the rank.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use fast_allreduce::bootstrap::UniqueId;
use fast_allreduce::{Communicator, Error, Host, ReduceOp};
use nix::sys::wait::{waitpid, WaitStatus};
use nix::unistd::{alarm, fork, ForkResult};

use crate::fixtures::world::local;

#[test]
fn a_fork_can_neither_use_nor_close_its_parents_communicator() {
    let id = UniqueId::new().unwrap();
    thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let communicator = local(&id, 1, 2);
            for _ in 0..2 {
                communicator.all_reduce_in_place(&mut [2i32; 9], ReduceOp::Sum).unwrap();
            }
        });
        let communicator = local(&id, 0, 2);
        let mut data = [1i32; 9];
        communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
        // SAFETY: the child uses a communicator, which takes no lock in a fork and allocates for its error. This
        // platform's allocator supports that after a fork. The child leaves by _exit.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let refused =
                    communicator.all_reduce_in_place(&mut data, ReduceOp::Sum) == Err(Error::Forked);
                communicator.abort();
                drop(communicator);
                // SAFETY: ends the child without the parent's exit handlers.
                unsafe { libc::_exit(i32::from(!refused)) }
            }
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
            }
        }
        // The rank continues in the parent.
        communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [5; 9]);
        peer.join().unwrap();
    });
}

#[test]
fn a_fork_that_drops_its_parents_buffers_leaves_them_to_the_parent() {
    let id = UniqueId::new().unwrap();
    let set_up = |rank| {
        let communicator = local(&id, rank, 2);
        let mut buffer = communicator.alloc(9).unwrap();
        buffer.fill(rank as i64 + 1);
        let symmetric = communicator.symmetric_memory::<i64>(9).unwrap();
        (communicator, buffer, symmetric)
    };
    let sum = |communicator: &Communicator<Host>, buffer: &[i64]| {
        let mut sum = [0; 9];
        communicator.all_reduce(buffer, &mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [3; 9]);
    };
    let (go_on, may_call) = mpsc::channel();
    thread::scope(|scope| {
        let peer = scope.spawn(move || {
            let (communicator, buffer, symmetric) = set_up(1);
            may_call.recv().unwrap();
            (0..2).for_each(|_| sum(&communicator, &buffer));
            symmetric.free().unwrap();
        });
        let (communicator, buffer, symmetric) = set_up(0);
        thread::scope(|scope| {
            // Waits for the peer, and holds the lock that drops take.
            let waiting = scope.spawn(|| sum(&communicator, &[1; 9]));
            thread::sleep(Duration::from_millis(100));
            // SAFETY: as above; the alarm ends a child that waits for the lock.
            match unsafe { fork() }.unwrap() {
                ForkResult::Child => {
                    alarm::set(20);
                    // SAFETY: the child reads each value once, and leaves by _exit, so that nothing drops twice. The
                    // parent's values are separate copies.
                    unsafe {
                        drop(std::ptr::read(&buffer));
                        drop(std::ptr::read(&symmetric));
                        libc::_exit(0)
                    }
                }
                ForkResult::Parent { child } => {
                    go_on.send(()).unwrap();
                    assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
                }
            }
            waiting.join().unwrap();
        });
        sum(&communicator, &buffer);
        symmetric.free().unwrap();
        peer.join().unwrap();
    });
}
