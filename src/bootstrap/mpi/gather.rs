//! One exchange: each rank sends a message to every other rank, and so finds missing ranks by itself.

use std::sync::Arc;
use std::time::Duration;

use super::channel::{Channel, Pause, Receiving, Sending, Tag, SEGMENT_BYTES};
use super::library::{lock, MpiLock};
use crate::bootstrap::world_state::Failure;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Maximum number of bytes that a rank contributes to one gather.
pub(super) const MAX_CONTRIBUTION: usize = 1 << 20;

/// Size of the header of a message: the number of its exchange, and its length with the header.
pub(super) const HEADER_BYTES: usize = 2 * size_of::<u64>();

/// Sends `bytes` to every rank of the channel, and returns the bytes of every rank. The first exchange of a channel has
/// number 1.
///
/// A rank that gives up notifies all others, which then give up as well.
pub(super) fn gather(
    channel: &Channel,
    sequence: u64,
    bytes: &[u8],
    deadline: &Deadline<'_>,
) -> Result<Vec<Vec<u8>>> {
    let mut spare = Spare::default();
    let message = spare.message(sequence, |message| message.extend(bytes));
    let messages = vec![message; channel.size()];
    let limits = Limits { bytes: MAX_CONTRIBUTION, busy: Duration::from_micros(100), deadline };
    let parts = Exchange::start(channel, sequence, messages)?.finish(channel, &limits, &mut spare)?;
    Ok(parts.iter().map(|part| part[HEADER_BYTES..].to_vec()).collect())
}

/// Memory of messages that have been sent or received, for later ones: new memory costs a page fault for each page.
#[derive(Default)]
pub(super) struct Spare(Vec<Vec<u8>>);

impl Spare {
    /// Builds a message: the header, then what `fill` appends.
    pub(super) fn message(&mut self, sequence: u64, fill: impl FnOnce(&mut Vec<u8>)) -> Arc<Vec<u8>> {
        let mut message = self.take();
        message.clear();
        message.extend([0; HEADER_BYTES]);
        fill(&mut message);
        let length = message.len() as u64;
        message[..HEADER_BYTES].copy_from_slice([sequence, length].map(u64::to_le_bytes).as_flattened());
        Arc::new(message)
    }

    fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_default()
    }

    /// Keeps the memory of a message that nobody else has.
    pub(super) fn put(&mut self, message: Arc<Vec<u8>>) {
        self.0.extend(Arc::try_unwrap(message));
    }
}

/// Limits of an exchange.
pub(super) struct Limits<'a> {
    /// Maximum number of bytes of a message, without its header.
    pub bytes: usize,
    /// How long to poll without sleeping.
    pub busy: Duration,
    pub deadline: &'a Deadline<'a>,
}

/// An exchange that has been started: one message to each rank of the channel, and one from each.
pub(super) struct Exchange {
    sequence: u64,
    /// Messages being sent, by rank; `None` for this rank.
    sending: Vec<Option<Sending>>,
    parts: Vec<Part>,
}

/// The message from one rank.
enum Part {
    Awaited,
    /// Its first segment, of this length, or all others.
    Arriving(Receiving, Option<usize>),
    Arrived(Arc<Vec<u8>>),
}

impl Exchange {
    /// Starts to send one message, built by [`Spare::message`], to each rank of the channel.
    pub(super) fn start(channel: &Channel, sequence: u64, mut messages: Vec<Arc<Vec<u8>>>) -> Result<Self> {
        let own = Arc::clone(&messages[channel.rank()]);
        let lock = lock()?;
        let mut sending = Vec::with_capacity(channel.size());
        for (peer, message) in messages.drain(..).enumerate() {
            let is_own = peer == channel.rank();
            sending.push((!is_own).then(|| channel.send(peer, Tag::Part, &message, &lock)).transpose()?);
        }
        let mut parts: Vec<_> = (0..channel.size()).map(|_| Part::Awaited).collect();
        parts[channel.rank()] = Part::Arrived(own);
        Ok(Self { sequence, sending, parts })
    }

