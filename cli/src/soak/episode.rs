//! One rank's part of an episode: calls on a communicator of its own until a fault ends them, and the next one.
//!
//! What a rank owns it overwrites as soon as its call has returned, with a result or with an error, while slower ranks
//! may still be in the call. Whatever the fault, a call that returns `Ok` has the right result.

use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Buffer, Communicator, Error, Host};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::draw::{Draws, View};
use super::exchange;
use super::fault::{Episode, Fault, FaultKind, Recovery};
use super::find::{part, Judge, Made};
use super::memory::{words, Window};
use super::rank::{round_number, Rank, FAULTY_COLOR, MOST_TIMES};
use crate::failure::Failure;
use crate::harness::elements::elements;
use crate::harness::inputs::Inputs;
use crate::harness::memory::POISON;

/// What a rank's machine may add to the time of a call.
const SLACK: Duration = Duration::from_secs(30);

/// Times that ranks try to make a communicator that waits so shortly that a busy machine may be too slow for it.
const ATTEMPTS: usize = 10;

/// A communicator and its ranks' memory.
struct Party {
    communicator: Communicator<Host>,
    /// An input and an output.
    buffer: Option<Buffer<u64>>,
}

/// How a round ended for a rank, as the others need to know.
#[derive(Serialize, Deserialize)]
struct End {
    is_timeout: bool,
}

