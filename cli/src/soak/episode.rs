//! One rank's part of an episode: calls on a separate communicator until a fault ends them, and on its successors.
//!
//! A rank overwrites its buffers as soon as its call has returned, with a result or with an error, while slower
//! ranks may still be in the call. Whatever the fault, a call that returns `Ok` has the right result.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::record::{Options, Recording};
use fast_allreduce::{Buffer, Communicator, Error, Host, ReduceOp};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use super::check::{Checker, Label};
use super::draw::Draws;
use super::exchange;
use super::fault::{Episode, Fault, FaultKind, Recovery};
use super::memory::{words, CallBuffers, Memories, Window};
use super::rank::{close_in_either_order, round_number, Rank, FAULTY_COLOR, MOST_TIMES};
use crate::failure::Failure;
use crate::harness::elements::elements;
use crate::harness::inputs::Inputs;
use crate::harness::memory::POISON;
use crate::harness::work::part;

/// Time that a busy machine may add to a call.
const SLACK: Duration = Duration::from_secs(30);

/// Attempts to make a communicator whose timeout is so short that a busy machine may exceed it.
const ATTEMPTS: usize = 10;

/// The communicator of an episode, and its registered buffer.
struct Party {
    communicator: Communicator<Host>,
    /// An input and an output.
    buffer: Option<Buffer<u64>>,
}

