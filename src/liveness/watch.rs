//! The thread that notices when a rank goes.
//!
//! Three things tell it, whatever way the ranks found each other. A connection: a socket pair, one end of which the peer
//! keeps and shuts down when it leaves; that ends it whoever else holds the end, as a fork of the peer does. A pidfd
//! of the peer's process, which it passed itself, so that process ids and their namespaces play no part: a process
//! that is killed shuts nothing down, and its forks hold the connection. Where the peer has no pidfd (before Linux 5.3, or
//! refused to a sandbox), its [`ExitFutex`](super::exit_futex::ExitFutex) instead, which is looked at again and again.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{getsockopt, socketpair, AddressFamily, SockFlag, SockType};

use super::page::{own_page, page};
use crate::abi::MAX_RANKS;
use crate::descriptor::{above_streams, moved, Taken};
use crate::device::host::SharedMemory;
use crate::error::{Error, Result};
use crate::thread::{self, SMALL_STACK};

/// Between two looks at what does not wake the thread.
const LOOK_INTERVAL_MS: u8 = 20;

/// Between two looks where everything wakes it, unless the program has closed what does.
const IDLE_INTERVAL_MS: u16 = 1000;

/// What wakes the thread to end it; the others' are below.
const STOP: u64 = u64::MAX;

/// Tell of a peer's end.
#[derive(Debug)]
pub(super) struct Watched {
    pub rank: usize,
    /// Until it has told.
    pub connection: Option<OwnedFd>,
    pub process: Option<Arc<OwnedFd>>,
    /// Nothing else tells when its process ends.
    pub look: bool,
}

/// What was seen of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    ConnectionClosed,
    ProcessEnded,
}

/// The thread, until it is dropped.
#[derive(Debug)]
pub(super) struct Watcher {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Stop {
    /// For a program that has closed descriptors which are not its own.
    asked: AtomicBool,
    wake: EventFd,
}

impl Watcher {
    /// Calls `tell` with each event, maybe twice. `pages` are those of the peers and this rank's own.
    pub fn start(
        pages: Arc<SharedMemory>,
        watched: Vec<Watched>,
        tell: impl Fn(usize, Event) + Send + 'static,
    ) -> Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = above_streams(|| EventFd::from_flags(flags).map(OwnedFd::from));
        let wake = wake.map_err(Error::system("eventfd"))?;
        // SAFETY: it is the eventfd that was made above, or a duplicate of it.
        let wake = unsafe { EventFd::from_owned_fd(wake) };
        // Not poll, which refuses more descriptors than the process may open by now: sandboxes lower that to none.
        let epoll = above_streams(|| Ok(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?.0));
        let epoll = epoll.map(Epoll).map_err(Error::system("epoll_create"))?;
        let add = |descriptor: &dyn AsFd, flags, key| {
            epoll.add(descriptor, EpollEvent::new(flags, key)).map_err(Error::system("epoll_ctl"))
        };
        add(&wake, EpollFlags::EPOLLIN, STOP)?;
        for peer in &watched {
            if let Some(connection) = &peer.connection {
                // Its end is reported whatever is asked for.
                add(connection, EpollFlags::empty(), key(peer.rank, Event::ConnectionClosed))?;
            }
            if let Some(process) = &peer.process {
                add(process, EpollFlags::EPOLLIN, key(peer.rank, Event::ProcessEnded))?;
            }
        }
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), wake });
        let stopped = Arc::clone(&stop);
        let (started, has_started) = channel();
        let body = move || watch(&stopped, &epoll, &pages, watched, &started, tell);
        let thread = thread::spawn("fast-allreduce".into(), SMALL_STACK, body)
            .map_err(Error::io("starting the thread that watches the other ranks"))?;
        // It shows this rank's exit_futex, on which peers rely from the next step on. An error: it has ended, and they will see that.
        let _ = has_started.recv();
        Ok(Self { stop, thread: Some(thread) })
    }

    /// In a fork of its process, which has no such thread: waits for nothing.
    pub fn forget(&mut self) {
        std::mem::forget(self.thread.take());
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop.asked.store(true, Ordering::Release);
            // An error: it is not this thread's any more, and then the thread looks at the flag.
            let _ = self.stop.wake.write(1);
            // It cannot panic; if it did, it has said so.
            let _ = thread.join();
        }
    }
}

