//! Bytes that a broken or hostile peer could send, for the tests of all decoders.

use proptest::prelude::*;
use proptest::sample::Index;

/// One change of a message.
#[derive(Debug, Clone)]
enum Damage {
    Set(Index, u8),
    Flip(Index, u8),
    Insert(Index, u8),
    Remove(Index),
    Cut(Index),
    Repeat(Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        (any::<Index>(), 0..8_u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Insert(at, byte)),
        any::<Index>().prop_map(Damage::Remove),
        any::<Index>().prop_map(Damage::Cut),
        any::<Index>().prop_map(Damage::Repeat),
    ]
}

fn apply(mut bytes: Vec<u8>, damage: Damage) -> Vec<u8> {
    if bytes.is_empty() {
        return bytes;
    }
    let length = bytes.len();
    match damage {
        Damage::Set(at, byte) => bytes[at.index(length)] = byte,
        Damage::Flip(at, bit) => bytes[at.index(length)] ^= 1 << bit,
        Damage::Insert(at, byte) => bytes.insert(at.index(length + 1), byte),
        Damage::Remove(at) => drop(bytes.remove(at.index(length))),
        Damage::Cut(at) => bytes.truncate(at.index(length)),
        Damage::Repeat(at) => bytes.extend_from_within(at.index(length)..),
    }
    bytes
}

/// Generates a valid encoding with up to four changes, or random bytes up to twice as long as the longest encoding.
pub(crate) fn damaged(valid: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let longest = valid.iter().map(Vec::len).max().unwrap_or(0);
    let changed = (proptest::sample::select(valid), proptest::collection::vec(damage(), 0..=4));
    prop_oneof![
        3 => changed.prop_map(|(bytes, changes)| changes.into_iter().fold(bytes, apply)),
        1 => proptest::collection::vec(any::<u8>(), 0..=2 * longest),
    ]
}