impl Rank<'_> {
    /// Makes the calls of all rounds. Wrong results are noted in the tally.
    pub fn episode(&mut self, episode: &Episode) -> Result<(), Failure> {
        let mut party = Some(self.meet(episode)?);
        for number in 0..episode.rounds.len() {
            let fault = episode.rounds[number].fault;
            let error = match &mut party {
                Some(party) => self.round(party, episode, number)?,
                None => None,
            };
            let is_timeout = matches!(error, Some(Error::Timeout { .. }));
            let has_expired = exchange(&*self.bootstrap, &is_timeout, self.round_limit())?.contains(&true);
            // A busy machine may exceed a short timeout without a fault.
            let is_expected = fault.is_some_and(Fault::ends_calls) || (episode.is_long && has_expired);
            if let Some(error) = error.filter(|_| !is_expected) {
                return Err(error.into());
            }
            if number + 1 < episode.rounds.len() {
                party = self.recover(party, episode, number)?;
            }
        }
        if let Some(party) = party {
            party.close(episode.call.number);
        }
        Ok(())
    }

    /// Makes a new communicator for the episode. Collective.
    fn meet(&mut self, episode: &Episode) -> Result<Party, Failure> {
        let settings = episode.settings(self.parameters.seed);
        let (rank, ranks, limit) = (self.bootstrap.rank(), self.parameters.ranks, self.round_limit());
        self.attempt(episode, |this| {
            // On the first rank alone: an id that no rank uses would be served for long.
            let id = (rank == 0).then(|| UniqueId::new().map(|id| id.to_string())).transpose()?;
            let ids: Vec<Option<String>> = exchange(&*this.bootstrap, &id, limit)?;
            let id: UniqueId = ids[0].as_deref().unwrap_or_default().parse()?;
            let local = Local::connect(&id, rank, ranks, limit)?;
            let (device, builder) = settings.builder(episode.limit(), &this.options.settings)?;
            let communicator = builder.build(device, local)?;
            Party::new(communicator, episode, settings.has_buffer)
        })
    }

    /// Replaces the communicator after a round. Returns `None` on a rank that is left out.
    fn recover(
        &mut self,
        party: Option<Party>,
        episode: &Episode,
        number: usize,
    ) -> Result<Option<Party>, Failure> {
        let Some(party) = party else {
            return Ok(None);
        };
        let recovery = episode.rounds[number].recovery;
        let communicator = &party.communicator;
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let without = match recovery {
            Recovery::ShrinkWithout(other) => Some(other),
            Recovery::Return(replaced) => return self.come_back(party, episode, replaced).map(Some),
            Recovery::Shrink | Recovery::New => None,
        };
        let list: Vec<_> = (0..ranks).filter(|&other| Some(other) != without).collect();
        let next = match recovery {
            Recovery::New => Some(self.meet(episode)?),
            _ => self.attempt(episode, |_| match without == Some(rank) {
                true => Ok(None),
                false => Party::new(communicator.shrink(&list)?, episode, party.buffer.is_some()).map(Some),
            })?,
        };
        *self.tally.recoveries.entry(recovery.name().into()).or_default() += 1;
        party.close(episode.call.number + number as u64);
        Ok(next)
    }

    /// Goes on with the communicator of a round, in which one rank may be replaced. Collective.
    fn come_back(
        &mut self,
        party: Party,
        episode: &Episode,
        replaced: Option<usize>,
    ) -> Result<Party, Failure> {
        let (rank, ranks, limit) = (party.communicator.rank(), self.parameters.ranks, self.round_limit());
        let works = exchange(&*self.bootstrap, &party.communicator.check().is_ok(), limit)?;
        let works = works.iter().all(|works| *works);
        let name = match (works, replaced) {
            (true, None) => "suspend",
            (true, Some(_)) => "suspend, with a new rank",
            (false, None) => "join",
            (false, Some(_)) => "join, with a new rank",
        };
        let id = party.communicator.join_id()?.to_string();
        let ids: Vec<String> = exchange(&*self.bootstrap, &id, limit)?;
        if works {
            let suspended = party.communicator.suspend()?;
            if suspended.bytes == 0 || party.communicator.barrier().is_ok() {
                self.tally
                    .note(format!("before {}: a suspended communicator works: {suspended:?}", episode.call));
            }
        }
        *self.tally.recoveries.entry(name.into()).or_default() += 1;
        if replaced == Some(rank) {
            let has_buffer = party.buffer.is_some();
            party.close(episode.call.number);
            let local = Local::connect(&ids[rank].parse()?, rank, ranks, limit)?;
            let settings = episode.settings(self.parameters.seed);
            let (device, builder) = settings.builder(episode.limit(), &self.options.settings)?;
            let communicator = builder.build(device, local)?;
            let buffer = has_buffer.then(|| communicator.inherit_buffer(0)).transpose()?;
            return Ok(Party { communicator, buffer });
        }
        match works {
            true => party.communicator.resume(limit)?,
            false => {
                let survivors: Vec<_> = (0..ranks).filter(|&one| Some(one) != replaced).collect();
                party.communicator.join(&survivors, limit)?
            }
        };
        Ok(party)
    }

    /// Runs a step that must succeed on all ranks. If the timeout is short, the ranks try several times.
    fn attempt<R>(
        &mut self,
        episode: &Episode,
        mut make: impl FnMut(&mut Self) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let mut left = if episode.is_long { ATTEMPTS } else { 1 };
        loop {
            let made = make(self);
            let all_made = exchange(&*self.bootstrap, &made.is_ok(), self.round_limit())?;
            left -= 1;
            match made {
                Ok(made) if all_made.iter().all(|made| *made) => return Ok(made),
                Err(failure) if left == 0 => return Err(failure),
                // The rank that failed ends, which this barrier reports.
                Ok(_) if left == 0 => self.bootstrap.barrier(self.round_limit())?,
                _ => {}
            }
            left = left.max(1);
        }
    }

    /// Makes calls until one fails, or all have been made. Returns the error, if there was one.
    fn round(
        &mut self,
        party: &mut Party,
        episode: &Episode,
        number: usize,
    ) -> Result<Option<Error>, Failure> {
        let Party { communicator, buffer } = party;
        let communicator = &*communicator;
        let (call, fault, seed) = (&episode.call, episode.rounds[number].fault, self.parameters.seed);
        let own_rank = self.bootstrap.rank();
        let layout = call.layout(seed, own_rank);
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        let work = call.work(seed, rank, world_size);
        let label = Label::of(communicator, &work);
        let elements = elements(work.dtype)?;
        let round = round_number(call.number, number as u64 % MOST_TIMES, FAULTY_COLOR);
        let inputs = Inputs::new(seed, round, world_size, call.op);
        let checker = Checker { inputs: &inputs, work: &work, elements, promise: label.promise() };
        let memories = Memories::new(&mut self.private, buffer);
        let CallBuffers { mut input, mut output, is_in_place, from, to } =
            CallBuffers::new(memories, &layout, &work);

        let [own, result, right] = &mut self.kept;
        let own = Window::<u8>::new(own, 0, input.elements.len()).elements;
        elements.fill(&inputs, rank, part(own, &work, &from));
        let result = Window::<u8>::new(result, 0, work.bytes(work.output_len())).elements;
        let right = Window::<u8>::new(right, 0, work.bytes(work.output_len())).elements;

        let (mut error, mut wrong, mut longest) = (None, None, Duration::ZERO);
        let recorded =
            (fault.is_none() && episode.is_replayed).then(|| Recorded::begin(communicator)).transpose()?;
        let processes = &self.processes;
        let was_made = thread::scope(|scope| {
            let mut maker = None;
            for time in 0..episode.calls() {
                input.elements.copy_from_slice(own);
                output.elements.fill(POISON);
                if time == 1 {
                    maker = fault.and_then(|fault| fault.start(scope, communicator, own_rank, processes));
                }
                let start = Instant::now();
                let returned = match is_in_place {
                    true => work.run_in_place(communicator, input.elements),
                    false => work.run(communicator, input.elements, output.elements),
                };
                if returned.is_ok() {
                    let written =
                        if is_in_place { part(input.elements, &work, &to) } else { &mut *output.elements };
                    result.copy_from_slice(written);
                }
                input.overwrite();
                output.overwrite();
                longest = longest.max(start.elapsed());
                if let Err(failed) = returned {
                    error = Some(failed);
                    break;
                }
                let overwritten = input.overwritten() + output.overwritten();
                // A result with the bits of one that was checked is right.
                if time > 0 && overwritten == 0 && result == right {
                    continue;
                }
                let mut defects = checker.check(result, overwritten, 0).map(|defects| defects.to_string());
                match time {
                    0 => right.copy_from_slice(result),
                    _ => {
                        defects.get_or_insert("the bits differ from those of the call before".into());
                    }
                }
                if wrong.is_none() {
                    wrong = defects.map(|defects| (time, defects));
                }
            }
            maker.is_some_and(|maker| maker.join().unwrap_or(false))
        });
        if let (Some(fault), true) = (fault, was_made) {
            *self.tally.faults.entry(fault.kind.name().into()).or_default() += 1;
        }
        if fault.is_some() {
            *self.tally.after_faults.entry(name(error.as_ref()).into()).or_default() += 1;
        }
        let fault_name = fault.map_or("no fault".into(), |fault| fault.to_string());
        let context =
            format!("seed {seed}, before {call}, round {number}, {fault_name}, rank {rank} of {world_size}");
        if let Some((time, defects)) = wrong {
            self.tally.note(format!("{context}: call {time} returned Ok {layout} by {label}, and {defects}"));
        }
        let bound = episode.limit() + fault.map_or(Duration::ZERO, Fault::time) + SLACK;
        if longest > bound {
            self.tally.note(format!("{context}: a call took {longest:?}, more than {bound:?}"));
        }
        // No rank ends in an episode, or closes a communicator before the others are done with it.
        if let Some(error @ Error::PeerLost { .. }) = &error {
            self.tally.note(format!("{context}: a live rank is reported as lost: {error}"));
        }
        if let (Some(recorded), None) = (recorded, &error) {
            match recorded.replay(communicator)? {
                (0, _) => {}
                (_, None) => *self.tally.recoveries.entry("replay".into()).or_default() += 1,
                (_, Some(found)) => self.tally.note(format!("{context}: replayed, {found}")),
            }
        }
        // So all ranks are survivors.
        let survivors = communicator.survivors();
        if survivors.len() != world_size {
            self.tally
                .note(format!("{context}: of {world_size} live ranks only {survivors:?} are survivors"));
        }
        Ok(error)
    }

    /// Returns the longest time between the ends of a round on two ranks.
    fn round_limit(&self) -> Duration {
        2 * self.options.timeout + SLACK
    }
}

