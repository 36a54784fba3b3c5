//! What the crate tells those who watch a program: events for `tracing`, and with the feature `nvtx` a range for each call.
//!
//! | level | event |
//! |---|---|
//! | error | a communicator fails |
//! | info | a communicator is made |
//! | debug | a plan is taken that differs from that of the call before |
//! | trace | a call begins |

use crate::call::CallId;
use crate::plan::Plan;

/// A call, from its start to the return to the caller: on a GPU, until it is enqueued.
pub(crate) struct CallSpan {
    #[cfg(feature = "nvtx")]
    _range: nvtx::domain::LocalRange<'static>,
}

impl CallSpan {
    /// Begins a call.
    pub fn enter(rank: usize, number: u64, call: &CallId, plan: &Plan) -> Self {
        tracing::trace!(
            rank,
            number,
            collective = call.kind.name(),
            count = call.count,
            dtype = call.dtype.name(),
            op = call.op.map(|op| op.name()),
            algorithm = call.algorithm.map(|algorithm| algorithm.name()),
            blocks = plan.blocks,
            "call"
        );
        Self {
            #[cfg(feature = "nvtx")]
            _range: domain().local_range(call.kind.c_name()),
        }
    }
}

#[cfg(feature = "nvtx")]
fn domain() -> &'static nvtx::Domain {
    static DOMAIN: std::sync::OnceLock<nvtx::Domain> = std::sync::OnceLock::new();
    DOMAIN.get_or_init(|| nvtx::Domain::new(c"fast-allreduce"))
}
