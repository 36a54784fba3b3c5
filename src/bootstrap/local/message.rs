//! What ranks and the rendezvous say to each other, and its form in bytes.
//!
//! A frame is the length of its body (32 bits, little-endian), then the body: one byte that tells the kind, then the fields as
//! [postcard] writes them. The functions that decode are pure, and check every length that they read.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::super::socket::Token;
use super::super::world::{Event, Failure};

/// Version of these messages, and of the unique id.
pub(super) const VERSION: u32 = 1;

/// Most bytes that a rank may give to one gather.
pub(super) const MAX_CONTRIBUTION: usize = 1 << 20;

/// Longest body that a connection may send before it has said who it is.
pub(super) const HELLO_LIMIT: usize = 64;

/// Longest body that a rank may send.
pub(super) const REQUEST_LIMIT: usize = MAX_CONTRIBUTION + 16;

const LENGTH_BYTES: usize = size_of::<u32>();

/// Longest body that the rendezvous sends to a rank.
pub(super) const fn reply_limit(world_size: usize) -> usize {
    world_size * (MAX_CONTRIBUTION + LENGTH_BYTES) + 4096
}

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Malformed {
    /// It ends before its last field does.
    Truncated,
    /// A number in it has more bits than it may have.
    Number,
    /// Bytes follow its last field.
    TrailingBytes,
    /// It is longer than it may be.
    TooLong { length: usize, limit: usize },
    /// No message is of this kind.
    UnknownKind(u8),
    /// The other side speaks another version.
    Version(u32),
    /// It lists more ranks than there can be.
    TooManyRanks(usize),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("the message is cut short"),
            Self::Number => f.write_str("the message has a number that is too large"),
            Self::TrailingBytes => f.write_str("the message has bytes after its end"),
            Self::TooLong { length, limit } => {
                write!(f, "the message has {length} bytes, at most {limit} may be")
            }
            Self::UnknownKind(kind) => write!(f, "no message is of kind {kind}"),
            Self::Version(theirs) => write!(f, "protocol version {theirs} met version {VERSION}"),
            Self::TooManyRanks(count) => write!(f, "the message lists {count} ranks"),
        }
    }
}

/// What a rank says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    /// The first message: who the rank is. Its version stands first, to be read in every version.
    Hello { token: Token, rank: usize, world_size: usize },
    /// The rank's bytes for gather `sequence`.
    Gather { sequence: u64, bytes: Vec<u8> },
    /// The rank's time is up; `sequence` is 0 while the world forms.
    GiveUp { sequence: u64 },
}

/// What the rendezvous says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    /// The sender does not belong to this world, or breaks its rules. The connection ends here.
    Refused { reason: String },
    /// What happened to the world.
    Event(Event),
}

const HELLO: u8 = 1;
const GATHER: u8 = 2;
const GIVE_UP: u8 = 3;

const REFUSED: u8 = 0x80;
const FORMED: u8 = 0x81;
const GATHERED: u8 = 0x82;
const TIMED_OUT: u8 = 0x83;
const LOST: u8 = 0x84;

impl Request {
    pub(super) fn frame(&self) -> Vec<u8> {
        match self {
            Self::Hello { token, rank, world_size } => {
                frame(HELLO, &(VERSION, token.as_bytes(), number(*rank), number(*world_size)))
            }
            Self::Gather { sequence, bytes } => frame(GATHER, &(sequence, Bytes(bytes))),
            Self::GiveUp { sequence } => frame(GIVE_UP, sequence),
        }
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let (&kind, fields) = body.split_first().ok_or(Malformed::Truncated)?;
        match kind {
            HELLO => {
                let (version, fields) = first::<u32>(fields)?;
                if version != VERSION {
                    return Err(Malformed::Version(version));
                }
                let (token, rank, world_size) = all(fields)?;
                Ok(Self::Hello {
                    token: Token::from_bytes(token),
                    rank: size(rank),
                    world_size: size(world_size),
                })
            }
            GATHER => {
                let (sequence, bytes): (_, &[u8]) = all(fields)?;
                Ok(Self::Gather { sequence, bytes: bytes.to_vec() })
            }
            GIVE_UP => Ok(Self::GiveUp { sequence: all(fields)? }),
            kind => Err(Malformed::UnknownKind(kind)),
        }
    }
}

