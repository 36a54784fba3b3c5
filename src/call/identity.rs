//! Identity of a call, encoded in a few words: ranks compare it in checked calls, and errors decode it.

use std::fmt;
use std::hash::Hasher;

use fnv::FnvHasher;

use super::fused::RawFused;
use super::gathered::RawGatheredRows;
use super::quantized::QuantizedTransport;
use super::sharded;
use crate::abi::FaCall;
pub use crate::catalogue::CallKind;
use crate::catalogue::{DType, ReduceOp};
use crate::plan::Algorithm;

/// Facts about a call that must be equal on all ranks. The addresses of buffers, and whether they are registered or in
/// place, may differ among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallId {
    pub kind: CallKind,
    pub dtype: DType,
    /// Operation. The scale of a premultiplied sum may differ among ranks.
    pub op: Option<ReduceOp>,
    pub algorithm: Option<Algorithm>,
    pub root: Option<u8>,
    /// Digest of the fused operations, of the quantised transport or rows, of the sharded rows, or of the counts by
    /// rank; 0 if the call has none.
    pub digest: u64,
    pub count: usize,
    /// Digest of the counts by rank, in 24 bits, if `digest` is that of something else; else 0.
    pub counts: u32,
}

/// Code of a call without an algorithm.
const NO_ALGORITHM: u8 = u8::MAX;

/// Bits of the count in a word that also has the digest of counts by rank. No memory has room for more elements.
const COUNT_BITS: u32 = 40;

/// The count in such a word.
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// Code of a call without an operation, in four bits.
const NO_OP: u8 = 0xF;

/// Code of a call without a root.
const NO_ROOT: u8 = 0x7F;

// Codes of types and operations have four bits each.
const _: () = {
    let (mut last_type, mut last_op) = (0, 0);
    while last_type < DType::ALL.len() {
        assert!((DType::ALL[last_type] as u32) < 16);
        last_type += 1;
    }
    while last_op < ReduceOp::ALL.len() {
        assert!(ReduceOp::ALL[last_op].code() < NO_OP as u32);
        last_op += 1;
    }
};

impl CallId {
    /// Encodes the call in three words: kind, type, operation, algorithm and root; the count; the digest. The first
    /// word has 32 bits. It is never zero: zero means no call.
    #[inline]
    pub fn encode(self) -> FaCall {
        let Self { kind, dtype, op, algorithm, root, digest, count, counts } = self;
        let op = op.map_or(NO_OP, |op| op.code() as u8);
        let algorithm = algorithm.map_or(NO_ALGORITHM, |algorithm| algorithm as u8);
        let bytes = [kind as u8, dtype as u8 | op << 4, algorithm, root.unwrap_or(NO_ROOT), 0, 0, 0, 0];
        let count = match Self::has_both(kind) {
            true => count as u64 & COUNT_MASK | u64::from(counts) << COUNT_BITS,
            false => count as u64,
        };
        FaCall { what: u64::from_le_bytes(bytes), count, digest }
    }

    /// Decodes words; `None` if they are not a call that this build knows.
    pub fn decode(call: FaCall) -> Option<Self> {
        let [kind, dtype_and_op, algorithm, root, 0, 0, 0, 0] = call.what.to_le_bytes() else {
            return None;
        };
        let kind = CallKind::ALL.iter().copied().find(|&known| known as u8 == kind)?;
        let (count, counts) = match Self::has_both(kind) {
            true => (call.count & COUNT_MASK, (call.count >> COUNT_BITS) as u32),
            false => (call.count, 0),
        };
        Some(Self {
            kind,
            dtype: DType::ALL.into_iter().find(|&known| known as u8 == dtype_and_op & 0xF)?,
            op: match dtype_and_op >> 4 {
                NO_OP => None,
                op => Some(ReduceOp::of_code(op.into())?),
            },
            algorithm: match algorithm {
                NO_ALGORITHM => None,
                _ => Some(
                    Algorithm::ALL
                        .into_iter()
                        .chain(Algorithm::NVLS)
                        .find(|&known| known as u8 == algorithm)?,
                ),
            },
            root: (root != NO_ROOT).then_some(root),
            digest: call.digest,
            count: usize::try_from(count).ok()?,
            counts,
        })
    }

    /// Describes a call; any words are valid input.
    pub fn describe(call: FaCall) -> String {
        Self::decode(call)
            .map_or_else(|| "a call that this build does not know".into(), |call| call.to_string())
    }

    /// Returns whether calls have counts by rank and another digest: then their counts share a word with the count.
    const fn has_both(kind: CallKind) -> bool {
        matches!(kind, CallKind::ReduceScatterFusedV | CallKind::AllGatherRowsV)
    }

