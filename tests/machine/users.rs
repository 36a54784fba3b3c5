//! Rendezvous between processes of different users.

use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::Command;

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::Error;
use nix::unistd::Uid;

use crate::launch::{this_test, Process, LIMIT, THIS_PROGRAM};
use crate::runner::{Found, Missing};

tests! {
    root => another_user_is_refused;
}

/// The user `nobody`, which every system has.
const OTHER: u32 = 65534;

/// Set in the other user's process: the unique id, including its token.
const ID: &str = "FAST_ALLREDUCE_TEST_OTHER_USER";

/// Starts a process as another user, from a copy of the program that this user may run.
fn root() -> Found<()> {
    let missing = |reason: String| Err(Missing::new("root", reason));
    if std::env::var_os(ID).is_some() {
        return Ok(());
    }
    if !Uid::effective().is_root() {
        return missing("only root starts processes as another user".into());
    }
    match as_the_other(Command::new(THIS_PROGRAM).arg("--list")).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => missing(format!("another user's process: {}", output.status)),
        Err(error) => missing(format!("another user cannot run this program: {error}")),
    }
}

fn as_the_other(command: &mut Command) -> &mut Command {
    command.uid(OTHER).gid(OTHER)
}

fn another_user_is_refused() {
    if let Ok(id) = std::env::var(ID) {
        return both_sides_refuse(&id.parse().unwrap());
    }
    let id = UniqueId::new().unwrap();
    let mut command = this_test("users::another_user_is_refused");
    Process::start(as_the_other(command.env(ID, id.to_string()))).finish().unwrap();
    // The ranks of the right user are not disturbed.
    std::thread::scope(|scope| {
        for rank in [0, 1] {
            let id = &id;
            scope.spawn(move || Local::connect(id, rank, 2, LIMIT).unwrap());
        }
    });
}

fn both_sides_refuse(id: &UniqueId) {
    let error = Local::connect(id, 0, 2, LIMIT).unwrap_err();
    assert!(matches!(&error, Error::Refused { reason } if reason.contains("runs as user 0")), "{error}");
    // The rendezvous checks the user as well, before it reads anything.
    let mut link = UnixStream::connect_addr(&address(id)).unwrap();
    link.set_read_timeout(Some(LIMIT)).unwrap();
    let mut said = Vec::new();
    link.read_to_end(&mut said).unwrap();
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains(&format!("runs as user {OTHER}")), "{said}");
}

/// Name of the rendezvous socket, which the id contains.
fn address(id: &UniqueId) -> SocketAddr {
    let bytes = id.as_bytes();
    let first = bytes.windows(15).position(|part| part == b"fast-allreduce-").unwrap();
    let name = bytes[first..].split(|&byte| byte == 0).next().unwrap();
    SocketAddr::from_abstract_name(name).unwrap()
}
