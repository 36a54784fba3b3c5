//! One rank's part of the calls: makes them, and checks every element.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

use fast_allreduce::bootstrap::Bootstrap;
use fast_allreduce::{Buffer, CallKind, Communicator, Host};
use nix::unistd::Pid;

use super::check::{Checker, Defects, Label};
use super::draw::{Call, DrawnSettings, Groups, Layout, Parameters, SLOTS};
use super::fault::Episode;
use super::memory::{words, CallBuffers, Memories};
use super::report::Tally;
use crate::arguments::Soak;
use crate::failure::Failure;
use crate::harness::elements::elements;
use crate::harness::fused::with_float;
use crate::harness::inputs::Inputs;
use crate::harness::work::part;

/// A communicator, its registered buffer, and counts of its calls.
pub struct Member {
    pub(super) communicator: Communicator<Host>,
    /// An input and an output.
    pub(super) buffer: Option<Buffer<u64>>,
    /// Distinguishes the inputs of groups.
    pub(super) color: u64,
    pub(super) calls: u64,
    pub(super) bytes: u64,
    /// The communicator's setting.
    pub(super) max_bytes: usize,
}

/// The ranks that make a call.
enum Caller {
    AllRanks,
    Group(Box<Member>),
    /// Groups without this rank.
    Others,
}

/// A rank between two calls.
pub struct Rank<'a> {
    pub(super) bootstrap: Arc<dyn Bootstrap>,
    pub(super) parameters: Parameters,
    pub(super) options: &'a Soak,
    /// By rank; empty if they cannot be stopped.
    pub(super) processes: Vec<Pid>,
    /// Seed of this rank's inputs. Differs from the parameters' seed only in a test that wrong inputs are noticed.
    pub(super) own_seed: u64,
    members: [Option<Member>; SLOTS],
    pub(super) private: [Vec<u64>; 2],
    /// In an episode, an input and results, which are not overwritten; else a residual, weights and a plain sum.
    pub(super) kept: [Vec<u64>; 3],
    drawn: DefaultHasher,
    pub tally: Tally,
}

impl<'a> Rank<'a> {
    pub fn new(
        bootstrap: Arc<dyn Bootstrap>,
        parameters: Parameters,
        options: &'a Soak,
        processes: Vec<Pid>,
        own_seed: u64,
    ) -> Self {
        // Written now, so that no later call makes it resident.
        let memory = || vec![u64::MAX; words(parameters.max_bytes)];
        let kept = [(); 3].map(|()| memory());
        let private = [(); 2].map(|()| memory());
        let (members, drawn, tally) = Default::default();
        Self { bootstrap, parameters, options, processes, own_seed, members, private, kept, drawn, tally }
    }

    /// Returns a digest of the calls so far, which is equal on all ranks.
    pub fn digest(&self) -> u64 {
        self.drawn.finish()
    }

    /// Makes a call. Wrong results are noted in the tally.
    pub fn call(&mut self, call: &Call) -> Result<(), Failure> {
        let seed = self.parameters.seed;
        if let Some(episode) = Episode::draw(&self.parameters, call.number) {
            episode.hash(&mut self.drawn);
            self.episode(&episode).map_err(|failure| {
                Failure::During(format!("seed {seed}, faults before {call}"), Box::new(failure))
            })?;
        }
        call.hash(&mut self.drawn);
        self.tally.drawn += 1;
        self.make_call(call)
            .map_err(|failure| Failure::During(format!("seed {seed}, {call}"), Box::new(failure)))
    }

    /// Drops all communicators.
    pub fn retire_all(&mut self) {
        for slot in 0..SLOTS {
            self.retire(slot);
        }
    }

    fn retire(&mut self, slot: usize) {
        if let Some(member) = self.members[slot].take() {
            self.close(member);
        }
    }

    fn make_call(&mut self, call: &Call) -> Result<(), Failure> {
        if call.renew {
            self.retire(call.slot);
        }
        if let Some((rank, time)) = call.late {
            if rank == self.bootstrap.rank() {
                std::thread::sleep(time);
            }
        }
        let mut member = match self.members[call.slot].take() {
            Some(member) => member,
            None => self.make(call)?,
        };
        match self.caller(&member, call)? {
            Caller::AllRanks => self.call_any(&mut member, call)?,
            Caller::Group(mut group) => {
                self.call_any(&mut group, call)?;
                self.close(*group);
            }
            Caller::Others => {}
        }
        self.members[call.slot] = Some(member);
        Ok(())
    }

    /// Makes a slot's communicator. Collective.
    fn make(&mut self, call: &Call) -> Result<Member, Failure> {
        let drawn = DrawnSettings::draw(self.parameters.seed, call.number, call.slot);
        let drawn = drawn.with_size_of(&self.options.settings);
        let timeout = self.options.timeout * drawn.timeout_factor;
        let (device, builder) = drawn.builder(timeout, &self.options.settings)?;
        let communicator = builder.build(device, Arc::clone(&self.bootstrap))?;
        let buffer_bytes = drawn.has_buffer.then_some(self.parameters.max_bytes);
        self.tally.communicators += 1;
        Member::new(communicator, buffer_bytes, (0, drawn.max_bytes))
    }

