//! One exchange: each rank sends its part to every other, so that each knows by itself who is missing.

use std::sync::Arc;
use std::time::Duration;

use super::channel::{Channel, Pause, Receiving, Sending, Tag};
use super::library::{turn, Turn};
use crate::bootstrap::world::Failure;
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Most bytes that a rank gives to one gather.
pub(super) const MAX_CONTRIBUTION: usize = 1 << 20;

/// Before a part: the number of its exchange.
pub(super) const HEADER_BYTES: usize = size_of::<u64>();

/// Gives `bytes` to every rank of the channel and returns every rank's. The first exchange of a channel is number 1.
///
/// A rank that gives up says so to all others, which then do not wait any longer.
pub(super) fn gather(
    channel: &Channel,
    sequence: u64,
    bytes: &[u8],
    deadline: &Deadline<'_>,
) -> Result<Vec<Vec<u8>>> {
    let message = Arc::new(message(sequence, |message| message.extend(bytes)));
    let messages = vec![message; channel.size()];
    let limits = Limits { bytes: MAX_CONTRIBUTION, busy: Duration::from_micros(100), deadline };
    let mut parts = exchange(channel, sequence, messages, &limits)?;
    parts.iter_mut().for_each(|part| drop(part.drain(..HEADER_BYTES)));
    Ok(parts)
}

/// A message of the exchange of that number, of which `fill` adds what it carries.
pub(super) fn message(sequence: u64, fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut message = sequence.to_le_bytes().to_vec();
    fill(&mut message);
    message
}

/// What an exchange may take.
pub(super) struct Limits<'a> {
    /// Most bytes that a message carries.
    pub bytes: usize,
    /// How long to look without a break.
    pub busy: Duration,
    pub deadline: &'a Deadline<'a>,
}

/// Gives each rank of the channel a message of its own, made by [`message`], and returns what each has for this one: with the
/// [header](HEADER_BYTES) before it.
///
/// A rank that gives up says so to all others, which then do not wait any longer.
pub(super) fn exchange(
    channel: &Channel,
    sequence: u64,
    messages: Vec<Arc<Vec<u8>>>,
    limits: &Limits<'_>,
) -> Result<Vec<Vec<u8>>> {
    let mut exchange = Exchange::start(channel, sequence, messages, limits.bytes)?;
    exchange.finish(limits).inspect_err(|error| {
        let failure = match error {
            Error::Timeout { missing, .. } => {
                Failure::TimedOut { sequence, by: channel.rank(), missing: missing.clone() }
            }
            // Whoever said so has told all others too.
            Error::PeerLost { .. } => return,
            error => Failure::Lost { rank: channel.rank(), reason: error.to_string() },
        };
        // Those who do not hear of it run into their own limits.
        let _ = notify(channel, &failure);
    })
}

struct Exchange<'a> {
    channel: &'a Channel,
    sequence: u64,
    most_bytes: usize,
    /// By rank; nothing at the own.
    sending: Vec<Option<Sending>>,
    parts: Vec<Part>,
}

/// What a rank gives.
enum Part {
    Awaited,
    Arriving(Receiving),
    Here(Vec<u8>),
}

impl<'a> Exchange<'a> {
    fn start(
        channel: &'a Channel,
        sequence: u64,
        mut messages: Vec<Arc<Vec<u8>>>,
        most_bytes: usize,
    ) -> Result<Self> {
        let own = messages[channel.rank()].to_vec();
        let turn = turn()?;
        let mut sending = Vec::with_capacity(channel.size());
        for (peer, message) in messages.drain(..).enumerate() {
            let is_own = peer == channel.rank();
            sending.push((!is_own).then(|| channel.send(peer, Tag::Part, &message, &turn)).transpose()?);
        }
        let mut parts: Vec<_> = (0..channel.size()).map(|_| Part::Awaited).collect();
        parts[channel.rank()] = Part::Here(own);
        Ok(Self { channel, sequence, most_bytes, sending, parts })
    }

    fn finish(&mut self, &Limits { busy, deadline, .. }: &Limits<'_>) -> Result<Vec<Vec<u8>>> {
        let mut pause = Pause::after(busy);
        loop {
            // Asked before looking, so that the last look comes after the limit.
            let is_late = deadline.has_passed();
            let missing = self.progress(&turn()?, deadline)?;
            if missing.is_empty() {
                let part = |part: &mut Part| match part {
                    Part::Here(bytes) => std::mem::take(bytes),
                    Part::Awaited | Part::Arriving(_) => Vec::new(),
                };
                return Ok(self.parts.iter_mut().map(part).collect());
            }
            if is_late {
                let waited = deadline.waited();
                let last_seen = String::new();
                return Err(Error::Timeout { operation: "all_gather", epoch: 0, missing, waited, last_seen });
            }
            pause.take();
        }
    }

