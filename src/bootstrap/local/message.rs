//! What ranks and the rendezvous say to each other, and its form in bytes.
//!
//! A frame is the length of its body (32 bits), then the body: one byte that tells the kind, then the fields.
//! Integers are little-endian. The functions that decode are pure, and check every length that they read.

use std::fmt;

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
                let writer = Writer::new(HELLO).u32(VERSION).bytes(token.as_bytes());
                writer.number(*rank).number(*world_size).frame()
            }
            Self::Gather { sequence, bytes } => Writer::new(GATHER).u64(*sequence).bytes(bytes).frame(),
            Self::GiveUp { sequence } => Writer::new(GIVE_UP).u64(*sequence).frame(),
        }
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(body);
        let request = match reader.u8()? {
            HELLO => {
                let version = reader.u32()?;
                if version != VERSION {
                    return Err(Malformed::Version(version));
                }
                let token = Token::from_bytes(reader.array()?);
                Self::Hello { token, rank: reader.number()?, world_size: reader.number()? }
            }
            GATHER => Self::Gather { sequence: reader.u64()?, bytes: reader.rest().to_vec() },
            GIVE_UP => Self::GiveUp { sequence: reader.u64()? },
            kind => return Err(Malformed::UnknownKind(kind)),
        };
        reader.end()?;
        Ok(request)
    }
}

impl Reply {
    pub(super) fn frame(&self) -> Vec<u8> {
        match self {
            Self::Refused { reason } => Writer::new(REFUSED).bytes(reason.as_bytes()).frame(),
            Self::Event(Event::Formed) => Writer::new(FORMED).frame(),
            Self::Event(Event::Gathered { sequence, parts }) => {
                let writer = Writer::new(GATHERED).u64(*sequence).number(parts.len());
                parts.iter().fold(writer, |writer, part| writer.number(part.len()).bytes(part)).frame()
            }
            Self::Event(Event::Failed(Failure::TimedOut { sequence, by, missing })) => {
                let writer = Writer::new(TIMED_OUT).u64(*sequence).number(*by).number(missing.len());
                missing.iter().fold(writer, |writer, rank| writer.number(*rank)).frame()
            }
            Self::Event(Event::Failed(Failure::Lost { rank, reason })) => {
                Writer::new(LOST).number(*rank).bytes(reason.as_bytes()).frame()
            }
        }
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(body);
        let reply = match reader.u8()? {
            REFUSED => Self::Refused { reason: reader.text() },
            FORMED => Self::Event(Event::Formed),
            GATHERED => {
                let sequence = reader.u64()?;
                let parts = (0..reader.count()?).map(|_| {
                    let length = reader.number()?;
                    reader.take(length).map(<[u8]>::to_vec)
                });
                Self::Event(Event::Gathered { sequence, parts: parts.collect::<Result<_, _>>()? })
            }
            TIMED_OUT => {
                let (sequence, by) = (reader.u64()?, reader.number()?);
                let missing = (0..reader.count()?).map(|_| reader.number()).collect::<Result<_, _>>()?;
                Self::Event(Event::Failed(Failure::TimedOut { sequence, by, missing }))
            }
            LOST => {
                let (rank, reason) = (reader.number()?, reader.text());
                Self::Event(Event::Failed(Failure::Lost { rank, reason }))
            }
            kind => return Err(Malformed::UnknownKind(kind)),
        };
        reader.end()?;
        Ok(reply)
    }
}

/// The body of the first frame in `buffer`, if it is there as a whole. Bodies longer than `limit` are refused
/// as soon as their length is known. The frame takes up [`frame_length`] bytes.
pub(super) fn first_body(buffer: &[u8], limit: usize) -> Result<Option<&[u8]>, Malformed> {
    let mut reader = Reader(buffer);
    let Ok(length) = reader.number() else {
        return Ok(None);
    };
    if length > limit {
        return Err(Malformed::TooLong { length, limit });
    }
    Ok(reader.take(length).ok())
}

/// Bytes of the frame around `body`.
pub(super) const fn frame_length(body: &[u8]) -> usize {
    LENGTH_BYTES + body.len()
}

/// Writes a frame: room for the length first, the length itself last.
struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u8) -> Self {
        Self(vec![0; LENGTH_BYTES]).bytes(&[kind])
    }

    fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// A rank, a count or a length. None above 32 bits exists; such a one is sent as one that cannot be.
    fn number(self, value: usize) -> Self {
        self.u32(u32::try_from(value).unwrap_or(u32::MAX))
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn frame(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len() - LENGTH_BYTES).unwrap_or(u32::MAX);
        self.0[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        self.0
    }
}

/// Reads fields, each after a check that it is there.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (field, rest) = self.0.split_at_checked(length).ok_or(Malformed::Truncated)?;
        self.0 = rest;
        Ok(field)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (field, rest) = self.0.split_first_chunk().ok_or(Malformed::Truncated)?;
        self.0 = rest;
        Ok(*field)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(u8::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// A rank, a count or a length.
    fn number(&mut self) -> Result<usize, Malformed> {
        // Too large for a usize is too large for anything.
        self.u32().map(|value| usize::try_from(value).unwrap_or(usize::MAX))
    }

    /// How many ranks a list has.
    fn count(&mut self) -> Result<usize, Malformed> {
        match self.number()? {
            count if count > crate::abi::MAX_RANKS => Err(Malformed::TooManyRanks(count)),
            count => Ok(count),
        }
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn text(&mut self) -> String {
        String::from_utf8_lossy(self.rest()).into_owned()
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed::TrailingBytes)
        }
    }
}

#[cfg(test)]
mod tests;
