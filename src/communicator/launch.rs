//! Starts calls: a launch for each piece of the message, or one launch for messages between pairs.

use std::sync::atomic::Ordering;

use super::Communicator;
use crate::abi::{self, FaCall, FaLaunch, FaTransfer, FaTransfers};
use crate::call::{
    is_all_gather, nanoseconds, number_after, set_number, Call, CallCache, CallId, CallKind, Collective,
    Division, LaunchContext, Prepared, PreparedTransfers, Recorder, Transfer, NO_LIMIT,
};
use crate::device::sealed::{Operands, Windows as _};
use crate::device::Device;
use crate::endpoint::{Membership, State};
use crate::error::{Error, Result};
use crate::plan::{set_teams, DeviceKind, Plan};
use crate::registry::Registry;
use crate::trace::CallSpan;

/// Outcome of a step of a call. An [`Error`] has many words: to move one, loads that are wider than the stores before
/// them wait until all earlier stores of the core have ended, also those to lines that a peer's core has.
type Started = Result<(), Box<Error>>;

impl<D: Device> Communicator<D> {
    /// Starts a launch for each piece of the message. `source` returns where peers find an input that is in no
    /// registered buffer: 0 for staging.
    ///
    /// # Safety
    ///
    /// Until the launches have ended, the input is valid for reads and the output for writes of the elements that the
    /// collective reads and writes on this rank. Nothing else writes the input or accesses the output. Both are aligned
    /// for the type, and disjoint or placed as in the collective's in-place form. The same holds for the memory of
    /// fused operations. [`Call::check`] has passed, or cannot fail.
    pub(super) unsafe fn start(
        &self,
        call: Call<'_>,
        stream: D::Stream<'_>,
        source: impl FnOnce() -> Result<u64>,
    ) -> Result<()> {
        self.can_lock()?;
        // SAFETY: the caller's obligation.
        unsafe { self.start_locked(&mut *self.endpoint.enter()?, call, stream, source) }
            .map_err(|error| *error)
    }

    /// Starts a call with the endpoint's lock held.
    ///
    /// # Safety
    ///
    /// As [`Communicator::start`].
    #[inline]
    unsafe fn start_locked(
        &self,
        state: &mut State<D>,
        call: Call<'_>,
        stream: D::Stream<'_>,
        source: impl FnOnce() -> Result<u64>,
    ) -> Started {
        let division = call.division();
        if division == Division::Transfers || self.gathers_directly(state, &call)? {
            if let Some(recorder) = state.calls.recorder.take() {
                // SAFETY: the caller's obligation.
                return unsafe { self.start_recorded(recorder, state, call, stream, source) };
            }
            let key = call.messages_key();
            let again = state.calls.transfers.as_ref().and_then(|prepared| prepared.id_of(key));
            let mut list = std::mem::take(&mut state.calls.list);
            let (id, transfers) = match again {
                Some(id) => (id, None),
                None => {
                    call.transfers(self.rank, self.world_size, &mut list);
                    (call.id(None), Some(&list[..]))
                }
            };
            // On GPUs one rank may replay a captured call while another makes the call again.
            let number = match D::KIND {
                DeviceKind::Host => number_after(state.calls.number),
                DeviceKind::Cuda => 0,
            };
            // SAFETY: the caller's obligation; each transfer is a part of the input or the output, also where those of
            // the launch before are repeated: that call had the same memory.
            let started = unsafe { self.start_transfers_locked(state, id, transfers, Some(number), stream) };
            if let (None, Ok(()), Some(prepared)) = (again, &started, &mut state.calls.transfers) {
                prepared.set_made(key, id);
            }
            state.calls.list = list;
            return started;
        }
        let (registry, calls, membership) = state.parts()?;
        self.healthy_in(membership)?;
        let extent = call.extent(self.world_size);
        let again = calls.last.filter(|last| call.repeats(&last.id));
        if again.is_none() {
            if let Some(recorder) = calls.recorder.take() {
                // SAFETY: the caller's obligation.
                return unsafe { self.start_recorded(recorder, state, call, stream, source) };
            }
        }
        let prepared = again.unwrap_or_else(|| Prepared::new(&call, extent, &self.planner));
        let Prepared { id, plan, piece } = prepared;
        let algorithm = id.algorithm;
        let what = id.encode();
        let number = membership.liveness.begin(what);
        let _span = CallSpan::enter(self.rank, number, &id, &plan);
        let bytes = call.input_bytes(self.rank, self.world_size);
        let source = match call.pulls(algorithm, bytes) && call.input % D::SOURCE_ALIGNMENT == 0 {
            false => 0,
            true => match registry.source(call.input, bytes) {
                0 => source().map_err(|error| self.cut_short(membership, error))?,
                registered => registered,
            },
        };
        let launch = match (again, &mut *calls) {
            (Some(_), CallCache { launch: Some(launch), .. }) => launch,
            (_, calls) => {
                calls.planned(&plan);
                calls.last = Some(prepared);
                self.launch(membership, calls, &call, &plan, what)
            }
        };
        launch.streams_output = call.streams_output(&self.planner.limits).into();
        // Every launch waits for a signal of every peer.
        let is_launched = extent != 0 || division == Division::Empty;
        let peers = if is_launched { self.peers() } else { 0 };
        launch.timeout_ns = self.wait_limits.next(peers, peers).map_or(NO_LIMIT, nanoseconds);
        for done in division.pieces(extent, piece) {
            call.set_piece(launch, done, piece, source);
            let mut fused = call.fused_of_piece(self.rank, done, piece);
            let is_pushed = algorithm.is_some() && self.planner.limits.device == DeviceKind::Cuda;
            if let (Some(fused), true) = (&mut fused, is_pushed) {
                set_teams(fused, launch, call.dtype.size(), &plan);
            }
            let gathered = call.gathered_of_piece(self.rank, self.world_size, done);
            let sharded = call.sharded_of_piece(done, piece);
            let operands = match (&fused, &gathered, &sharded) {
                (Some(fused), ..) => Operands::Fused(fused),
                (_, Some(rows), _) => Operands::Gathered(rows),
                (.., Some(sharded)) => Operands::Sharded(sharded),
                _ => Operands::None,
            };
            // SAFETY: the caller vouches for input and output, and a piece is within their counts. Regions and the
            // table belong to this endpoint, and nothing changes the table while the lock is held.
            unsafe { self.endpoint.device.launch(launch, &plan, operands, stream) }
                .map_err(|error| self.cut_short(membership, error))?;
            if membership.region.failure() != abi::FA_OK {
                self.endpoint.make_private(source);
                break;
            }
        }
        self.count_bytes(membership, what, bytes);
        self.outcome(membership, calls, true)
    }

