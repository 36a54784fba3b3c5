//! Cache of the previous call: the next one is often equal.

use super::arguments::{Call, MessagesKey};
use super::collective::Collective;
use super::identity::CallId;
use super::recorder::Recorder;
use super::transfer::{pack, Moved, Transfer, NO_TRANSFERS};
use crate::abi::{FaLaunch, FaTransfers};
use crate::error::Result;
use crate::plan::{Plan, PlannedCall, Planner};
use crate::region::Stripes;

/// State reused from the previous call. Copying it is measurable in small calls.
#[derive(Debug, Default)]
pub(crate) struct CallCache {
    plan: Option<Plan>,
    /// Last call, if it was not a transfer.
    pub last: Option<Prepared>,
    /// Last launch. Most fields are equal in all launches; in launches of equal calls all except the piece are.
    pub launch: Option<Box<FaLaunch>>,
    /// Last transfers.
    pub transfers: Option<Box<PreparedTransfers>>,
    /// Number of the last collective that was carried out as messages.
    pub number: u32,
    /// Scratch memory for a list of transfers.
    pub list: Vec<Transfer>,
    /// Number of collectives that have been carried out; on a GPU 0.
    pub completed: u64,
    /// Records the calls. Then `last` is `None`.
    pub recorder: Option<Box<Recorder>>,
}

impl CallCache {
    /// Clears everything that the world of the calls has determined, and counts on from `completed`.
    pub fn restart(&mut self, completed: u64) {
        *self = Self { completed, ..Self::default() };
    }
}

/// Facts about a call that are computed before its launches. They do not depend on the buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prepared {
    pub id: CallId,
    pub plan: Plan,
    /// Elements of one launch: of the message, or of each share.
    pub piece: usize,
}

impl Prepared {
    /// Plans the call. `extent` is the number of elements of the message, or of the largest share.
    #[inline(always)]
    pub fn new(call: &Call<'_>, extent: usize, planner: &Planner) -> Self {
        let size = call.dtype.size();
        let (plan, algorithm) = match call.collective {
            Collective::AllReduce(op) => {
                let plan = planner.reduction(call.count, call.dtype, op);
                (plan, Some(plan.algorithm))
            }
            Collective::AllReduceFused(fused) => {
                let plan = planner.rows(call.count, call.dtype, fused.row());
                (plan, Some(plan.algorithm))
            }
            Collective::ReduceScatterFused(fused) | Collective::ReduceScatterFusedV(fused, _) => {
                (planner.row_shares(extent, call.dtype, fused.row()), None)
            }
            Collective::AllGatherRows(rows) | Collective::AllGatherRowsV(rows, _) => {
                (planner.gathered_rows(extent, rows.row_bytes(), rows.staged_row()), None)
            }
            Collective::ShardedRmsNorm(parts) => {
                let totals = parts.iter().map(|part| part.total).sum();
                (planner.sharded_rows(call.count, totals, call.dtype), None)
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

/// Facts about transfers that are computed before their launch, except where receivers read the messages.
#[derive(Debug)]
pub(crate) struct PreparedTransfers {
    /// The transfers as given; empty if they were refused.
    list: Vec<Transfer>,
    /// The collective that these are the messages of, if it is known, and its identity.
    made: Option<(MessagesKey, CallId)>,
    pub packed: FaTransfers,
    pub moved: Moved,
    pub plan: Plan,
}

impl PreparedTransfers {
    /// Prepares an empty list of transfers.
    pub fn new(planner: &Planner) -> Self {
        let moved = Moved { sent_bytes: 0, received_bytes: 0 };
        Self {
            list: Vec::new(),
            made: None,
            packed: NO_TRANSFERS,
            moved,
            plan: Self::plan(planner, moved, &NO_TRANSFERS),
        }
    }

    /// Prepares a list of transfers, unless it is equal to the previous one. The memory of the messages is not
    /// accessed.
    ///
    /// # Errors
    ///
    /// The errors of [`pack`].
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
        self.made = None;
        self.moved = pack(transfers, rank, planner.limits.world_size, stripes, &mut self.packed)?;
        self.plan = Self::plan(planner, self.moved, &self.packed);
        self.list.extend_from_slice(transfers);
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the identity of the collective whose messages these are, if it is that one.
    #[inline]
    pub fn id_of(&self, key: Option<MessagesKey>) -> Option<CallId> {
        let (made, id) = self.made?;
        (Some(made) == key).then_some(id)
    }

    /// Notes the collective whose messages these are, and its identity.
    pub fn set_made(&mut self, key: Option<MessagesKey>, id: CallId) {
        self.made = key.map(|key| (key, id));
    }

    fn plan(planner: &Planner, moved: Moved, packed: &FaTransfers) -> Plan {
        // Receiving takes as many threads as sending.
        let bytes = moved.sent_bytes.max(moved.received_bytes) as usize;
        let plan = planner.shares(PlannedCall::Messages, bytes, 1);
        planner.messages(plan, packed.stripes[2 * planner.limits.world_size] as usize)
    }
}

impl CallCache {
    /// Logs a `tracing` event at level debug if the plan differs from that of the previous call.
    #[inline]
    pub fn planned(&mut self, plan: &Plan) {
        if self.plan != Some(*plan) {
            self.plan = Some(*plan);
            let Plan { algorithm, blocks, threads, piece_bytes } = *plan;
            tracing::debug!(algorithm = algorithm.name(), blocks, threads, piece_bytes, "plan");
        }
    }
}
