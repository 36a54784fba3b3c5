//! What is kept from one call to the next, since the next is often the same.

use super::collective::Collective;
use super::identity::CallId;
use super::message::Message;
use crate::abi::{FaLaunch, FaTransfers};
use crate::plan::{Plan, Planner};

/// The call before. Small calls feel what they copy.
#[derive(Debug, Default)]
pub(crate) struct CallCache {
    plan: Option<Plan>,
    /// The call before, if it was no transfer.
    pub last: Option<Prepared>,
    /// The launch before: most of it is the same in all, and all but the piece in those of equal calls.
    pub launch: Option<Box<FaLaunch>>,
    /// The transfers before, in whose place the next are put.
    pub transfers: Option<Box<FaTransfers>>,
}

/// What is worked out for a call before its launches, wherever its buffers are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prepared {
    pub id: CallId,
    pub plan: Plan,
    /// Elements of a launch, of the message or of each share.
    pub piece: usize,
}

impl Prepared {
    /// The call worked out. `extent` is of the message.
    #[inline(always)]
    pub fn new(message: &Message<'_>, extent: usize, planner: &Planner) -> Self {
        let size = message.dtype.size();
        let (plan, algorithm) = match message.collective {
            Collective::AllReduce(op) => {
                let plan = planner.reduction(message.count, message.dtype, op);
                (plan, Some(plan.algorithm))
            }
            Collective::AllReduceEpilogue(epilogue) => {
                let plan = planner.rows(message.count, message.dtype, epilogue.row());
                (plan, Some(plan.algorithm))
            }
            Collective::AllReduceQuantized(_) => (planner.quantized(message.count, message.dtype), None),
            _ => {
                let shares = message.staged_shares(planner.limits.world_size);
                (planner.shares(message.collective.planned_as(), extent.saturating_mul(size), shares), None)
            }
        };
        Self { id: message.id(algorithm), plan, piece: (plan.piece_bytes / size).max(1) }
    }
}

impl CallCache {
    /// Tells of a plan that differs from that of the call before.
    #[inline]
    pub fn planned(&mut self, plan: &Plan) {
        if self.plan != Some(*plan) {
            self.plan = Some(*plan);
            let Plan { algorithm, blocks, threads, piece_bytes } = *plan;
            tracing::debug!(algorithm = algorithm.name(), blocks, threads, piece_bytes, "plan");
        }
    }
}
