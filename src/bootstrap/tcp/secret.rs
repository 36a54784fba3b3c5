//! The secret that admits ranks to a rendezvous over a network.

use std::fmt;
use std::str::FromStr;

use super::super::socket::Token;
use crate::error::{Error, Result};

/// A random secret of 128 bits, which all ranks of a job know and nobody else. Ranks prove to each other that they know
/// it, and never send it.
///
/// It is written as 32 hexadecimal digits. `Debug` omits it; `Display`, which is for passing it to ranks, includes it.
/// Choose it at random, by [`Secret::random`] or `openssl rand -hex 16`: a reader of the network can try guesses on
/// recorded traffic.
///
/// ```
/// use fast_allreduce::bootstrap::Secret;
///
/// let secret = Secret::random()?;
/// assert_eq!(secret.to_string().parse::<Secret>()?, secret);
/// assert_eq!(format!("{secret:?}"), "Secret(..)");
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub(super) Token);

impl Secret {
    /// Returns another secret each time.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel has no random bytes.
    pub fn random() -> Result<Self> {
        Token::random().map(Self)
    }
}

impl FromStr for Secret {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut bytes = [0; Token::LENGTH];
        match base16ct::mixed::decode(text, &mut bytes) {
            Ok(decoded) if decoded.len() == Token::LENGTH => Ok(Self(Token::from_bytes(bytes))),
            // The error omits the text, since errors are logged.
            _ => Err(Error::InvalidSetting {
                name: "secret",
                value: format!("a text of {} bytes", text.len()),
                expected: "32 random hexadecimal digits, as of openssl rand -hex 16",
            }),
        }
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&base16ct::lower::encode_string(self.0.as_bytes()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
