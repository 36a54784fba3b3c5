//! Starting a call: its launches, one for each piece of the message.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::message::{Form, Message};
use super::Communicator;
use crate::abi::{self, FaCall, FaLaunch, FaShare, FaTransfers, FA_MAX_RANKS};
use crate::call::CallId;
use crate::collective::Collective;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::op::ReduceOp;
use crate::plan::{Algorithm, Plan};
use crate::region::TABLE_ROWS;
use crate::registry::{Prepared, Registry};
use crate::trace::Span;

impl<D: Device> Communicator<D> {
    /// Starts a launch for each piece of the message. `source` says where peers find the input if it is in no registered
    /// buffer: 0 for staging.
    ///
    /// # Safety
    ///
    /// Until the launches have ended, the input is valid for reads and the output for writes of the elements that the collective
    /// has there on this rank, and nothing else writes the one or accesses the other. They are aligned for the type, and disjoint or
    /// placed as the collective's in-place form is. [`Message::check`] has passed, or cannot fail.
    pub(super) unsafe fn start(
        &self,
        message: Message<'_>,
        stream: D::Stream<'_>,
        source: impl FnOnce(&mut Registry, &Plan) -> Result<u64>,
    ) -> Result<()> {
        let form = message.form();
        if form == Form::Transfers {
            let transfers = message.transfers(self.rank, self.world_size);
            // SAFETY: the caller's: each transfer is a part of the input or the output.
            return unsafe { self.start_transfers(message.id(None), &transfers, stream) };
        }
        let mut registry = self.endpoint.lock();
        self.healthy()?;
        let extent = message.extent(self.world_size);
        let again = registry.last.filter(|last| message.is_again(&last.id));
        let prepared = again.unwrap_or_else(|| self.prepare(&message, extent));
        let Prepared { id: call, plan, piece } = prepared;
        let algorithm = call.algorithm;
        let number = self.presence.begin(call.encode());
        let _span = Span::enter(self.rank, number, &call, &plan);
        let bytes = message.input_bytes(self.rank, self.world_size);
        let pulls = match algorithm {
            // In place, a one-shot writes where peers still read: it must stage. A push has no peers that read.
            Some(Algorithm::OneShotPull) => message.input != message.output,
            Some(algorithm) => algorithm == Algorithm::TwoShotPull,
            None => bytes > 0,
        };
        let source = match pulls && message.input % D::SOURCE_ALIGNMENT == 0 {
            false => 0,
            true => match registry.source(message.input, bytes) {
                0 => source(&mut registry, &plan).map_err(|error| self.cut_short(error))?,
                registered => registered,
            },
        };
        let launch = match (again, &mut *registry) {
            (Some(_), Registry { launch: Some(launch), .. }) => launch,
            (_, registry) => {
                registry.planned(&plan);
                registry.last = algorithm.map(|_| prepared);
                self.launch(registry, &message, &plan, call.encode())
            }
        };
        let mut done = 0;
        while done < extent || (form == Form::Empty && done == 0) {
            message.set_piece(launch, done, piece, source);
            // SAFETY: input and output are the caller's, within their counts; regions and the table are this
            // endpoint's, and the registry's lock keeps the table as it is.
            unsafe { self.endpoint.device.launch(launch, &plan, None, stream) }
                .map_err(|error| self.cut_short(error))?;
            if self.endpoint.region.failure() != abi::FA_OK {
                self.endpoint.make_private(source);
                break;
            }
            done = done.saturating_add(piece);
        }
        self.count_bytes(bytes);
        Ok(())
    }