    /// Returns whether the call is an all-gather that ranks carry out by reading from each other's processes.
    #[inline]
    fn gathers_directly(&self, state: &mut State<D>, call: &Call<'_>) -> Result<bool> {
        if !D::READS_DIRECTLY || !is_all_gather(call.collective.kind()) {
            return Ok(false);
        }
        let (_, _, membership) = state.parts()?;
        let bytes = call.extent(self.world_size).saturating_mul(call.dtype.size()) as u64;
        Ok(membership.direct_reads.as_ref().is_some_and(|direct| direct.gathers(bytes)))
    }

    /// Starts a call that is recorded, with the endpoint's lock held. On the host it has ended when this returns.
    ///
    /// # Safety
    ///
    /// As [`Communicator::start`].
    #[cold]
    unsafe fn start_recorded(
        &self,
        mut recorder: Box<Recorder>,
        state: &mut State<D>,
        call: Call<'_>,
        stream: D::Stream<'_>,
        source: impl FnOnce() -> Result<u64>,
    ) -> Started {
        // SAFETY: the caller vouches for the memory.
        let begun = unsafe { recorder.begin(&call) };
        // SAFETY: the caller's obligation. Without a recorder it does not come here again.
        let outcome = unsafe { self.start_locked(state, call, stream, source) };
        // SAFETY: the caller vouches for the memory, and the call has ended.
        if begun && unsafe { recorder.end(&call, outcome.as_ref().err().map(Box::as_ref)) } {
            state.calls.last = None;
            state.calls.recorder = Some(recorder);
        }
        outcome
    }

    /// Starts a barrier in which ranks compare the call that has begun, a collective that is carried out by messages.
    fn compare(
        &self,
        membership: &Membership<D>,
        calls: &mut CallCache,
        id: CallId,
        stream: D::Stream<'_>,
    ) -> Result<()> {
        let (collective, dtype) = (Collective::Barrier, id.dtype);
        let barrier = Call { collective, input: 0, output: 0, count: 0, dtype };
        let plan = Prepared::new(&barrier, 0, &self.planner).plan;
        // Where each rank has its own counts, their sums may differ.
        let count = if id.kind == CallKind::AllToAllV { 0 } else { id.count };
        let launch = self.launch(membership, calls, &barrier, &plan, CallId { count, ..id }.encode());
        launch.timeout_ns = self.wait_limits.next(self.peers(), self.peers()).map_or(NO_LIMIT, nanoseconds);
        barrier.set_piece(launch, 0, 1, 0);
        // SAFETY: a barrier has no buffers; regions and the table are as in `start`.
        unsafe { self.endpoint.device.launch(launch, &plan, Operands::None, stream) }
    }

