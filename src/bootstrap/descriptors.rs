//! Every rank gives one file descriptor to every other rank, over Unix sockets and with any bootstrap.
//!
//! Each rank listens on a socket made for this one exchange and all-gathers its name and a secret. Then it
//! connects to every peer, and sends one message with the peer's secret and the descriptor, without waiting
//! for the peer to accept: the message stays in the peer's queue, even after this rank has closed its end. So
//! the order in which ranks connect cannot block them, and a rank that has heard from all is done: nobody
//! needs its socket any more. Ranks of one process take the same way, and get duplicates.
//!
//! Name and secret are fresh each time, so exchanges that follow each other cannot mix.

use std::io::{IoSlice, IoSliceMut};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{recvmsg, sendmsg, ControlMessage, ControlMessageOwned, MsgFlags, SockType};

use super::socket::{self, accept, is_ready, poll_until, uninterrupted, Deadline, Token};
use super::Bootstrap;
use crate::error::{Error, Result};

/// Messages keep their bounds, and a descriptor stays with its message.
const KIND: SockType = SockType::SeqPacket;

/// How often to try a peer again whose queue is full.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Connections kept while they have said nothing, as a rank's is for a moment. Beyond these the oldest goes.
const MAX_SILENT: usize = 32;

/// Most descriptors that Linux passes with one message. Room for all makes sure that none is cut off, since
/// those that came before the cut could not be closed.
const MAX_DESCRIPTORS: usize = 253;

/// Passes a duplicate of `descriptor` to every other rank, and returns theirs by rank; `None` at the own.
/// As [`exchange_several`].
pub(crate) fn exchange_descriptors(
    bootstrap: &dyn Bootstrap,
    descriptor: BorrowedFd<'_>,
    timeout: Duration,
) -> Result<Vec<Option<OwnedFd>>> {
    let received = exchange_several(bootstrap, &[descriptor], 1..=1, timeout)?;
    Ok(received.into_iter().map(|mut descriptors| descriptors.pop()).collect())
}

