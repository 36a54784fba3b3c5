//! Ranks that leave their world and come back: suspending and resuming a communicator, and replacing ranks that have
//! gone.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use super::enter::{compare, form, share_kept, Forming, HasBegun, Member, Progress, Role};
use super::place::{locked, Inheritance, Inherited, Suspended};
use super::Communicator;
use crate::bootstrap::{agree_on, Bootstrap, Lineage, UniqueId};
use crate::deadline::Deadline;
use crate::device::sealed::Shared as _;
use crate::device::{sealed, Device};
use crate::element::Element;
use crate::endpoint::{Connection, Membership, MemoryFacts, State};
use crate::error::{Error, Result};
use crate::plan::{DeviceKind, Nvls, Proposal};
use crate::registry::{Range, Row};
use crate::symmetric::{Buffer, SymmetricMemory};

impl<D: Device> Communicator<D> {
    /// Returns an id by which new processes take the places of ranks that have gone ([`Communicator::join`]) or come in
    /// addition ([`Communicator::grow`]).
    ///
    /// It is the same on all ranks. It is for the next world alone: when the ranks have joined or resumed, there is
    /// another. Like every [`UniqueId`] it contains a secret.
    ///
    /// # Errors
    ///
    /// [`Error::Aborted`], if the communicator was aborted while suspended.
    pub fn join_id(&self) -> Result<UniqueId> {
        match self.endpoint.with_membership(|membership| membership.lineage.next_id()) {
            Ok(id) => Ok(id),
            Err(suspended) => self.endpoint.place.get().map(|lineage| lineage.next_id()).ok_or(suspended),
        }
    }

