//! A nonblocking connection that carries frames. It buffers unsent frames and incomplete received ones.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::poll::{poll, PollFd, PollFlags};
use nix::sys::socket::{recv, send, shutdown, MsgFlags, Shutdown};

use super::super::socket::uninterrupted;
use super::message::{first_body, frame_length, Malformed};
use crate::descriptor::pidfd;
use crate::fork::ForkCheck;

/// Maximum number of bytes received at a time: on the stack, which is small in some threads, and so that one connection
/// does not delay the others.
const CHUNK: usize = 8 << 10;

/// The connection has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::bootstrap) enum Closed {
    /// The other end closed it.
    End,
    Failed(Errno),
    /// The process at the other end has ended; a fork of it may still hold the connection.
    ProcessEnded,
    /// The layer does not accept what has arrived.
    Refused(String),
}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::End => f.write_str("its connection closed"),
            Self::Failed(errno) => write!(f, "its connection failed: {errno}"),
            Self::ProcessEnded => f.write_str("its process ended"),
            Self::Refused(reason) => f.write_str(reason),
        }
    }
}

/// Converts the bytes of a connection, such as by encryption.
pub(in crate::bootstrap) trait Layer: Send {
    /// Takes bytes that have arrived. Appends the frames' bytes to `received`, and to `outgoing` what the layer itself
    /// sends in answer. An error is the reason why the connection ends; `outgoing` is sent before.
    fn arrived(
        &mut self,
        bytes: &[u8],
        received: &mut Vec<u8>,
        outgoing: &mut Vec<u8>,
    ) -> std::result::Result<(), String>;

    /// Converts the first bytes of a frame and appends them to `outgoing`. Returns how many these are: 0 if the layer
    /// cannot send frames yet.
    fn convert(&mut self, frame: &[u8], outgoing: &mut Vec<u8>) -> usize;

    /// Returns whether it can convert frames.
    fn is_ready(&self) -> bool;

    /// Returns whether the other end has proven that it is in this process.
    fn is_same_process(&self) -> bool;
}

pub(in crate::bootstrap) struct Link {
    stream: OwnedFd,
    /// Pidfd of the process at the other end; `None` if there is none, or after the process has ended.
    process: Option<OwnedFd>,
    layer: Option<Box<dyn Layer>>,
    /// With a layer: converted bytes that are not sent yet, and how many of them are.
    outgoing: Vec<u8>,
    sent_of_outgoing: usize,
    received: Vec<u8>,
    /// Frames to send, shared between links that send equal frames. The first may be partly sent.
    unsent: VecDeque<Arc<[u8]>>,
    sent_of_first: usize,
    /// Why this end has shut the connection down.
    failure: Option<Closed>,
    fork_check: ForkCheck,
}

impl Link {
    pub(in crate::bootstrap) fn new(stream: OwnedFd) -> Self {
        Self {
            stream,
            process: None,
            layer: None,
            outgoing: Vec::new(),
            sent_of_outgoing: 0,
            received: Vec::new(),
            unsent: VecDeque::new(),
            sent_of_first: 0,
            failure: None,
            fork_check: ForkCheck::new(),
        }
    }

    /// Makes the connection end when the process at its other end does, even if a fork of that process holds it.
    ///
    /// `process` is from the kernel's credentials of the connection: the process that connected or listened. If it has
    /// already ended and another process has its id, the end of that one ends a connection that is dead anyway.
    pub(super) fn of_process(mut self, process: libc::pid_t) -> Self {
        // 0: it is not visible in this process's namespace. This process need not watch itself.
        let process = u32::try_from(process).ok().filter(|&id| id != 0 && id != std::process::id());
        self.process = process.and_then(pidfd);
        self
    }

