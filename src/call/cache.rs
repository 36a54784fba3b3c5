//! What is kept from one call to the next, since the next is often the same.

use super::identity::CallId;
use crate::abi::FaLaunch;
use crate::plan::Plan;

/// The call before. Small calls feel what they copy.
#[derive(Debug, Default)]
pub(crate) struct CallCache {
    plan: Option<Plan>,
    /// The call before, if it was an allreduce.
    pub last: Option<Prepared>,
    /// The launch before: most of it is the same in all, and all but the piece in those of equal calls.
    pub launch: Option<Box<FaLaunch>>,
}

/// What is worked out for a call before its launches, wherever its buffers are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prepared {
    pub id: CallId,
    pub plan: Plan,
    /// Elements of a launch, of the message or of each share.
    pub piece: usize,
}

impl CallCache {
    /// Tells of a plan that differs from that of the call before.
    pub fn planned(&mut self, plan: &Plan) {
        if self.plan != Some(*plan) {
            self.plan = Some(*plan);
            let Plan { algorithm, blocks, threads, piece_bytes } = *plan;
            tracing::debug!(algorithm = algorithm.name(), blocks, threads, piece_bytes, "plan");
        }
    }
}
