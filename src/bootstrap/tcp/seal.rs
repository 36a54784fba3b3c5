//! Encryption of a connection by the Noise protocol (`Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s`): both ends prove that
//! they know the secret, and nobody else can read, change, repeat or reorder what they send.
//!
//! On the wire, each end first sends a greeting with its protocol version; the one that accepted the connection does so
//! only in answer. Then follow packets: a length (16 bits, big-endian) and a Noise message. The first packet of each
//! direction is the handshake. An empty packet in place of the second one says that the secrets differ.

use std::os::fd::OwnedFd;

use snow::{Builder, HandshakeState, TransportState};

use super::super::local::hub::Admission;
use super::super::local::link::{Layer, Link};
use super::super::local::message::{MAX_WORLD, VERSION};
use super::super::process_identity;
use super::super::socket::Token;
use super::address;

/// Begins every connection. The version follows.
const GREETING: [u8; 7] = *b"fastall";

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// Authenticated by both ends, with the version.
const PROLOGUE: &[u8] = b"fast-allreduce";

/// Maximum length of a Noise message.
const MAX_PACKET: usize = 65535;

/// Bytes that encryption adds to a message.
const TAG: usize = 16;

/// Maximum length of a message of the handshake: a public key, a process identity and a tag.
const MAX_HANDSHAKE: usize = 32 + 16 + TAG;

pub(super) const VERSION_BYTE: u8 = VERSION as u8;

/// Encryption of one connection.
pub(super) struct Seal {
    state: State,
    /// Bytes of an incomplete greeting or packet.
    incomplete: Vec<u8>,
    is_greeted: bool,
    is_same_process: bool,
}

enum State {
    Handshake(Box<HandshakeState>),
    Open(Box<TransportState>),
    Closed,
}

impl Seal {
    pub(super) fn new(token: &Token, is_initiator: bool) -> Result<Self, snow::Error> {
        let mut key = [0; 32];
        key[..Token::LENGTH].copy_from_slice(token.as_bytes());
        let prologue = [PROLOGUE, &[VERSION_BYTE]].concat();
        let builder = Builder::new(PATTERN.parse()?).psk(0, &key)?.prologue(&prologue)?;
        let handshake = if is_initiator { builder.build_initiator() } else { builder.build_responder() }?;
        let state = State::Handshake(Box::new(handshake));
        Ok(Self { state, incomplete: Vec::new(), is_greeted: false, is_same_process: false })
    }

    /// Seals the connection of a rank to the rendezvous.
    pub(super) fn of_rank(link: Link, token: &Token) -> Result<Link, String> {
        let mut seal = Self::new(token, true).map_err(|error| error.to_string())?;
        let first = seal.first_bytes()?;
        Ok(link.with_layer(Box::new(seal), first))
    }

    /// Returns what a rank sends first: the greeting and its part of the handshake.
    pub(super) fn first_bytes(&mut self) -> Result<Vec<u8>, String> {
        let mut first = greeting();
        if let State::Handshake(handshake) = &mut self.state {
            let identity = process_identity().map_err(|error| error.to_string())?;
            packet(&mut first, |space| handshake.write_message(&identity, space))?;
        }
        Ok(first)
    }

    /// Reads the greeting, when it has arrived.
    fn greet(&mut self, outgoing: &mut Vec<u8>) -> Result<(), String> {
        let length = self.incomplete.len().min(GREETING.len());
        if self.incomplete[..length] != GREETING[..length] {
            return Err("the other end is another program".into());
        }
        let Some(&version) = self.incomplete.get(GREETING.len()) else { return Ok(()) };
        if matches!(&self.state, State::Handshake(handshake) if !handshake.is_initiator()) {
            outgoing.extend(greeting());
        }
        if version != VERSION_BYTE {
            return Err(format!("the other end has protocol version {version}, not {VERSION_BYTE}"));
        }
        self.incomplete.drain(..=GREETING.len());
        self.is_greeted = true;
        Ok(())
    }

    /// Handles one packet.
    fn packet(
        &mut self,
        message: &[u8],
        received: &mut Vec<u8>,
        outgoing: &mut Vec<u8>,
    ) -> Result<(), String> {
        self.state = match std::mem::replace(&mut self.state, State::Closed) {
            State::Handshake(mut handshake) => {
                let mut payload = [0; MAX_HANDSHAKE];
                let is_initiator = handshake.is_initiator();
                let read = handshake.read_message(message, &mut payload);
                let Ok(length) = read else {
                    if !is_initiator {
                        outgoing.extend([0, 0]);
                    }
                    return Err("it has another secret".into());
                };
                if !is_initiator {
                    self.is_same_process =
                        process_identity().is_ok_and(|identity| payload[..length] == identity);
                    packet(outgoing, |space| handshake.write_message(&[], space))?;
                }
                let open = handshake.into_transport_mode().map_err(|error| error.to_string())?;
                State::Open(Box::new(open))
            }
            State::Open(mut open) => {
                let start = received.len();
                received.resize(start + message.len(), 0);
                let read = open.read_message(message, &mut received[start..]);
                received.truncate(start + read.as_ref().map_or(0, |length| *length));
                read.map_err(|_| "its connection was tampered with")?;
                State::Open(open)
            }
            State::Closed => return Err("its connection was closed before".into()),
        };
        Ok(())
    }
}