    /// Returns what to poll for besides [`Link::poll_fd`]: the end of the process, which [`Link::fill`] notices.
    pub(super) fn process_fd(&self) -> Option<PollFd<'_>> {
        self.process.as_ref().map(|process| PollFd::new(process.as_fd(), PollFlags::POLLIN))
    }

    /// Returns the connection with a layer, which sends `first` before any frame.
    #[cfg(feature = "tcp")]
    pub(in crate::bootstrap) fn with_layer(mut self, layer: Box<dyn Layer>, first: Vec<u8>) -> Self {
        self.layer = Some(layer);
        self.outgoing = first;
        self.flush();
        self
    }

    /// Returns whether the layer can convert frames.
    pub(in crate::bootstrap) fn is_ready(&self) -> bool {
        self.layer.as_ref().is_none_or(|layer| layer.is_ready())
    }

    /// Returns whether the layer says that the other end is in this process.
    pub(super) fn is_same_process(&self) -> bool {
        self.layer.as_ref().is_some_and(|layer| layer.is_same_process())
    }

    /// Returns what to poll for: always reading, and writing if there are unsent bytes.
    pub(in crate::bootstrap) fn poll_fd(&self) -> PollFd<'_> {
        // Frames that the layer cannot send yet wait for bytes to arrive.
        let is_empty = match self.layer {
            Some(_) => self.outgoing.is_empty(),
            None => self.unsent.is_empty(),
        };
        let writes = if is_empty { PollFlags::empty() } else { PollFlags::POLLOUT };
        PollFd::new(self.stream.as_fd(), PollFlags::POLLIN | writes)
    }

    /// Queues `frame`, and sends as much of the queue as is possible without waiting.
    pub(in crate::bootstrap) fn send(&mut self, frame: Arc<[u8]>) {
        self.unsent.push_back(frame);
        self.flush();
    }

    /// Sends as much of the queue as is possible without waiting.
    ///
    /// If that fails, the queue is dropped and the connection ends. What has arrived is still to be read; then
    /// [`Link::fill`] reports the failure.
    pub(in crate::bootstrap) fn flush(&mut self) {
        if self.layer.is_some() {
            return self.flush_layer();
        }
        while let Some(frame) = self.unsent.front() {
            let rest = &frame[self.sent_of_first..];
            match uninterrupted(|| send(self.stream.as_raw_fd(), rest, MsgFlags::MSG_NOSIGNAL)) {
                Ok(sent) if sent < rest.len() => self.sent_of_first += sent,
                Ok(_) => {
                    self.unsent.pop_front();
                    self.sent_of_first = 0;
                }
                Err(Errno::EAGAIN) => return,
                Err(errno) => self.end(Closed::Failed(errno)),
            }
        }
    }

    /// Ends the connection on both ends, unless the other end has ended it. What has arrived can still be read.
    fn end(&mut self, why: Closed) {
        self.unsent.clear();
        if matches!(why, Closed::Failed(Errno::EPIPE | Errno::ECONNRESET)) {
            return;
        }
        self.failure.get_or_insert(why);
        // An error means that the connection has ended already.
        let _ = shutdown(self.stream.as_raw_fd(), Shutdown::Both);
    }

    /// Frames are converted as late as possible: until then, links that send equal frames share them.
    fn flush_layer(&mut self) {
        let Some(layer) = &mut self.layer else { return };
        loop {
            let rest = &self.outgoing[self.sent_of_outgoing..];
            if !rest.is_empty() {
                match uninterrupted(|| send(self.stream.as_raw_fd(), rest, MsgFlags::MSG_NOSIGNAL)) {
                    Ok(sent) => self.sent_of_outgoing += sent,
                    Err(Errno::EAGAIN) => return,
                    Err(errno) => {
                        self.outgoing.clear();
                        self.sent_of_outgoing = 0;
                        return self.end(Closed::Failed(errno));
                    }
                }
                continue;
            }
            self.outgoing.clear();
            self.sent_of_outgoing = 0;
            let Some(frame) = self.unsent.front() else { return };
            match layer.convert(&frame[self.sent_of_first..], &mut self.outgoing) {
                0 => return,
                converted => self.sent_of_first += converted,
            }
            if self.sent_of_first == frame.len() {
                self.unsent.pop_front();
                self.sent_of_first = 0;
            }
        }
    }

    /// Ends the connection if the process at its other end has ended.
    fn notice_end(&mut self) {
        let Some(process) = self.process_fd() else { return };
        let mut polled = [process];
        if !matches!(poll(&mut polled, 0u8), Ok(1..)) {
            return;
        }
        let has_ended = polled[0].revents().is_some_and(|events| events.contains(PollFlags::POLLIN));
        // Otherwise the program has closed the descriptor.
        self.process = None;
        if has_ended {
            self.end(Closed::ProcessEnded);
        }
    }

    /// Receives what has arrived, up to `CHUNK`, without waiting.
    pub(in crate::bootstrap) fn fill(&mut self) -> Result<(), Closed> {
        self.notice_end();
        let mut chunk = [0; CHUNK];
        match uninterrupted(|| recv(self.stream.as_raw_fd(), &mut chunk, MsgFlags::empty())) {
            Ok(0) => Err(self.failure.clone().unwrap_or(Closed::End)),
            Ok(length) => {
                let Some(layer) = &mut self.layer else {
                    self.received.extend_from_slice(&chunk[..length]);
                    return Ok(());
                };
                let arrived = layer.arrived(&chunk[..length], &mut self.received, &mut self.outgoing);
                self.flush_layer();
                arrived.map_err(Closed::Refused)
            }
            Err(Errno::EAGAIN) => Ok(()),
            Err(errno) => Err(Closed::Failed(errno)),
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
    fn a_sandbox_that_forbids_sending_ends_the_connection_after_what_has_arrived() {
        let (mut one, mut other) = pair();
        let last = Reply::Refused { reason: "why".into() };
        other.send(last.frame().into());
        let mut one = std::thread::scope(|scope| {
            let sending = scope.spawn(move || {
                crate::thread::tests::forbid(libc::SYS_sendto);
                one.send(Request::GiveUp { sequence: 1 }.frame().into());
                one
            });
            sending.join().unwrap()
        });
        one.fill().unwrap();
        assert_eq!(Reply::decode(&one.next(64).unwrap().unwrap()), Ok(last));
        assert_eq!(one.fill(), Err(Closed::Failed(Errno::EPERM)));
        assert_eq!(other.fill(), Err(Closed::End));
    }

    #[test]
    fn a_connection_ends_with_the_process_though_another_holds_it() {
        let (one, mut other) = pair();
        let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut one = one.of_process(process.id() as i32);
        let last = Reply::Refused { reason: "why".into() };
        other.send(last.frame().into());
        assert_eq!(one.next(64), Ok(None));
        process.kill().unwrap();
        poll(&mut [one.process_fd().unwrap()], nix::poll::PollTimeout::NONE).unwrap();
        one.fill().unwrap();
        assert_eq!(Reply::decode(&one.next(64).unwrap().unwrap()), Ok(last));
        assert_eq!(one.fill(), Err(Closed::ProcessEnded));
        assert_eq!(other.fill(), Err(Closed::End));
        process.wait().unwrap();
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
