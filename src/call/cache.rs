//! What is kept from one call to the next, since the next is often the same.

use super::arguments::Call;
use super::collective::Collective;
use super::identity::CallId;
use super::transfer::{pack, Moved, Transfer, NO_TRANSFERS};
use crate::abi::{FaLaunch, FaTransfers};
use crate::error::Result;
use crate::plan::{Plan, PlannedCall, Planner};
use crate::region::Stripes;

/// The call before. Small calls feel what they copy.
#[derive(Debug, Default)]
pub(crate) struct CallCache {
    plan: Option<Plan>,
    /// The call before, if it was no transfer.
    pub last: Option<Prepared>,
    /// The launch before: most of it is the same in all, and all but the piece in those of equal calls.
    pub launch: Option<Box<FaLaunch>>,
    /// The transfers before.
    pub transfers: Option<Box<PreparedTransfers>>,
    /// The number of the last collective that was messages.
    pub number: u32,
    /// The memory of a list of transfers.
    pub list: Vec<Transfer>,
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
    pub fn new(call: &Call<'_>, extent: usize, planner: &Planner) -> Self {
        let size = call.dtype.size();
        let (plan, algorithm) = match call.collective {
            Collective::AllReduce(op) => {
                let plan = planner.reduction(call.count, call.dtype, op);
                (plan, Some(plan.algorithm))
            }
            Collective::AllReduceFused(fused) => {
                let plan = planner.rows(call.count, call.dtype, fused.row(), fused.has_other_norm());
                (plan, Some(plan.algorithm))
            }
            Collective::AllReduceQuantized(_) => (planner.quantized(call.count, call.dtype), None),
            _ => {
                let shares = call.staged_shares(planner.limits.world_size);
                (
                    planner.shares(call.collective.kind().planned_as(), extent.saturating_mul(size), shares),
                    None,
                )
            }
        };
        Self { id: call.id(algorithm), plan, piece: (plan.piece_bytes / size).max(1) }
    }
}

/// What is worked out for transfers before their launch, but for where receivers read them.
#[derive(Debug)]
pub(crate) struct PreparedTransfers {
    /// As they were given; none, where they were refused.
    list: Vec<Transfer>,
    pub packed: FaTransfers,
    pub moved: Moved,
    pub plan: Plan,
}

impl PreparedTransfers {
    /// Of no transfers.
    pub fn new(planner: &Planner) -> Self {
        let moved = Moved { sent_bytes: 0, received_bytes: 0 };
        Self {
            list: Vec::new(),
            packed: NO_TRANSFERS,
            moved,
            plan: Self::plan(planner, moved, &NO_TRANSFERS),
        }
    }

    /// Works out these, unless they are those before. Their addresses are looked at, not what is there.
    ///
    /// # Errors
    ///
    /// As [`pack`].
    pub fn set(
        &mut self,
        transfers: &[Transfer],
        rank: usize,
        planner: &Planner,
        stripes: Stripes,
    ) -> Result<()> {
        if self.list == transfers {
            return Ok(());
        }
        self.list.clear();
        self.moved = pack(transfers, rank, planner.limits.world_size, stripes, &mut self.packed)?;
        self.plan = Self::plan(planner, self.moved, &self.packed);
        self.list.extend_from_slice(transfers);
        Ok(())
    }

    fn plan(planner: &Planner, moved: Moved, packed: &FaTransfers) -> Plan {
        // Receiving takes as many threads as sending.
        let bytes = moved.sent_bytes.max(moved.received_bytes) as usize;
        let plan = planner.shares(PlannedCall::Messages, bytes, 1);
        planner.messages(plan, packed.stripes[2 * planner.limits.world_size] as usize)
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