    /// Makes the groups of a call. Collective.
    fn caller(&mut self, member: &Member, call: &Call) -> Result<Caller, Failure> {
        let rank = self.bootstrap.rank();
        let (made, color) = match &call.groups {
            None => return Ok(Caller::AllRanks),
            Some(Groups::Split(parts)) => {
                let (color, key) = parts[rank];
                (member.communicator.split(color, key)?, u64::from(color.unwrap_or(0)))
            }
            // All ranks are on one of two lists, so that all make equally many groups.
            Some(Groups::Shrink(sides)) => {
                let list: Vec<_> = (0..sides.len()).filter(|&other| sides[other] == sides[rank]).collect();
                (Some(member.communicator.shrink(&list)?), u64::from(sides[rank]))
            }
        };
        let Some(communicator) = made else {
            return Ok(Caller::Others);
        };
        self.tally.groups += 1;
        let buffer_bytes = member.buffer.is_some().then_some(call.count * call.dtype.size());
        Ok(Caller::Group(Box::new(Member::new(communicator, buffer_bytes, (1 + color, member.max_bytes))?)))
    }

    fn call_any(&mut self, member: &mut Member, call: &Call) -> Result<(), Failure> {
        if let Some(form) = call.form {
            return with_float!(call.dtype, T => self.call_form::<T>(member, call, form));
        }
        if call.kind == CallKind::AllReduceFused {
            return with_float!(call.dtype, T => self.call_fused::<T>(member, call));
        }
        self.call_collective(member, call)
    }

    fn call_collective(&mut self, member: &mut Member, call: &Call) -> Result<(), Failure> {
        let layout = call.layout(self.parameters.seed, self.bootstrap.rank());
        let (rank, world_size) = (member.communicator.rank(), member.communicator.world_size());
        let work = call.work(self.parameters.seed, rank, world_size);
        let label = Label::of(&member.communicator, &work);
        let elements = elements(work.dtype)?;
        for time in 0..call.times {
            let inputs = |seed: u64| {
                Inputs::new(seed, round_number(call.number, time, member.color), world_size, call.op)
            };
            let (own, all) = (inputs(self.own_seed), inputs(self.parameters.seed));
            let memories = Memories::new(&mut self.private, &mut member.buffer);
            let CallBuffers { input, output, is_in_place, from, to } =
                CallBuffers::new(memories, &layout, &work);
            elements.fill(&own, rank, part(input.elements, &work, &from));
            let start = Instant::now();
            match is_in_place {
                true => work.run_in_place(&member.communicator, input.elements)?,
                false => work.run(&member.communicator, input.elements, output.elements)?,
            }
            self.tally.time(start.elapsed(), call, &label);
            let written = if is_in_place { to.clone() } else { 0..0 };
            let changed = elements.count_changed(&own, rank, input.elements, from, written);
            let overwritten = input.overwritten() + output.overwritten();
            let result = if is_in_place { part(input.elements, &work, &to) } else { &mut *output.elements };
            let checker = Checker { inputs: &all, work: &work, elements, promise: label.promise() };
            let defects = checker.check(result, overwritten, changed);
            let bytes = work.bytes(work.input_len()) as u64;
            self.count(member, call, &label, (&layout, bytes), defects);
        }
        Ok(())
    }

    /// Counts a call of a communicator, and notes its defects.
    pub(super) fn count(
        &mut self,
        member: &mut Member,
        call: &Call,
        label: &Label,
        (layout, bytes): (&Layout, u64),
        defects: Option<Defects>,
    ) {
        member.calls += 1;
        member.bytes += bytes;
        self.tally.count(label, call.dtype, bytes);
        if let Some(defects) = defects {
            let (rank, world_size) = (member.communicator.rank(), member.communicator.world_size());
            self.tally.note(format!(
                "seed {}, {call}, rank {rank} of {world_size}, {layout}, by {label}: {defects}",
                self.parameters.seed
            ));
        }
    }

    /// Drops a communicator, and compares its counters with the calls that were made.
    fn close(&mut self, member: Member) {
        let Member { communicator, buffer, calls, bytes, .. } = member;
        let counters = communicator.counters();
        self.tally.waits += counters.waits.iter().sum::<u64>();
        self.tally.timeouts += counters.timeouts.iter().sum::<u64>();
        if (counters.calls, counters.bytes) != (calls, bytes) {
            self.tally.note(format!(
                "seed {}: a communicator counts {} calls of {} bytes after {calls} of {bytes}",
                self.parameters.seed, counters.calls, counters.bytes
            ));
        }
        close_in_either_order(communicator, buffer, calls % 2 == 0);
    }
}

/// Drops the communicator or the buffer first: the last one holds what both need.
pub(super) fn close_in_either_order(
    communicator: Communicator<Host>,
    buffer: Option<Buffer<u64>>,
    communicator_first: bool,
) {
    match communicator_first {
        true => drop((communicator, buffer)),
        false => drop((buffer, communicator)),
    }
}

/// More than [`Call::times`].
pub const MOST_TIMES: u64 = 4;

/// More than the colors of groups: also one for none, and one for faults.
const MOST_COLORS: u64 = 10;

/// The color of calls with faults.
pub const FAULTY_COLOR: u64 = MOST_COLORS - 1;

/// Returns the number that distinguishes the inputs of calls.
pub fn round_number(call: u64, time: u64, color: u64) -> u64 {
    (call * MOST_TIMES + time) * MOST_COLORS + color
}

impl Member {
    /// Registers a buffer for an input and an output of `buffer_bytes` each. Collective.
    fn new(
        communicator: Communicator<Host>,
        buffer_bytes: Option<usize>,
        (color, max_bytes): (u64, usize),
    ) -> Result<Self, Failure> {
        let buffer = buffer_bytes.map(|bytes| communicator.alloc(2 * words(bytes))).transpose()?;
        Ok(Self { communicator, buffer, color, calls: 0, bytes: 0, max_bytes })
    }
}
