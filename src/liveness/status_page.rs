//! Status of a rank in shared memory: its process, and how it left.
//!
//! Only its owner writes a status page. Peers read it only after an error, so that its lines stay in the owner's cache.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};

const TEXT_BYTES: usize = 1024;

/// Layout in shared memory; all zeros is the state before the first call.
#[repr(C)]
pub(super) struct StatusPage {
    /// [`Cause`]; 0 before the rank leaves. Stored with release ordering after the other fields of the exit record.
    left: AtomicU32,
    /// Exit record: mask of the ranks that the failure concerns.
    ranks: AtomicU32,
    /// Exit record: length of `text`.
    length: AtomicU32,
    /// [`Later`]; 0 while the rank is in this world. A rank that has failed can take part in a later one.
    later: AtomicU32,
    /// Identity of the owner's process, written before the status page is shared.
    process: [AtomicU8; 16],
    /// Address of a copy of `process` in the owner's private memory, for peers that can read it.
    read_probe: AtomicU64,
    text: [AtomicU8; TEXT_BYTES],
}

/// What a rank that has left does later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Later {
    /// It takes part in no later world, even if it has no exit record.
    Absent = 1,
    /// It has suspended its communicator: it takes part in a later world, but in no step of this one.
    Away = 2,
}

/// How a rank left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Cause {
    /// It closed its communicator.
    Closed = 1,
    /// It lost another rank.
    Lost = 2,
    /// Its time limit passed.
    TimedOut = 3,
    /// Any other failure.
    Failed = 4,
}

/// Why a rank left, for the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExitRecord {
    pub cause: Cause,
    /// Mask of the ranks that were lost or missing.
    pub ranks: u32,
    pub text: String,
}

impl ExitRecord {
    pub fn closed() -> Self {
        Self { cause: Cause::Closed, ranks: 0, text: "it closed its communicator".into() }
    }
}

impl StatusPage {
    /// Marks the rank as absent.
    ///
    /// Relaxed: a peer that sees the exit record also sees this, by the release store of the record; others see it
    /// soon.
    pub fn set_absent(&self) {
        self.later.store(Later::Absent as u32, Ordering::Relaxed);
    }

    pub fn is_absent(&self) -> bool {
        self.later.load(Ordering::Relaxed) == Later::Absent as u32
    }

    /// Marks the rank as suspended. Relaxed, as above.
    pub fn set_away(&self) {
        self.later.store(Later::Away as u32, Ordering::Relaxed);
    }

    pub fn is_away(&self) -> bool {
        self.later.load(Ordering::Relaxed) == Later::Away as u32
    }

    pub fn set_process(&self, identity: &[u8; 16], read_probe: u64) {
        self.process.iter().zip(identity).for_each(|(word, byte)| word.store(*byte, Ordering::Relaxed));
        self.read_probe.store(read_probe, Ordering::Relaxed);
    }

    pub fn read_probe(&self) -> u64 {
        self.read_probe.load(Ordering::Relaxed)
    }

    pub fn process(&self) -> [u8; 16] {
        std::array::from_fn(|index| self.process[index].load(Ordering::Relaxed))
    }

    /// Writes the exit record. Called once.
    pub fn leave(&self, exit_record: &ExitRecord) {
        let bytes = exit_record.text.as_bytes();
        let length = bytes.len().min(TEXT_BYTES);
        self.text.iter().zip(bytes).for_each(|(word, byte)| word.store(*byte, Ordering::Relaxed));
        self.length.store(length as u32, Ordering::Relaxed);
        self.ranks.store(exit_record.ranks, Ordering::Relaxed);
        // Release: a peer that sees the cause sees all of the above.
        self.left.store(exit_record.cause as u32, Ordering::Release);
    }

    /// Returns the exit record; `None` before the rank leaves. A faulty peer may write anything, so that every field is
    /// checked.
    pub fn exit_record(&self) -> Option<ExitRecord> {
        let cause = match self.left.load(Ordering::Acquire) {
            0 => return None,
            1 => Cause::Closed,
            2 => Cause::Lost,
            3 => Cause::TimedOut,
            _ => Cause::Failed,
        };
        let length = (self.length.load(Ordering::Relaxed) as usize).min(TEXT_BYTES);
        let bytes: Vec<u8> = self.text[..length].iter().map(|word| word.load(Ordering::Relaxed)).collect();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Some(ExitRecord { cause, ranks: self.ranks.load(Ordering::Relaxed), text })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a status page with these bytes.
    fn written(bytes: &[u8; size_of::<StatusPage>()]) -> StatusPage {
        // SAFETY: a status page consists of atomics and integers, for which any bits are valid; the sizes are equal.
        unsafe { std::mem::transmute_copy(bytes) }
    }

    proptest! {
        #[test]
        fn exit_records_are_read_as_written(cause in 1..=4_u32, ranks: u32, text in ".{0,600}") {
            let cause = [Cause::Closed, Cause::Lost, Cause::TimedOut, Cause::Failed][cause as usize - 1];
            let status = written(&[0; size_of::<StatusPage>()]);
            prop_assert_eq!(status.exit_record(), None);
            status.leave(&ExitRecord { cause, ranks, text: text.clone() });
            let read = status.exit_record().unwrap();
            prop_assert_eq!((read.cause, read.ranks), (cause, ranks));
            match text.len() {
                0..=TEXT_BYTES => prop_assert_eq!(read.text, text),
                _ => prop_assert!(text.starts_with(read.text.trim_end_matches(char::REPLACEMENT_CHARACTER))),
            }
        }

        #[test]
        fn any_bytes_are_an_exit_record_or_none(
            bytes in proptest::collection::vec(any::<u8>(), size_of::<StatusPage>()),
            length: u32,
        ) {
            let status = written(bytes[..].try_into().unwrap());
            status.length.store(length, Ordering::Relaxed);
            if let Some(exit_record) = status.exit_record() {
                prop_assert!(exit_record.text.chars().count() <= TEXT_BYTES);
            }
            let _ = status.process();
        }
    }
}
