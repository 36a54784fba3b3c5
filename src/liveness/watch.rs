//! The thread that notices ranks that leave.
//!
//! It watches three things, independent of the bootstrap:
//!
//! * A connection to the peer: a socket pair. The peer holds one end, and shuts it down when it leaves. A shutdown
//!   takes effect even if a fork of the peer also holds that end.
//! * A pidfd of the peer's process: a killed process shuts nothing down, and its forks may hold the connection. The
//!   peer passes the pidfd itself, so that process ids and their namespaces do not matter.
//! * If the peer has no pidfd (before Linux 5.3, or in some sandboxes): its
//!   [`ExitFutex`](super::exit_futex::ExitFutex), which the thread polls.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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

/// Interval of polling if there are peers without a pidfd.
const POLL_INTERVAL_MS: u8 = 20;

/// Interval of polling if all peers have pidfds; polling is then needed only if the program has closed this thread's
/// descriptors.
const IDLE_INTERVAL_MS: u16 = 1000;

/// Interval of calls of `look`.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Epoll key of the event that stops the thread; the keys of peers are smaller.
const STOP: u64 = u64::MAX;

/// A peer that is watched.
#[derive(Debug)]
pub(super) struct Watched {
    pub rank: usize,
    /// `None` after it has closed.
    pub connection: Option<OwnedFd>,
    /// The pidfd; `None` if there is none, or after the process has ended.
    pub process: Option<Arc<OwnedFd>>,
    /// The peer's page must be polled, since there is no pidfd.
    pub is_polled: bool,
}

/// What happened to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    ConnectionClosed,
    ProcessEnded,
}

