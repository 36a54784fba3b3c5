//! A fork of a rank is not the rank.

use std::thread;

use fast_allreduce::bootstrap::UniqueId;
use fast_allreduce::{Error, ReduceOp};
use nix::sys::wait::{waitpid, WaitStatus};
use nix::unistd::{fork, ForkResult};

use crate::world::local;

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
        // SAFETY: the child uses a communicator, which takes no lock there and allocates for its error; the allocator of this
        // platform is made for that. It leaves by _exit.
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
        // The rank lives on in the parent.
        communicator.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [5; 9]);
        peer.join().unwrap();
    });
}
