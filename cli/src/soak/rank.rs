//! One rank's part of the calls: makes them, and looks at every element.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fast_allreduce::bootstrap::Bootstrap;
use fast_allreduce::{Buffer, CallKind, Communicator, Host};
use nix::unistd::Pid;

use super::draw::{Call, Groups, Range, Settings, View, SLOTS};
use super::fault::Episode;
use super::find::{part, Judge, Made};
use super::memory::{words, Window};
use super::report::Tally;
use crate::failure::Failure;
use crate::harness::elements::elements;
use crate::harness::inputs::Inputs;
use crate::harness::rms_norm::with_float;

/// A communicator and what is kept with it.
pub struct World {
    pub(super) communicator: Communicator<Host>,
    /// An input and an output.
    pub(super) buffer: Option<Buffer<u64>>,
    /// Tells the inputs of groups from each other.
    pub(super) color: u64,
    pub(super) calls: u64,
    pub(super) bytes: u64,
}

/// Who makes a call.
enum Caller {
    AllRanks,
    Group(Box<World>),
    /// Groups without this rank.
    Others,
}

/// A rank between two calls.
pub struct Rank {
    pub(super) bootstrap: Arc<dyn Bootstrap>,
    pub(super) range: Range,
    pub(super) timeout: Duration,
    /// By rank; none where they cannot be stopped.
    pub(super) processes: Vec<Pid>,
    /// Of this rank's own inputs: the range's seed, save in a test of what is noticed.
    pub(super) own_seed: u64,
    worlds: [Option<World>; SLOTS],
    pub(super) private: [Vec<u64>; 2],
    /// An episode's input and results, which nobody overwrites; else a residual, weights and a plain sum.
    pub(super) kept: [Vec<u64>; 3],
    drawn: DefaultHasher,
    pub tally: Tally,
}

impl Rank {
    pub fn new(
        bootstrap: Arc<dyn Bootstrap>,
        range: Range,
        timeout: Duration,
        processes: Vec<Pid>,
        own_seed: u64,
    ) -> Self {
        // Written now, so that no later call makes them resident.
        let memory = || vec![u64::MAX; words(range.max_bytes)];
        let kept = [(); 3].map(|()| memory());
        let private = [(); 2].map(|()| memory());
        let (worlds, drawn, tally) = Default::default();
        Self { bootstrap, range, timeout, processes, own_seed, worlds, private, kept, drawn, tally }
    }

    /// A digest of the calls so far, equal on all ranks.
    pub fn digest(&self) -> u64 {
        self.drawn.finish()
    }

