//! Server of a rendezvous: a thread that admits the ranks of one world and distributes their contributions.
//!
//! It waits only in `poll`, on all connections, so that a slow or silent rank does not delay the others.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{shutdown, Shutdown};

use super::super::socket::{self, accept, is_ready, poll_unbounded, poll_until, Token};
use super::super::socket_name::Listener;
use super::super::world_state::{Denied, Event, WorldState};
use super::link::Link;
use super::message::{Reply, Request, ANY_RANK, HELLO_LIMIT, REQUEST_LIMIT};
use super::Place;
use crate::deadline::{Deadline, Stopwatch};
use crate::error::{Error, Result};
use crate::thread;

/// Time limit for a connection to identify itself.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of rounds in which everything that has arrived is processed before a rank's timeout is answered. If
/// the ranks and the rendezvous were stopped together, the event that the rank waits for arrives at the same time as
/// its timeout, perhaps as a connection to be accepted. Messages after these rounds are too late.
const LAST_ROUNDS: usize = 8;

/// Interval between two checks of the clock while a time limit runs.
const CLOCK_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of connections that have not identified themselves, or the number of ranks if that is larger; beyond
/// it, the oldest is closed, or the oldest that has not proven the world's secret. Ranks identify themselves at once,
/// but all may come at the same time.
const MAX_UNIDENTIFIED: usize = 64;

/// Stack size of the thread, which receives large messages.
const HUB_STACK: usize = 1 << 20;

/// Who may connect to a rendezvous.
pub(in crate::bootstrap) trait Admission: Send {
    /// Maximum number of ranks.
    fn max_ranks(&self) -> usize;

    /// Prepares an accepted connection. Returns it with whether its other end is in this process, as far as that is
    /// known, or with the reason why it is refused.
    fn prepare(&self, stream: OwnedFd) -> (Link, Result<bool, String>);
}

/// Processes of the same user, over Unix sockets.
pub(super) struct SameUser;

impl Admission for SameUser {
    fn max_ranks(&self) -> usize {
        crate::abi::MAX_RANKS
    }

    fn prepare(&self, stream: OwnedFd) -> (Link, Result<bool, String>) {
        let user = socket::same_user(stream.as_fd());
        let process = user.as_ref().map_or(0, |user| user.pid());
        let is_same_process = user.map(|user| u32::try_from(user.pid()) == Ok(std::process::id()));
        (Link::new(stream).of_process(process), is_same_process)
    }
}

/// Serves one world behind `listener`, in a thread that ends with the world, or if no rank joins within `join_limit`.
/// `world` is the place of the rank that serves it; without it, the first rank sets the size.
///
/// The returned cell holds the error if the thread cannot go on; ranks only see that their connections close.
pub(in crate::bootstrap) fn spawn(
    listener: Listener,
    admission: Box<dyn Admission>,
    token: Token,
    world: Option<Place>,
    join_limit: Duration,
) -> Result<Arc<OnceLock<Error>>> {
    let failure = Arc::default();
    let hub = Hub {
        failure: Arc::clone(&failure),
        listener: Some(listener),
        admission,
        token,
        join_limit,
        clock: Stopwatch::start(),
        peers: Vec::new(),
        world: world.map(|place| WorldState::new(place.world_size)),
        open: world.map_or(0, |place| place.open),
        frees_name: world.is_some_and(|place| place.frees_name),
        timed_out: Vec::new(),
        rounds: 0,
    };
    let started = thread::spawn("rendezvous".into(), HUB_STACK, move || hub.run());
    started.map(|_| failure).map_err(Error::io("thread of the rendezvous"))
}

struct Hub {
    failure: Arc<OnceLock<Error>>,
    /// `None` once another rendezvous may have the name.
    listener: Option<Listener>,
    admission: Box<dyn Admission>,
    token: Token,
    join_limit: Duration,
    clock: Stopwatch,
    peers: Vec<Peer>,
    /// `None` until the size is known: the first rank that is admitted may set it.
    world: Option<WorldState>,
    /// Mask of the places that spares may take.
    open: u32,
    /// See [`Place`].
    frees_name: bool,
    /// Ranks whose time limit has passed, and the gathers that they waited for.
    timed_out: Vec<(usize, u64)>,
    /// Rounds since the first of these timeouts.
    rounds: usize,
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.stop_listening();
    }
}