    /// Waits for the messages for this rank, and returns them with their headers.
    ///
    /// A rank that gives up notifies all others, which then give up as well.
    pub(super) fn finish(
        mut self,
        channel: &Channel,
        limits: &Limits<'_>,
        spare: &mut Spare,
    ) -> Result<Vec<Arc<Vec<u8>>>> {
        self.wait(channel, limits, spare).inspect_err(|error| {
            let failure = match error {
                Error::Timeout { missing, .. } => {
                    let (by, missing) = (channel.rank(), missing.clone());
                    Failure::TimedOut { sequence: self.sequence, by, missing, refused: String::new() }
                }
                // The rank that reported it has notified all others.
                Error::PeerLost { .. } => return,
                error => Failure::Lost { rank: channel.rank(), reason: error.to_string() },
            };
            // A rank that does not receive the notice gives up at its own limit.
            let _ = notify(channel, &failure);
        })
    }

    fn wait(
        &mut self,
        channel: &Channel,
        limits: &Limits<'_>,
        spare: &mut Spare,
    ) -> Result<Vec<Arc<Vec<u8>>>> {
        let (mut pause, deadline) = (Pause::after(limits.busy), limits.deadline);
        loop {
            // The deadline is checked first, so that the last attempt comes after the limit.
            let is_late = deadline.has_passed();
            let missing = self.progress(channel, &lock()?, limits, spare)?;
            if missing.is_empty() {
                let part = |part: Part| match part {
                    Part::Arrived(bytes) => bytes,
                    Part::Awaited | Part::Arriving(..) => Arc::default(),
                };
                return Ok(self.parts.drain(..).map(part).collect());
            }
            if is_late {
                let waited = deadline.waited();
                let last_seen = String::new();
                return Err(Error::Timeout { operation: "all_gather", epoch: 0, missing, waited, last_seen });
            }
            pause.take();
        }
    }

    /// Makes progress without waiting. Returns the ranks to or from which a message is not complete.
    fn progress(
        &mut self,
        channel: &Channel,
        lock: &MpiLock,
        limits: &Limits<'_>,
        spare: &mut Spare,
    ) -> Result<Vec<usize>> {
        let mut missing = Vec::new();
        for peer in 0..channel.size() {
            if let Some(sending) = &mut self.sending[peer] {
                if sending.has_completed(lock)? {
                    self.sending[peer] = None;
                }
            }
            if !self.has_arrived(channel, peer, lock, limits.bytes, spare)? || self.sending[peer].is_some() {
                missing.push(peer);
            }
        }
        // Notices are checked last: a rank that gave up may have sent its part before, and the probes for parts have
        // let MPI receive what follows them.
        if let Some((from, length)) = channel.arrived(None, Tag::Notice, lock)? {
            let failure = receive_notice(channel, from, length, lock)?;
            return Err(failure.to_error(channel.rank(), limits.deadline.waited()));
        }
        Ok(missing)
    }

    fn has_arrived(
        &mut self,
        channel: &Channel,
        peer: usize,
        lock: &MpiLock,
        max_bytes: usize,
        spare: &mut Spare,
    ) -> Result<bool> {
        let part = &mut self.parts[peer];
        if let Part::Awaited = part {
            let Some((_, length)) = channel.arrived(Some(peer), Tag::Part, lock)? else {
                return Ok(false);
            };
            if !(HEADER_BYTES..=SEGMENT_BYTES).contains(&length) {
                let reason = format!("its message in a gather begins with {length} bytes");
                return Err(Error::Malformed { rank: peer, reason });
            }
            let receiving = channel.receive(peer, Tag::Part, spare.take(), 0..length, lock)?;
            *part = Part::Arriving(receiving, Some(length));
        }
        while let Part::Arriving(receiving, first) = part {
            let Some(mut message) = receiving.take(lock)? else {
                return Ok(false);
            };
            let Some(first) = first.take() else {
                *part = Part::Arrived(Arc::new(message));
                break;
            };
            let length = check_header(&message, self.sequence, first, max_bytes)
                .map_err(|reason| Error::Malformed { rank: peer, reason })?;
            message.truncate(length);
            let rest = channel.receive(peer, Tag::Part, message, first..length, lock)?;
            *part = Part::Arriving(rest, None);
        }
        Ok(true)
    }
}

