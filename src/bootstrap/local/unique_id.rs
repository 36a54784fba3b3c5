//! The 128-byte id that names a rendezvous and admits ranks to it.

use std::fmt;
use std::hash::Hasher;
use std::str::FromStr;
use std::time::Duration;

use fnv::FnvHasher;
use nix::sys::socket::SockType;

use super::super::socket::{self, Token};
use super::super::socket_name::{socket_directory, SocketNamespace, SOCKET_DIRECTORY};
use super::hub;
use super::message::VERSION;
use crate::error::{Error, Result};

/// How long the rendezvous waits for the first rank: an id may be created long before its ranks start.
pub(in crate::bootstrap) const FORMATION_LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

const LENGTH: usize = 128;
const MAGIC: [u8; 8] = *b"fastallr";

// Layout: magic; version (32 bits); length of the name (32 bits); the name, padded with zeros; the token; the kind of
// the name (8 bits); zeros; FNV-1a of all bytes before it. Integers are little-endian.
const VERSION_AT: usize = 8;
const NAME_LENGTH_AT: usize = 12;
const NAME_AT: usize = 16;
const TOKEN_AT: usize = 80;
const KIND_AT: usize = TOKEN_AT + Token::LENGTH;
const ZEROS_AT: usize = KIND_AT + 1;
const CHECKSUM_AT: usize = LENGTH - 8;

/// Kinds of names: of an abstract Unix socket, of one in a directory, and an address of the Internet with its port.
const ABSTRACT: u8 = 0;
const DIRECTORY: u8 = 1;
pub(in crate::bootstrap) const INTERNET: u8 = 2;

/// Maximum length of a name.
pub(in crate::bootstrap) const MAX_NAME: usize = TOKEN_AT - NAME_AT;

/// Id of a rendezvous, with which ranks find each other; like `ncclUniqueId`.
///
/// One process creates it and passes it to the others by any means (an environment variable, a file, MPI), as text or
/// as 128 bytes. It contains a secret: treat it like a password for that one world. `Debug` omits the secret;
/// `Display`, which is for passing the id to ranks, includes it.
///
/// All ranks run on one machine, as one user, and in one network namespace. Containers with separate network namespaces
/// need a shared directory instead: set `FAST_ALLREDUCE_SOCKET_DIR` to its path, which may differ by container, in the
/// process that creates the id and in all ranks. [`Local::in_directory`](super::Local::in_directory) needs no id.
///
/// Ranks of several machines use an id of `UniqueId::over_tcp` and `Tcp::join` (feature `tcp`).
///
/// ```
/// use fast_allreduce::bootstrap::UniqueId;
///
/// let id = UniqueId::new()?;
/// let text = id.to_string();
/// assert_eq!(text.parse::<UniqueId>()?, id);
/// assert_eq!(UniqueId::from_bytes(*id.as_bytes())?, id);
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; LENGTH]);

impl UniqueId {
    /// Creates a rendezvous for one world, served by the calling process, which need not be one of the ranks.
    ///
    /// A thread of this process serves it until all ranks have disconnected, or for a day if no rank joins. The
    /// rendezvous ends with this process. If `FAST_ALLREDUCE_SOCKET_DIR` names a directory, the socket is there until
    /// all ranks have joined.
    ///
    /// # Errors
    ///
    /// * [`Error::System`] if random bytes, a socket or a thread cannot be created.
    /// * [`Error::InvalidSetting`] if the directory cannot be used.
    pub fn new() -> Result<Self> {
        let name = socket::random_name()?;
        let token = Token::random()?;
        let namespace = SocketNamespace::new(socket_directory().as_deref())?;
        let listener = namespace.listen(SockType::Stream, &name)?;
        hub::spawn(listener, Box::new(hub::SameUser), token.clone(), None, FORMATION_LIMIT)?;
        let kind = if namespace.directory().is_some() { DIRECTORY } else { ABSTRACT };
        Ok(Self::encode(&name, &token, kind))
    }

    /// Returns the id as bytes.
    pub fn as_bytes(&self) -> &[u8; 128] {
        &self.0
    }

    /// Converts the bytes of [`UniqueId::as_bytes`] back to an id.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if they are not an id, are damaged, or come from an incompatible version of this
    /// crate.
    pub fn from_bytes(bytes: [u8; 128]) -> Result<Self> {
        match problem(&bytes) {
            None => Ok(Self(bytes)),
            Some(problem) => Err(invalid(problem)),
        }
    }

