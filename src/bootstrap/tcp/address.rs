//! Addresses of a rendezvous, and TCP sockets.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::sockopt::{
    KeepAlive, ReuseAddr, SocketError, TcpKeepCount, TcpKeepIdle, TcpKeepInterval, TcpNoDelay, TcpUserTimeout,
};
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage};

use super::super::socket::{poll_until, uninterrupted};
use crate::deadline::Deadline;
use crate::descriptor::above_streams;
use crate::error::{Error, Result};
use crate::thread;

/// Connections that are not accepted yet: all ranks may come at the same time.
const BACKLOG: i32 = 1024;

/// Limit of one attempt to connect, so that the other addresses of a host get their turn.
const ATTEMPT: Duration = Duration::from_secs(3);

/// Limit on the time in which the other end acknowledges nothing. The kernel's own takes a quarter of an hour.
const SILENCE: Duration = Duration::from_secs(20);

/// Stack size of the thread that resolves a name.
const RESOLVER_STACK: usize = 256 << 10;

/// A host and a port, as text: `node0:29600`, `198.18.0.1:29600`, `[fd00::1]:29600`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl Address {
    pub fn parse(text: &str) -> Result<Self> {
        let invalid = || Error::InvalidSetting {
            name: "address",
            value: text.into(),
            expected: "a host and a port: node0:29600, 198.18.0.1:29600 or [fd00::1]:29600",
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let in_brackets = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match in_brackets {
            Some(host) => host,
            None if host.contains([':', '[', ']']) => return Err(invalid()),
            None => host,
        };
        // A sign is not part of a port.
        let is_number = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        match port.parse() {
            Ok(port) if is_number && !host.is_empty() => Ok(Self { host: host.into(), port }),
            _ => Err(invalid()),
        }
    }

    /// Returns the addresses of the host, those of IPv6 first, or why there are none.
    pub fn resolve(&self, deadline: &Deadline<'_>) -> Result<Vec<SocketAddr>, String> {
        if let Ok(address) = self.host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, self.port)]);
        }
        let (answer, answered) = mpsc::channel();
        let (host, port) = (self.host.clone(), self.port);
        // In a thread, since the system's resolver has limits of its own, which may be minutes.
        let resolver = thread::spawn("resolver".into(), RESOLVER_STACK, move || {
            let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            // The receiver may have given up.
            let _ = answer.send(found);
        });
        resolver.map_err(|error| format!("no thread resolves {}: {error}", self.host))?;
        loop {
            let wait = deadline.next_wait();
            match answered.recv_timeout(wait) {
                Ok(Ok(mut addresses)) => {
                    addresses.sort_by_key(|address| !address.is_ipv6());
                    return Ok(addresses);
                }
                Ok(Err(error)) => return Err(format!("{} does not resolve: {error}", self.host)),
                Err(RecvTimeoutError::Timeout) if !wait.is_zero() => {}
                Err(_) => return Err(format!("{} does not resolve in time", self.host)),
            }
        }
    }

    /// Creates a socket that listens at the first address that this machine has; returns it with its address.
    pub fn listen(&self, deadline: &Deadline<'_>) -> Result<(OwnedFd, SocketAddr)> {
        let refused = |reason: String| Error::Rendezvous { reason };
        let mut reasons = Vec::new();
        for address in self.resolve(deadline).map_err(refused)? {
            match listen_at(address) {
                Ok(listener) => {
                    let port =
                        bound_port(&listener).map_err(Error::system("getsockname of the rendezvous"))?;
                    return Ok((listener, SocketAddr::new(address.ip(), port)));
                }
                Err(Errno::EADDRINUSE) => {
                    return Err(refused(format!(
                        "{address} is in use, perhaps by another job: choose another port"
                    )));
                }
                Err(Errno::EADDRNOTAVAIL) => reasons.push(format!("{address} is no address of this machine")),
                Err(errno) => reasons.push(format!("{address}: {}", errno.desc())),
            }
        }
        Err(refused(format!("this process cannot serve at {self}: {}", reasons.join(", "))))
    }
}

fn new_socket(address: &SocketAddr) -> nix::Result<OwnedFd> {
    let family = if address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    above_streams(|| socket::socket(family, SockType::Stream, flags, None))
}

fn listen_at(address: SocketAddr) -> nix::Result<OwnedFd> {
    let listener = new_socket(&address)?;
    // Connections of an earlier job may still be closing.
    socket::setsockopt(&listener, ReuseAddr, &true)?;
    socket::bind(listener.as_raw_fd(), &SockaddrStorage::from(address))?;
    socket::listen(&listener, Backlog::new(BACKLOG)?)?;
    Ok(listener)
}

fn bound_port(listener: &OwnedFd) -> nix::Result<u16> {
    let bound: SockaddrStorage = socket::getsockname(listener.as_raw_fd())?;
    let port = bound.as_sockaddr_in().map(|v4| v4.port());
    port.or_else(|| bound.as_sockaddr_in6().map(|v6| v6.port())).ok_or(Errno::EAFNOSUPPORT)
}

/// Connects, within a few seconds and before the deadline.
pub(super) fn connect(address: SocketAddr, deadline: &Deadline<'_>) -> Result<nix::Result<OwnedFd>> {
    let stream = match new_socket(&address) {
        Ok(stream) => stream,
        Err(errno) => return Ok(Err(errno)),
    };
    let address = SockaddrStorage::from(address);
    match uninterrupted(|| socket::connect(stream.as_raw_fd(), &address)) {
        Ok(()) => {}
        Err(Errno::EINPROGRESS | Errno::EALREADY) => {
            let is_late = || deadline.has_passed();
            let attempt = Deadline::unless(ATTEMPT, &is_late);
            if !poll_until(&mut [PollFd::new(stream.as_fd(), PollFlags::POLLOUT)], &attempt)? {
                return Ok(Err(Errno::ETIMEDOUT));
            }
        }
        Err(errno) => return Ok(Err(errno)),
    }
    Ok(connected(&stream).map(|()| stream))
}

/// Checks that a connection was made, and not with itself.
fn connected(stream: &OwnedFd) -> nix::Result<()> {
    match socket::getsockopt(stream, SocketError)? {
        0 => {}
        errno => return Err(Errno::from_raw(errno)),
    }
    // If nobody listens at a port of the range from which the kernel takes ports for connections, it may choose that
    // port for this end, and connect the socket with itself.
    let own: SockaddrStorage = socket::getsockname(stream.as_raw_fd())?;
    let peer: SockaddrStorage = socket::getpeername(stream.as_raw_fd())?;
    if own == peer {
        return Err(Errno::ECONNREFUSED);
    }
    prepare(stream)
}

/// Sets the options of a connection: short messages leave at once, and a silent end is noticed.
pub(super) fn prepare(stream: &OwnedFd) -> nix::Result<()> {
    socket::setsockopt(stream, TcpNoDelay, &true)?;
    socket::setsockopt(stream, KeepAlive, &true)?;
    socket::setsockopt(stream, TcpKeepIdle, &5)?;
    socket::setsockopt(stream, TcpKeepInterval, &2)?;
    socket::setsockopt(stream, TcpKeepCount, &3)?;
    socket::setsockopt(stream, TcpUserTimeout, &(SILENCE.as_millis() as u32))
}