struct Peer {
    link: Link,
    role: Role,
    /// The peer is a rank in this process. When this process ends, the rendezvous ends with it.
    is_same_process: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// It has not identified itself. Contains the time of its connection on the hub's clock.
    Unidentified(Duration),
    Rank(usize),
    /// The connection is to be closed.
    Dismissed,
}

impl Peer {
    fn refuse(&mut self, reason: String) {
        self.dismiss(&Reply::Refused { reason });
    }

    /// Sends a last message and marks the connection for closing. The message is short, and fits into the socket's
    /// buffer unless the peer does not read.
    fn dismiss(&mut self, last: &Reply) {
        self.link.send(last.frame().into());
        self.role = Role::Dismissed;
    }
}

impl Hub {
    fn run(mut self) {
        if let Err(error) = self.serve_all() {
            tracing::error!(%error, "the rendezvous ends");
            // Only this thread sets it. It does so before the connections close, since ranks then read it.
            let _ = self.failure.set(error);
        }
    }

    /// Serves the world until it is over.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if this process can no longer poll or accept.
    fn serve_all(&mut self) -> Result<()> {
        while !self.is_over() {
            let (ready, has_connections) = self.wait()?;
            let was_quiet = ready.is_empty() && !has_connections;
            for index in ready {
                self.serve(index);
            }
            if has_connections {
                self.accept_connections()?;
            }
            self.answer_timeouts(was_quiet);
            self.refuse_unidentified();
            self.peers.retain(|peer| peer.role != Role::Dismissed);
        }
        Ok(())
    }

    /// Returns whether the world is over: all ranks that joined have left (the first one to leave makes the world
    /// fail), or no rank has joined within the limit.
    fn is_over(&self) -> bool {
        let is_deserted = self.world.as_ref().is_none_or(WorldState::is_deserted);
        let has_failed = self.world.as_ref().is_some_and(|world| world.failure().is_some());
        is_deserted && (has_failed || self.clock.elapsed() >= self.join_limit)
    }

    /// Refuses new connections, even if a fork of this process also holds the socket.
    fn stop_listening(&mut self) {
        let Some(listener) = self.listener.take() else { return };
        // This cannot fail: the descriptor is a socket.
        let _ = shutdown(listener.as_fd().as_raw_fd(), Shutdown::Both);
        // No new connections arrive. Those that are queued would wait while a fork holds the listener.
        while accept(listener.as_fd()).is_ok() {}
    }

    /// Waits for events. Returns the indices of the peers that are ready, and whether connections are queued.
    fn wait(&self) -> Result<(Vec<usize>, bool)> {
        let mut polled: Vec<_> = self.peers.iter().map(|peer| peer.link.poll_fd()).collect();
        polled.extend(self.listener.iter().map(|listener| PollFd::new(listener.as_fd(), PollFlags::POLLIN)));
        let sockets = polled.len();
        polled.extend(self.peers.iter().filter_map(|peer| peer.link.process_fd()));
        let has_unidentified = self.peers.iter().any(|peer| matches!(peer.role, Role::Unidentified(_)));
        let is_empty = self.world.as_ref().is_none_or(WorldState::is_deserted);
        let limit = match (self.timed_out.is_empty(), has_unidentified || is_empty) {
            (false, _) => Some(Duration::ZERO),
            (true, true) => Some(CLOCK_INTERVAL),
            (true, false) => None,
        };
        match limit {
            Some(limit) if !poll_until(&mut polled, &Deadline::after(limit))? => {
                return Ok((Vec::new(), false));
            }
            Some(_) => {}
            None => poll_unbounded(&mut polled)?,
        }
        // If a process has ended, whichever it is, all peers are looked at.
        let has_ended = polled[sockets..].iter().any(is_ready);
        let ready = (0..self.peers.len()).filter(|&index| has_ended || is_ready(&polled[index])).collect();
        Ok((ready, polled[self.peers.len()..sockets].iter().any(is_ready)))
    }