/// Checks the header of a message of which `first` bytes are here. Returns its length, or what is wrong with it.
fn check_header(
    message: &[u8],
    sequence: u64,
    first: usize,
    max_bytes: usize,
) -> std::result::Result<usize, String> {
    let (of, length) = message[..HEADER_BYTES].split_at(size_of::<u64>());
    if of != sequence.to_le_bytes() {
        return Err(format!("it is in another gather than this rank, which is in number {sequence}"));
    }
    let length = length.try_into().map_or(u64::MAX, u64::from_le_bytes);
    // The first segment is the whole message or as long as a segment can be.
    let whole = first as u64..=if first < SEGMENT_BYTES { first } else { HEADER_BYTES + max_bytes } as u64;
    if !whole.contains(&length) {
        return Err(format!(
            "its message in a gather has {length} bytes, of which the first {first} came together"
        ));
    }
    Ok(length as usize)
}

/// Notifies all other ranks that this rank has given up.
fn notify(channel: &Channel, failure: &Failure) -> Result<()> {
    const TIMEOUT: Duration = Duration::from_millis(100);
    let message = Arc::new(encode(failure));
    let mut sending = Vec::new();
    for peer in (0..channel.size()).filter(|&peer| peer != channel.rank()) {
        sending.push(channel.send(peer, Tag::Notice, &message, &lock()?)?);
    }
    let (deadline, mut pause) = (Deadline::after(TIMEOUT), Pause::short());
    while !sending.is_empty() && !deadline.has_passed() {
        let lock = lock()?;
        // A request whose test fails is kept, and abandoned after the timeout.
        sending.retain_mut(|sending| !sending.has_completed(&lock).unwrap_or(false));
        drop(lock);
        pause.take();
    }
    Ok(())
}

fn receive_notice(channel: &Channel, from: usize, length: usize, lock: &MpiLock) -> Result<Failure> {
    let malformed = |reason: &str| Error::Malformed { rank: from, reason: reason.into() };
    if length >= SEGMENT_BYTES {
        return Err(malformed("its notice is too long"));
    }
    let mut receiving = channel.receive(from, Tag::Notice, Vec::new(), 0..length, lock)?;
    let (deadline, mut pause) = (Deadline::after(Duration::from_secs(2)), Pause::short());
    loop {
        let is_late = deadline.has_passed();
        if let Some(bytes) = receiving.take(lock)? {
            return decode(&bytes).ok_or_else(|| malformed("its notice does not decode"));
        }
        if is_late {
            let reason = "it gave up, and its reason did not arrive".into();
            return Ok(Failure::Lost { rank: from, reason });
        }
        pause.take();
    }
}

/// Encodes a failure by [postcard], with its reason truncated to a maximum length.
fn encode(failure: &Failure) -> Vec<u8> {
    const LONGEST_REASON: usize = 1000;
    let mut failure = failure.clone();
    if let Failure::Lost { reason, .. } = &mut failure {
        let end = (0..=reason.len().min(LONGEST_REASON)).rev().find(|&end| reason.is_char_boundary(end));
        reason.truncate(end.unwrap_or(0));
    }
    // This cannot fail: the vector grows, and postcard can encode every failure.
    postcard::to_allocvec(&failure).unwrap_or_default()
}

fn decode(bytes: &[u8]) -> Option<Failure> {
    match postcard::take_from_bytes(bytes) {
        Ok((failure, [])) => Some(failure),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_decode_to_what_was_encoded_or_to_nothing() {
        let reason = "no memory".to_owned();
        let notices = [
            Failure::TimedOut { sequence: 7, by: 3, missing: vec![0, 15], refused: String::new() },
            Failure::TimedOut { sequence: u64::MAX, by: 0, missing: vec![1], refused: String::new() },
            Failure::Lost { rank: 2, reason },
        ];
        for notice in notices {
            let bytes = encode(&notice);
            assert_eq!(decode(&bytes).as_ref(), Some(&notice));
            for length in 0..bytes.len() {
                assert_eq!(decode(&bytes[..length]), None);
            }
            assert_eq!(decode(&[&bytes[..], &[0]].concat()), None);
        }
        // At most 1000 bytes, of whole characters.
        let long = encode(&Failure::Lost { rank: 0, reason: "€".repeat(400) });
        assert_eq!(decode(&long), Some(Failure::Lost { rank: 0, reason: "€".repeat(333) }));
        assert_eq!(decode(&[0xff; 40]), None);
    }
}
