//! Unix sockets between processes of one user: creating, connecting, checking credentials, polling.
//!
//! All sockets are nonblocking and close-on-exec. `socket_name.rs` has their names.

use std::fmt;
use std::hint::black_box;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{fcntl, FcntlArg, FdFlag, OFlag};
use nix::poll::{poll, PollFd, PollTimeout};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, UnixAddr, UnixCredentials};
use nix::unistd::Uid;

use crate::deadline::Deadline;
use crate::descriptor::above_streams;
use crate::error::{Error, Result};

/// Prefix of all socket names.
pub(super) const PREFIX: &str = "fast-allreduce-";

const FLAGS: SockFlag = SockFlag::SOCK_CLOEXEC.union(SockFlag::SOCK_NONBLOCK);

/// Length of the queue of connections that are not accepted yet: several per rank, so that ranks do not wait for each
/// other.
pub(super) const BACKLOG: i32 = 128;

/// A random 128-bit secret that admits a connection. Compared in constant time, and never printed.
#[derive(Clone)]
pub(super) struct Token([u8; Token::LENGTH]);

impl Token {
    pub(super) const LENGTH: usize = 16;

    pub(super) fn random() -> Result<Self> {
        random_bytes().map(Self)
    }

    pub(super) const fn from_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        Self(bytes)
    }

    pub(super) const fn as_bytes(&self) -> &[u8; Self::LENGTH] {
        &self.0
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(&other.0).fold(0, |sum, (a, b)| black_box(sum | (a ^ b)));
        difference == 0
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Returns random bytes from the kernel.
pub(super) fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        let errno = Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
        Error::System { call: "getrandom", errno }
    })?;
    Ok(bytes)
}

/// Returns a random socket name that cannot be guessed.
pub(super) fn random_name() -> Result<Vec<u8>> {
    let nonce: [u8; 16] = random_bytes()?;
    Ok(format!("{PREFIX}{}", base16ct::lower::encode_string(&nonce)).into_bytes())
}

/// Creates a socket that listens at an address.
pub(super) fn listen(kind: SockType, address: &UnixAddr) -> Result<OwnedFd> {
    let listener = new_socket(kind).map_err(Error::system("socket"))?;
    socket::bind(listener.as_raw_fd(), address).map_err(Error::system("bind of a Unix socket"))?;
    let backlog = Backlog::new(BACKLOG).map_err(Error::system("listen backlog"))?;
    socket::listen(&listener, backlog).map_err(Error::system("listen"))?;
    Ok(listener)
}

/// Connects a socket, without waiting.
pub(super) fn connect_to(stream: BorrowedFd<'_>, address: &UnixAddr) -> nix::Result<()> {
    uninterrupted(|| socket::connect(stream.as_raw_fd(), address))
}