    /// Answers the ranks whose time limit has passed, once nothing more has arrived.
    fn answer_timeouts(&mut self, was_quiet: bool) {
        if self.timed_out.is_empty() {
            return;
        }
        self.rounds += 1;
        if was_quiet || self.rounds > LAST_ROUNDS {
            self.rounds = 0;
            for (rank, sequence) in std::mem::take(&mut self.timed_out) {
                let event = self.world.as_mut().and_then(|world| world.give_up(rank, sequence));
                self.broadcast(event);
            }
        }
    }

    /// Accepts queued connections.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if this process cannot accept.
    fn accept_connections(&mut self) -> Result<()> {
        // A bounded number in each round, so that a process that keeps connecting does not delay the ranks.
        for _ in 0..crate::abi::MAX_RANKS {
            let Some(listener) = &self.listener else { return Ok(()) };
            let stream = match accept(listener.as_fd()) {
                Ok(stream) => stream,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::ECONNABORTED) => continue,
                Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM) => {
                    // The connections stay queued: without this pause, `poll` would return at once.
                    thread::pause(Duration::from_millis(10));
                    return Ok(());
                }
                Err(errno) => return Err(Error::System { call: "accept of a rank", errno }),
            };
            let role = Role::Unidentified(self.clock.elapsed());
            let (link, admitted) = self.admission.prepare(stream);
            let mut peer = Peer { link, role, is_same_process: false };
            match admitted {
                Ok(is_same_process) => {
                    peer.is_same_process = is_same_process;
                    self.peers.push(peer);
                }
                Err(reason) => peer.refuse(reason),
            }
        }
        Ok(())
    }

    fn refuse_unidentified(&mut self) {
        let ranks = self.world.as_ref().map_or(self.admission.max_ranks(), WorldState::size);
        let now = self.clock.elapsed();
        // In the order of their connection, but those last that have proven the world's secret.
        let peers = self.peers.iter_mut().filter(|peer| matches!(peer.role, Role::Unidentified(_)));
        let mut unidentified: Vec<_> = peers.collect();
        unidentified.sort_by_key(|peer| peer.link.is_ready());
        let excess = unidentified.len().saturating_sub(MAX_UNIDENTIFIED.max(ranks));
        for (position, peer) in unidentified.into_iter().enumerate() {
            let is_late = matches!(peer.role, Role::Unidentified(since) if now - since >= HELLO_TIMEOUT);
            if position < excess || is_late {
                peer.refuse("it did not identify itself in time".into());
            }
        }
    }

    /// Sends to a peer and receives from it, and handles its requests.
    fn serve(&mut self, index: usize) {
        self.peers[index].link.flush();
        if let Err(closed) = self.peers[index].link.fill() {
            self.disconnect(index, &closed.to_string());
            return;
        }
        loop {
            let peer = &mut self.peers[index];
            let request = match peer.role {
                Role::Unidentified(_) => peer.link.next(HELLO_LIMIT),
                Role::Rank(_) => peer.link.next(REQUEST_LIMIT),
                Role::Dismissed => return,
            };
            match request.and_then(|body| body.map(|body| Request::decode(&body)).transpose()) {
                Ok(Some(request)) => self.answer(index, request),
                Ok(None) => return,
                Err(malformed) => self.expel(index, malformed),
            }
        }
    }

    fn answer(&mut self, index: usize, request: Request) {
        let event = match (self.peers[index].role, request, &mut self.world) {
            (Role::Unidentified(_), Request::Hello { token, rank, world_size }, _) => {
                self.admit(index, &token, rank, world_size)
            }
            (Role::Rank(rank), Request::Gather { sequence, bytes }, Some(world)) => {
                match world.contribute(rank, sequence, bytes) {
                    Ok(event) => event,
                    Err(reason) => return self.expel(index, reason),
                }
            }
            (Role::Rank(rank), Request::GiveUp { sequence }, Some(_)) => {
                self.timed_out.push((rank, sequence));
                None
            }
            _ => return self.expel(index, "it sent an unexpected message"),
        };
        self.broadcast(event);
    }

    fn admit(&mut self, index: usize, token: &Token, rank: usize, world_size: usize) -> Option<Event> {
        let peer = &mut self.peers[index];
        if *token != self.token {
            peer.refuse("its token is not that of this world".into());
            return None;
        }
        let (rank, world_size) = match (&self.world, rank, world_size) {
            (Some(world), ANY_RANK, 0) => {
                if let Some(failure) = world.failure() {
                    peer.dismiss(&Reply::Event(Event::Failed(failure.clone())));
                    return None;
                }
                let Some(rank) = world.awaited_among(self.open) else {
                    peer.refuse("this world has no place for a spare".into());
                    return None;
                };
                let place = (rank, world.size());
                peer.link.send(Reply::Placed { rank, world_size: place.1 }.frame().into());
                place
            }
            _ => (rank, world_size),
        };
        if !(1..=self.admission.max_ranks()).contains(&world_size) || rank >= world_size {
            peer.refuse(format!("rank {rank} of {world_size} is invalid"));
            return None;
        }
        let world = self.world.get_or_insert_with(|| WorldState::new(world_size));
        if world.size() != world_size {
            let reason = format!("it joins a world of {world_size}, but this one has {} ranks", world.size());
            world.note_refusal(rank, format!("rank {rank} was refused: {reason}"));
            peer.refuse(reason);
            return None;
        }
        match world.join(rank) {
            Ok(event) => {
                peer.role = Role::Rank(rank);
                peer.is_same_process |= peer.link.is_same_process();
                event
            }
            Err(Denied::Taken) => {
                peer.refuse(format!("rank {rank} is taken: another process has joined as this rank"));
                None
            }
            Err(Denied::Failed(failure)) => {
                peer.dismiss(&Reply::Event(Event::Failed(failure)));
                None
            }
        }
    }

    /// Refuses a peer that has violated the protocol.
    fn expel(&mut self, index: usize, reason: impl fmt::Display) {
        let reason = reason.to_string();
        let reason_for_others = format!("the rendezvous expelled it: {reason}");
        let role = self.peers[index].role;
        self.peers[index].refuse(reason);
        self.forget(role, &reason_for_others);
    }

    /// Closes the connection of a peer that has ended.
    fn disconnect(&mut self, index: usize, reason: &str) {
        let role = std::mem::replace(&mut self.peers[index].role, Role::Dismissed);
        self.forget(role, reason);
    }

    fn forget(&mut self, role: Role, reason: &str) {
        if let (Role::Rank(rank), Some(world)) = (role, &mut self.world) {
            let event = world.leave(rank, reason);
            self.broadcast(event);
        }
    }

    /// Sends an event to all ranks.
    ///
    /// Ranks in this process are last: they may end the process when they receive it, and with it this thread.
    fn broadcast(&mut self, event: Option<Event>) {
        let Some(event) = event else { return };
        if matches!(event, Event::Formed | Event::Failed(_)) {
            // No more ranks are expected. Removing the name now means that no file is left, however this process ends.
            self.listener.iter().for_each(Listener::hide);
            if self.frees_name {
                // Before any rank knows of the event, and may meet others at this name.
                self.stop_listening();
            }
        }
        let frame: Arc<[u8]> = Reply::Event(event).frame().into();
        for is_same_process in [false, true] {
            for peer in self.peers.iter_mut().filter(|peer| peer.is_same_process == is_same_process) {
                if matches!(peer.role, Role::Rank(_)) {
                    peer.link.send(Arc::clone(&frame));
                }
            }
        }
    }
}