    /// Replaces the ranks that have gone by new processes. Collective among the survivors and the new ranks.
    ///
    /// `survivors` are the ranks that keep their places, in ascending order, this one among them; all of them pass the
    /// same. Every other place is taken by a process that builds its communicator with the same settings, from
    /// [`Local::connect`](crate::bootstrap::Local::connect) with [`Communicator::join_id`]'s id, that rank and
    /// the same world size; or from [`Local::spare`](crate::bootstrap::Local::spare), which takes any place. It may
    /// come before or after the survivors, at most `timeout` apart.
    ///
    /// The communicator has usually failed; it works again afterwards, as the same object. Buffers and symmetric memory
    /// stay as they are, registered as before, on the survivors; the new ranks take theirs by
    /// [`Communicator::inherit_buffer`], filled with zeros. What some survivor has dropped is no longer registered on
    /// any rank. A buffer of more than 16 MiB whose call has failed, and all memory beyond the first 256 allocations of
    /// a process, is not shared again: calls from it work as from any other memory. Drop it in the end.
    ///
    /// The result says how many collective calls all survivors have completed; messages between pairs do not count. So
    /// repeat from call number `completed`, counted from 0: the inputs of calls that are not in place are untouched. A
    /// survivor may be ahead: by one call at most, if all ranks wait for each other in it, as in an allreduce; by
    /// several broadcasts, gathers or scatters. On GPUs it is always 0, since their calls are enqueued.
    ///
    /// On GPUs the survivors' captured graphs stay valid; their caller waits for replays before, and for other kernels
    /// that use peers' memory. Parts of new ranks are at the addresses that those of the ranks before had.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # let limit = std::time::Duration::from_secs(10);
    /// # let (send, receive) = std::sync::mpsc::channel();
    /// # let new = std::thread::spawn(move || -> Result<()> {
    /// use fast_allreduce::bootstrap::{Local, UniqueId};
    ///
    /// // The new process, which has got the id by any means.
    /// let id: UniqueId = receive.recv().unwrap();
    /// let communicator =
    ///     Communicator::builder().build(Host::new(), Local::connect(&id, 1, 2, limit)?)?;
    /// let mut buffer = communicator.inherit_buffer::<f32>(0)?;
    /// buffer.fill(2.0);
    /// communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    /// assert_eq!(buffer[0], 3.0);
    /// # communicator.barrier()
    /// # });
    /// # ranks(2, move |communicator| {
    /// let mut buffer = communicator.alloc::<f32>(1000)?;
    /// if communicator.rank() == 1 {
    ///     return Ok(()); // Drops its communicator.
    /// }
    /// println!("{}", communicator.barrier().unwrap_err()); // Rank 1 is gone.
    /// # let send = send.clone();
    /// send.send(communicator.join_id()?).unwrap();
    /// let progress = communicator.join(&[0], limit)?;
    /// assert_eq!((progress.completed, progress.of_rank), (0, vec![Some(0), None]));
    ///
    /// buffer.fill(1.0);
    /// communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    /// assert_eq!(buffer[0], 3.0);
    /// # communicator.barrier()
    /// # });
    /// # new.join().unwrap().unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// * [`Error::InvalidSetting`], if the list is not in ascending order, has a rank out of range or lacks this rank.
    /// * [`Error::Timeout`], if ranks do not come in time; [`Error::PeerLost`], if a survivor has gone.
    /// * [`Error::Disagreement`], if the ranks have other settings or builds, or other lists of survivors.
    /// * [`Error::Refused`], if another process has taken this rank's place, or ranks do not fit the list.
    /// * [`Error::Unavailable`] while the communicator is suspended, within a call, and if calls of other threads leave
    ///   no gap within `timeout` and half of the limit of steps (on the other ranks [`Error::Disagreement`] with that
    ///   reason). [`Communicator::abort`] ends such a call. On GPUs also where [`Communicator::suspend`] is refused,
    ///   and for new ranks that do not fit the plans, or are threads of another rank's process.
    /// * The errors of [`Builder::build`](crate::Builder::build).
    ///
    /// After an error the communicator is as it was, so that the ranks can try again. If the last step has failed, it
    /// is suspended: [`Communicator::resume`] tries again.
    pub fn join(&self, survivors: &[usize], timeout: Duration) -> Result<Progress> {
        self.index_among(survivors)?;
        self.can_lock()?;
        let _step = self.endpoint.step()?;
        let membership = self.endpoint.membership()?;
        self.can_return(&membership)?;
        let aborts = self.aborts.load(Ordering::Relaxed);
        let is_gone = |rank: &usize| *rank != self.rank && !membership.liveness.is_present(*rank);
        let gone = || survivors.iter().copied().find(is_gone);
        let is_hopeless = || gone().is_some() || self.has_aborted_since(aborts);
        let mask = survivors.iter().fold(0, |mask, rank| mask | 1 << rank);
        let place = (self.rank, self.world_size);
        let met = membership.lineage.regroup(place, !mask, &is_hopeless, timeout);
        let local = met.map_err(|error| match (&error, gone()) {
            (Error::Timeout { .. } | Error::Rendezvous { .. }, Some(rank)) => {
                self.in_world_ranks(Error::PeerLost {
                    rank,
                    reason: "it has left the world whose survivors meet".into(),
                })
            }
            _ => error,
        });
        let bootstrap = local.map(|local| Arc::new(local) as Arc<_>);
        self.enter(&membership.lineage, mask, aborts, bootstrap, timeout)
    }