/// A recording of calls. Its file has no name once it is open, so that a process that is killed leaves nothing.
struct Recorded(File);

impl Recorded {
    fn begin(communicator: &Communicator<Host>) -> Result<Self, Failure> {
        const MOST_BYTES: u64 = 32 << 20;
        let (world, rank) = (communicator.flight_record().world, communicator.rank());
        let folder = std::env::temp_dir().join(format!("fast-allreduce-soak-{world}-{rank}"));
        fs::create_dir(&folder).map_err(|error| Failure::File(folder.clone(), error))?;
        let begun = communicator.record(Some(&Options::new(&folder).bytes(MOST_BYTES)));
        let file = folder.join(format!("{world}-{rank}.record"));
        let opened = File::open(&file).map_err(|error| Failure::File(file, error));
        fs::remove_dir_all(&folder).map_err(|error| Failure::File(folder, error))?;
        begun?;
        opened.map(Self)
    }

    /// Makes the calls again. Returns their number, and the first difference. Collective.
    fn replay(&self, communicator: &Communicator<Host>) -> Result<(u64, Option<String>), Failure> {
        const MOST_CALLS: u64 = 8;
        communicator.record(None)?;
        let mut recording = Recording::open(format!("/proc/self/fd/{}", self.0.as_raw_fd()).as_ref())?;
        let (mut calls, mut found) = (Vec::new(), None);
        while calls.len() < MOST_CALLS as usize {
            let Some(call) = recording.next_call()? else { break };
            calls.push(call);
        }
        let mut fewest = [calls.len() as u64];
        communicator.all_reduce_in_place(&mut fewest, ReduceOp::Min)?;
        for call in calls.iter().take(fewest[0] as usize) {
            let difference = communicator.replay(call)?.map(|difference| format!("{call}: {difference}"));
            found = found.or(difference);
        }
        Ok((fewest[0], found))
    }
}

