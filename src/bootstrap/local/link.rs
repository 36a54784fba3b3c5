//! A nonblocking connection that carries frames. It buffers unsent frames and incomplete received ones.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{recv, send, shutdown, MsgFlags, Shutdown};

use super::super::socket::uninterrupted;
use super::message::{first_body, frame_length, Malformed};
use crate::fork::ForkCheck;

/// Maximum number of bytes received at a time, so that one connection does not delay the others.
const CHUNK: usize = 64 << 10;

/// The connection has ended: the other end closed it, or an error occurred.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Closed(Option<Errno>);

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("its connection closed"),
            Some(errno) => write!(f, "its connection failed: {errno}"),
        }
    }
}

#[derive(Debug)]
pub(super) struct Link {
    stream: OwnedFd,
    received: Vec<u8>,
    /// Frames to send, shared between links that send equal frames. The first may be partly sent.
    unsent: VecDeque<Arc<[u8]>>,
    sent_of_first: usize,
    fork_check: ForkCheck,
}

impl Link {
    pub(super) fn new(stream: OwnedFd) -> Self {
        Self {
            stream,
            received: Vec::new(),
            unsent: VecDeque::new(),
            sent_of_first: 0,
            fork_check: ForkCheck::new(),
        }
    }

    /// Returns what to poll for: always reading, and writing if there are unsent frames.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        let writes = if self.unsent.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
        PollFd::new(self.stream.as_fd(), PollFlags::POLLIN | writes)
    }

    /// Queues `frame`, and sends as much of the queue as is possible without waiting.
    pub(super) fn send(&mut self, frame: Arc<[u8]>) {
        self.unsent.push_back(frame);
        self.flush();
    }

    /// Sends as much of the queue as is possible without waiting.
    ///
    /// If the connection has failed, the queue is dropped without an error: messages received before are still to be
    /// read, and [`Link::fill`] reports the end after them.
    pub(super) fn flush(&mut self) {
        while let Some(frame) = self.unsent.front() {
            let rest = &frame[self.sent_of_first..];
            match uninterrupted(|| send(self.stream.as_raw_fd(), rest, MsgFlags::MSG_NOSIGNAL)) {
                Ok(sent) if sent < rest.len() => self.sent_of_first += sent,
                Ok(_) => {
                    self.unsent.pop_front();
                    self.sent_of_first = 0;
                }
                Err(Errno::EAGAIN) => return,
                Err(_) => self.unsent.clear(),
            }
        }
    }

    /// Receives what has arrived, up to `CHUNK`, without waiting.
    pub(super) fn fill(&mut self) -> Result<(), Closed> {
        let mut chunk = [0; CHUNK];
        match uninterrupted(|| recv(self.stream.as_raw_fd(), &mut chunk, MsgFlags::empty())) {
            Ok(0) => Err(Closed(None)),
            Ok(length) => {
                self.received.extend_from_slice(&chunk[..length]);
                Ok(())
            }
            Err(Errno::EAGAIN) => Ok(()),
            Err(errno) => Err(Closed(Some(errno))),
        }
    }

    /// Returns the body of the next complete frame, if there is one.
    pub(super) fn next(&mut self, limit: usize) -> Result<Option<Vec<u8>>, Malformed> {
        let Some(body) = first_body(&self.received, limit)? else {
            return Ok(None);
        };
        let (length, body) = (frame_length(body), body.to_vec());
        self.received.drain(..length);
        Ok(Some(body))
    }
}

impl Drop for Link {
    /// Shuts the connection down, even if a fork of this process also holds it. In a fork, it only closes the
    /// descriptor.
    fn drop(&mut self) {
        if !self.fork_check.in_fork() {
            // An error means that the connection has ended already.
            let _ = shutdown(self.stream.as_raw_fd(), Shutdown::Both);
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::{Reply, Request};
    use super::*;
    use nix::sys::socket::{socketpair, AddressFamily, SockFlag, SockType};

    fn pair() -> (Link, Link) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (one, other) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags).unwrap();
        (Link::new(one), Link::new(other))
    }

    #[test]
    fn frames_larger_than_the_socket_arrive_whole_and_in_order() {
        let (mut one, mut other) = pair();
        let sizes = [3 << 20, 0, 1, 700_000];
        for (sequence, size) in sizes.iter().enumerate() {
            let bytes = vec![sequence as u8; *size];
            one.send(Request::Gather { sequence: sequence as u64, bytes }.frame().into());
        }
        assert!(!one.unsent.is_empty(), "the frames are larger than the socket's buffer");
        let mut bodies = Vec::new();
        while bodies.len() < sizes.len() {
            one.flush();
            other.fill().unwrap();
            bodies.extend(other.next(usize::MAX).unwrap());
        }
        for (sequence, (body, size)) in bodies.iter().zip(sizes).enumerate() {
            let bytes = vec![sequence as u8; size];
            assert_eq!(Request::decode(body), Ok(Request::Gather { sequence: sequence as u64, bytes }));
        }
    }

    #[test]
    fn messages_sent_before_the_end_are_received() {
        let (mut one, mut other) = pair();
        other.send(Request::GiveUp { sequence: 1 }.frame().into());
        let last = Reply::Refused { reason: "why".into() };
        one.send(last.frame().into());
        drop(one);
        other.send(Request::GiveUp { sequence: 2 }.frame().into());
        other.fill().unwrap();
        assert_eq!(Reply::decode(&other.next(64).unwrap().unwrap()), Ok(last));
        other.fill().unwrap_err();
    }
}