    /// Leaves the world and gives back its shared memory, but keeps the communicator's place. Collective.
    ///
    /// The region is freed, and nothing of other ranks stays mapped; no thread and no connection to them is left. So
    /// the process can be dumped and restored. Buffers and symmetric memory keep their addresses and contents. Until
    /// [`Communicator::resume`], calls and steps return [`Error::Unavailable`], and
    /// [views](SymmetricMemory::view) of other ranks' parts that exist read zeros.
    ///
    /// On GPUs the addresses of the memory stay reserved, so that captured graphs are valid again after the resume.
    /// The communicator sees neither replays nor other kernels that use
    /// [`peer_address`](SymmetricMemory::peer_address): the caller waits for them before, and starts none until then.
    ///
    /// ```
    #[doc = include_str!("../example_ranks.txt")]
    /// # ranks(2, |communicator| {
    /// let mut buffer = communicator.alloc::<f32>(1000)?;
    /// buffer.fill(1.0);
    /// let suspended = communicator.suspend()?;
    /// println!("{} bytes given back, {} kept", suspended.bytes, suspended.kept_bytes);
    /// assert!(communicator.is_suspended());
    /// assert!(communicator.barrier().is_err());
    ///
    /// communicator.resume(std::time::Duration::from_secs(10))?;
    /// communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    /// assert_eq!(buffer[0], 2.0);
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] while it is suspended, and while a call of another thread is under way or the last call's
    /// stream is being captured ([`Error::PeerFailed`] on the other ranks); on GPUs also for memory whose addresses
    /// cannot be kept: of CUDA IPC, of the host, NVLS windows, and what the program has registered. [Errors of every
    /// step](Communicator#errors-of-every-step). After an error the communicator is in its world, or has failed.
    pub fn suspend(&self) -> Result<Suspended> {
        let aborts = self.aborts.load(Ordering::Relaxed);
        self.can_step()?;
        let _step = self.endpoint.step()?;
        let membership = self.endpoint.membership()?;
        let connection = &membership.connection;
        let number = self.endpoint.next_number();
        let quiet = self.after_step(self.unless_a_peer_fails(|| {
            let fact = [("the step of symmetric memory", format!("suspend after {number}"))];
            agree_on(&*connection.bootstrap, &fact, connection.timeout)?;
            let quiet = self.endpoint.try_enter().and_then(|mut state| {
                self.endpoint.device.wait_for_calls()?;
                // A kernel may have failed meanwhile. What it has recorded ends with the world.
                self.healthy_in(&membership)?;
                drop(self.endpoint.clear_retired(&mut state));
                self.can_return(&membership)?;
                self.has_own_memory_alone()?;
                Ok(state)
            });
            connection.all_succeeded(quiet)
        }));
        let mut state = quiet.map_err(|error| self.in_world_ranks(error))?;
        // Nobody has left yet.
        let record = self.flight_record();
        let memories = self.endpoint.memory_facts();
        let region = &membership.region;
        let closed = self.endpoint.all_memory().iter().try_for_each(|memory| memory.close_peers());
        let closed = closed.and_then(|()| region.memory().unmap_peers());
        // A part that is not mapped any more could be read by a call.
        let or_failed = |error| self.poison_in(&membership, error);
        connection.all_succeeded(closed).map_err(or_failed)?;
        // No rank has another's region mapped any more, so that this frees it.
        connection.all_succeeded(region.memory().give_back()).map_err(or_failed)?;
        region.end();
        self.returning.calls.fetch_add(membership.liveness.calls(), Ordering::Relaxed);
        *locked(&self.returning.record) = Some(record);
        self.keep_place(&membership.lineage, aborts);
        self.endpoint.set_membership(&mut state, None);
        drop(state);
        membership.liveness.leave_for_now("it has suspended its communicator");
        Ok(Suspended {
            bytes: region.memory().own_bytes(),
            kept_bytes: memories.iter().map(|memory| memory.bytes as usize).sum(),
        })
    }

    /// Returns whether the communicator is suspended.
    pub fn is_suspended(&self) -> bool {
        self.endpoint.with_membership(|_| ()).is_err()
    }

    /// Returns into the world after [`Communicator::suspend`]. Collective.
    ///
    /// All ranks of before meet, by a secret that they have kept. A rank may have moved to another process: it builds
    /// its communicator with [`Communicator::join_id`]'s id, as for [`Communicator::join`]. `timeout` limits the wait
    /// for the others.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], if ranks do not come in time; [`Error::Unavailable`], if the communicator is not suspended;
    /// [`Error::Aborted`], if it was aborted; the errors of [`Communicator::join`]. After an error it is still
    /// suspended, and can try again.
    pub fn resume(&self, timeout: Duration) -> Result<Progress> {
        self.resume_by(|lineage, aborts| {
            let is_hopeless = || self.has_aborted_since(aborts);
            let met = lineage.regroup((self.rank, self.world_size), 0, &is_hopeless, timeout);
            met.map(|local| Arc::new(local) as Arc<_>)
        })
    }

    /// Returns into the world, as [`Communicator::resume`] does, over a bootstrap of the program, where this rank has
    /// the number that it had.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`], if it is of another rank or size; the errors of [`Communicator::resume`].
    pub fn resume_with(&self, bootstrap: impl Bootstrap + 'static) -> Result<Progress> {
        let given = (bootstrap.rank(), bootstrap.world_size());
        self.resume_by(|_, _| match given == (self.rank, self.world_size) {
            true => Ok(Arc::new(bootstrap)),
            false => Err(Error::InvalidSetting {
                name: "bootstrap",
                value: format!("rank {} of {}", given.0, given.1),
                expected: "the rank and the size that the communicator had",
            }),
        })
    }

    fn resume_by(&self, meet: impl FnOnce(&Lineage, u32) -> Result<Arc<dyn Bootstrap>>) -> Result<Progress> {
        self.can_lock()?;
        let _step = self.endpoint.step()?;
        if !self.is_suspended() {
            return Err(Error::Unavailable {
                what: "resuming".into(),
                reason: "the communicator is not suspended".into(),
            });
        }
        let aborts = self.aborts.load(Ordering::Relaxed);
        let lineage = self.endpoint.place.get().ok_or(Error::Aborted)?;
        let met = meet(&lineage, aborts);
        self.enter(&lineage, 0, aborts, met, self.terms.timeout)
    }

    fn has_aborted_since(&self, aborts: u32) -> bool {
        self.aborts.load(Ordering::Relaxed) != aborts
    }

    /// Keeps the secrets by which the ranks meet again, unless the communicator was aborted.
    fn keep_place(&self, lineage: &Arc<Lineage>, aborts: u32) {
        self.endpoint.place.set(Some(Arc::clone(lineage)));
        // Relaxed: an abort that had the lock before is seen, and one that comes after clears the place itself.
        if self.has_aborted_since(aborts) {
            self.endpoint.place.set(None);
        }
    }

    /// Enters the world of a bootstrap as a rank of an earlier one, in a step. Collective.
    fn enter(
        &self,
        lineage: &Lineage,
        survivors: u32,
        aborts: u32,
        bootstrap: Result<Arc<dyn Bootstrap>>,
        timeout: Duration,
    ) -> Result<Progress> {
        let or_aborted = |error| if self.has_aborted_since(aborts) { Error::Aborted } else { error };
        let bootstrap = bootstrap.map_err(or_aborted)?;
        *locked(&self.returning.entering) = Some(Arc::clone(&bootstrap));
        // Relaxed: an abort that had the lock before is seen, and one that comes after finds the bootstrap.
        if self.has_aborted_since(aborts) {
            bootstrap.interrupt();
        }
        // Calls of other threads end first, if they leave a gap in time. The others wait for this rank as long as for
        // any step, so it tells them before that limit.
        let limit = timeout.min(self.terms.timeout / 2);
        let locked_state = self.endpoint.enter_within(&Deadline::after(limit));
        let entered = match locked_state.and_then(|state| self.has_own_memory_alone().map(|()| state)) {
            Ok(mut state) => self.enter_locked(&mut state, lineage, survivors, aborts, &bootstrap),
            // The others learn the reason.
            Err(error) => {
                let (facts, role) = (&self.terms.facts, Role::default());
                let compared = compare(facts, &role, Err(error), &*bootstrap, self.terms.timeout);
                compared.map(|roles| roles.progress())
            }
        };
        *locked(&self.returning.entering) = None;
        let progress = entered.map_err(|error| self.in_world_ranks(or_aborted(error)))?;
        if self.has_aborted_since(aborts) {
            return Err(self.poison(Error::Aborted));
        }
        Ok(progress)
    }

    fn enter_locked(
        &self,
        state: &mut State<D>,
        lineage: &Lineage,
        survivors: u32,
        aborts: u32,
        bootstrap: &Arc<dyn Bootstrap>,
    ) -> Result<Progress> {
        let (endpoint, terms) = (&self.endpoint, &self.terms);
        let member = Member {
            world: lineage.id(),
            survivors,
            rows: state.registry.rows() as u64,
            allocations: endpoint.next_number(),
            memories: endpoint.memory_facts(),
            world_ranks: self.world_ranks.clone(),
        };
        let role = Role { completed: Some(state.calls.completed), member: Some(member) };
        let plan = Proposal::given(terms.table.clone()).encode();
        let roles = compare(&terms.facts, &role, plan, &**bootstrap, terms.timeout)?;
        endpoint.device.join_again(&**bootstrap, terms.timeout)?;
        let exports = endpoint.device.exports();
        let connection = Connection::new(exports, Box::new(Arc::clone(bootstrap)), terms.timeout);
        let formed = form(&*endpoint.device, &connection, terms, Forming::Again, Nvls::Never)?;
        let kept: Vec<_> = roles
            .kept()
            .into_iter()
            .filter_map(|facts| Some((facts, endpoint.memory_of(facts.number)?)))
            .collect();
        // The new ranks have allocated their parts.
        connection.all_succeeded(Ok(()))?;
        let before = endpoint.membership().ok();
        let region_before = before.as_ref().map(|before| &*before.region);
        let shared = share_kept(&*endpoint.device, &connection, &formed.region, region_before, &kept);
        if let Err((error, HasBegun(false))) = shared {
            return Err(error);
        }
        // If this fails, ranks that have entered see this one leave. All meet again by the secrets of the new world.
        self.keep_place(&formed.lineage, aborts);
        // The world of before is over. Its calls are not known to the new one.
        if let Some(before) = before {
            self.returning.calls.fetch_add(before.liveness.calls(), Ordering::Relaxed);
        }
        endpoint.set_membership(state, None);
        let progress = roles.progress();
        state.calls.restart(progress.completed);
        let (rows, allocations) = roles.most();
        endpoint.set_allocations(allocations);
        state.registry.grow(rows);
        self.set_rows(state, &kept);
        if let Err((error, _)) = shared {
            endpoint.all_memory().iter().for_each(|memory| drop(memory.close_peers()));
            // If that fails, they stay mapped until the next attempt.
            let _ = formed.region.abandon();
            return Err(error);
        }
        *locked(&self.returning.record) = None;
        *locked(&self.returning.progress) = progress.clone();
        self.wait_limits.forget(roles.new_ranks());
        endpoint.set_membership(state, Some(formed.membership(connection)));
        if let Err(error) = self.record_again(state) {
            tracing::warn!(rank = self.rank, %error, "calls are not recorded any more");
        }
        Ok(progress)
    }

    /// Checks that this rank can leave its world and come back.
    fn can_return(&self, membership: &Membership<D>) -> Result<()> {
        if membership.region.windows.is_some() {
            return Err(sealed::cannot_return(
                "it uses in-switch reductions (NVLS), whose windows cannot be given back and made again at the \
                 addresses that graphs have: build it with Order::Fixed",
            ));
        }
        self.endpoint.device.can_return()
    }

    /// Checks that the program has registered no memory. Ranks may differ in that.
    fn has_own_memory_alone(&self) -> Result<()> {
        match D::KIND == DeviceKind::Cuda && self.endpoint.has_memory_of_program() {
            true => Err(sealed::cannot_return(
                "memory of the program is registered, which other ranks could not open again at the addresses that \
                 they have: end these registrations first, or take registered memory from Communicator::alloc",
            )),
            false => Ok(()),
        }
    }

    /// Notes the rows of memory that is kept, and forgets those of other memory, which stays memory of this rank.
    fn set_rows(&self, state: &mut State<D>, kept: &[(MemoryFacts, Arc<D::Shared>)]) {
        for (facts, memory) in kept {
            if let Some(row) = facts.row {
                // It may have been forgotten in an earlier world, where not all ranks had it.
                let base = memory.address(self.rank);
                state.registry.set(row as usize, Row::Used(Range { base, bytes: facts.bytes }));
            }
        }
        let kept: Vec<_> = kept.iter().map(|(facts, _)| facts.number).collect();
        for (row, memory) in self.endpoint.memory_except(&kept) {
            if let Some(row) = row {
                // Not free: its registration ends later.
                state.registry.set(row, Row::Retired);
            }
            // If that fails, the parts of ranks that have gone stay mapped.
            let _ = memory.close_peers();
        }
    }

    /// Returns how far the ranks had come when this communicator was formed: by [`Communicator::join`],
    /// [`Communicator::resume`] or [`Communicator::shrink`]. All zeros in a world without a history.
    pub fn progress(&self) -> Progress {
        locked(&self.returning.progress).clone()
    }

    /// Returns the memory that this rank has found in the place that it has taken, in the order of allocation, and has
    /// not taken yet by [`Communicator::inherit_buffer`] or [`Communicator::inherit_memory`].
    pub fn inherited(&self) -> Vec<Inherited> {
        let described = |inheritance: &Inheritance<D>| Inherited {
            number: inheritance.facts.number,
            bytes: inheritance.facts.bytes as usize,
            is_registered: inheritance.registration.is_some(),
        };
        locked(&self.returning.inherited).iter().map(described).collect()
    }

    /// Takes the registered buffer of that number, of zeros: see [`Communicator::inherited`]. Local.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`], if there is no such buffer, or it has no whole number of elements of `T`.
    pub fn inherit_buffer<T: Element>(&self, number: u64) -> Result<Buffer<T, D>> {
        let taken = self.take_inherited::<T>(number, true)?;
        let count = taken.facts.bytes as usize / size_of::<T>();
        let missing = || no_inheritance(number, true);
        Ok(Buffer::new(taken.registration.ok_or_else(missing)?, number, count))
    }

    /// Takes the symmetric memory of that number, of zeros: see [`Communicator::inherited`]. Local.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`], if there is no such memory, or it has no whole number of elements of `T`.
    pub fn inherit_memory<T: Element>(&self, number: u64) -> Result<SymmetricMemory<T, D>> {
        let taken = self.take_inherited::<T>(number, false)?;
        let count = taken.facts.bytes as usize / size_of::<T>();
        Ok(SymmetricMemory::new(Arc::clone(&self.endpoint), Some(taken.memory), number, count))
    }

    fn take_inherited<T: Element>(&self, number: u64, is_registered: bool) -> Result<Inheritance<D>> {
        let mut inherited = locked(&self.returning.inherited);
        let is_it = |inheritance: &Inheritance<D>| {
            inheritance.facts.number == number
                && inheritance.registration.is_some() == is_registered
                && inheritance.facts.bytes % size_of::<T>() as u64 == 0
        };
        let index = inherited.iter().position(is_it);
        index.map(|index| inherited.remove(index)).ok_or_else(|| no_inheritance(number, is_registered))
    }
}

fn no_inheritance(number: u64, is_registered: bool) -> Error {
    let kind = if is_registered { "buffer" } else { "symmetric memory" };
    Error::InvalidSetting {
        name: "number of an allocation",
        value: format!("{number}, as {kind}"),
        expected: "one that this rank has inherited and not taken yet, with whole elements of the type",
    }
}