impl Rank {
    /// Makes the calls of all rounds. What is wrong with their results is for the tally.
    pub fn episode(&mut self, episode: &Episode) -> Result<(), Failure> {
        let mut party = Some(self.meet(episode)?);
        for number in 0..episode.rounds.len() {
            let fault = episode.rounds[number].fault;
            let error = match &mut party {
                Some(party) => {
                    let error = self.round(party, episode, number)?;
                    self.look_for_survivors(&party.communicator, episode, number);
                    error
                }
                None => None,
            };
            let is_timeout = matches!(error, Some(Error::Timeout { .. }));
            let ends = exchange(&*self.bootstrap, &End { is_timeout }, self.patience())?;
            let has_expired = ends.iter().any(|end| end.is_timeout);
            // A machine that does other things may be too slow for a short limit, without a fault of its own.
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

    /// Makes the episode's communicator, from nothing. Collective.
    fn meet(&mut self, episode: &Episode) -> Result<Party, Failure> {
        let settings = episode.settings(self.range.seed);
        let (rank, ranks, patience) = (self.bootstrap.rank(), self.range.ranks, self.patience());
        self.attempt(episode, |this| {
            // One that nobody meets at would serve for long.
            let id = (rank == 0).then(|| UniqueId::new().map(|id| id.to_string())).transpose()?;
            let ids: Vec<Option<String>> = exchange(&*this.bootstrap, &id, patience)?;
            let id: UniqueId = ids[0].as_deref().unwrap_or_default().parse()?;
            let local = Local::connect(&id, rank, ranks, patience)?;
            let device = Host::new().workers(settings.workers)?.wait(settings.wait);
            let communicator = Communicator::builder()
                .algorithm(settings.algorithm)
                .max_bytes(settings.max_bytes)
                .check(settings.check)
                .timeout(episode.limit())
                .first_epoch(settings.last_epoch)
                .build(device, local)?;
            Party::new(communicator, episode, settings.has_buffer)
        })
    }

    /// The ranks go on after a round: with a new communicator, and this one is dropped. `None` for a rank left out.
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

    /// Does what all ranks must succeed in, or try again where the limit is short.
    fn attempt<R>(
        &mut self,
        episode: &Episode,
        mut make: impl FnMut(&mut Self) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let mut left = if episode.is_long { ATTEMPTS } else { 1 };
        loop {
            let made = make(self);
            let all_made = exchange(&*self.bootstrap, &made.is_ok(), self.patience())?;
            left -= 1;
            match made {
                Ok(made) if all_made.iter().all(|made| *made) => return Ok(made),
                Err(failure) if left == 0 => return Err(failure),
                // Who failed ends, and this rank hears of it.
                Ok(_) if left == 0 => self.bootstrap.barrier(self.patience())?,
                _ => {}
            }
            left = left.max(1);
        }
    }

    /// Calls until one fails, or all have been made. The error, if there was one.
    fn round(
        &mut self,
        party: &mut Party,
        episode: &Episode,
        number: usize,
    ) -> Result<Option<Error>, Failure> {
        let Party { communicator, buffer } = party;
        let (call, fault, seed) = (&episode.call, episode.rounds[number].fault, self.range.seed);
        let placement = call.placement(seed, self.bootstrap.rank());
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        let work = call.work(seed, rank, world_size);
        let made = Made::of(communicator, &work, work.dtype);
        let (elements, size) = (elements(work.dtype)?, work.dtype.size());
        let inputs = Inputs::new(
            seed,
            round_number(call.number, number as u64 % MOST_TIMES, FAULTY_COLOR),
            world_size,
            call.op,
        );
        let judge = Judge { inputs: &inputs, work: &work, elements, promise: made.promise() };
        let in_place = if placement.output.is_none() { work.in_place() } else { None };

        let [first, second] = &mut self.private;
        let (mut registered_input, mut registered_output) = match buffer {
            Some(buffer) => {
                let half = buffer.len() / 2;
                let (input, output) = buffer.split_at_mut(half);
                (Some(input), Some(output))
            }
            None => (None, None),
        };
        let place = |view: View, registered: &mut Option<_>| registered.take().filter(|_| view.is_registered);
        let input = place(placement.input, &mut registered_input).unwrap_or(first);
        let data_len = work.bytes(if in_place.is_some() { work.elements() } else { work.input_len() });
        let mut data = Window::<u8>::new(input, placement.input.offset * size, data_len);
        let view = placement.output.unwrap_or(View { is_registered: false, offset: 0 });
        let output = place(view, &mut registered_output).unwrap_or(second);
        let result_len = work.bytes(work.output_len());
        let output_len = if in_place.is_some() { 0 } else { result_len };
        let mut output = Window::<u8>::new(output, view.offset * size, output_len);
        let (from, to) = in_place.unwrap_or((0, 0));
        let to = to..to + work.output_len();

        let [own, result, right] = &mut self.kept;
        let own = Window::<u8>::new(own, 0, data_len);
        elements.fill(&inputs, rank, part(own.elements, &work, &(from..from + work.input_len())));
        let result = Window::<u8>::new(result, 0, result_len).elements;
        let right = Window::<u8>::new(right, 0, result_len).elements;

        let (mut error, mut wrong, mut longest) = (None, None, Duration::ZERO);
        let communicator = &*communicator;
        let was_made = thread::scope(|scope| {
            let mut maker = None;
            for time in 0..episode.calls() {
                data.elements.copy_from_slice(own.elements);
                output.elements.fill(POISON);
                if time == 1 {
                    maker = fault.and_then(|fault| {
                        fault.start(scope, communicator, self.bootstrap.rank(), &self.processes)
                    });
                }
                let start = Instant::now();
                let returned = match in_place {
                    Some(_) => work.run_in_place(communicator, data.elements),
                    None => work.run(communicator, data.elements, output.elements),
                };
                if let Err(failed) = returned {
                    data.overwrite();
                    output.overwrite();
                    longest = longest.max(start.elapsed());
                    error = Some(failed);
                    break;
                }
                match in_place {
                    Some(_) => result.copy_from_slice(part(data.elements, &work, &to)),
                    None => result.copy_from_slice(output.elements),
                }
                data.overwrite();
                output.overwrite();
                longest = longest.max(start.elapsed());
                let beside = data.overwritten() + output.overwritten();
                // All of them in full, but those with the bits of one that is right.
                if time > 0 && beside == 0 && result == right {
                    continue;
                }
                let mut found = judge.find(result, beside, 0).map(|found| found.to_string());
                match time {
                    0 => right.copy_from_slice(result),
                    _ => {
                        found.get_or_insert("the bits are not those of the call before".into());
                    }
                }
                if wrong.is_none() {
                    wrong = found.map(|found| (time, found));
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
        let context = || {
            let fault = fault.map_or("no fault".into(), |fault| fault.to_string());
            format!("seed {seed}, before {call}, round {number}, {fault}, rank {rank} of {world_size}")
        };
        if let Some((time, found)) = wrong {
            let told = format!("{}: call {time} returned Ok {placement} by {made}, and {found}", context());
            self.tally.wrong.get_or_insert(told);
        }
        let bound = episode.limit() + fault.map_or(Duration::ZERO, Fault::time) + SLACK;
        if longest > bound {
            let told = format!("{}: a call took {longest:?}, more than {bound:?}", context());
            self.tally.wrong.get_or_insert(told);
        }
        // No rank ends in an episode, or closes a communicator before the others are done with it.
        if let Some(error @ Error::PeerLost { .. }) = &error {
            let told = format!("{}: a rank that lives is said to be gone: {error}", context());
            self.tally.wrong.get_or_insert(told);
        }
        Ok(error)
    }

    /// No rank has ended, and none has closed its communicator.
    fn look_for_survivors(&mut self, communicator: &Communicator<Host>, episode: &Episode, number: usize) {
        let survivors = communicator.survivors();
        if survivors.len() != communicator.world_size() {
            let (seed, call) = (self.range.seed, &episode.call);
            let told = format!(
                "seed {seed}, before {call}, round {number}: of {} ranks that live only {survivors:?} are survivors",
                communicator.world_size()
            );
            self.tally.wrong.get_or_insert(told);
        }
    }

    /// How long a rank may need to come from a round.
    fn patience(&self) -> Duration {
        2 * self.timeout + SLACK
    }
}

impl Party {
    /// Collective.
    fn new(communicator: Communicator<Host>, episode: &Episode, has_buffer: bool) -> Result<Self, Failure> {
        let bytes = episode.call.count * episode.call.dtype.size();
        let buffer = has_buffer.then(|| communicator.alloc(2 * words(bytes))).transpose()?;
        Ok(Self { communicator, buffer })
    }

    /// In either order, by a number.
    fn close(self, number: u64) {
        let Self { communicator, buffer } = self;
        match Draws::new(number, 0, 0).one_in(2) {
            true => drop((communicator, buffer)),
            false => drop((buffer, communicator)),
        }
    }
}

impl Recovery {
    /// As it is counted.
    fn name(self) -> &'static str {
        match self {
            Self::Shrink => "shrink",
            Self::ShrinkWithout(_) => "shrink without one",
            Self::New => "new",
        }
    }
}

impl Fault {
    /// Whether calls may fail of it.
    fn ends_calls(self) -> bool {
        self.kind.name() != "short stop"
    }

    /// How long its rank does nothing.
    fn time(self) -> Duration {
        match self.kind {
            FaultKind::Abort => Duration::ZERO,
            FaultKind::Stop(time) => time,
        }
    }

    /// Starts the thread that makes it, on the rank that does: an abort on its own, a stop on the next. It returns
    /// whether the fault was made.
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
                    // Nothing is lost where it has ended.
                    let _ = kill(process, Signal::SIGCONT);
                    is_stopped
                }))
            }
        }
    }
}

/// How a rank's round ended, as it is counted.
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