fn key(rank: usize, event: Event) -> u64 {
    2 * rank as u64 + u64::from(event == Event::ProcessEnded)
}

fn watch(
    stop: &Stop,
    epoll: &Epoll,
    pages: &SharedMemory,
    mut watched: Vec<Watched>,
    started: &Sender<()>,
    tell: impl Fn(usize, Event),
) {
    // SAFETY: this thread is the crate's own, and the mapping outlives what is held.
    let _life = unsafe { own_page(pages).exit_futex.hold() };
    // `Watcher::start` waits for it.
    let _ = started.send(());
    let mut events = [EpollEvent::empty(); 2 * MAX_RANKS + 1];
    loop {
        let looks = watched.iter().any(|peer| peer.look);
        let interval = if looks { LOOK_INTERVAL_MS.into() } else { IDLE_INTERVAL_MS };
        let interval = EpollTimeout::from(interval);
        let ready = match epoll.wait(&mut events, interval) {
            Ok(ready) => &events[..ready],
            Err(Errno::EINTR) => &[],
            Err(_) => {
                // The program has closed it. Pages are still there.
                watched.iter_mut().for_each(|peer| peer.look = true);
                thread::pause(Duration::from_millis(LOOK_INTERVAL_MS.into()));
                &[]
            }
        };
        if stop.asked.load(Ordering::Acquire) {
            return;
        }
        let is_ready = |key| ready.iter().any(|event| event.data() == key);
        for peer in &mut watched {
            let rank = peer.rank;
            let page = page(pages, rank).filter(|_| peer.look);
            let has_left = page.is_some_and(|page| page.status.exit_record().is_some());
            let seen = |event| is_ready(key(rank, event));
            if let Some(connection) = peer.connection.take_if(|_| has_left || seen(Event::ConnectionClosed)) {
                // Before it is closed: a fork that holds it keeps it watched.
                let _ = epoll.delete(&connection);
                tell(rank, Event::ConnectionClosed);
            }
            if let Some(process) = peer.process.take_if(|_| seen(Event::ProcessEnded)) {
                let _ = epoll.delete(&process);
                tell(rank, Event::ProcessEnded);
            }
            if page.is_some_and(|page| page.exit_futex.has_ended()) {
                peer.look = false;
                tell(rank, Event::ProcessEnded);
            }
        }
    }
}

/// A pair of sockets, close-on-exec. When one end is shut down or closed, the other tells.
pub(super) fn connection() -> Result<(OwnedFd, OwnedFd)> {
    let _taken = Taken::now();
    let made = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC);
    let made = made.and_then(|(one, other)| Ok((moved(one)?, moved(other)?)));
    made.map_err(Error::system("socketpair"))
}

/// The process that made a socket pair of which this is an end, by its id here.
pub(super) fn maker(connection: BorrowedFd<'_>) -> Option<u32> {
    let credentials = getsockopt(&connection, PeerCredentials).ok()?;
    // 0: it is in no namespace that this process sees.
    u32::try_from(credentials.pid()).ok().filter(|&process| process != 0)
}

/// A descriptor of this process that is readable once it has ended, where the kernel gives such.
pub(super) fn own_process() -> Option<OwnedFd> {
    let opened = above_streams(|| {
        // SAFETY: takes a process id and flags, and returns a descriptor or -1.
        let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) };
        let descriptor = Errno::result(descriptor)?;
        // SAFETY: the kernel has just opened it, close-on-exec, and nothing else owns it. It fits, as all descriptors do.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
    });
    opened.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_who_made_a_connection() {
        let (here, there) = connection().unwrap();
        assert_eq!(maker(here.as_fd()), Some(std::process::id()));
        assert_eq!(maker(there.as_fd()), Some(std::process::id()));
    }
}