    /// Goes as far as it can without waiting; returns the ranks that are not done.
    fn progress(&mut self, turn: &Turn, deadline: &Deadline<'_>) -> Result<Vec<usize>> {
        let mut missing = Vec::new();
        for peer in 0..self.channel.size() {
            if let Some(sending) = &mut self.sending[peer] {
                if sending.has_ended(turn)? {
                    self.sending[peer] = None;
                }
            }
            if !self.is_here(peer, turn)? || self.sending[peer].is_some() {
                missing.push(peer);
            }
        }
        // Last what others say: who has given up is not there for the part that it sent before, and the looks at the parts
        // have let MPI take in what followed them.
        if let Some((from, length)) = self.channel.arrived(None, Tag::Notice, turn)? {
            let failure = receive_notice(self.channel, from, length, turn)?;
            return Err(failure.to_error(self.channel.rank(), deadline.waited()));
        }
        Ok(missing)
    }

    fn is_here(&mut self, peer: usize, turn: &Turn) -> Result<bool> {
        let part = &mut self.parts[peer];
        if let Part::Awaited = part {
            let Some((_, length)) = self.channel.arrived(Some(peer), Tag::Part, turn)? else {
                return Ok(false);
            };
            if !(HEADER_BYTES..=HEADER_BYTES + self.most_bytes).contains(&length) {
                let reason = format!("its part of a gather has {length} bytes");
                return Err(Error::Malformed { rank: peer, reason });
            }
            *part = Part::Arriving(self.channel.receive(peer, Tag::Part, length, turn)?);
        }
        if let Part::Arriving(receiving) = part {
            let Some(message) = receiving.take(turn)? else {
                return Ok(false);
            };
            if !message.starts_with(&self.sequence.to_le_bytes()) {
                let reason = format!("it is at another gather than this rank, which is at {}", self.sequence);
                return Err(Error::Malformed { rank: peer, reason });
            }
            *part = Part::Here(message);
        }
        Ok(true)
    }
}

/// Tells all others that this rank waits no longer.
fn notify(channel: &Channel, failure: &Failure) -> Result<()> {
    const PATIENCE: Duration = Duration::from_millis(100);
    let message = Arc::new(encode(failure));
    let mut sending = Vec::new();
    for peer in (0..channel.size()).filter(|&peer| peer != channel.rank()) {
        sending.push(channel.send(peer, Tag::Notice, &message, &turn()?)?);
    }
    let (deadline, mut pause) = (Deadline::after(PATIENCE), Pause::short());
    while !sending.is_empty() && !deadline.has_passed() {
        let turn = turn()?;
        // What cannot be tested is dropped as it is.
        sending.retain_mut(|sending| !sending.has_ended(&turn).unwrap_or(false));
        drop(turn);
        pause.take();
    }
    Ok(())
}

fn receive_notice(channel: &Channel, from: usize, length: usize, turn: &Turn) -> Result<Failure> {
    const MAX_NOTICE: usize = 64 << 10;
    let malformed = |reason: &str| Error::Malformed { rank: from, reason: reason.into() };
    if length > MAX_NOTICE {
        return Err(malformed("its notice is too long"));
    }
    let mut receiving = channel.receive(from, Tag::Notice, length, turn)?;
    let (deadline, mut pause) = (Deadline::after(Duration::from_secs(2)), Pause::short());
    loop {
        let is_late = deadline.has_passed();
        if let Some(bytes) = receiving.take(turn)? {
            return decode(&bytes).ok_or_else(|| malformed("its notice does not decode"));
        }
        if is_late {
            let reason = "it gave up, and did not come to say why".into();
            return Ok(Failure::Lost { rank: from, reason });
        }
        pause.take();
    }
}

/// As [postcard] writes it, with a reason that is cut where it is too long.
fn encode(failure: &Failure) -> Vec<u8> {
    const LONGEST_REASON: usize = 1000;
    let mut failure = failure.clone();
    if let Failure::Lost { reason, .. } = &mut failure {
        let end = (0..=reason.len().min(LONGEST_REASON)).rev().find(|&end| reason.is_char_boundary(end));
        reason.truncate(end.unwrap_or(0));
    }
    // It grows as it must, and every failure has a form: nothing can fail.
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
    fn notices_are_what_was_sent_or_nothing() {
        let reason = "no memory".to_owned();
        let notices = [
            Failure::TimedOut { sequence: 7, by: 3, missing: vec![0, 15] },
            Failure::TimedOut { sequence: u64::MAX, by: 0, missing: vec![1] },
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
