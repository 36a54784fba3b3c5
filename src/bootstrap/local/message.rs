//! Messages between ranks and the rendezvous, and their encoding.
//!
//! A frame is the length of its body (32 bits, little-endian) and the body: one byte for the kind, and the fields as
//! [postcard] encodes them. Decoding functions are pure, and check every length that they read.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::super::socket::Token;
use super::super::world_state::{Event, Failure};

/// Version of these messages, and of the unique id.
pub(in crate::bootstrap) const VERSION: u32 = 1;

/// Maximum number of bytes that a rank contributes to one gather.
pub(in crate::bootstrap) const MAX_CONTRIBUTION: usize = 1 << 20;

/// Maximum number of ranks in any world, and of entries in a list.
pub(in crate::bootstrap) const MAX_WORLD: usize = 1024;

/// Maximum length of a body from a connection that has not identified itself.
pub(super) const HELLO_LIMIT: usize = 64;

/// Maximum length of a body from a rank.
pub(super) const REQUEST_LIMIT: usize = MAX_CONTRIBUTION + 16;

/// The rank that a spare asks for, of 0 ranks.
pub(super) const ANY_RANK: usize = u32::MAX as usize;

const LENGTH_BYTES: usize = size_of::<u32>();

/// Returns the maximum length of a body from the rendezvous.
pub(super) const fn reply_limit(world_size: usize) -> usize {
    world_size * (MAX_CONTRIBUTION + LENGTH_BYTES) + 4096
}

/// Why bytes are not a valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Malformed {
    /// The message ends before its last field.
    Truncated,
    /// A number in the message is too large for its type.
    Number,
    /// Bytes follow the last field.
    TrailingBytes,
    /// The message is longer than the limit.
    TooLong { length: usize, limit: usize },
    /// The kind is unknown.
    UnknownKind(u8),
    /// The other end uses another version of the protocol.
    Version(u32),
    /// The message lists more than [`MAX_WORLD`] ranks.
    TooManyRanks(usize),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("the message is truncated"),
            Self::Number => f.write_str("the message has a number that is too large"),
            Self::TrailingBytes => f.write_str("the message has bytes after its last field"),
            Self::TooLong { length, limit } => {
                write!(f, "the message has {length} bytes, but at most {limit} are allowed")
            }
            Self::UnknownKind(kind) => write!(f, "the message has the unknown kind {kind}"),
            Self::Version(theirs) => write!(f, "the message has protocol version {theirs}, not {VERSION}"),
            Self::TooManyRanks(count) => write!(f, "the message lists {count} ranks"),
        }
    }
}

/// A message from a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    /// The first message: identifies the rank, or asks for any place ([`ANY_RANK`]). Its first field is the version, so
    /// that any version can read it.
    Hello { token: Token, rank: usize, world_size: usize },
    /// The rank's contribution to gather `sequence`.
    Gather { sequence: u64, bytes: Vec<u8> },
    /// The rank's time limit has passed; `sequence` is 0 while the world forms.
    GiveUp { sequence: u64 },
}

/// A message from the rendezvous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    /// The receiver does not belong to this world, or has violated the protocol. The connection ends.
    Refused { reason: String },
    /// The receiver has asked for any place, and has this one.
    Placed { rank: usize, world_size: usize },
    /// An event of the world.
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
const PLACED: u8 = 0x85;

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
            Self::Placed { rank, world_size } => frame(PLACED, &(number(*rank), number(*world_size))),
            Self::Event(Event::Formed) => frame(FORMED, &()),
            Self::Event(Event::Gathered { sequence, parts }) => {
                frame(GATHERED, &(sequence, parts.iter().map(|part| Bytes(part)).collect::<Vec<_>>()))
            }
            Self::Event(Event::Failed(Failure::TimedOut { sequence, by, missing, refused })) => {
                let missing: Vec<_> = missing.iter().copied().map(number).collect();
                frame(TIMED_OUT, &(sequence, number(*by), Bytes(refused.as_bytes()), missing))
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
            PLACED => {
                let (rank, world_size) = all(fields)?;
                Ok(Self::Placed { rank: size(rank), world_size: size(world_size) })
            }
            FORMED => all(fields).map(|()| Self::Event(Event::Formed)),
            GATHERED => {
                let (sequence, fields) = first(fields)?;
                let parts = list(fields)?.into_iter().map(<[u8]>::to_vec).collect();
                Ok(Self::Event(Event::Gathered { sequence, parts }))
            }
            TIMED_OUT => {
                let ((sequence, by, refused), fields) = first(fields)?;
                let missing = list(fields)?.into_iter().map(size).collect();
                let (by, refused) = (size(by), text(refused));
                Ok(Self::Event(Event::Failed(Failure::TimedOut { sequence, by, missing, refused })))
            }
            LOST => {
                let (rank, reason) = all(fields)?;
                Ok(Self::Event(Event::Failed(Failure::Lost { rank: size(rank), reason: text(reason) })))
            }
            kind => Err(Malformed::UnknownKind(kind)),
        }
    }
}

/// Encodes a frame.
fn frame(kind: u8, fields: &impl Serialize) -> Vec<u8> {
    // Space for the length, which is filled in last.
    let mut frame = vec![0; LENGTH_BYTES];
    frame.push(kind);
    // This cannot fail: the vector grows, and postcard can encode all field types of these messages.
    let mut frame = postcard::to_extend(fields, frame).unwrap_or_default();
    if let Some((length, body)) = frame.split_first_chunk_mut() {
        *length = number(body.len()).to_le_bytes();
    }
    frame
}

/// Decodes the first field; returns it and the remaining bytes.
fn first<'a, T: Deserialize<'a>>(fields: &'a [u8]) -> Result<(T, &'a [u8]), Malformed> {
    postcard::take_from_bytes(fields).map_err(|error| match error {
        postcard::Error::DeserializeUnexpectedEnd => Malformed::Truncated,
        _ => Malformed::Number,
    })
}

/// Decodes all fields.
fn all<'a, T: Deserialize<'a>>(fields: &'a [u8]) -> Result<T, Malformed> {
    match first(fields)? {
        (value, []) => Ok(value),
        _ => Err(Malformed::TrailingBytes),
    }
}

/// Decodes the last field, a list of values of ranks. Its length is checked before anything is allocated.
fn list<'a, T: Deserialize<'a>>(fields: &'a [u8]) -> Result<Vec<T>, Malformed> {
    let (count, mut rest) = first(fields).map(|(count, rest)| (size(count), rest))?;
    if count > MAX_WORLD {
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

/// Converts a rank, a count or a length to its encoding. Values above 32 bits do not occur; they would become
/// `u32::MAX`, which the receiver refuses.
fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Converts an encoded rank, count or length. If it is too large for a `usize`, the result is too large for every
/// limit.
fn size(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Bytes that are encoded as one slice, not element by element.
struct Bytes<'a>(&'a [u8]);

impl Serialize for Bytes<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

/// Returns the body of the first frame in `buffer`, or `None` if the frame is incomplete. A body longer than `limit` is
/// an error as soon as its length is known. The frame has [`frame_length`] bytes.
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

/// Returns the number of bytes of the frame with this `body`.
pub(super) const fn frame_length(body: &[u8]) -> usize {
    LENGTH_BYTES + body.len()
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_frame, |bytes| {
    let body = first_body(bytes, 1 << 20);
    body.map(|body| body.map(|body| (Request::decode(body), Reply::decode(body))))
});

#[cfg(test)]
mod tests;
