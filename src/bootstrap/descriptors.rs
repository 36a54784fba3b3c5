//! Every rank gives one file descriptor to every other rank, over Unix sockets and with any bootstrap.
//!
//! Each rank listens on a socket made for this one exchange and all-gathers its name and a secret. Then it
//! connects to every peer, and sends one message with the peer's secret and the descriptor, without waiting
//! for the peer to accept: the message stays in the peer's queue, even after this rank has closed its end. So
//! the order in which ranks connect cannot block them, and a rank that has heard from all is done: nobody
//! needs its socket any more. Ranks of one process take the same way, and get duplicates.
//!
//! Name and secret are fresh each time, so exchanges that follow each other cannot mix.
//!
//! A rank that is out of descriptors says so at once, and leaves nobody waiting: the sockets that it sends with are made before the
//! gather, which tells the others where that failed, and it sends what it owes before it returns with an error of what it received.
//! A rank that ends in between is noticed by the sockets to it, which it closes.

use std::io::IoSlice;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{sendmsg, ControlMessage, MsgFlags, SockType};

use super::place::{Listener, Place};
use super::socket::{self, accept, is_ready, poll_until, uninterrupted, Token};
use super::Bootstrap;
use crate::deadline::Deadline;
use crate::descriptor::{moved, Taken};
use crate::error::{Error, Result};
use crate::thread;

/// Messages keep their bounds, and a descriptor stays with its message.
const KIND: SockType = SockType::SeqPacket;

/// How often to try a peer again whose queue is full.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Looks at what has come after the limit, however much keeps coming.
const LAST_LOOKS: usize = 16;

/// Connections kept while they have said nothing, as a rank's is for a moment. Beyond these the oldest goes.
const MAX_SILENT: usize = 32;

/// Most descriptors that Linux passes with one message. With room for all, a message is cut only where this process may not open
/// them.
const MAX_DESCRIPTORS: usize = 253;