    /// The end of a call. The lock of the registry is held, so that no other call counts at the same time.
    fn count_bytes(&self, bytes: u64) {
        self.bytes.store(self.bytes.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
        self.presence.end();
    }

    /// The end of a call that this rank cannot carry out, or not whole. Nothing has told the others, which may be in it.
    #[cold]
    fn cut_short(&self, error: Error) -> Error {
        self.presence.end();
        self.poison(error)
    }

    /// The call worked out. `extent` is of the message.
    fn prepare(&self, message: &Message<'_>, extent: usize) -> Prepared {
        let size = message.dtype.size();
        let shares = |shares| (self.plan_shares(extent.saturating_mul(size), shares), None);
        let (plan, algorithm) = match message.collective {
            Collective::AllReduce(op) => {
                let plan = self.plan_reduction(message.count, message.dtype, op);
                (plan, Some(plan.algorithm))
            }
            Collective::ReduceScatter(_) | Collective::ReduceScatterV(..) => shares(self.world_size),
            _ => shares(1),
        };
        // What is aligned stays so from piece to piece.
        let alignment = D::SOURCE_ALIGNMENT as usize;
        let bytes = plan.piece_bytes - plan.piece_bytes % alignment;
        Prepared { id: message.id(algorithm), plan, piece: (bytes / size).max(1) }
    }

    /// Starts a launch of messages between pairs of ranks.
    ///
    /// # Safety
    ///
    /// The addresses of the transfers are valid, as [`Communicator::start`] has it, until the launch has ended.
    pub(super) unsafe fn start_packed(
        &self,
        call: CallId,
        transfers: &FaTransfers,
        bytes: u64,
        stream: D::Stream<'_>,
    ) -> Result<()> {
        let mut registry = self.endpoint.lock();
        self.healthy()?;
        let number = self.presence.begin(call.encode());
        // Receiving takes as many threads as sending.
        let all: u64 = transfers.transfer.iter().map(|transfer| transfer.bytes).sum();
        let plan = self.plan_shares(bytes.max(all.saturating_sub(bytes)) as usize, 1);
        // A channel is one block's.
        let plan = Plan { blocks: plan.blocks.min(2 * self.world_size), ..plan };
        let _span = Span::enter(self.rank, number, &call, &plan);
        registry.planned(&plan);
        let nothing =
            Message { collective: Collective::Barrier, input: 0, output: 0, count: 0, dtype: call.dtype };
        registry.last = None;
        let launch = self.launch(&mut registry, &nothing, &plan, call.encode());
        launch.algorithm = abi::FA_TRANSFER;
        // SAFETY: the caller's; the rest as in `start`.
        unsafe { self.endpoint.device.launch(launch, &plan, Some(transfers), stream) }
            .map_err(|error| self.cut_short(error))?;
        self.count_bytes(bytes);
        Ok(())
    }

    /// A launch of the call, all but the piece.
    fn launch<'a>(
        &self,
        registry: &'a mut Registry,
        message: &Message<'_>,
        plan: &Plan,
        call: FaCall,
    ) -> &'a mut FaLaunch {
        let launch = registry.launch.get_or_insert_with(|| Box::new(self.blank_launch()));
        launch.timeout_ns = self.timeout.map_or(0, nanoseconds);
        launch.blocks = plan.blocks as u32;
        launch.dtype = message.dtype as u32;
        launch.op = message.collective.reduction().unwrap_or(ReduceOp::Sum) as u32;
        launch.algorithm = message.kernel(plan.algorithm, D::KIND, self.world_size);
        (launch.place_bytes, launch.last_place) = match D::WALKED_BYTES {
            0 => (0, 0),
            walked => message
                .walked_bytes(plan.piece_bytes, self.world_size)
                .map_or((0, 0), |staged| self.endpoint.region.layout.places(staged, walked)),
        };
        launch.root = message.collective.root().unwrap_or(0) as u32;
        launch.call = call;
        launch
    }

    /// What all launches have in common.
    fn blank_launch(&self) -> FaLaunch {
        let region = &self.endpoint.region;
        FaLaunch {
            regions: std::array::from_fn(|rank| region.address(rank)),
            input: 0,
            output: 0,
            count: 0,
            source: 0,
            buffers: region.table_address(),
            buffer_count: TABLE_ROWS as u64,
            status: region.status_address(),
            mailbox_offset: region.layout.mailbox_offset as u64,
            mailbox_bytes: region.layout.mailbox_bytes as u64,
            staging_offset: region.layout.staging_offset as u64,
            staging_bytes: region.layout.staging_bytes as u64,
            place_bytes: 0,
            channel_offset: region.layout.channel_offset as u64,
            channel_bytes: region.layout.channel_bytes as u64,
            transfers: 0,
            launches: 0,
            timeout_ns: 0,
            rank: self.rank as u32,
            world: self.world_size as u32,
            blocks: 0,
            dtype: 0,
            op: 0,
            algorithm: 0,
            spin: 0,
            checked: u32::from(self.checked),
            root: 0,
            last_place: 0,
            call: FaCall { what: 0, count: 0, digest: 0 },
            shares: [FaShare { first: 0, count: 0 }; FA_MAX_RANKS as usize],
        }
    }
}

/// A limit as kernels take it: at least 1, as 0 is none, and at most half the range, as a kernel adds the time of its clock.
fn nanoseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).clamp(1, u64::MAX / 2)
}