impl Party {
    /// Collective.
    fn new(communicator: Communicator<Host>, episode: &Episode, has_buffer: bool) -> Result<Self, Failure> {
        let bytes = episode.call.count * episode.call.dtype.size();
        let buffer = has_buffer.then(|| communicator.alloc(2 * words(bytes))).transpose()?;
        Ok(Self { communicator, buffer })
    }

    fn close(self, number: u64) {
        close_in_either_order(self.communicator, self.buffer, Draws::new(number, 0, 0).one_in(2));
    }
}

impl Recovery {
    /// Returns the name under which it is counted.
    fn name(self) -> &'static str {
        match self {
            Self::Shrink => "shrink",
            Self::ShrinkWithout(_) => "shrink without one",
            Self::New => "new",
            Self::Return(_) => "return",
        }
    }
}

impl Fault {
    /// Returns whether the fault may fail calls.
    fn ends_calls(self) -> bool {
        self.kind.name() != "short stop"
    }

    /// Returns how long the rank is stopped.
    fn time(self) -> Duration {
        match self.kind {
            FaultKind::Abort => Duration::ZERO,
            FaultKind::Stop(time) => time,
        }
    }

    /// Starts the thread that causes the fault: an abort on the rank itself, a stop on the next rank. The thread
    /// returns whether it succeeded.
    fn start<'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        communicator: &'scope Communicator<Host>,
        own: usize,
        processes: &'scope [Pid],
    ) -> Option<thread::ScopedJoinHandle<'scope, bool>> {
        let Self { kind, rank, moment } = self;
        match kind {
            FaultKind::Abort => (own == rank).then(|| {
                scope.spawn(move || {
                    thread::sleep(moment);
                    communicator.abort();
                    true
                })
            }),
            FaultKind::Stop(time) => {
                let &process = processes.get(rank).filter(|_| own == (rank + 1) % processes.len())?;
                Some(scope.spawn(move || {
                    thread::sleep(moment);
                    let is_stopped = kill(process, Signal::SIGSTOP).is_ok();
                    thread::sleep(time);
                    // An error means that the process has ended.
                    let _ = kill(process, Signal::SIGCONT);
                    is_stopped
                }))
            }
        }
    }
}

/// Returns the name under which the end of a rank's round is counted.
fn name(error: Option<&Error>) -> &'static str {
    match error {
        None => "ok",
        Some(Error::Aborted) => "aborted",
        Some(Error::Timeout { .. }) => "timeout",
        Some(Error::PeerLost { .. }) => "peer lost",
        Some(Error::PeerFailed { .. }) => "peer failed",
        Some(_) => "another error",
    }
}
