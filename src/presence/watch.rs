//! The thread that notices when a rank goes.
//!
//! Two descriptors tell it, whatever way the ranks found each other: a pipe, whose writing end the peer holds and closes when it
//! leaves, and a pidfd of the peer's process, which it passed itself, so that process ids and their namespaces play no part. The
//! pidfd is for a peer that has forked: its children hold the pipe open. Before Linux 5.3 there is the pipe alone.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

use crate::bootstrap::is_ready;
use crate::error::{Error, Result};
use crate::thread::{self, SMALL_STACK};

/// Tell of a peer's end.
#[derive(Debug)]
pub(super) struct Watched {
    pub rank: usize,
    pub pipe: Option<OwnedFd>,
    pub process: Option<OwnedFd>,
}

/// What was seen of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    PipeClosed,
    ProcessEnded,
}

/// The thread, until it is dropped.
#[derive(Debug)]
pub(super) struct Watcher {
    /// Closed to end the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Calls `tell` with each event, once.
    pub fn start(watched: Vec<Watched>, tell: impl Fn(usize, Event) + Send + 'static) -> Result<Self> {
        let (stopped, stop) = pipe()?;
        let thread =
            thread::spawn("fast-allreduce".into(), SMALL_STACK, move || watch(&stopped, watched, tell))
                .map_err(Error::io("starting the thread that watches the other ranks"))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    /// In a fork of its process, which has no such thread: waits for nothing.
    pub fn forget(&mut self) {
        std::mem::forget(self.thread.take());
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It cannot panic; if it did, it has said so.
            let _ = thread.join();
        }
    }
}

fn watch(stopped: &OwnedFd, mut watched: Vec<Watched>, tell: impl Fn(usize, Event)) {
    loop {
        // A closed pipe is reported whatever is asked for; a pidfd is readable when its process has ended.
        let mut polled = vec![PollFd::new(stopped.as_fd(), PollFlags::empty())];
        let descriptors = watched.iter().flat_map(|peer| [&peer.pipe, &peer.process]).flatten();
        polled.extend(descriptors.map(|descriptor| PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)));
        match poll(&mut polled, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR | Errno::EAGAIN) => continue,
            // Nothing can be watched any more; timeouts still hold.
            Err(_) => return,
        }
        let mut ready = polled.iter().map(is_ready).collect::<Vec<_>>().into_iter();
        if ready.next() == Some(true) {
            return;
        }
        for peer in &mut watched {
            let slots = [(&mut peer.pipe, Event::PipeClosed), (&mut peer.process, Event::ProcessEnded)];
            for (descriptor, event) in slots {
                if descriptor.is_some() && ready.next() == Some(true) {
                    *descriptor = None;
                    tell(peer.rank, event);
                }
            }
        }
    }
}

/// A pipe, its reading end first; close-on-exec.
pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(Error::system("pipe2"))
}

/// A descriptor of this process that is readable once it has ended, where the kernel has such.
pub(super) fn own_process() -> Option<OwnedFd> {
    // SAFETY: takes a process id and flags, and returns a descriptor or -1.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) };
    let descriptor = i32::try_from(descriptor).ok().filter(|&descriptor| descriptor >= 0);
    // SAFETY: the kernel has just opened it, close-on-exec, and nothing else owns it.
    descriptor.map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) })
}