/// Passes duplicates of `descriptors` to every other rank, and returns theirs by rank, so many as `counts` admits and each
/// gave; none at the own. They are close-on-exec.
///
/// # Errors
///
/// As [`Bootstrap::all_gather`], with the operation `"exchange_descriptors"` where a peer gathered but then
/// did not pass its descriptor; [`Error::Malformed`] if its gathered message does not decode;
/// [`Error::Refused`] if a peer runs as another user; [`Error::System`] where a system call fails.
pub(crate) fn exchange_several(
    bootstrap: &dyn Bootstrap,
    descriptors: &[BorrowedFd<'_>],
    counts: RangeInclusive<usize>,
    timeout: Duration,
) -> Result<Vec<Vec<OwnedFd>>> {
    debug_assert!(counts.contains(&descriptors.len()) && !counts.contains(&0));
    let (rank, world_size) = (bootstrap.rank(), bootstrap.world_size());
    if !(1..=crate::MAX_RANKS).contains(&world_size) {
        return Err(Error::WorldSize { world_size });
    }
    if rank >= world_size {
        return Err(Error::RankOutOfRange { rank, world_size });
    }
    let deadline = Deadline::after(timeout);
    let own = Address { name: socket::random_name()?, secret: Token::random()? };
    let listener = socket::listen(KIND, &own.name)?;
    let gathered = bootstrap.all_gather(&own.encode(), timeout)?;
    let addresses = Address::decode_all(&gathered, world_size)?;

    let mut inbox = Inbox::new(listener, own.secret, rank, world_size, counts);
    let mut unsent: Vec<_> = (0..world_size).filter(|&peer| peer != rank).collect();
    loop {
        let mut still_unsent = Vec::new();
        for peer in unsent {
            if !send(peer, &addresses[peer], rank, descriptors)? {
                still_unsent.push(peer);
            }
        }
        unsent = still_unsent;
        let awaited = inbox.awaited();
        if unsent.is_empty() && awaited.is_empty() {
            return Ok(inbox.received.into_iter().map(Option::unwrap_or_default).collect());
        }
        if deadline.has_passed() {
            let is_missing = |peer: &usize| unsent.contains(peer) || awaited.contains(peer);
            return Err(Error::Timeout {
                operation: "exchange_descriptors",
                epoch: 0,
                missing: (0..world_size).filter(is_missing).collect(),
                waited: timeout,
                last_seen: String::new(),
            });
        }
        let remaining = deadline.remaining();
        let turn = if unsent.is_empty() { remaining } else { remaining.min(RETRY_INTERVAL) };
        inbox.receive(&Deadline::after(turn))?;
    }
}

/// Where a rank listens, and what to show there. On its way: the secret, then the name.
struct Address {
    name: Vec<u8>,
    secret: Token,
}

impl Address {
    /// Abstract names leave one byte of the kernel's 108 to the zero before them.
    const MAX_NAME: usize = 107;

    fn encode(&self) -> Vec<u8> {
        [self.secret.as_bytes(), &self.name[..]].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let (secret, name) = bytes.split_first_chunk().ok_or("the address for descriptors is cut short")?;
        if !(1..=Self::MAX_NAME).contains(&name.len()) {
            return Err("the address for descriptors has no possible name");
        }
        Ok(Self { name: name.to_vec(), secret: Token::from_bytes(*secret) })
    }

    fn decode_all(gathered: &[Vec<u8>], world_size: usize) -> Result<Vec<Self>> {
        if gathered.len() != world_size {
            let reason = format!("all_gather gave {} messages to a world of {world_size}", gathered.len());
            return Err(Error::Rendezvous { reason });
        }
        let malformed = |rank| move |reason: &str| Error::Malformed { rank, reason: reason.into() };
        let decode = |(rank, bytes): (usize, &Vec<u8>)| Self::decode(bytes).map_err(malformed(rank));
        gathered.iter().enumerate().map(decode).collect()
    }
}

/// The message that carries a descriptor: the receiver's secret, and the sender's rank.
#[derive(Debug, PartialEq, Eq)]
struct Offer {
    secret: Token,
    rank: usize,
}

impl Offer {
    const LENGTH: usize = Token::LENGTH + 1;

    fn encode(&self) -> [u8; Self::LENGTH] {
        let secret = self.secret.as_bytes();
        // A rank is below MAX_RANKS; a larger one would be sent as one that cannot be.
        let rank = u8::try_from(self.rank).unwrap_or(u8::MAX);
        std::array::from_fn(|index| secret.get(index).copied().unwrap_or(rank))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (secret, rank) = bytes.split_first_chunk()?;
        let [rank] = rank else { return None };
        Some(Self { secret: Token::from_bytes(*secret), rank: usize::from(*rank) })
    }
}

/// Passes `descriptors` to `peer`; false if its queue is full for now.
fn send(peer: usize, address: &Address, rank: usize, descriptors: &[BorrowedFd<'_>]) -> Result<bool> {
    let lost = |reason: &str| Error::PeerLost { rank: peer, reason: reason.into() };
    let stream = match socket::connect(KIND, &address.name) {
        Ok(stream) => stream,
        Err(Errno::EAGAIN) => return Ok(false),
        Err(Errno::ECONNREFUSED) => return Err(lost("it takes no descriptors: it has ended or failed")),
        Err(errno) => return Err(Error::System { call: "connect to pass a descriptor", errno }),
    };
    socket::same_user(stream.as_fd()).map_err(|reason| Error::Refused { reason })?;
    let offer = Offer { secret: address.secret.clone(), rank }.encode();
    let message = [IoSlice::new(&offer)];
    let descriptors: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let control = [ControlMessage::ScmRights(&descriptors)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    match uninterrupted(|| sendmsg::<()>(stream.as_raw_fd(), &message, &control, flags, None)) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN) => Ok(false),
        Err(Errno::EPIPE | Errno::ECONNRESET) => Err(lost("it closed the connection for descriptors")),
        Err(errno) => Err(Error::System { call: "sendmsg of a descriptor", errno }),
    }
}

/// What one connection brought.
enum Arrival {
    Descriptors {
        from: usize,
        descriptors: Vec<OwnedFd>,
    },
    NothingYet,
    /// It ended, or brought what no rank of this exchange sends.
    Nonsense,
}

/// The side that receives.
struct Inbox {
    listener: OwnedFd,
    secret: Token,
    rank: usize,
    /// How many descriptors a rank may pass.
    counts: RangeInclusive<usize>,
    received: Vec<Option<Vec<OwnedFd>>>,
    /// Connections that have said nothing yet, oldest first.
    silent: Vec<OwnedFd>,
}

impl Inbox {
    fn new(
        listener: OwnedFd,
        secret: Token,
        rank: usize,
        world_size: usize,
        counts: RangeInclusive<usize>,
    ) -> Self {
        let received = (0..world_size).map(|_| None).collect();
        Self { listener, secret, rank, counts, received, silent: Vec::new() }
    }

    /// Ranks whose descriptors have not come.
    fn awaited(&self) -> Vec<usize> {
        let is_awaited = |rank: &usize| *rank != self.rank && self.received[*rank].is_none();
        (0..self.received.len()).filter(is_awaited).collect()
    }

    /// Waits until the deadline for something to come, and takes it in.
    fn receive(&mut self, deadline: &Deadline) -> Result<()> {
        let listener = PollFd::new(self.listener.as_fd(), PollFlags::POLLIN);
        let silent = self.silent.iter().map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN));
        let mut polled: Vec<_> = std::iter::once(listener).chain(silent).collect();
        if !poll_until(&mut polled, deadline)? {
            return Ok(());
        }
        let ready: Vec<_> = polled.iter().map(is_ready).collect();
        for (stream, is_ready) in std::mem::take(&mut self.silent).into_iter().zip(&ready[1..]) {
            if *is_ready {
                self.take_from(stream);
            } else {
                self.silent.push(stream);
            }
        }
        if ready[0] {
            self.accept()?;
        }
        Ok(())
    }

    /// Accepts who waits, up to a bound, so that whoever keeps knocking does not keep this rank from its
    /// deadline.
    fn accept(&mut self) -> Result<()> {
        for _ in 0..crate::MAX_RANKS {
            match accept(self.listener.as_fd()) {
                Ok(stream) if socket::same_user(stream.as_fd()).is_ok() => self.take_from(stream),
                Ok(_) | Err(Errno::ECONNABORTED) => {}
                Err(Errno::EAGAIN) => break,
                Err(errno) => return Err(Error::System { call: "accept of a descriptor", errno }),
            }
        }
        let excess = self.silent.len().saturating_sub(MAX_SILENT);
        self.silent.drain(..excess);
        Ok(())
    }

    fn take_from(&mut self, stream: OwnedFd) {
        match self.arrival(&stream) {
            Arrival::Descriptors { from, descriptors } => self.received[from] = Some(descriptors),
            Arrival::NothingYet => self.silent.push(stream),
            Arrival::Nonsense => {}
        }
    }

    /// Reads the one message of a connection. Descriptors that are not wanted are closed.
    fn arrival(&self, stream: &OwnedFd) -> Arrival {
        // One byte more than a message has shows that a message is longer.
        let mut bytes = [0; Offer::LENGTH + 1];
        let (length, descriptors) = match receive_with_descriptors(stream.as_fd(), &mut bytes) {
            Ok(message) => message,
            Err(Errno::EAGAIN | Errno::EINTR) => return Arrival::NothingYet,
            Err(_) => return Arrival::Nonsense,
        };
        let Some(offer) = Offer::decode(&bytes[..length]) else {
            return Arrival::Nonsense;
        };
        if offer.secret != self.secret || !self.awaited().contains(&offer.rank) {
            return Arrival::Nonsense;
        }
        if !self.counts.contains(&descriptors.len()) {
            return Arrival::Nonsense;
        }
        Arrival::Descriptors { from: offer.rank, descriptors }
    }
}

/// Receives one message, its length and all descriptors that came with it.
fn receive_with_descriptors(stream: BorrowedFd<'_>, bytes: &mut [u8]) -> nix::Result<(usize, Vec<OwnedFd>)> {
    let mut control = cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let mut buffers = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(stream.as_raw_fd(), &mut buffers, Some(&mut control), flags)?;
    let mut descriptors = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            // SAFETY: the kernel has just opened these descriptors for this message, nothing else owns them,
            // and each is listed once.
            descriptors.extend(raw.into_iter().map(|raw| unsafe { OwnedFd::from_raw_fd(raw) }));
        }
    }
    Ok((message.bytes, descriptors))
}

#[cfg(test)]
mod tests;
