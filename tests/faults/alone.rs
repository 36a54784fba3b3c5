//! Tests that change their process: each runs once more in a process of its own.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

/// Set in the process that runs a test alone.
const ALONE: &str = "FAST_ALLREDUCE_TEST_ALONE";

/// True in the process of the test's own. Elsewhere runs that, and returns false when the test has passed there. No
/// thread of it takes the signals in `blocked` unless the test says so: a process's main thread is the runner's, and
/// would be the first to take them.
pub fn is_alone(test: &str, blocked: impl IntoIterator<Item = Signal>) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let blocked = SigSet::from_iter(blocked);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(ALONE, "1").stdin(Stdio::null());
    // SAFETY: changes a mask, which is safe after a fork.
    unsafe { command.pre_exec(move || Ok(blocked.thread_set_mask()?)) };
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    let passed = output.status.success() && text.contains("1 passed");
    assert!(passed, "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    false
}

/// Whether this thread takes a signal.
pub fn take(signal: Signal, takes: bool) {
    let how = if takes { SigmaskHow::SIG_UNBLOCK } else { SigmaskHow::SIG_BLOCK };
    SigSet::from(signal).thread_swap_mask(how).unwrap();
}