/// Room for that many and for the header before them, in words of its alignment.
const CONTROL_WORDS: usize = (MAX_DESCRIPTORS * size_of::<RawFd>()).div_ceil(8) + 4;

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
/// [`Error::Refused`] if a peer runs as another user; [`Error::System`] where a system call fails, with `EMFILE` where this process
/// has no descriptors left; [`Error::PeerFailed`] if a peer could not begin.
pub(crate) fn exchange_several(
    bootstrap: &dyn Bootstrap,
    descriptors: &[BorrowedFd<'_>],
    counts: RangeInclusive<usize>,
    timeout: Duration,
) -> Result<Vec<Vec<OwnedFd>>> {
    debug_assert!(counts.contains(&descriptors.len()) && !counts.contains(&0));
    let (rank, world_size) = (bootstrap.rank(), bootstrap.world_size());
    if !(1..=crate::abi::MAX_RANKS).contains(&world_size) {
        return Err(Error::WorldSize { world_size });
    }
    if rank >= world_size {
        return Err(Error::RankOutOfRange { rank, world_size });
    }
    let prepared =
        Place::new(bootstrap.socket_directory()).and_then(|place| prepare(place, rank, world_size));
    // Empty: it could not.
    let announced = prepared.as_ref().map(|(_, own, ..)| own.encode()).unwrap_or_default();
    let gathered = bootstrap.all_gather(&announced, timeout)?;
    let (place, own, listener, mut unsent) = prepared?;
    let addresses = Address::decode_all(&gathered, world_size)?;

    let mut inbox = Inbox::new(place.clone(), listener, own.secret, rank, world_size, counts);
    let (mut sent, mut failure) = (Vec::new(), None::<Error>);
    let (deadline, mut last_looks) = (Deadline::after(timeout), 0);
    loop {
        // Asked before looking, so that the last look comes after the limit.
        let turn = deadline.turn();
        let mut still_unsent = Vec::new();
        for (peer, stream) in unsent {
            match send(&place, peer, &stream, &addresses[peer], rank, descriptors) {
                Ok(true) => sent.push((peer, stream)),
                Ok(false) => still_unsent.push((peer, stream)),
                // The others are sent theirs first: they would take this rank for the one to blame.
                Err(error) => _ = failure.get_or_insert(error),
            }
        }
        unsent = still_unsent;
        if let Some(error) = failure.take_if(|_| unsent.is_empty() || turn.is_zero()) {
            return Err(error);
        }
        if unsent.is_empty() && inbox.awaited().is_empty() {
            return Ok(inbox.received.into_iter().map(Option::unwrap_or_default).collect());
        }
        let is_late = turn.is_zero();
        let turn = if unsent.is_empty() { turn } else { turn.min(RETRY_INTERVAL) };
        let mut has_heard = false;
        if failure.is_some() {
            thread::pause(turn);
        } else {
            match inbox.receive(&mut sent, &addresses, turn) {
                Ok(heard) => has_heard = heard,
                Err(error) => failure = Some(error),
            }
        }
        last_looks += usize::from(is_late);
        if is_late && failure.is_none() && (!has_heard || last_looks == LAST_LOOKS) {
            let awaited = inbox.awaited();
            let is_missing =
                |rank: &usize| unsent.iter().any(|(peer, _)| peer == rank) || awaited.contains(rank);
            return Err(Error::Timeout {
                operation: "exchange_descriptors",
                epoch: 0,
                missing: (0..world_size).filter(is_missing).collect(),
                waited: timeout,
                last_seen: String::new(),
            });
        }
    }
}

/// Everything that takes descriptors, but for those that come: this rank's address, the socket behind it, and a socket for each
/// peer.
fn prepare(place: Place, rank: usize, world_size: usize) -> Result<(Place, Address, Listener, Streams)> {
    let own = Address { name: socket::random_name()?, secret: Token::random()? };
    let listener = place.listen(KIND, &own.name)?;
    let peers = (0..world_size).filter(|&peer| peer != rank);
    let streams = peers.map(|peer| Ok((peer, socket::new_socket(KIND).map_err(Error::system("socket"))?)));
    let streams = streams.collect::<Result<_>>()?;
    Ok((place, own, listener, streams))
}

/// A socket for each peer.
type Streams = Vec<(usize, OwnedFd)>;

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
        if let Some(rank) = gathered.iter().position(Vec::is_empty) {
            return Err(Error::PeerFailed { rank, reason: "it could not begin to pass descriptors".into() });
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

/// Passes `descriptors` to `peer` through `stream`, which no other uses; false if its queue is full for now.
fn send(
    place: &Place,
    peer: usize,
    stream: &OwnedFd,
    address: &Address,
    rank: usize,
    descriptors: &[BorrowedFd<'_>],
) -> Result<bool> {
    let lost = |reason: &str| Error::PeerLost { rank: peer, reason: reason.into() };
    match place.connect_to(stream.as_fd(), &address.name) {
        // Connected the last time, when the message found no room.
        Ok(()) | Err(Errno::EISCONN) => {}
        Err(Errno::EAGAIN) => return Ok(false),
        Err(Errno::ECONNREFUSED) => return Err(lost("it takes no descriptors: it has ended or failed")),
        Err(errno) => return Err(Error::System { call: "connect to pass a descriptor", errno }),
    }
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

/// Whether nobody listens there any more.
fn is_refused(place: &Place, address: &Address) -> bool {
    matches!(place.connect(KIND, &address.name), Err(Errno::ECONNREFUSED))
}

/// What one connection brought.
enum Arrival {
    Descriptors {
        from: usize,
        descriptors: Vec<OwnedFd>,
    },
    NothingYet,
    /// A rank's descriptors, which this process may not open.
    CutShort,
    /// It ended, or brought what no rank of this exchange sends.
    Nonsense,
    /// This process may not receive.
    Refused(Errno),
}

/// The side that receives.
struct Inbox {
    place: Place,
    listener: Listener,
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
        place: Place,
        listener: Listener,
        secret: Token,
        rank: usize,
        world_size: usize,
        counts: RangeInclusive<usize>,
    ) -> Self {
        let received = (0..world_size).map(|_| None).collect();
        Self { place, listener, secret, rank, counts, received, silent: Vec::new() }
    }

    /// Ranks whose descriptors have not come.
    fn awaited(&self) -> Vec<usize> {
        let is_awaited = |rank: &usize| *rank != self.rank && self.received[*rank].is_none();
        (0..self.received.len()).filter(is_awaited).collect()
    }

    /// Waits that long for something to come, and takes it in; or for a peer to close what this rank `sent` it.
    /// Whether anything came.
    ///
    /// # Errors
    ///
    /// [`Error::PeerLost`] for a peer that has ended before it passed its own.
    fn receive(
        &mut self,
        sent: &mut Vec<(usize, OwnedFd)>,
        addresses: &[Address],
        turn: Duration,
    ) -> Result<bool> {
        let Some(closed) = self.take_in(sent, turn)? else {
            return Ok(false);
        };
        sent.retain(|(peer, _)| !closed.contains(peer));
        for peer in closed {
            // It has read what it was sent, or stopped listening, as it does when it returns or ends. It sends before it reads, so
            // that what it has not sent now it never will, unless this rank's queue was full: then it still listens.
            if self.has_come(peer)? || !is_refused(&self.place, &addresses[peer]) || self.has_come(peer)? {
                continue;
            }
            let reason = "it has ended or failed before it passed its descriptors".into();
            return Err(Error::PeerLost { rank: peer, reason });
        }
        Ok(true)
    }

    /// Whether a rank's descriptors are among all that has come until now.
    fn has_come(&mut self, peer: usize) -> Result<bool> {
        let deadline = Deadline::after(RETRY_INTERVAL);
        while !deadline.has_passed() && self.take_in(&[], Duration::ZERO)?.is_some() {}
        Ok(!self.awaited().contains(&peer))
    }

    /// Takes in what comes. The peers that have closed what they were sent; `None` if nothing came in that time.
    fn take_in(&mut self, sent: &[(usize, OwnedFd)], turn: Duration) -> Result<Option<Vec<usize>>> {
        let listener = PollFd::new(self.listener.as_fd(), PollFlags::POLLIN);
        let silent = self.silent.iter().map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN));
        // A hang-up is reported whatever is asked for.
        let streams = sent.iter().map(|(_, stream)| PollFd::new(stream.as_fd(), PollFlags::empty()));
        let mut polled: Vec<_> = std::iter::once(listener).chain(silent).chain(streams).collect();
        if !poll_until(&mut polled, &Deadline::after(turn))? {
            return Ok(None);
        }
        let ready: Vec<_> = polled.iter().map(is_ready).collect();
        let hung_up = sent.iter().zip(&ready[1 + self.silent.len()..]).filter(|(_, is_ready)| **is_ready);
        let closed = hung_up.map(|((peer, _), _)| *peer).collect();
        for (stream, is_ready) in std::mem::take(&mut self.silent).into_iter().zip(&ready[1..]) {
            if *is_ready {
                self.take_from(stream)?;
            } else {
                self.silent.push(stream);
            }
        }
        if ready[0] {
            self.accept()?;
        }
        Ok(Some(closed))
    }

    /// Accepts who waits, up to a bound, so that whoever keeps knocking does not keep this rank from its
    /// deadline.
    fn accept(&mut self) -> Result<()> {
        for _ in 0..crate::abi::MAX_RANKS {
            match accept(self.listener.as_fd()) {
                Ok(stream) if socket::same_user(stream.as_fd()).is_ok() => self.take_from(stream)?,
                Ok(_) | Err(Errno::ECONNABORTED) => {}
                Err(Errno::EAGAIN) => break,
                Err(errno) => return Err(Error::System { call: "accept of a descriptor", errno }),
            }
        }
        let excess = self.silent.len().saturating_sub(MAX_SILENT);
        self.silent.drain(..excess);
        Ok(())
    }

    fn take_from(&mut self, stream: OwnedFd) -> Result<()> {
        match self.arrival(&stream) {
            Arrival::Descriptors { from, descriptors } => self.received[from] = Some(descriptors),
            Arrival::NothingYet => self.silent.push(stream),
            Arrival::CutShort => {
                return Err(Error::System { call: "recvmsg of a descriptor", errno: Errno::EMFILE });
            }
            Arrival::Refused(errno) => {
                return Err(Error::System { call: "recvmsg of a descriptor", errno });
            }
            Arrival::Nonsense => {}
        }
        Ok(())
    }

    /// Reads the one message of a connection. Descriptors that are not wanted are closed.
    fn arrival(&self, stream: &OwnedFd) -> Arrival {
        // One byte more than a message has shows that a message is longer.
        let mut bytes = [0; Offer::LENGTH + 1];
        let Received { length, descriptors, is_cut } =
            match receive_with_descriptors(stream.as_fd(), &mut bytes) {
                Ok(message) => message,
                Err(Errno::EAGAIN | Errno::EINTR) => return Arrival::NothingYet,
                Err(Errno::ECONNRESET) => return Arrival::Nonsense,
                Err(errno) => return Arrival::Refused(errno),
            };
        let Some(offer) = Offer::decode(&bytes[..length]) else {
            return Arrival::Nonsense;
        };
        if offer.secret != self.secret || !self.awaited().contains(&offer.rank) {
            return Arrival::Nonsense;
        }
        if is_cut {
            return Arrival::CutShort;
        }
        if !self.counts.contains(&descriptors.len()) {
            return Arrival::Nonsense;
        }
        Arrival::Descriptors { from: offer.rank, descriptors }
    }
}

/// One message.
struct Received {
    length: usize,
    /// All that came with it and could be opened.
    descriptors: Vec<OwnedFd>,
    /// More came.
    is_cut: bool,
}

/// Receives one message. Not through nix, which does not give out the descriptors of a message that is cut: they would stay open.
fn receive_with_descriptors(stream: BorrowedFd<'_>, bytes: &mut [u8]) -> nix::Result<Received> {
    let mut control = [0u64; CONTROL_WORDS];
    let mut buffer = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all zeros is a header without buffers.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&mut buffer, 1);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control) as _);
    let _taken = Taken::now();
    // SAFETY: the header's buffers are exclusively borrowed, live for the call, and have the lengths that it says.
    let length = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut header, libc::MSG_CMSG_CLOEXEC) };
    let length = Errno::result(length)?.unsigned_abs();
    let mut descriptors = Vec::new();
    // SAFETY: the kernel has filled the control buffer and set its length; it is aligned for its parts.
    let mut part = unsafe { libc::CMSG_FIRSTHDR(&header) };
    // SAFETY: null, or a part within the control buffer, which nothing else accesses.
    while let Some(head) = unsafe { part.as_ref() } {
        if (head.cmsg_level, head.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: arithmetic on a length and on a pointer to a part.
            let (empty, data) = unsafe { (libc::CMSG_LEN(0) as usize, libc::CMSG_DATA(part)) };
            #[allow(clippy::unnecessary_cast)] // It has other types on other platforms.
            let count = (head.cmsg_len as usize).saturating_sub(empty) / size_of::<RawFd>();
            descriptors.extend((0..count).map(|index| {
                // SAFETY: the part holds `count` descriptors. The kernel has just opened them for this message, nothing else owns
                // them, and each is listed once.
                unsafe { OwnedFd::from_raw_fd(data.cast::<RawFd>().add(index).read_unaligned()) }
            }));
        }
        // SAFETY: `part` is a part of this header's.
        part = unsafe { libc::CMSG_NXTHDR(&header, part) };
    }
    let opened = descriptors.len();
    // An error: no number is left for it.
    descriptors = descriptors.into_iter().filter_map(|descriptor| moved(descriptor).ok()).collect();
    let is_cut = header.msg_flags & libc::MSG_CTRUNC != 0 || descriptors.len() < opened;
    Ok(Received { length, descriptors, is_cut })
}

#[cfg(test)]
mod tests;
