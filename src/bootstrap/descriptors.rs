//! All-to-all exchange of file descriptors over Unix sockets, with any bootstrap.
//!
//! Each rank listens on a new socket, and all-gathers the socket's name and a secret. Then it connects to every peer
//! and sends one message with the peer's secret and the descriptor. It does not wait for the peer to accept: the
//! message stays in the peer's queue, even after this rank has closed its end. So the ranks can connect in any order
//! without blocking each other, and a rank that has received from all peers is done: nobody needs its socket any more.
//! Ranks of one process use the same path, and get duplicates.
//!
//! Names and secrets are new in each exchange, so that consecutive exchanges cannot mix.
//!
//! A rank without free descriptors fails at once and leaves nobody waiting. It creates the sockets for sending before
//! the gather; if that fails, its gathered message says so. If receiving fails, it still sends to all peers before it
//! returns the error. If a peer ends during the exchange, its sockets close, which this rank notices.

use std::io::IoSlice;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{sendmsg, ControlMessage, MsgFlags, SockType};

use super::socket::{self, accept, is_ready, poll_until, uninterrupted, Token};
use super::socket_name::{Listener, SocketNamespace};
use super::Bootstrap;
use crate::deadline::Deadline;
use crate::descriptor::{moved, Taken};
use crate::error::{Error, Result};
use crate::thread;

/// Sequenced packets keep message boundaries, and a descriptor stays with its message.
const KIND: SockType = SockType::SeqPacket;

/// Pause between two attempts to reach a peer whose queue is full.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Maximum number of receive attempts after the time limit, even if messages keep arriving.
const LAST_ATTEMPTS: usize = 16;

/// Number of connections kept without a message; a peer's connection is in this state only for a moment. Beyond that,
/// the oldest is closed.
const MAX_SILENT: usize = 32;

/// Maximum number of descriptors that Linux passes with one message. The buffer has space for all of them, so that a
/// message is truncated only if this process cannot open the descriptors.
const MAX_DESCRIPTORS: usize = 253;

/// Size, in 8-byte words, of the control buffer for `MAX_DESCRIPTORS` descriptors and their header.
const CONTROL_WORDS: usize = (MAX_DESCRIPTORS * size_of::<RawFd>()).div_ceil(8) + 4;

/// Passes a duplicate of `descriptor` to every other rank, and returns the descriptors of the others by rank; `None`
/// for this rank. The errors are those of [`exchange_several`].
pub(crate) fn exchange_descriptors(
    bootstrap: &dyn Bootstrap,
    descriptor: BorrowedFd<'_>,
    timeout: Duration,
) -> Result<Vec<Option<OwnedFd>>> {
    let received = exchange_several(bootstrap, &[descriptor], 1..=1, timeout)?;
    Ok(received.into_iter().map(|mut descriptors| descriptors.pop()).collect())
}

