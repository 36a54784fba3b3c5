//! Output that cannot be written is a failure: a full device, a closed or read-only descriptor, a closed pipe.

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

use nix::sys::signal::Signal;

use crate::program::temporary::Folder;
use crate::program::{program, text};

/// Returns command lines that write to standard output.
fn everything(folder: &Folder) -> Vec<String> {
    let rows = "--ranks 2 -b 8 -e 8 -n 2";
    let recorded = concat!(env!("CARGO_MANIFEST_DIR"), "/../src/topology/recorded/pcie-4.txt");
    let tuning = folder.path().join("tuning.toml");
    let tune = format!("tune --ranks 2 --budget 0.1 -b 64 -e 64 --output {}", tuning.display());
    let mut all: Vec<String> =
        ["--help", "bench --help", "help plan", "--version", "--version --verbose", "plan", "plan --toml"]
            .map(String::from)
            .into();
    all.extend([format!("topology --parse {recorded}"), tune]);
    all.extend(["table", "json", "csv"].map(|format| format!("bench {rows} --format {format}")));
    all.push(format!("compare {rows}"));
    all.extend(["text", "json"].map(|format| format!("soak --ranks 2 --calls 16 -e 4K --format {format}")));
    all
}

/// Runs the program with the given standard output.
fn into(arguments: &str, output: impl FnOnce(&mut Command) -> &mut Command) -> Output {
    let mut command = program(arguments);
    output(command.stderr(Stdio::piped()));
    command.spawn().unwrap().wait_with_output().unwrap()
}

fn fails(arguments: &str, output: &Output, fact: &str) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments}: {error}");
    assert!(error.starts_with("error: ") && error.contains(fact), "{arguments}: {error}");
    assert_eq!(error.lines().count(), 1, "{arguments}: {error}");
}

#[test]
fn to_a_full_device_is_an_error() {
    for arguments in everything(&Folder::new()) {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = into(&arguments, |command| command.stdout(full));
        fails(&arguments, &output, "No space left");
    }
}

#[test]
fn to_a_closed_or_read_only_descriptor_is_an_error() {
    for arguments in everything(&Folder::new()) {
        let close = || Ok(nix::unistd::close(1)?);
        // SAFETY: the closure closes a descriptor, which is async-signal-safe.
        let output = into(&arguments, |command| unsafe { command.pre_exec(close) });
        fails(&arguments, &output, "standard output is closed");
        let output = into(&arguments, |command| command.stdout(File::open("/dev/null").unwrap()));
        fails(&arguments, &output, "standard output is closed or read-only");
    }
}

#[test]
fn to_a_closed_pipe_is_a_silent_failure() {
    for arguments in everything(&Folder::new()) {
        let (reader, writer) = UnixStream::pair().unwrap();
        drop(reader);
        let output = into(&arguments, |command| command.stdout(OwnedFd::from(writer)));
        assert_eq!(output.status.code(), Some(128 + Signal::SIGPIPE as i32), "{arguments}");
        assert_eq!(text(&output.stderr), "", "{arguments}");
    }
}

#[test]
fn to_dev_null_is_a_success() {
    for arguments in ["--help", "bench --ranks 2 -b 8 -e 8 -n 2"] {
        let output = into(arguments, |command| command.stdout(Stdio::null()));
        assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
        let both = OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
        let output = into(arguments, |command| command.stdout(both));
        assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
    }
}