/// Handle of the thread; dropping it stops the thread.
#[derive(Debug)]
pub(super) struct Watcher {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Stop {
    /// Works even if the program has closed the eventfd.
    is_requested: AtomicBool,
    wake: EventFd,
}

impl Watcher {
    /// Starts the thread, which calls `on_event` with each event, possibly twice, and `look` about once a second.
    /// `pages` has the pages of all ranks.
    pub fn start(
        pages: Arc<SharedMemory>,
        watched: Vec<Watched>,
        on_event: impl Fn(usize, Event) + Send + 'static,
        look: impl Fn() + Send + 'static,
    ) -> Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = above_streams(|| EventFd::from_flags(flags).map(OwnedFd::from));
        let wake = wake.map_err(Error::system("eventfd"))?;
        // SAFETY: the descriptor is the eventfd created above, or a duplicate of it.
        let wake = unsafe { EventFd::from_owned_fd(wake) };
        // Not `poll`, which fails with more descriptors than RLIMIT_NOFILE: a sandbox may lower that limit to zero
        // later.
        let epoll = above_streams(|| Ok(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?.0));
        let epoll = epoll.map(Epoll).map_err(Error::system("epoll_create"))?;
        let add = |descriptor: &dyn AsFd, flags, key| {
            epoll.add(descriptor, EpollEvent::new(flags, key)).map_err(Error::system("epoll_ctl"))
        };
        add(&wake, EpollFlags::EPOLLIN, STOP)?;
        for peer in &watched {
            if let Some(connection) = &peer.connection {
                // Hang-ups are always reported.
                add(connection, EpollFlags::empty(), key(peer.rank, Event::ConnectionClosed))?;
            }
            if let Some(process) = &peer.process {
                add(process, EpollFlags::EPOLLIN, key(peer.rank, Event::ProcessEnded))?;
            }
        }
        let stop = Arc::new(Stop { is_requested: AtomicBool::new(false), wake });
        let stopped = Arc::clone(&stop);
        let (started, has_started) = channel();
        let body = move || watch(&stopped, &epoll, &pages, watched, &started, on_event, look);
        let thread = thread::spawn("fast-allreduce".into(), SMALL_STACK, body)
            .map_err(Error::io("starting the thread that watches the other ranks"))?;
        // The thread holds this rank's exit futex, on which peers rely from the next step on. An error means that the
        // thread has ended, which peers will notice.
        let _ = has_started.recv();
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Leaves the thread alone, in a fork of the process, where it does not run: joining it would hang.
    pub fn forget(&mut self) {
        std::mem::forget(self.thread.take());
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop.is_requested.store(true, Ordering::Release);
            // On error, the program has closed the eventfd: the thread then sees the flag.
            let _ = self.stop.wake.write(1);
            // The thread cannot panic; if it did, the panic has been printed.
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
    on_event: impl Fn(usize, Event),
    look: impl Fn(),
) {
    // SAFETY: this thread belongs to the crate and uses no robust mutexes; the mapping outlives the guard.
    let _held = unsafe { own_page(pages).exit_futex.hold() };
    // `Watcher::start` waits for it.
    let _ = started.send(());
    let mut looked = Instant::now();
    let mut events = [EpollEvent::empty(); 2 * MAX_RANKS + 1];
    loop {
        let polls = watched.iter().any(|peer| peer.is_polled);
        let interval = if polls { POLL_INTERVAL_MS.into() } else { IDLE_INTERVAL_MS };
        let interval = EpollTimeout::from(interval);
        let ready = match epoll.wait(&mut events, interval) {
            Ok(ready) => &events[..ready],
            Err(Errno::EINTR) => &[],
            Err(_) => {
                // The program has closed the epoll descriptor. The pages can still be polled.
                watched.iter_mut().for_each(|peer| peer.is_polled = true);
                thread::pause(Duration::from_millis(POLL_INTERVAL_MS.into()));
                &[]
            }
        };
        if stop.is_requested.load(Ordering::Acquire) {
            return;
        }
        if looked.elapsed() >= LOOK_INTERVAL {
            look();
            looked = Instant::now();
        }
        let is_ready = |key| ready.iter().any(|event| event.data() == key);
        for peer in &mut watched {
            let rank = peer.rank;
            let page = page(pages, rank).filter(|_| peer.is_polled);
            let has_left = page.is_some_and(|page| page.status.exit_record().is_some());
            let seen = |event| is_ready(key(rank, event));
            if let Some(connection) = peer.connection.take_if(|_| has_left || seen(Event::ConnectionClosed)) {
                // Before it is closed: if a fork holds it as well, closing it does not remove it from the epoll.
                let _ = epoll.delete(&connection);
                on_event(rank, Event::ConnectionClosed);
            }
            if let Some(process) = peer.process.take_if(|_| seen(Event::ProcessEnded)) {
                let _ = epoll.delete(&process);
                on_event(rank, Event::ProcessEnded);
            }
            // The thread of a rank that is away has released it, but the process runs.
            if page.is_some_and(|page| page.exit_futex.has_ended() && !page.status.is_away()) {
                peer.is_polled = false;
                on_event(rank, Event::ProcessEnded);
            }
        }
    }
}

/// Creates a socket pair, close-on-exec. When one end is shut down or closed, the other reports a hang-up.
pub(super) fn connection() -> Result<(OwnedFd, OwnedFd)> {
    let _taken = Taken::now();
    let made = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC);
    let made = made.and_then(|(one, other)| Ok((moved(one)?, moved(other)?)));
    made.map_err(Error::system("socketpair"))
}

/// Returns the id, in this process's namespace, of the process that created the socket pair of `connection`.
pub(super) fn creator(connection: BorrowedFd<'_>) -> Option<u32> {
    let credentials = getsockopt(&connection, PeerCredentials).ok()?;
    // 0: the process is not visible in this namespace.
    u32::try_from(credentials.pid()).ok().filter(|&process| process != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_knows_the_process_that_created_a_connection() {
        let (here, there) = connection().unwrap();
        assert_eq!(creator(here.as_fd()), Some(std::process::id()));
        assert_eq!(creator(there.as_fd()), Some(std::process::id()));
    }
}