/// Accepts the next connection, or returns `EAGAIN` if the queue is empty.
pub(super) fn accept(listener: BorrowedFd<'_>) -> nix::Result<OwnedFd> {
    let owned = |accepted| {
        // SAFETY: the call succeeded, so this is a new open descriptor that nothing else owns.
        unsafe { OwnedFd::from_raw_fd(accepted) }
    };
    above_streams(|| match uninterrupted(|| socket::accept4(listener.as_raw_fd(), FLAGS)) {
        // Sandboxes may allow only the older call.
        Err(Errno::ENOSYS | Errno::EPERM) => {
            let accepted = owned(uninterrupted(|| socket::accept(listener.as_raw_fd()))?);
            fcntl(&accepted, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
            fcntl(&accepted, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            Ok(accepted)
        }
        accepted => accepted.map(owned),
    })
}

/// Returns the credentials of the other end of a connection, if it runs as the user of this process.
///
/// The kernel recorded the credentials at `connect` or `listen`, so that they cannot be forged.
pub(super) fn same_user(stream: BorrowedFd<'_>) -> Result<UnixCredentials, String> {
    let peer = socket::getsockopt(&stream, PeerCredentials)
        .map_err(|errno| format!("the user of the other end is unknown: {errno}"))?;
    let own = Uid::effective();
    if peer.uid() != own.as_raw() {
        return Err(format!("the other end runs as user {}, this process as user {own}", peer.uid()));
    }
    Ok(peer)
}

/// Waits until one of `descriptors` is ready. Returns false if the deadline passes first.
pub(super) fn poll_until(descriptors: &mut [PollFd<'_>], deadline: &Deadline<'_>) -> Result<bool> {
    loop {
        let wait = deadline.next_wait();
        match poll(descriptors, milliseconds(wait)) {
            Ok(0) if wait.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(Error::System { call: "poll", errno }),
        }
    }
}

/// Waits until one of `descriptors` is ready, without a limit.
pub(super) fn poll_unbounded(descriptors: &mut [PollFd<'_>]) -> Result<()> {
    uninterrupted(|| poll(descriptors, PollTimeout::NONE)).map(drop).map_err(Error::system("poll"))
}

/// Converts to milliseconds, rounded up.
fn milliseconds(wait: Duration) -> PollTimeout {
    PollTimeout::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(PollTimeout::MAX)
}

/// Returns whether `poll` reported an event on a descriptor, including errors and hang-ups.
pub(super) fn is_ready(polled: &PollFd<'_>) -> bool {
    polled.any().unwrap_or(true)
}

/// Repeats a system call while signals interrupt it.
pub(super) fn uninterrupted<T>(mut call: impl FnMut() -> nix::Result<T>) -> nix::Result<T> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
}

/// Creates an unconnected socket.
pub(super) fn new_socket(kind: SockType) -> nix::Result<OwnedFd> {
    above_streams(|| socket::socket(AddressFamily::Unix, kind, FLAGS, None))
}

#[cfg(test)]
mod tests {
    use super::super::socket_name::SocketNamespace;
    use super::*;
    use nix::poll::PollFlags;
    use std::os::fd::AsFd as _;

    #[test]
    fn tokens_compare_by_value_and_are_not_printed() {
        let token = Token::random().unwrap();
        let mut other = *token.as_bytes();
        assert_eq!(token, Token::from_bytes(other));
        other[15] ^= 0x80;
        assert_ne!(token, Token::from_bytes(other));
        assert_eq!(format!("{token:?}"), "Token(..)");
    }

    #[test]
    fn names_and_tokens_differ_each_time() {
        assert_ne!(random_name().unwrap(), random_name().unwrap());
        assert_ne!(Token::random().unwrap(), Token::random().unwrap());
        assert_eq!(random_bytes::<0>().unwrap(), []);
    }

    #[test]
    fn connect_says_that_nobody_listens() {
        let name = random_name().unwrap();
        let namespace = SocketNamespace::Abstract;
        assert_eq!(namespace.connect(SockType::Stream, &name).unwrap_err(), Errno::ECONNREFUSED);
        let listener = namespace.listen(SockType::Stream, &name).unwrap();
        let stream = namespace.connect(SockType::Stream, &name).unwrap();
        let accepted = accept(listener.as_fd()).unwrap();
        assert_eq!(accept(listener.as_fd()).unwrap_err(), Errno::EAGAIN);
        assert_eq!(same_user(stream.as_fd()).unwrap().pid(), std::process::id() as i32);
        assert_eq!(same_user(accepted.as_fd()).unwrap().pid(), std::process::id() as i32);
    }

    #[test]
    fn accepted_sockets_are_nonblocking_and_close_on_exec() {
        let name = random_name().unwrap();
        let listener = SocketNamespace::Abstract.listen(SockType::Stream, &name).unwrap();
        for without in [false, true] {
            let _stream = SocketNamespace::Abstract.connect(SockType::Stream, &name).unwrap();
            let accepted = std::thread::scope(|scope| {
                let accepting = scope.spawn(|| {
                    if without {
                        crate::thread::tests::forbid(libc::SYS_accept4);
                    }
                    accept(listener.as_fd()).unwrap()
                });
                accepting.join().unwrap()
            });
            let flags = OFlag::from_bits_retain(fcntl(&accepted, FcntlArg::F_GETFL).unwrap());
            assert!(flags.contains(OFlag::O_NONBLOCK));
            assert_eq!(fcntl(&accepted, FcntlArg::F_GETFD).unwrap(), FdFlag::FD_CLOEXEC.bits());
        }
    }

    #[test]
    fn polls_end() {
        let listener = SocketNamespace::Abstract.listen(SockType::Stream, &random_name().unwrap()).unwrap();
        let mut polled = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        let deadline = Deadline::after(Duration::from_millis(20));
        assert!(!poll_until(&mut polled, &deadline).unwrap());
        assert!(deadline.has_passed());
        assert_eq!(deadline.waited(), Duration::from_millis(20));
    }
}
