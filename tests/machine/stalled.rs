//! Memory that does not respond, such as a file mapping whose server is gone: a time limit cannot end a system call
//! that waits for a page.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Communicator, Error, Host};

use crate::launch::{this_test, Process, LIMIT};
use crate::runner::{Found, Missing};

tests! {
    userfaultfd => a_message_that_does_not_answer_is_waited_for_in_vain;
}

/// Set in the sender's process: the unique id.
const ID: &str = "FAST_ALLREDUCE_TEST_STALLED";

const BYTES: usize = 1 << 20;

/// How long the receiver waits, and after how long the memory responds.
const TIMEOUT: Duration = Duration::from_millis(300);
const ANSWER: Duration = Duration::from_secs(2);

/// Memory whose pages arrive when the descriptor is closed (linux/userfaultfd.h).
fn stalled() -> io::Result<(&'static [u8], OwnedFd)> {
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
    let done = |code: i32| if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: the call creates a descriptor and takes no pointer.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
    done(descriptor)?;
    // SAFETY: the descriptor is new and has no other owner.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let mut api = [0xAA_u64, 0, 0];
    // SAFETY: the ioctl number states the size of the structure.
    done(unsafe { libc::ioctl(descriptor.as_raw_fd(), UFFDIO_API, &mut api) })?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, which replaces none.
    let memory =
        unsafe { libc::mmap(std::ptr::null_mut(), BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    done(if memory == libc::MAP_FAILED { -1 } else { 0 })?;
    // The first page responds, so that it is not the header of the message that stalls.
    // SAFETY: within the mapping.
    unsafe { memory.cast::<u8>().write(1) };
    let mut range = [memory as u64, BYTES as u64, UFFDIO_REGISTER_MODE_MISSING, 0];
    // SAFETY: as above.
    done(unsafe { libc::ioctl(descriptor.as_raw_fd(), UFFDIO_REGISTER, &mut range) })?;
    // SAFETY: the mapping stays until the process ends.
    Ok((unsafe { std::slice::from_raw_parts(memory.cast(), BYTES) }, descriptor))
}

fn userfaultfd() -> Found<()> {
    stalled().map(drop).map_err(|error| Missing::new("userfaultfd", error.to_string()))
}

fn communicator(id: &UniqueId, rank: usize) -> Communicator<Host> {
    let bootstrap = Local::connect(id, rank, 2, LIMIT).unwrap();
    Communicator::builder().timeout(TIMEOUT).direct_reads(true).build(Host::new(), bootstrap).unwrap()
}

fn a_message_that_does_not_answer_is_waited_for_in_vain() {
    if let Ok(id) = std::env::var(ID) {
        let (message, descriptor) = stalled().unwrap();
        let communicator = communicator(&id.parse().unwrap(), 0);
        std::thread::spawn(move || {
            std::thread::sleep(ANSWER);
            drop(descriptor);
        });
        // The receiver has left in the meantime.
        communicator.send(message, 1, 0).unwrap_err();
        return;
    }
    let id = UniqueId::new().unwrap();
    let mut command = this_test("stalled::a_message_that_does_not_answer_is_waited_for_in_vain");
    let sender = Process::start(command.env(ID, id.to_string()));
    let communicator = communicator(&id, 1);
    assert_eq!(communicator.direct_reads().unwrap().readable().collect::<Vec<_>>(), [0]);
    let start = Instant::now();
    let error = communicator.recv(&mut vec![0_u8; BYTES], 0, 0).unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[0]), "{error}");
    assert!(start.elapsed() < ANSWER / 2, "{:?}", start.elapsed());
    drop(communicator);
    sender.finish().unwrap();
}