/// Passes duplicates of `descriptors` to every other rank, and returns the descriptors of the others by rank; an empty
/// list for this rank. Ranks may pass different numbers of descriptors, all within `counts`. Received descriptors are
/// close-on-exec.
///
/// # Errors
///
/// * Those of [`Bootstrap::all_gather`].
/// * [`Error::Timeout`] of `"exchange_descriptors"` if a peer gathered but did not pass its descriptors.
/// * [`Error::PeerLost`] if a peer ended, [`Error::PeerFailed`] if it could not begin.
/// * [`Error::Malformed`] if a peer's gathered message does not decode.
/// * [`Error::Refused`] if a peer runs as another user.
/// * [`Error::System`] if a system call fails; with `EMFILE` if this process has no free descriptors.
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
    let prepared = SocketNamespace::new(bootstrap.socket_directory())
        .and_then(|namespace| prepare(namespace, rank, world_size));
    // Empty if this rank could not begin.
    let announced = prepared.as_ref().map(|(_, own, ..)| own.encode()).unwrap_or_default();
    let gathered = bootstrap.all_gather(&announced, timeout)?;
    let (namespace, own, listener, mut unsent) = prepared?;
    let addresses = Address::decode_all(&gathered, world_size)?;

    let mut receiver = Receiver::new(namespace.clone(), listener, own.secret, rank, world_size, counts);
    let (mut sent, mut failure) = (Vec::new(), None::<Error>);
    let (deadline, mut last_attempts) = (Deadline::after(timeout), 0);
    loop {
        // The deadline is checked first, so that the last attempt comes after the limit.
        let wait = deadline.next_wait();
        let mut still_unsent = Vec::new();
        for (peer, stream) in unsent {
            match send(&namespace, peer, &stream, &addresses[peer], rank, descriptors) {
                Ok(true) => sent.push((peer, stream)),
                Ok(false) => still_unsent.push((peer, stream)),
                // Returned only after the descriptors were sent to the other peers: otherwise they would report this
                // rank as lost.
                Err(error) => _ = failure.get_or_insert(error),
            }
        }
        unsent = still_unsent;
        if let Some(error) = failure.take_if(|_| unsent.is_empty() || wait.is_zero()) {
            return Err(error);
        }
        if unsent.is_empty() && receiver.awaited().is_empty() {
            return Ok(receiver.received.into_iter().map(Option::unwrap_or_default).collect());
        }
        let is_late = wait.is_zero();
        let wait = if unsent.is_empty() { wait } else { wait.min(RETRY_INTERVAL) };
        let mut has_received = false;
        if failure.is_some() {
            thread::pause(wait);
        } else {
            match receiver.receive(&mut sent, &addresses, wait) {
                Ok(received) => has_received = received,
                Err(error) => failure = Some(error),
            }
        }
        last_attempts += usize::from(is_late);
        if is_late && failure.is_none() && (!has_received || last_attempts == LAST_ATTEMPTS) {
            let awaited = receiver.awaited();
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

/// Creates everything that needs file descriptors: the listener with its address, and a socket for each peer.
fn prepare(
    namespace: SocketNamespace,
    rank: usize,
    world_size: usize,
) -> Result<(SocketNamespace, Address, Listener, Streams)> {
    let own = Address { name: socket::random_name()?, secret: Token::random()? };
    let listener = namespace.listen(KIND, &own.name)?;
    let peers = (0..world_size).filter(|&peer| peer != rank);
    let streams = peers.map(|peer| Ok((peer, socket::new_socket(KIND).map_err(Error::system("socket"))?)));
    let streams = streams.collect::<Result<_>>()?;
    Ok((namespace, own, listener, streams))
}

/// An unconnected socket for each peer, with the peer's rank.
type Streams = Vec<(usize, OwnedFd)>;

/// Where a rank listens, and the secret that senders must present. Encoded as the secret followed by the name.
struct Address {
    name: Vec<u8>,
    secret: Token,
}

impl Address {
    /// The kernel's 108 bytes, less the zero byte that precedes an abstract name.
    const MAX_NAME: usize = 107;

    fn encode(&self) -> Vec<u8> {
        [self.secret.as_bytes(), &self.name[..]].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let (secret, name) = bytes.split_first_chunk().ok_or("the address for descriptors is truncated")?;
        if !(1..=Self::MAX_NAME).contains(&name.len()) {
            return Err("the address for descriptors has a name of invalid length");
        }
        Ok(Self { name: name.to_vec(), secret: Token::from_bytes(*secret) })
    }

    fn decode_all(gathered: &[Vec<u8>], world_size: usize) -> Result<Vec<Self>> {
        if gathered.len() != world_size {
            let reason =
                format!("all_gather returned {} messages in a world of {world_size}", gathered.len());
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
        // Ranks are below MAX_RANKS. A larger one would become 255, which the receiver refuses.
        let rank = u8::try_from(self.rank).unwrap_or(u8::MAX);
        std::array::from_fn(|index| secret.get(index).copied().unwrap_or(rank))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (secret, rank) = bytes.split_first_chunk()?;
        let [rank] = rank else { return None };
        Some(Self { secret: Token::from_bytes(*secret), rank: usize::from(*rank) })
    }
}

/// Passes `descriptors` to `peer` through `stream`, its own socket. Returns false if the peer's queue is full.
fn send(
    namespace: &SocketNamespace,
    peer: usize,
    stream: &OwnedFd,
    address: &Address,
    rank: usize,
    descriptors: &[BorrowedFd<'_>],
) -> Result<bool> {
    let lost = |reason: &str| Error::PeerLost { rank: peer, reason: reason.into() };
    match namespace.connect_to(stream.as_fd(), &address.name) {
        // EISCONN: the previous attempt connected, but the queue had no space for the message.
        Ok(()) | Err(Errno::EISCONN) => {}
        Err(Errno::EAGAIN) => return Ok(false),
        Err(Errno::ECONNREFUSED) => {
            return Err(lost("it no longer receives descriptors: it has ended or failed"))
        }
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

/// Returns whether no socket listens at the address any more.
fn is_refused(namespace: &SocketNamespace, address: &Address) -> bool {
    matches!(namespace.connect(KIND, &address.name), Err(Errno::ECONNREFUSED))
}

/// Result of receiving from one connection.
enum Arrival {
    Descriptors {
        from: usize,
        descriptors: Vec<OwnedFd>,
    },
    NothingYet,
    /// A rank's descriptors arrived, but this process cannot open all of them.
    Truncated,
    /// The connection ended, or its message does not belong to this exchange.
    Invalid,
    /// Receiving failed.
    Failed(Errno),
}

/// The receiving side of an exchange.
struct Receiver {
    namespace: SocketNamespace,
    listener: Listener,
    secret: Token,
    rank: usize,
    /// Allowed numbers of descriptors of a rank.
    counts: RangeInclusive<usize>,
    received: Vec<Option<Vec<OwnedFd>>>,
    /// Connections without a message so far, oldest first.
    silent: Vec<OwnedFd>,
}

impl Receiver {
    fn new(
        namespace: SocketNamespace,
        listener: Listener,
        secret: Token,
        rank: usize,
        world_size: usize,
        counts: RangeInclusive<usize>,
    ) -> Self {
        let received = (0..world_size).map(|_| None).collect();
        Self { namespace, listener, secret, rank, counts, received, silent: Vec::new() }
    }

    /// Returns the ranks whose descriptors have not arrived.
    fn awaited(&self) -> Vec<usize> {
        let is_awaited = |rank: &usize| *rank != self.rank && self.received[*rank].is_none();
        (0..self.received.len()).filter(is_awaited).collect()
    }

    /// Waits for up to `wait` for messages, or for a peer to close a connection in `sent`, and processes them. Returns
    /// whether anything happened.
    ///
    /// # Errors
    ///
    /// [`Error::PeerLost`] if a peer has ended before it passed its descriptors.
    fn receive(
        &mut self,
        sent: &mut Vec<(usize, OwnedFd)>,
        addresses: &[Address],
        wait: Duration,
    ) -> Result<bool> {
        let Some(closed) = self.process_arrivals(sent, wait)? else {
            return Ok(false);
        };
        sent.retain(|(peer, _)| !closed.contains(peer));
        for peer in closed {
            // The peer has read the message, or has stopped listening because it returned or ended. A peer sends before
            // it reads. So if its own message has not arrived by now, it never will, unless this rank's queue was full:
            // in that case the peer still listens.
            let address = &addresses[peer];
            if self.has_arrived(peer)? || !is_refused(&self.namespace, address) || self.has_arrived(peer)? {
                continue;
            }
            let reason = "it ended or failed before it passed its descriptors".into();
            return Err(Error::PeerLost { rank: peer, reason });
        }
        Ok(true)
    }

    /// Processes everything that has arrived, and returns whether a peer's descriptors are among it.
    fn has_arrived(&mut self, peer: usize) -> Result<bool> {
        // What had arrived was queued, and each turn accepts some of the queue. More may keep coming. A time limit
        // would report a live peer as lost where this thread is not running.
        const MOST_TURNS: usize = socket::BACKLOG as usize / crate::abi::MAX_RANKS + 2;
        for _ in 0..MOST_TURNS {
            if !self.awaited().contains(&peer) || self.process_arrivals(&[], Duration::ZERO)?.is_none() {
                break;
            }
        }
        Ok(!self.awaited().contains(&peer))
    }

    /// Waits for up to `wait` and processes what has arrived. Returns the peers that have closed their connections in
    /// `sent`, or `None` if nothing happened in that time.
    fn process_arrivals(&mut self, sent: &[(usize, OwnedFd)], wait: Duration) -> Result<Option<Vec<usize>>> {
        let listener = PollFd::new(self.listener.as_fd(), PollFlags::POLLIN);
        let silent = self.silent.iter().map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN));
        // Hang-ups are always reported.
        let streams = sent.iter().map(|(_, stream)| PollFd::new(stream.as_fd(), PollFlags::empty()));
        let mut polled: Vec<_> = std::iter::once(listener).chain(silent).chain(streams).collect();
        if !poll_until(&mut polled, &Deadline::after(wait))? {
            return Ok(None);
        }
        let ready: Vec<_> = polled.iter().map(is_ready).collect();
        let hung_up = sent.iter().zip(&ready[1 + self.silent.len()..]).filter(|(_, is_ready)| **is_ready);
        let closed = hung_up.map(|((peer, _), _)| *peer).collect();
        for (stream, is_ready) in std::mem::take(&mut self.silent).into_iter().zip(&ready[1..]) {
            if *is_ready {
                self.process_connection(stream)?;
            } else {
                self.silent.push(stream);
            }
        }
        if ready[0] {
            self.accept()?;
        }
        Ok(Some(closed))
    }

    /// Accepts queued connections, up to a bound: a process that keeps connecting must not keep this rank from checking
    /// its deadline.
    fn accept(&mut self) -> Result<()> {
        for _ in 0..crate::abi::MAX_RANKS {
            match accept(self.listener.as_fd()) {
                Ok(stream) if socket::same_user(stream.as_fd()).is_ok() => self.process_connection(stream)?,
                Ok(_) | Err(Errno::ECONNABORTED) => {}
                Err(Errno::EAGAIN) => break,
                Err(errno) => return Err(Error::System { call: "accept of a descriptor", errno }),
            }
        }
        let excess = self.silent.len().saturating_sub(MAX_SILENT);
        self.silent.drain(..excess);
        Ok(())
    }

    fn process_connection(&mut self, stream: OwnedFd) -> Result<()> {
        match self.read_message(&stream) {
            Arrival::Descriptors { from, descriptors } => self.received[from] = Some(descriptors),
            Arrival::NothingYet => self.silent.push(stream),
            Arrival::Truncated => {
                return Err(Error::System { call: "recvmsg of a descriptor", errno: Errno::EMFILE });
            }
            Arrival::Failed(errno) => {
                return Err(Error::System { call: "recvmsg of a descriptor", errno });
            }
            Arrival::Invalid => {}
        }
        Ok(())
    }

    /// Reads the one message of a connection. Descriptors of invalid messages are closed.
    fn read_message(&self, stream: &OwnedFd) -> Arrival {
        // One byte more than a valid message has, to detect longer ones.
        let mut bytes = [0; Offer::LENGTH + 1];
        let Received { length, descriptors, is_truncated } =
            match receive_with_descriptors(stream.as_fd(), &mut bytes) {
                Ok(message) => message,
                Err(Errno::EAGAIN | Errno::EINTR) => return Arrival::NothingYet,
                Err(Errno::ECONNRESET) => return Arrival::Invalid,
                Err(errno) => return Arrival::Failed(errno),
            };
        let Some(offer) = Offer::decode(&bytes[..length]) else {
            return Arrival::Invalid;
        };
        if offer.secret != self.secret || !self.awaited().contains(&offer.rank) {
            return Arrival::Invalid;
        }
        if is_truncated {
            return Arrival::Truncated;
        }
        if !self.counts.contains(&descriptors.len()) {
            return Arrival::Invalid;
        }
        Arrival::Descriptors { from: offer.rank, descriptors }
    }
}

/// One received message.
struct Received {
    length: usize,
    /// The descriptors of the message that could be opened.
    descriptors: Vec<OwnedFd>,
    /// The message carried more descriptors.
    is_truncated: bool,
}

/// Receives one message. This does not use nix, which does not return the descriptors of a truncated message: they
/// would stay open.
fn receive_with_descriptors(stream: BorrowedFd<'_>, bytes: &mut [u8]) -> nix::Result<Received> {
    let mut control = [0u64; CONTROL_WORDS];
    let mut buffer = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all zeros is a valid header, without buffers.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&mut buffer, 1);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control) as _);
    let _taken = Taken::now();
    // SAFETY: the header's buffers are exclusively borrowed, outlive the call, and have the lengths in the header.
    let length = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut header, libc::MSG_CMSG_CLOEXEC) };
    let length = Errno::result(length)?.unsigned_abs();
    let mut descriptors = Vec::new();
    // SAFETY: the kernel has filled the control buffer and set its length; the buffer is aligned for control messages.
    let mut part = unsafe { libc::CMSG_FIRSTHDR(&header) };
    // SAFETY: null, or a control message within the control buffer, which nothing else accesses.
    while let Some(head) = unsafe { part.as_ref() } {
        if (head.cmsg_level, head.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: arithmetic on a length and on a pointer to a control message.
            let (empty, data) = unsafe { (libc::CMSG_LEN(0) as usize, libc::CMSG_DATA(part)) };
            #[allow(clippy::unnecessary_cast)] // Its type differs by platform.
            let count = (head.cmsg_len as usize).saturating_sub(empty) / size_of::<RawFd>();
            descriptors.extend((0..count).map(|index| {
                // SAFETY: the control message holds `count` descriptors. The kernel has just opened them for this
                // message, nothing else owns them, and each is listed once.
                unsafe { OwnedFd::from_raw_fd(data.cast::<RawFd>().add(index).read_unaligned()) }
            }));
        }
        // SAFETY: `part` is a control message of this header.
        part = unsafe { libc::CMSG_NXTHDR(&header, part) };
    }
    let opened = descriptors.len();
    // An error means that no number is left: the descriptor is closed.
    descriptors = descriptors.into_iter().filter_map(|descriptor| moved(descriptor).ok()).collect();
    let is_truncated = header.msg_flags & libc::MSG_CTRUNC != 0 || descriptors.len() < opened;
    Ok(Received { length, descriptors, is_truncated })
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_descriptor_address, |bytes| Address::decode(bytes));
#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_descriptor_offer, |bytes| Offer::decode(bytes));

#[cfg(test)]
mod tests;
