//! Trace events: events for the crate `tracing` and, with the feature `nvtx`, an NVTX range for each call.
//!
//! | level | event |
//! |---|---|
//! | error | a communicator has failed |
//! | info | a communicator was created |
//! | debug | the plan of a call differs from that of the previous call |
//! | trace | a call begins |

use crate::call::CallId;
use crate::plan::Plan;

/// Span of a call, from its start to the return to the caller. On a GPU it ends when the call is enqueued.
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
