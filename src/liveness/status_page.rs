//! One page of shared memory for each rank, on which it tells the others what it is doing and how it left.
//!
//! Only its owner writes a status page. Peers read it when something has gone wrong, so that the lines stay in the owner's cache.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};

use crate::abi::FaCall;

const TEXT_BYTES: usize = 1024;

/// As it lies in shared memory; all zeros is a rank that has made no call.
#[repr(C)]
pub(super) struct StatusPage {
    /// Calls that the rank has begun, and has come back from.
    begun: AtomicU64,
    ended: AtomicU64,
    /// The call last begun.
    what: AtomicU64,
    count: AtomicU64,
    digest: AtomicU64,
    /// The number of the last call that was captured into a graph instead of carried out.
    captured: AtomicU64,
    padding: [u64; 2],
    /// [`Cause`], 0 while the rank is here. Released after what follows.
    left: AtomicU32,
    /// The ranks that the failure is about, a bit for each.
    ranks: AtomicU32,
    length: AtomicU32,
    /// Not 0: the rank takes part in nothing any more, whether or not it has left.
    absent: AtomicU32,
    /// Names the owner's process, from before the status page is shared.
    process: [AtomicU8; 16],
    /// Where the owner has the same in private memory, for peers that can read it.
    probe: AtomicU64,
    text: [AtomicU8; TEXT_BYTES],
}

/// How a rank left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Cause {
    /// It closed its communicator.
    Closed = 1,
    /// It lost a rank.
    Lost = 2,
    /// Its time was up.
    TimedOut = 3,
    /// Anything else.
    Failed = 4,
}

/// What a rank says when it leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExitRecord {
    pub cause: Cause,
    /// The ranks that were lost, or waited for.
    pub ranks: u32,
    pub text: String,
}

impl ExitRecord {
    pub fn closed() -> Self {
        Self { cause: Cause::Closed, ranks: 0, text: "it closed its communicator".into() }
    }
}

/// What a rank was doing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Activity {
    pub begun: u64,
    pub ended: u64,
    /// The call last begun went into a graph, and nothing ran.
    pub captured: bool,
    pub call: FaCall,
}

impl StatusPage {
    /// Begins a call and returns its number, from 1. The calls of a rank come one after the other.
    pub fn begin(&self, call: FaCall) -> u64 {
        let number = self.begun.load(Ordering::Relaxed) + 1;
        self.what.store(call.what, Ordering::Relaxed);
        self.count.store(call.count, Ordering::Relaxed);
        self.digest.store(call.digest, Ordering::Relaxed);
        self.begun.store(number, Ordering::Relaxed);
        number
    }

    pub fn end(&self) {
        self.ended.store(self.begun.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The call last begun was captured.
    pub fn capture(&self) {
        self.captured.store(self.begun.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// What the rank was doing a moment ago. The words are of one call or of two that follow each other: a rank that everybody
    /// waits for stands still.
    pub fn activity(&self) -> Activity {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let call = FaCall { what: load(&self.what), count: load(&self.count), digest: load(&self.digest) };
        let (begun, ended) = (load(&self.begun), load(&self.ended));
        Activity { begun, ended, captured: begun != 0 && load(&self.captured) == begun, call }
    }

    /// Relaxed: who has heard that the rank left sees this too, by the order of that; anybody else sees it soon.
    pub fn set_absent(&self) {
        self.absent.store(1, Ordering::Relaxed);
    }

    pub fn is_absent(&self) -> bool {
        self.absent.load(Ordering::Relaxed) != 0
    }

    pub fn set_process(&self, identity: &[u8; 16], probe: u64) {
        self.process.iter().zip(identity).for_each(|(word, byte)| word.store(*byte, Ordering::Relaxed));
        self.probe.store(probe, Ordering::Relaxed);
    }

    pub fn probe(&self) -> u64 {
        self.probe.load(Ordering::Relaxed)
    }

    pub fn process(&self) -> [u8; 16] {
        std::array::from_fn(|index| self.process[index].load(Ordering::Relaxed))
    }

    /// Leaves. Called once.
    pub fn leave(&self, exit_record: &ExitRecord) {
        let bytes = exit_record.text.as_bytes();
        let length = bytes.len().min(TEXT_BYTES);
        self.text.iter().zip(bytes).for_each(|(word, byte)| word.store(*byte, Ordering::Relaxed));
        self.length.store(length as u32, Ordering::Relaxed);
        self.ranks.store(exit_record.ranks, Ordering::Relaxed);
        // Release: whoever sees the cause sees all of the above.
        self.left.store(exit_record.cause as u32, Ordering::Release);
    }

    /// How the rank left; `None` while it is here. A peer may write anything here: nothing is taken for granted.
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

    /// A status page of which a peer has written every byte.
    fn written(bytes: &[u8; size_of::<StatusPage>()]) -> StatusPage {
        // SAFETY: a status page is atomics and integers, for which any bits are values, in as many bytes.
        unsafe { std::mem::transmute_copy(bytes) }
    }

    proptest! {
        #[test]
        fn exit_records_travel(cause in 1..=4_u32, ranks: u32, text in ".{0,600}") {
            let cause = [Cause::Closed, Cause::Lost, Cause::TimedOut, Cause::Failed][cause as usize - 1];
            let status = written(&[0; size_of::<StatusPage>()]);
            prop_assert_eq!(status.exit_record(), None);
            status.leave(&ExitRecord { cause, ranks, text: text.clone() });
            let heard = status.exit_record().unwrap();
            prop_assert_eq!((heard.cause, heard.ranks), (cause, ranks));
            match text.len() {
                0..=TEXT_BYTES => prop_assert_eq!(heard.text, text),
                _ => prop_assert!(text.starts_with(heard.text.trim_end_matches(char::REPLACEMENT_CHARACTER))),
            }
        }

        #[test]
        fn any_bytes_are_an_exit_record_or_none(bytes in proptest::collection::vec(any::<u8>(), size_of::<StatusPage>()), length: u32) {
            let status = written(bytes[..].try_into().unwrap());
            status.length.store(length, Ordering::Relaxed);
            if let Some(exit_record) = status.exit_record() {
                prop_assert!(exit_record.text.chars().count() <= TEXT_BYTES);
            }
            let _ = (status.activity(), status.process());
        }
    }
}