    /// Ends a call and counts its bytes. The endpoint's lock is held, so no other call counts at the same time.
    fn count_bytes(&self, membership: &Membership<D>, what: FaCall, bytes: u64) {
        self.bytes.store(self.bytes.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
        membership.liveness.count(what.what, bytes);
        self.end(membership);
    }

    /// Publishes that the call has ended.
    fn end(&self, membership: &Membership<D>) {
        let region = &membership.region;
        membership.liveness.end(region.slow(), || region.take_waits());
    }

    /// Returns the outcome of a call at its end: on the host its launches have ended. Counts collectives that have
    /// been carried out.
    #[inline]
    fn outcome(&self, membership: &Membership<D>, calls: &mut CallCache, is_collective: bool) -> Started {
        if D::KIND == DeviceKind::Host {
            self.healthy_in(membership)?;
            calls.completed += u64::from(is_collective);
        }
        Ok(())
    }

    /// Ends a call that this rank cannot complete. It poisons the communicator, because peers may already wait in the
    /// call.
    #[cold]
    fn cut_short(&self, membership: &Membership<D>, error: Error) -> Error {
        self.end(membership);
        self.poison_in(membership, error)
    }

    /// Starts a launch of messages between pairs of ranks.
    ///
    /// # Safety
    ///
    /// Until the launch has ended, memory that is sent is valid for reads and memory that is received into for writes.
    /// Nothing else writes the former or accesses the latter.
    pub(super) unsafe fn start_transfers(
        &self,
        call: CallId,
        transfers: &[Transfer],
        stream: D::Stream<'_>,
    ) -> Result<()> {
        self.can_lock()?;
        let mut state = self.endpoint.enter()?;
        // SAFETY: the caller's obligation.
        unsafe { self.start_transfers_locked(&mut state, call, Some(transfers), None, stream) }
            .map_err(|error| *error)
    }

    /// Starts a launch of messages with the endpoint's lock held. Without `transfers` it repeats those of the last
    /// launch of messages. `number` is set for a collective.
    ///
    /// # Safety
    ///
    /// As [`Communicator::start_transfers`].
    unsafe fn start_transfers_locked(
        &self,
        state: &mut State<D>,
        call: CallId,
        transfers: Option<&[Transfer]>,
        number: Option<u32>,
        stream: D::Stream<'_>,
    ) -> Started {
        let (registry, calls, membership) = state.parts()?;
        let mut prepared =
            calls.transfers.take().unwrap_or_else(|| Box::new(PreparedTransfers::new(&self.planner)));
        let stripes = membership.region.layout.stripes;
        let set = transfers.map_or(Ok(()), |list| prepared.set(list, self.rank, &self.planner, stripes));
        self.healthy_in(membership)?;
        let started = match set {
            // SAFETY: the caller's obligation.
            Ok(()) if !prepared.is_empty() => unsafe {
                if let Some(number) = number {
                    set_number(&mut prepared.packed, number, self.world_size);
                    calls.number = number;
                }
                self.post_sources(membership, registry, &mut prepared.packed);
                self.start_prepared(membership, calls, call, number.is_some(), &prepared, stream)
            },
            set => {
                // A collective in which this rank has nothing to do.
                let is_done = D::KIND == DeviceKind::Host && number.is_some() && set.is_ok();
                calls.completed += u64::from(is_done);
                set.map_err(Box::new)
            }
        };
        calls.transfers = Some(prepared);
        started
    }

    /// Sets `source` of large messages that receivers can read where they are: in a registered buffer, between threads
    /// of one process, or where the operating system lets the receiver read this process.
    fn post_sources(&self, membership: &Membership<D>, registry: &Registry, transfers: &mut FaTransfers) {
        let peers = (0..self.world_size).filter(|&peer| peer != self.rank);
        for peer in peers {
            let [first, end] = [0, 1].map(|next| transfers.first[2 * peer + next] as usize);
            let least_private = match membership.liveness.threads() >> peer & 1 {
                1 if D::READS_PRIVATE => D::LEAST_POSTED_BYTES,
                _ => membership.direct_reads.as_ref().map_or(u64::MAX, |direct| direct.least_bytes(peer)),
            };
            for message in &mut transfers.transfer[first..end] {
                message.source = 0;
                if message.bytes >= D::LEAST_POSTED_BYTES && message.address % D::SOURCE_ALIGNMENT == 0 {
                    message.source = registry.source(message.address, message.bytes);
                }
                if message.source == 0 && message.bytes >= least_private {
                    message.source = message.address | 1 << abi::FA_SOURCE_PRIVATE_SHIFT;
                }
            }
        }
    }

    /// Starts a launch of prepared messages with the endpoint's lock held.
    ///
    /// # Safety
    ///
    /// As [`Communicator::start_transfers`].
    unsafe fn start_prepared(
        &self,
        membership: &Membership<D>,
        calls: &mut CallCache,
        call: CallId,
        is_collective: bool,
        prepared: &PreparedTransfers,
        stream: D::Stream<'_>,
    ) -> Started {
        let PreparedTransfers { packed: transfers, moved, plan, .. } = prepared;
        let what = call.encode();
        let number = membership.liveness.begin(what);
        let _span = CallSpan::enter(self.rank, number, &call, plan);
        calls.planned(plan);
        calls.last = None;
        // A call that other ranks may make as a launch of another kind is compared first.
        if is_collective && (self.checked || is_all_gather(call.kind)) {
            self.compare(membership, calls, call, stream)
                .map_err(|error| self.cut_short(membership, error))?;
            if membership.region.failure() != abi::FA_OK {
                self.end(membership);
                return self.outcome(membership, calls, is_collective);
            }
        }
        let is_such = |launch: &FaLaunch| {
            launch.algorithm == abi::FA_TRANSFER
                && (launch.dtype, launch.blocks) == (call.dtype as u32, plan.blocks as u32)
        };
        let launch = match &mut calls.launch {
            Some(launch) if is_such(launch) => launch,
            _ => {
                let collective = Collective::Barrier;
                let nothing = Call { collective, input: 0, output: 0, count: 0, dtype: call.dtype };
                let launch = self.launch(membership, calls, &nothing, plan, what);
                launch.algorithm = abi::FA_TRANSFER;
                launch
            }
        };
        launch.call = what;
        let (maybe, surely) = self.awaited(membership, transfers);
        launch.timeout_ns = self.wait_limits.next(maybe, surely).map_or(NO_LIMIT, nanoseconds);
        // SAFETY: the caller's obligation; regions and the table are as in `start`.
        unsafe { self.endpoint.device.launch(launch, plan, Operands::Transfers(transfers), stream) }
            .map_err(|error| self.cut_short(membership, error))?;
        // A share of an all-gather counts once, however many ranks read it.
        let copies = if is_all_gather(call.kind) { self.world_size as u64 } else { 1 };
        self.count_bytes(membership, what, moved.sent_bytes / copies);
        self.outcome(membership, calls, is_collective)
    }

    /// Returns the other ranks, a bit for each.
    fn peers(&self) -> u32 {
        ((1 << self.world_size) - 1) & !(1 << self.rank)
    }

    /// Returns the peers of the messages, a bit for each, and the peers that the launch is certain to wait for: for a
    /// message from the peer, or for credit for a message to it.
    fn awaited(&self, membership: &Membership<D>, transfers: &FaTransfers) -> (u32, u32) {
        let layout = &membership.region.layout;
        let stripe_bytes = (layout.channel_slots * layout.chunk_bytes) as u64;
        let (mut maybe, mut surely) = (0, 0);
        for peer in (0..self.world_size).filter(|&peer| peer != self.rank) {
            let [sent, received, end] = [0, 1, 2].map(|next| transfers.first[2 * peer + next] as usize);
            maybe |= u32::from(sent != end) << peer;
            let is_more_than_fits = |sent: &FaTransfer| {
                let part = u64::from(sent.part) * u64::from(abi::FA_PART_ALIGNMENT);
                let is_posted = D::KIND == DeviceKind::Cuda && sent.source != 0;
                is_posted || (if part == 0 { sent.bytes } else { part }) > stripe_bytes
            };
            let needs = received != end || transfers.transfer[sent..received].iter().any(is_more_than_fits);
            surely |= u32::from(needs) << peer;
        }
        (maybe, surely)
    }

    /// Returns a launch of the call, complete except for the piece and the limit.
    fn launch<'a>(
        &self,
        membership: &Membership<D>,
        calls: &'a mut CallCache,
        call: &Call<'_>,
        plan: &Plan,
        what: FaCall,
    ) -> &'a mut FaLaunch {
        let launch = calls.launch.get_or_insert_with(|| Box::new(self.first_launch(membership)));
        call.set_call(launch, plan, &self.planner.limits);
        launch.call = what;
        launch
    }

    /// Makes a launch with the fields that are the same in all launches.
    fn first_launch(&self, membership: &Membership<D>) -> FaLaunch {
        let region = &membership.region;
        let context = LaunchContext {
            rank: self.rank,
            world_size: self.world_size,
            layout: &region.layout,
            regions: std::array::from_fn(|rank| region.address(rank)),
            table: region.table_address(),
            status: region.status_address(),
            threads: membership.liveness.threads(),
            direct: membership.direct_reads.as_ref().map_or(0, |direct| direct.address()),
            window: region.windows.as_ref().map_or(0, |windows| windows.own()),
            multicast: region.windows.as_ref().map_or(0, |windows| windows.multicast()),
        };
        FaLaunch { checked: u32::from(self.checked), ..context.launch() }
    }
}