    /// Hashes counts by rank to 24 bits.
    pub fn short_digest(counts: &[usize]) -> u32 {
        (Self::digest(counts) >> COUNT_BITS) as u32
    }

    /// Hashes counts by rank.
    pub fn digest(counts: &[usize]) -> u64 {
        let mut hasher = FnvHasher::default();
        counts.iter().for_each(|count| hasher.write(&count.to_le_bytes()));
        hasher.finish()
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, dtype, op, algorithm, root, digest, count, counts } = self;
        f.write_str(kind.name())?;
        if *kind == CallKind::Barrier {
            return Ok(());
        }
        let of = if *kind == CallKind::ShardedRmsNorm { "rows of " } else { "" };
        write!(f, " of {count} {of}{dtype}")?;
        let op = op.map(|op| op.name().to_owned());
        let algorithm = algorithm.map(|algorithm| algorithm.to_string());
        let root = root.map(|root| format!("root {root}"));
        let digest = match (kind, *digest) {
            (_, 0) => None,
            (
                CallKind::AllReduceFused | CallKind::ReduceScatterFused | CallKind::ReduceScatterFusedV,
                digest,
            ) => Some(RawFused::describe(digest)),
            (CallKind::AllGatherRows | CallKind::AllGatherRowsV, digest) => {
                Some(RawGatheredRows::describe(digest))
            }
            (CallKind::AllReduceQuantized, digest) => Some(QuantizedTransport::describe(digest)),
            (CallKind::ShardedRmsNorm, digest) => Some(sharded::describe(digest)),
            (_, digest) => Some(format!("counts by rank with the digest {digest:016x}")),
        };
        let counts = (*counts != 0).then(|| format!("counts by rank with the digest {counts:06x}"));
        let details: Vec<_> = [op, algorithm, root, digest, counts].into_iter().flatten().collect();
        match details.is_empty() {
            true => Ok(()),
            false => write!(f, " ({})", details.join(", ")),
        }
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_call_words, |bytes| {
    let word = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let words = (|| Some(FaCall { what: word(0)?, count: word(8)?, digest: word(16)? }))();
    words.and_then(CallId::decode).map(|call| format!("{call:?}"))
});

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoded_words_encode_to_themselves(what: u64, count: u64, digest: u64) {
            let call = FaCall { what, count, digest };
            if let Some(id) = CallId::decode(call) {
                let again = id.encode();
                prop_assert_eq!((again.what, again.count, again.digest), (what, count, digest));
            }
            prop_assert!(!CallId::describe(call).is_empty());
        }
    }

    #[test]
    fn every_call_is_decoded_and_differs_from_every_other() {
        let mut seen = std::collections::HashSet::new();
        let ops = ReduceOp::ALL.into_iter().map(Some).chain([None]);
        let calls = CallKind::ALL.iter().flat_map(|kind| DType::ALL.map(|dtype| (*kind, dtype)));
        let calls = calls.flat_map(|call| ops.clone().map(move |op| (call, op)));
        for ((kind, dtype), op) in calls {
            let algorithms = Algorithm::ALL.into_iter().chain(Algorithm::NVLS);
            for algorithm in algorithms.map(Some).chain([None]) {
                for (root, digest) in [(None, 0), (Some(0), 0), (Some(15), 0), (None, u64::MAX)] {
                    let counts = if CallId::has_both(kind) { 0xFF_FFFF } else { 0 };
                    let id = CallId { kind, dtype, op, algorithm, root, digest, count: 7, counts };
                    assert_eq!(CallId::decode(id.encode()), Some(id));
                    let words = id.encode();
                    assert!(seen.insert((words.what, words.digest)) && words.what != 0);
                }
            }
        }
    }

    #[test]
    fn calls_are_described() {
        let call = CallId {
            kind: CallKind::AllReduce,
            dtype: DType::F32,
            op: Some(ReduceOp::Sum),
            algorithm: Some(Algorithm::OneShotPull),
            root: None,
            digest: 0,
            count: 5,
            counts: 0,
        };
        assert_eq!(call.to_string(), "all_reduce of 5 f32 (sum, one-shot-pull)");
        let call = CallId { kind: CallKind::Broadcast, op: None, algorithm: None, root: Some(3), ..call };
        assert_eq!(call.to_string(), "broadcast of 5 f32 (root 3)");
        let call = CallId { kind: CallKind::Barrier, root: None, ..call };
        assert_eq!(call.to_string(), "barrier");
        assert_ne!(CallId::digest(&[1, 2]), CallId::digest(&[2, 1]));
    }
}