    pub(in crate::bootstrap) fn encode(name: &[u8], token: &Token, kind: u8) -> Self {
        debug_assert!((1..=MAX_NAME).contains(&name.len()));
        let mut bytes = [0; LENGTH];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(VERSION_AT, &VERSION.to_le_bytes());
        put(NAME_LENGTH_AT, &(name.len() as u32).to_le_bytes());
        put(NAME_AT, name);
        put(TOKEN_AT, token.as_bytes());
        put(KIND_AT, &[kind]);
        let sum = checksum(&bytes);
        bytes[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
        Self(bytes)
    }

    /// Returns where the name of the rendezvous' socket is.
    pub(super) fn namespace(&self) -> Result<SocketNamespace> {
        let directory = match self.0[KIND_AT] {
            ABSTRACT => None,
            INTERNET => {
                let reason = "the id is for ranks of several machines, which join it by bootstrap::Tcp";
                return Err(Error::Rendezvous { reason: reason.into() });
            }
            _ => Some(socket_directory().ok_or_else(|| Error::Rendezvous {
                reason: format!(
                    "the id is for a rendezvous in a directory: {SOCKET_DIRECTORY} must name it on all ranks, \
                     and is not set here"
                ),
            })?),
        };
        SocketNamespace::new(directory.as_deref())
    }

    /// Returns the name of the rendezvous' socket.
    pub(in crate::bootstrap) fn socket_name(&self) -> &[u8] {
        // The length is in bounds: it was checked when the id was created or decoded.
        &self.0[NAME_AT..TOKEN_AT][..u32_at(&self.0, NAME_LENGTH_AT) as usize]
    }

    #[cfg(feature = "tcp")]
    pub(in crate::bootstrap) fn kind(&self) -> u8 {
        self.0[KIND_AT]
    }

    pub(in crate::bootstrap) fn token(&self) -> Token {
        Token::from_bytes(array_at(&self.0, TOKEN_AT))
    }
}

/// Checks the bytes of an id; returns a description of the problem, if there is one.
fn problem(bytes: &[u8; LENGTH]) -> Option<String> {
    if !bytes.starts_with(&MAGIC) {
        return Some("bytes that are not an id".into());
    }
    let version = u32_at(bytes, VERSION_AT);
    if version != VERSION {
        return Some(format!("an id of version {version}, not {VERSION}"));
    }
    if u64::from_le_bytes(array_at(bytes, CHECKSUM_AT)) != checksum(bytes) {
        return Some("a damaged id (its checksum is wrong)".into());
    }
    let name = &bytes[NAME_AT..TOKEN_AT];
    let name_length = u32_at(bytes, NAME_LENGTH_AT) as usize;
    let behind_name = name.get(name_length..).filter(|_| name_length > 0);
    let zeros = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    let is_known = bytes[KIND_AT] <= INTERNET;
    if !behind_name.is_some_and(zeros) || !is_known || !zeros(&bytes[ZEROS_AT..CHECKSUM_AT]) {
        return Some("an id with invalid fields".into());
    }
    None
}

fn invalid(problem: String) -> Error {
    // The error omits the id, since errors are logged and the id contains a secret.
    Error::InvalidSetting {
        name: "unique id",
        value: problem,
        expected: "the id that UniqueId::new or UniqueId::over_tcp returned",
    }
}

fn array_at<const N: usize>(bytes: &[u8; LENGTH], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

fn u32_at(bytes: &[u8; LENGTH], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

/// Returns the 64-bit FNV-1a hash, which detects accidental damage, but not tampering.
fn checksum(bytes: &[u8; LENGTH]) -> u64 {
    let mut hasher = FnvHasher::default();
    hasher.write(&bytes[..CHECKSUM_AT]);
    hasher.finish()
}

/// Writes 256 hexadecimal digits, including the secret.
impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&base16ct::lower::encode_string(&self.0))
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() != 2 * LENGTH {
            return Err(invalid(format!("a text of {} bytes, not {}", text.len(), 2 * LENGTH)));
        }
        let mut bytes = [0; LENGTH];
        base16ct::mixed::decode(text, &mut bytes)
            .map_err(|_| invalid("a text that is not hexadecimal".into()))?;
        Self::from_bytes(bytes)
    }
}