impl Layer for Seal {
    fn arrived(
        &mut self,
        bytes: &[u8],
        received: &mut Vec<u8>,
        outgoing: &mut Vec<u8>,
    ) -> Result<(), String> {
        self.incomplete.extend_from_slice(bytes);
        if !self.is_greeted {
            self.greet(outgoing)?;
        }
        let mut taken = 0;
        while self.is_greeted {
            let Some((length, rest)) = self.incomplete[taken..].split_first_chunk() else { break };
            let length = usize::from(u16::from_be_bytes(*length));
            // Nothing more is stored before the secret is proven.
            if matches!(self.state, State::Handshake(_)) && length > MAX_HANDSHAKE {
                return Err("its first message is too long".into());
            }
            let Some(message) = rest.get(..length).map(<[u8]>::to_vec) else { break };
            taken += size_of::<u16>() + length;
            self.packet(&message, received, outgoing)?;
        }
        self.incomplete.drain(..taken);
        Ok(())
    }

    fn convert(&mut self, frame: &[u8], outgoing: &mut Vec<u8>) -> usize {
        let State::Open(open) = &mut self.state else { return 0 };
        let taken = &frame[..frame.len().min(MAX_PACKET - TAG)];
        match packet(outgoing, |space| open.write_message(taken, space)) {
            Ok(()) => taken.len(),
            // Only after 2^64 messages.
            Err(_) => 0,
        }
    }

    fn is_ready(&self) -> bool {
        matches!(self.state, State::Open(_))
    }

    fn is_same_process(&self) -> bool {
        self.is_same_process
    }
}

fn greeting() -> Vec<u8> {
    [&GREETING[..], &[VERSION_BYTE]].concat()
}

/// Appends a packet with the message that `write` writes.
fn packet(
    outgoing: &mut Vec<u8>,
    write: impl FnOnce(&mut [u8]) -> Result<usize, snow::Error>,
) -> Result<(), String> {
    let start = outgoing.len();
    let message = start + size_of::<u16>();
    outgoing.resize(message + MAX_PACKET, 0);
    let written = write(&mut outgoing[message..]);
    let length = written.as_ref().map_or(0, |length| *length);
    outgoing.truncate(message + length);
    // Noise messages are at most `MAX_PACKET` long.
    outgoing[start..message].copy_from_slice(&(length as u16).to_be_bytes());
    written.map(drop).map_err(|error| error.to_string())
}

/// Ranks that know the token, over TCP.
pub(super) struct Sealed(pub Token);

impl Admission for Sealed {
    fn max_ranks(&self) -> usize {
        MAX_WORLD
    }

    fn prepare(&self, stream: OwnedFd) -> (Link, Result<bool, String>) {
        let prepared = address::prepare(&stream).map_err(|errno| errno.to_string());
        let link = Link::new(stream);
        match prepared.and_then(|()| Seal::new(&self.0, false).map_err(|error| error.to_string())) {
            Ok(seal) => (link.with_layer(Box::new(seal), Vec::new()), Ok(false)),
            Err(reason) => (link, Err(reason)),
        }
    }
}

// What both ends of a connection read from the network. The first byte chooses the end, the second where the bytes are
// cut in two.
#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_sealed, |bytes| {
    let token = Token::from_bytes([1; Token::LENGTH]);
    let new = |is_initiator| Seal::new(&token, is_initiator).expect("the pattern is known");
    let Some(([choice, cut], bytes)) = bytes.split_first_chunk() else { return };
    let parts = bytes.split_at(bytes.len().min(usize::from(*cut)));
    let arrive = |seal: &mut Seal, parts: [&[u8]; 2]| {
        let (mut received, mut answer) = (Vec::new(), Vec::new());
        let all = parts.iter().try_for_each(|part| seal.arrived(part, &mut received, &mut answer));
        (all, received, answer)
    };
    if choice % 3 < 2 {
        // Without the secret, nothing is accepted, and little is answered.
        let mut seal = new(choice % 3 == 0);
        if choice % 3 == 0 {
            seal.first_bytes().expect("the identity of this process");
        }
        let (_, received, answer) = arrive(&mut seal, [parts.0, parts.1]);
        assert!(received.is_empty() && !seal.is_ready() && answer.len() <= GREETING.len() + 3);
        return;
    }
    let (mut rank, mut rendezvous) = (new(true), new(false));
    let first = rank.first_bytes().expect("the identity of this process");
    let (greeted, _, answer) = arrive(&mut rendezvous, [&first, &[]]);
    let (proven, ..) = arrive(&mut rank, [&answer, &[]]);
    assert!(greeted.is_ok() && proven.is_ok() && rank.is_ready() && rendezvous.is_ready());
    if choice % 2 == 0 {
        // Bytes that were not encrypted with the key of the connection.
        assert!(arrive(&mut rendezvous, [parts.0, parts.1]).1.is_empty());
        return;
    }
    // What was sent arrives, and nothing of it if a bit is changed.
    let mut sealed = Vec::new();
    let taken = rank.convert(bytes, &mut sealed);
    let (whole, received, _) =
        arrive(&mut rendezvous, [&sealed[..sealed.len() / 2], &sealed[sealed.len() / 2..]]);
    assert!(whole.is_ok() && received == bytes[..taken]);
    sealed.clear();
    rank.convert(bytes, &mut sealed);
    let at = usize::from(*cut) % sealed.len();
    sealed[at] ^= 1 << (choice % 8);
    assert!(arrive(&mut rendezvous, [&sealed, &[]]).1.is_empty());
});
