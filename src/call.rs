//! What a call is, in two words: for ranks to compare in checked calls, and for errors to tell.

use std::fmt;

use crate::abi::FaCall;
use crate::dtype::DType;
use crate::op::ReduceOp;
use crate::plan::Algorithm;

/// The operations that ranks do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Collective {
    AllReduce = 1,
}

impl Collective {
    const ALL: [Self; 1] = [Self::AllReduce];

    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
        }
    }

    /// The name as C strings are.
    #[cfg(feature = "nvtx")]
    pub const fn c_name(self) -> &'static std::ffi::CStr {
        match self {
            Self::AllReduce => c"all_reduce",
        }
    }
}

/// Everything about a call that must be equal on all ranks. Where buffers are, and whether they are registered or the same, is each
/// rank's own affair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallId {
    pub collective: Collective,
    pub dtype: DType,
    pub op: ReduceOp,
    pub algorithm: Algorithm,
    pub count: usize,
}

impl CallId {
    /// A byte for each of collective, type, operation and algorithm, and the count. Never zero, which stands for no call.
    pub fn encode(self) -> FaCall {
        let bytes = [self.collective as u8, self.dtype as u8, self.op as u8, self.algorithm as u8];
        FaCall { what: u64::from(u32::from_le_bytes(bytes)), count: self.count as u64 }
    }

    /// `None` for words that are no call of this build's.
    pub fn decode(call: FaCall) -> Option<Self> {
        let [collective, dtype, op, algorithm] = u32::try_from(call.what).ok()?.to_le_bytes();
        Some(Self {
            collective: Collective::ALL.into_iter().find(|&known| known as u8 == collective)?,
            dtype: DType::ALL.into_iter().find(|&known| known as u8 == dtype)?,
            op: ReduceOp::ALL.into_iter().find(|&known| known as u8 == op)?,
            algorithm: Algorithm::ALL.into_iter().find(|&known| known as u8 == algorithm)?,
            count: usize::try_from(call.count).ok()?,
        })
    }

    /// The call in words, whatever the words of it hold.
    pub fn describe(call: FaCall) -> String {
        Self::decode(call)
            .map_or_else(|| "a call that this build does not know".into(), |call| call.to_string())
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, dtype, op, algorithm, count } = self;
        write!(f, "{} of {count} {dtype} ({op}, {algorithm})", collective.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_words_decode_or_do_not(what: u64, count: u64) {
            let call = FaCall { what, count };
            if let Some(id) = CallId::decode(call) {
                prop_assert_eq!(id.encode().what, what);
                prop_assert_eq!(id.encode().count, count);
            }
            prop_assert!(!CallId::describe(call).is_empty());
        }
    }

    #[test]
    fn every_call_comes_back_and_differs_from_every_other() {
        let mut seen = std::collections::HashSet::new();
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                for algorithm in Algorithm::ALL {
                    let id = CallId { collective: Collective::AllReduce, dtype, op, algorithm, count: 7 };
                    assert_eq!(CallId::decode(id.encode()), Some(id));
                    assert!(seen.insert(id.encode().what) && id.encode().what != 0);
                }
            }
        }
    }
}