/// Writes the socket's name, without the secret.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = String::from_utf8_lossy(self.socket_name());
        f.debug_struct("UniqueId").field("socket", &name).finish_non_exhaustive()
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_unique_id, |bytes| {
    let text = String::from_utf8_lossy(bytes).parse::<UniqueId>();
    let id = bytes.try_into().map(UniqueId::from_bytes);
    (text, id.map(|id| id.map(|id| id.namespace().map(drop))))
});

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::damaged::damaged;

    fn id() -> UniqueId {
        UniqueId::encode(b"a-name", &Token::from_bytes([0xc5; 16]), ABSTRACT)
    }

    /// Returns the id with `bytes` at `at` and a correct checksum.
    fn altered(at: usize, bytes: &[u8]) -> Result<UniqueId> {
        let mut id = id().0;
        id[at..at + bytes.len()].copy_from_slice(bytes);
        let sum = checksum(&id);
        id[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
        UniqueId::from_bytes(id)
    }

    #[test]
    fn it_converts_to_bytes_and_text_and_back() {
        let id = id();
        assert_eq!(UniqueId::from_bytes(*id.as_bytes()).unwrap(), id);
        let text = id.to_string();
        assert_eq!(text.len(), 256);
        assert_eq!(text.parse::<UniqueId>().unwrap(), id);
        assert_eq!(text.to_uppercase().parse::<UniqueId>().unwrap(), id);
        assert_eq!(id.socket_name(), b"a-name");
        assert_eq!(id.token(), Token::from_bytes([0xc5; 16]));
    }

    #[test]
    fn debug_and_errors_keep_the_secret() {
        let secret = "c5c5";
        assert!(id().to_string().contains(secret));
        assert_eq!(format!("{:?}", id()), r#"UniqueId { socket: "a-name", .. }"#);
        let damaged = id().to_string().replacen('6', "7", 1).parse::<UniqueId>().unwrap_err();
        let cut = id().to_string()[..254].parse::<UniqueId>().unwrap_err();
        for error in [damaged, cut] {
            assert!(!format!("{error} {error:?}").contains(secret), "{error}");
        }
    }

    #[test]
    fn every_damaged_bit_is_noticed() {
        for bit in 0..8 * LENGTH {
            let mut bytes = id().0;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(UniqueId::from_bytes(bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn fields_are_checked_even_with_a_correct_checksum() {
        altered(NAME_AT, b"b").unwrap();
        altered(NAME_LENGTH_AT, &64u32.to_le_bytes()).unwrap();
        altered(NAME_LENGTH_AT, &0u32.to_le_bytes()).unwrap_err();
        assert!(id().namespace().unwrap().directory().is_none());
        let refused = altered(KIND_AT, &[1]).unwrap().namespace().unwrap_err().to_string();
        assert!(refused.contains("FAST_ALLREDUCE_SOCKET_DIR must name it on all ranks"), "{refused}");
        let refused = altered(KIND_AT, &[2]).unwrap().namespace().unwrap_err().to_string();
        assert!(refused.contains("join it by bootstrap::Tcp"), "{refused}");
        altered(KIND_AT, &[3]).unwrap_err();
        altered(NAME_LENGTH_AT, &5u32.to_le_bytes()).unwrap_err();
        altered(NAME_LENGTH_AT, &65u32.to_le_bytes()).unwrap_err();
        altered(NAME_LENGTH_AT, &u32::MAX.to_le_bytes()).unwrap_err();
        altered(ZEROS_AT, &[1]).unwrap_err();
        altered(0, b"F").unwrap_err();
        let error = altered(VERSION_AT, &2u32.to_le_bytes()).unwrap_err();
        assert!(error.to_string().contains("version 2, not 1"), "{error}");
    }

    #[test]
    fn invalid_text_is_refused() {
        for text in ["", "00", &"0".repeat(256), &"x".repeat(256), &"+f".repeat(128), &"é".repeat(128)] {
            assert!(text.parse::<UniqueId>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_id_converts_back(name in proptest::collection::vec(any::<u8>(), 1..=64), token: [u8; 16]) {
            // Trailing zeros are padding.
            prop_assume!(name.last() != Some(&0));
            let id = UniqueId::encode(&name, &Token::from_bytes(token), ABSTRACT);
            prop_assert_eq!(id.to_string().parse::<UniqueId>(), Ok(id));
            prop_assert_eq!((id.socket_name(), id.token()), (&name[..], Token::from_bytes(token)));
        }

        // `sealed`: with a correct checksum, so that the checks after it are reached.
        #[test]
        fn any_bytes_are_refused_or_an_id(bytes in damaged(vec![id().0.to_vec()]), sealed: bool) {
            let Ok(mut bytes) = <[u8; LENGTH]>::try_from(bytes) else { return Ok(()) };
            if sealed {
                let sum = checksum(&bytes);
                bytes[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
            }
            if let Ok(id) = UniqueId::from_bytes(bytes) {
                prop_assert_eq!(id.as_bytes(), &bytes);
                prop_assert!((1..=64).contains(&id.socket_name().len()));
            }
        }

        #[test]
        fn any_text_is_refused_or_an_id(text in damaged(vec![id().to_string().into_bytes()])) {
            let text = String::from_utf8_lossy(&text);
            if let Ok(id) = text.parse::<UniqueId>() {
                prop_assert_eq!(id.to_string(), text.to_lowercase());
            }
        }
    }
}