    /// Makes a call. What is wrong with its results is for the tally.
    pub fn call(&mut self, call: &Call) -> Result<(), Failure> {
        let seed = self.range.seed;
        if let Some(episode) = Episode::draw(&self.range, call.number) {
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
        if let Some(world) = self.worlds[slot].take() {
            self.close(world);
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
        let mut world = match self.worlds[call.slot].take() {
            Some(world) => world,
            None => self.make(call)?,
        };
        match self.caller(&world, call)? {
            Caller::AllRanks => self.collective_any(&mut world, call)?,
            Caller::Group(mut group) => {
                self.collective_any(&mut group, call)?;
                self.close(*group);
            }
            Caller::Others => {}
        }
        self.worlds[call.slot] = Some(world);
        Ok(())
    }

    /// Makes a slot's communicator. Collective.
    fn make(&mut self, call: &Call) -> Result<World, Failure> {
        let settings = Settings::draw(self.range.seed, call.number, call.slot);
        let device = Host::new().workers(settings.workers)?.wait(settings.wait);
        let communicator = Communicator::builder()
            .algorithm(settings.algorithm)
            .max_bytes(settings.max_bytes)
            .check(settings.check)
            .timeout(self.timeout * settings.patience)
            .first_epoch(settings.last_epoch)
            .build(device, Arc::clone(&self.bootstrap))?;
        let buffer_bytes = settings.has_buffer.then_some(self.range.max_bytes);
        self.tally.communicators += 1;
        World::new(communicator, buffer_bytes, 0)
    }

    /// The groups of a call. Collective.
    fn caller(&mut self, world: &World, call: &Call) -> Result<Caller, Failure> {
        let rank = self.bootstrap.rank();
        let (made, color) = match &call.groups {
            None => return Ok(Caller::AllRanks),
            Some(Groups::Split(parts)) => {
                let (color, key) = parts[rank];
                (world.communicator.split(color, key)?, u64::from(color.unwrap_or(0)))
            }
            // All ranks are on one of two lists, so that all have made as many groups.
            Some(Groups::Shrink(sides)) => {
                let list: Vec<_> = (0..sides.len()).filter(|&other| sides[other] == sides[rank]).collect();
                (Some(world.communicator.shrink(&list)?), u64::from(sides[rank]))
            }
        };
        let Some(communicator) = made else {
            return Ok(Caller::Others);
        };
        self.tally.groups += 1;
        let buffer_bytes = world.buffer.is_some().then_some(call.count * call.dtype.size());
        Ok(Caller::Group(Box::new(World::new(communicator, buffer_bytes, 1 + color)?)))
    }

    fn collective_any(&mut self, world: &mut World, call: &Call) -> Result<(), Failure> {
        if call.kind == CallKind::AllReduceFused {
            return with_float!(call.dtype, T => self.rows::<T>(world, call));
        }
        self.collective(world, call)
    }

    fn collective(&mut self, world: &mut World, call: &Call) -> Result<(), Failure> {
        let placement = call.placement(self.range.seed, self.bootstrap.rank());
        let (rank, world_size) = (world.communicator.rank(), world.communicator.world_size());
        let work = call.work(self.range.seed, rank, world_size);
        let made = Made::of(&world.communicator, &work, work.dtype);
        let (elements, size) = (elements(work.dtype)?, work.dtype.size());
        for time in 0..call.times {
            let inputs = |seed: u64| {
                Inputs::new(seed, round_number(call.number, time, world.color), world_size, call.op)
            };
            let (own, all) = (inputs(self.own_seed), inputs(self.range.seed));
            let [first, second] = &mut self.private;
            let (mut registered_input, mut registered_output) = halves(&mut world.buffer);
            let place =
                |view: View, registered: &mut Option<_>| registered.take().filter(|_| view.is_registered);
            let input = place(placement.input, &mut registered_input).unwrap_or(first);
            let judge = Judge { inputs: &all, work: &work, elements, promise: made.promise() };
            let found = match (placement.output, work.in_place()) {
                (None, Some((from, to))) => {
                    let data =
                        Window::<u8>::new(input, placement.input.offset * size, work.bytes(work.elements()));
                    let (from, to) = (from..from + work.input_len(), to..to + work.output_len());
                    elements.fill(&own, rank, part(data.elements, &work, &from));
                    let start = Instant::now();
                    work.run_in_place(&world.communicator, data.elements)?;
                    self.tally.time(start.elapsed(), call, &made);
                    let changed = elements.count_changed_beside(&own, rank, data.elements, from, to.clone());
                    let overwritten = data.overwritten();
                    judge.find(part(data.elements, &work, &to), overwritten, changed)
                }
                (view, _) => {
                    let view = view.unwrap_or(View { is_registered: false, offset: 0 });
                    let length = work.bytes(work.input_len());
                    let input = Window::<u8>::new(input, placement.input.offset * size, length);
                    elements.fill(&own, rank, input.elements);
                    let output = place(view, &mut registered_output).unwrap_or(second);
                    let output = Window::<u8>::new(output, view.offset * size, work.bytes(work.output_len()));
                    let start = Instant::now();
                    work.run(&world.communicator, input.elements, output.elements)?;
                    self.tally.time(start.elapsed(), call, &made);
                    let changed = elements.count_changed(&own, rank, input.elements) + input.overwritten();
                    judge.find(output.elements, output.overwritten(), changed)
                }
            };
            let bytes = work.bytes(work.input_len()) as u64;
            world.calls += 1;
            world.bytes += bytes;
            self.tally.count(&made, work.dtype, bytes);
            if let Some(found) = found {
                let told = format!(
                    "seed {}, {call}, of rank {rank} of {world_size} {placement} by {made}: {found}",
                    self.range.seed
                );
                self.tally.wrong.get_or_insert(told);
            }
        }
        Ok(())
    }

    /// Drops a communicator, whose counters must agree with what was done.
    fn close(&mut self, world: World) {
        let World { communicator, buffer, calls, bytes, .. } = world;
        let counters = communicator.counters();
        self.tally.waits += counters.waits.iter().sum::<u64>();
        self.tally.timeouts += counters.timeouts.iter().sum::<u64>();
        if (counters.calls, counters.bytes) != (calls, bytes) {
            self.tally.wrong.get_or_insert(format!(
                "seed {}: a communicator's counters say {} calls of {} bytes after {calls} of {bytes}",
                self.range.seed, counters.calls, counters.bytes
            ));
        }
        // In either order: the one that goes last holds what both need.
        if calls % 2 == 0 {
            drop((communicator, buffer));
        } else {
            drop((buffer, communicator));
        }
    }
}

/// Above [`Call::times`].
pub const MOST_TIMES: u64 = 4;

/// Above the colors of groups, one for none, and one for faults.
const MOST_COLORS: u64 = 10;

/// That of calls with faults.
pub const FAULTY_COLOR: u64 = MOST_COLORS - 1;

/// Tells the inputs of calls from each other.
pub fn round_number(call: u64, time: u64, color: u64) -> u64 {
    (call * MOST_TIMES + time) * MOST_COLORS + color
}

/// Where a registered buffer has an input and an output, if there is one.
pub(super) fn halves(buffer: &mut Option<Buffer<u64>>) -> (Option<&mut [u64]>, Option<&mut [u64]>) {
    match buffer {
        Some(buffer) => {
            let half = buffer.len() / 2;
            let (input, output) = buffer.split_at_mut(half);
            (Some(input), Some(output))
        }
        None => (None, None),
    }
}

impl World {
    /// With a registered buffer for an input and an output of so many bytes. Collective.
    fn new(
        communicator: Communicator<Host>,
        buffer_bytes: Option<usize>,
        color: u64,
    ) -> Result<Self, Failure> {
        let buffer = buffer_bytes.map(|bytes| communicator.alloc(2 * words(bytes))).transpose()?;
        Ok(Self { communicator, buffer, color, calls: 0, bytes: 0 })
    }
}
