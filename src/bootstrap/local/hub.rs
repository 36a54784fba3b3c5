//! The rendezvous' server: one thread that admits the ranks of one world and hands round what they give.
//!
//! It waits only in `poll`, for whoever speaks first, so no rank that is slow or silent holds up the others.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{shutdown, Shutdown};

use super::super::place::Listener;
use super::super::socket::{self, accept, is_ready, poll_for_ever, poll_until, Token};
use super::super::world::{Denied, Event, World};
use super::link::Link;
use super::message::{Reply, Request, HELLO_LIMIT, REQUEST_LIMIT};
use crate::deadline::{Deadline, Stopwatch};
use crate::error::{Error, Result};
use crate::thread;

/// How long a connection may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Looks at all that has come before a rank that waits no longer is answered. Where ranks and rendezvous were stopped
/// together, what the rank waits for has come at the same time, maybe as a connection to be accepted. Beyond these,
/// whoever goes on speaking is late.
const LAST_LOOKS: usize = 8;

/// Between two looks at the clock where somebody's time may run out.
const TURN: Duration = Duration::from_millis(100);

/// Connections that have not said who they are. Beyond these the oldest goes: a rank says so at once.
const MAX_STRANGERS: usize = 64;

/// It reads messages of any length that ranks send.
const HUB_STACK: usize = 1 << 20;

/// Serves one world behind `listener`, in a thread that ends when the world has, or when no rank has come within
/// `patience`. Without a `world_size` the first rank tells it. What is returned holds the error by which it ended, if it could not go
/// on; ranks see only that their connections close.
pub(super) fn spawn(
    listener: Listener,
    token: Token,
    world_size: Option<usize>,
    patience: Duration,
) -> Result<Arc<OnceLock<Error>>> {
    let failure = Arc::default();
    let hub = Hub {
        failure: Arc::clone(&failure),
        listener,
        token,
        patience,
        clock: Stopwatch::start(),
        peers: Vec::new(),
        world: world_size.map(World::new),
        impatient: Vec::new(),
        looks: 0,
    };
    let started = thread::spawn("rendezvous".into(), HUB_STACK, move || hub.run());
    started.map(|_| failure).map_err(Error::io("thread of the rendezvous"))
}

struct Hub {
    failure: Arc<OnceLock<Error>>,
    listener: Listener,
    token: Token,
    patience: Duration,
    clock: Stopwatch,
    peers: Vec<Peer>,
    /// Made at the latest by the first rank that is admitted: it tells the size.
    world: Option<World>,
    /// Ranks that wait no longer, and for which gather.
    impatient: Vec<(usize, u64)>,
    /// Since the first of them said so.
    looks: usize,
}

impl Drop for Hub {
    /// Whoever comes now is refused, though a fork of this process may hold the socket as well.
    fn drop(&mut self) {
        // It is a socket, which is all that this asks for.
        let _ = shutdown(self.listener.as_fd().as_raw_fd(), Shutdown::Both);
        // Nobody connects any more. Those who did and were not accepted would wait for as long as a fork holds the listener.
        while accept(self.listener.as_fd()).is_ok() {}
    }
}

struct Peer {
    link: Link,
    role: Role,
    /// It lives in this process, whose end is the rendezvous' end.
    is_housemate: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// It has not said who it is. Kept until then, or for a while since this time on the hub's clock.
    Stranger(Duration),
    Rank(usize),
    /// To be closed.
    Dismissed,
}

impl Peer {
    fn refuse(&mut self, reason: String) {
        self.dismiss(&Reply::Refused { reason });
    }

    /// Sends a last message, which is short and finds room in the socket, or finds nobody who reads.
    fn dismiss(&mut self, last: &Reply) {
        self.link.send(last.frame().into());
        self.role = Role::Dismissed;
    }
}

impl Hub {
    fn run(mut self) {
        if let Err(error) = self.serve_all() {
            tracing::error!(%error, "the rendezvous ends");
            // Nobody else sets it. Before the connections close, by which ranks come to ask.
            let _ = self.failure.set(error);
        }
    }