impl Reply {
    pub(super) fn frame(&self) -> Vec<u8> {
        match self {
            Self::Refused { reason } => frame(REFUSED, &Bytes(reason.as_bytes())),
            Self::Event(Event::Formed) => frame(FORMED, &()),
            Self::Event(Event::Gathered { sequence, parts }) => {
                frame(GATHERED, &(sequence, parts.iter().map(|part| Bytes(part)).collect::<Vec<_>>()))
            }
            Self::Event(Event::Failed(Failure::TimedOut { sequence, by, missing })) => {
                let missing: Vec<_> = missing.iter().copied().map(number).collect();
                frame(TIMED_OUT, &(sequence, number(*by), missing))
            }
            Self::Event(Event::Failed(Failure::Lost { rank, reason })) => {
                frame(LOST, &(number(*rank), Bytes(reason.as_bytes())))
            }
        }
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let (&kind, fields) = body.split_first().ok_or(Malformed::Truncated)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match kind {
            REFUSED => Ok(Self::Refused { reason: text(all(fields)?) }),
            FORMED => all(fields).map(|()| Self::Event(Event::Formed)),
            GATHERED => {
                let (sequence, fields) = first(fields)?;
                let parts = list(fields)?.into_iter().map(<[u8]>::to_vec).collect();
                Ok(Self::Event(Event::Gathered { sequence, parts }))
            }
            TIMED_OUT => {
                let ((sequence, by), fields) = first(fields)?;
                let missing = list(fields)?.into_iter().map(size).collect();
                Ok(Self::Event(Event::Failed(Failure::TimedOut { sequence, by: size(by), missing })))
            }
            LOST => {
                let (rank, reason) = all(fields)?;
                Ok(Self::Event(Event::Failed(Failure::Lost { rank: size(rank), reason: text(reason) })))
            }
            kind => Err(Malformed::UnknownKind(kind)),
        }
    }
}

/// A frame with a kind and its fields.
fn frame(kind: u8, fields: &impl Serialize) -> Vec<u8> {
    // Room for the length, which is known last.
    let mut frame = vec![0; LENGTH_BYTES];
    frame.push(kind);
    // It grows as it must, and the fields of these messages all have a form: nothing can fail.
    let mut frame = postcard::to_extend(fields, frame).unwrap_or_default();
    if let Some((length, body)) = frame.split_first_chunk_mut() {
        *length = number(body.len()).to_le_bytes();
    }
    frame
}

/// The first of the fields, and the rest.
fn first<'a, T: Deserialize<'a>>(fields: &'a [u8]) -> Result<(T, &'a [u8]), Malformed> {
    postcard::take_from_bytes(fields).map_err(|error| match error {
        postcard::Error::DeserializeUnexpectedEnd => Malformed::Truncated,
        _ => Malformed::Number,
    })
}

/// All of the fields.
fn all<'a, T: Deserialize<'a>>(fields: &'a [u8]) -> Result<T, Malformed> {
    match first(fields)? {
        (value, []) => Ok(value),
        _ => Err(Malformed::TrailingBytes),
    }
}

/// The last of the fields, with a value for each of some ranks. Their number is checked before anything is stored.
fn list<'a, T: Deserialize<'a>>(fields: &'a [u8]) -> Result<Vec<T>, Malformed> {
    let (count, mut rest) = first(fields).map(|(count, rest)| (size(count), rest))?;
    if count > crate::abi::MAX_RANKS {
        return Err(Malformed::TooManyRanks(count));
    }
    let mut values = Vec::with_capacity(count);
    for _ in 0..count {
        let (value, after) = first(rest)?;
        values.push(value);
        rest = after;
    }
    all(rest).map(|()| values)
}

/// A rank, a count or a length as it is sent. None above 32 bits exists; such a one is sent as one that cannot be.
fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// The same as it is used. Too large for a usize is too large for anything.
fn size(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Bytes that are copied as a whole, as they are read.
struct Bytes<'a>(&'a [u8]);

impl Serialize for Bytes<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

/// The body of the first frame in `buffer`, if it is there as a whole. Bodies longer than `limit` are refused
/// as soon as their length is known. The frame takes up [`frame_length`] bytes.
pub(super) fn first_body(buffer: &[u8], limit: usize) -> Result<Option<&[u8]>, Malformed> {
    let Some((length, rest)) = buffer.split_first_chunk() else {
        return Ok(None);
    };
    let length = size(u32::from_le_bytes(*length));
    if length > limit {
        return Err(Malformed::TooLong { length, limit });
    }
    Ok(rest.get(..length))
}

/// Bytes of the frame around `body`.
pub(super) const fn frame_length(body: &[u8]) -> usize {
    LENGTH_BYTES + body.len()
}

#[cfg(test)]
mod tests;
