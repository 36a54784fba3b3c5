//! Processes that have equal ids in their namespaces.

use std::process::{Command, Stdio};

use fast_allreduce::bootstrap::Threads;
use fast_allreduce::{Communicator, Error, Host, ReduceOp};

use crate::launch::{this_test, Process};
use crate::runner::{Found, Missing};

tests! {
    process_namespace => a_fork_with_the_id_of_its_parent_is_no_rank;
}

/// Set in the first process of a namespace.
const FIRST: &str = "FAST_ALLREDUCE_TEST_FIRST";

fn unshare() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork"]);
    command
}

fn process_namespace() -> Found<()> {
    match unshare().arg("true").output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(Missing::new("root", String::from_utf8_lossy(&output.stderr).trim().to_owned())),
        Err(error) => Err(Missing::new("root", format!("unshare: {error}"))),
    }
}

/// A rank is the first process of a namespace, and so is its fork.
fn a_fork_with_the_id_of_its_parent_is_no_rank(_: ()) {
    if std::env::var_os(FIRST).is_none() {
        let test = this_test("namespaces::a_fork_with_the_id_of_its_parent_is_no_rank");
        let mut command = unshare();
        // Not by its path in /proc, which is that of `unshare` there.
        command.arg(std::env::current_exe().unwrap()).args(test.get_args()).env(FIRST, "1");
        Process::start(command.stdout(Stdio::piped()).stderr(Stdio::piped())).finish().unwrap();
        return;
    }
    let ranks = std::thread::scope(|scope| {
        let build = |threads| Communicator::builder().build(Host::new(), threads).unwrap();
        let ranks: Vec<_> =
            Threads::world(2).unwrap().into_iter().map(|rank| scope.spawn(move || build(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    let reduced = |rank: usize, own: i32| {
        let mut data = [own; 8];
        ranks[rank].all_reduce_in_place(&mut data, ReduceOp::Sum).map(|()| data)
    };
    std::thread::scope(|scope| {
        // It is created here: a process whose forks have another namespace has no more threads.
        let (go, wait) = std::sync::mpsc::channel();
        let other = scope.spawn(move || {
            wait.recv().unwrap();
            reduced(1, 10)
        });
        // SAFETY: it changes the namespace of later forks alone.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWPID) }, 0);
        // SAFETY: the child makes one call, which ends before it takes a lock, and ends by _exit.
        match unsafe { libc::fork() } {
            0 => {
                // A child that takes part in the call waits for ever.
                // SAFETY: the alarm ends the child.
                unsafe { libc::alarm(30) };
                let right = std::process::id() == 1 && reduced(0, 5) == Err(Error::Forked);
                // SAFETY: ends the child without the parent's exit handlers.
                unsafe { libc::_exit(i32::from(!right)) }
            }
            child => {
                let mut status = -1;
                // SAFETY: the status outlives the call.
                assert_eq!((unsafe { libc::waitpid(child, &mut status, 0) }, status), (child, 0));
            }
        }
        assert_eq!(std::process::id(), 1);
        go.send(()).unwrap();
        assert_eq!(reduced(0, 1), Ok([11; 8]));
        assert_eq!(other.join().unwrap(), Ok([11; 8]));
    });
}