    /// # Errors
    ///
    /// This process may not wait, or not accept anybody.
    fn serve_all(&mut self) -> Result<()> {
        while !self.is_over() {
            let (ready, somebody_knocks) = self.wait()?;
            let was_quiet = ready.is_empty() && !somebody_knocks;
            for index in ready {
                self.serve(index);
            }
            if somebody_knocks {
                self.let_strangers_in()?;
            }
            self.disappoint(was_quiet);
            self.dismiss_the_silent();
            self.peers.retain(|peer| peer.role != Role::Dismissed);
        }
        Ok(())
    }

    /// A world is over when it has failed, as it does when the first rank leaves, and the last one has left.
    fn is_over(&self) -> bool {
        let is_deserted = self.world.as_ref().is_none_or(World::is_deserted);
        let has_failed = self.world.as_ref().is_some_and(|world| world.failure().is_some());
        is_deserted && (has_failed || self.clock.elapsed() >= self.patience)
    }

    /// Waits for something to do: the peers, by index, that are ready, and whether somebody wants to connect.
    fn wait(&self) -> Result<(Vec<usize>, bool)> {
        let mut polled = vec![PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        polled.extend(self.peers.iter().map(|peer| peer.link.poll_fd()));
        let has_strangers = self.peers.iter().any(|peer| matches!(peer.role, Role::Stranger(_)));
        let is_empty = self.world.as_ref().is_none_or(World::is_deserted);
        let limit = match (self.impatient.is_empty(), has_strangers || is_empty) {
            (false, _) => Some(Duration::ZERO),
            (true, true) => Some(TURN),
            (true, false) => None,
        };
        match limit {
            Some(limit) if !poll_until(&mut polled, &Deadline::after(limit))? => {
                return Ok((Vec::new(), false));
            }
            Some(_) => {}
            None => poll_for_ever(&mut polled)?,
        }
        let ready = (0..self.peers.len()).filter(|&index| is_ready(&polled[1 + index])).collect();
        Ok((ready, is_ready(&polled[0])))
    }

    /// Ends the waiting of the ranks that have said so, once nothing more has come.
    fn disappoint(&mut self, was_quiet: bool) {
        if self.impatient.is_empty() {
            return;
        }
        self.looks += 1;
        if was_quiet || self.looks > LAST_LOOKS {
            self.looks = 0;
            for (rank, sequence) in std::mem::take(&mut self.impatient) {
                let event = self.world.as_mut().and_then(|world| world.give_up(rank, sequence));
                self.tell(event);
            }
        }
    }

    /// # Errors
    ///
    /// This process may not accept anybody.
    fn let_strangers_in(&mut self) -> Result<()> {
        // Not more in one turn than there can be ranks, so that whoever keeps knocking does not keep the
        // ranks waiting.
        for _ in 0..crate::abi::MAX_RANKS {
            let stream = match accept(self.listener.as_fd()) {
                Ok(stream) => stream,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::ECONNABORTED) => continue,
                Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM) => {
                    // They stay in the queue, and poll would say so at once.
                    thread::pause(Duration::from_millis(10));
                    return Ok(());
                }
                Err(errno) => return Err(Error::System { call: "accept of a rank", errno }),
            };
            let user = socket::same_user(stream.as_fd());
            let role = Role::Stranger(self.clock.elapsed());
            let mut peer = Peer { link: Link::new(stream), role, is_housemate: false };
            match user {
                Ok(user) => {
                    peer.is_housemate = u32::try_from(user.pid()) == Ok(std::process::id());
                    self.peers.push(peer);
                }
                Err(reason) => peer.refuse(reason),
            }
        }
        Ok(())
    }

    fn dismiss_the_silent(&mut self) {
        let is_stranger = |peer: &&mut Peer| matches!(peer.role, Role::Stranger(_));
        let excess = self.peers.iter_mut().filter(is_stranger).count().saturating_sub(MAX_STRANGERS);
        let now = self.clock.elapsed();
        // Peers stand in the order in which they came.
        for (position, peer) in self.peers.iter_mut().filter(is_stranger).enumerate() {
            let is_late = matches!(peer.role, Role::Stranger(since) if now - since >= HELLO_TIMEOUT);
            if position < excess || is_late {
                peer.refuse("it did not say in time who it is".into());
            }
        }
    }

    /// Sends and receives what a peer is ready for, and does what it asks.
    fn serve(&mut self, index: usize) {
        self.peers[index].link.flush();
        if let Err(closed) = self.peers[index].link.fill() {
            self.part_from(index, &closed.to_string());
            return;
        }
        loop {
            let peer = &mut self.peers[index];
            let request = match peer.role {
                Role::Stranger(_) => peer.link.next(HELLO_LIMIT),
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
            (Role::Stranger(_), Request::Hello { token, rank, world_size }, _) => {
                self.admit(index, &token, rank, world_size)
            }
            (Role::Rank(rank), Request::Gather { sequence, bytes }, Some(world)) => {
                match world.contribute(rank, sequence, bytes) {
                    Ok(event) => event,
                    Err(reason) => return self.expel(index, reason),
                }
            }
            (Role::Rank(rank), Request::GiveUp { sequence }, Some(_)) => {
                self.impatient.push((rank, sequence));
                None
            }
            _ => return self.expel(index, "it sent a message out of turn"),
        };
        self.tell(event);
    }

    fn admit(&mut self, index: usize, token: &Token, rank: usize, world_size: usize) -> Option<Event> {
        let peer = &mut self.peers[index];
        if *token != self.token {
            peer.refuse("its session token is not that of this world".into());
            return None;
        }
        if !(1..=crate::abi::MAX_RANKS).contains(&world_size) || rank >= world_size {
            peer.refuse(format!("rank {rank} of {world_size} cannot be"));
            return None;
        }
        let world = self.world.get_or_insert_with(|| World::new(world_size));
        if world.size() != world_size {
            peer.refuse(format!("it came for a world of {world_size}, this one is of {}", world.size()));
            return None;
        }
        match world.join(rank) {
            Ok(event) => {
                peer.role = Role::Rank(rank);
                event
            }
            Err(Denied::Taken) => {
                peer.refuse(format!("rank {rank} is taken: another process has joined as that"));
                None
            }
            Err(Denied::Failed(failure)) => {
                peer.dismiss(&Reply::Event(Event::Failed(failure)));
                None
            }
        }
    }

    /// Sends away a peer that breaks the rules.
    fn expel(&mut self, index: usize, reason: impl fmt::Display) {
        let reason = reason.to_string();
        let reason_for_others = format!("the rendezvous expelled it: {reason}");
        let role = self.peers[index].role;
        self.peers[index].refuse(reason);
        self.forget(role, &reason_for_others);
    }

    /// Closes the connection of a peer that has gone.
    fn part_from(&mut self, index: usize, reason: &str) {
        let role = std::mem::replace(&mut self.peers[index].role, Role::Dismissed);
        self.forget(role, reason);
    }

    fn forget(&mut self, role: Role, reason: &str) {
        if let (Role::Rank(rank), Some(world)) = (role, &mut self.world) {
            let event = world.leave(rank, reason);
            self.tell(event);
        }
    }

    /// Tells all ranks.
    ///
    /// Those in this process come last: they may act on it by ending the process, and with it this thread.
    fn tell(&mut self, event: Option<Event>) {
        let Some(event) = event else { return };
        if matches!(event, Event::Formed | Event::Failed(_)) {
            // All are here, or nobody need come. A file that is gone now is not left behind, however this process ends.
            self.listener.hide();
        }
        let frame: Arc<[u8]> = Reply::Event(event).frame().into();
        for is_housemate in [false, true] {
            for peer in self.peers.iter_mut().filter(|peer| peer.is_housemate == is_housemate) {
                if matches!(peer.role, Role::Rank(_)) {
                    peer.link.send(Arc::clone(&frame));
                }
            }
        }
    }
}
