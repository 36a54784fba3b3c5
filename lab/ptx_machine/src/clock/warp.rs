//! A warp between two events: its threads run until they stop, then the warp replays their notes region by
//! region.

use std::sync::Arc;

use super::access::{Asks, Part};
use super::path::{After, Cause, Segment};
use super::plan::{is_look, Plan, Region};
use super::recorder::Note;
use super::simulate::{Event, Simulation};
use super::state::{Meeting, SimBlock, Stop, Value};
use crate::context::reason;
use crate::errors::{Fault, LaunchError};
use crate::ir::{Addr, Base, Instr, Op};
use crate::launch::block::State;
use crate::launch::report;
use crate::launch::together::{self, Met};
use crate::lower::FRAME_HEAD;
use crate::types::{Order, Scope, Space};

const WARP: usize = 32;
/// Bytes of a line of parameters.
const LINE: u64 = 64;

impl Simulation<'_> {
    pub(crate) fn warp(&mut self, sim: &mut SimBlock, w: usize, at: f64) -> Result<(), LaunchError> {
        let plan = Arc::clone(&self.plans[&self.run.kernel_of(sim.rank)]);
        loop {
            self.run_threads(sim, w)?;
            let warp = &mut sim.warps[w];
            let Some(first) = warp.lanes.iter().filter_map(|lane| lane.front()).min() else {
                if !warp.ended && warp.lanes.iter().all(|lane| lane.stop == Stop::Ended) {
                    warp.ended = true;
                    sim.left -= 1;
                    if warp.now >= sim.end {
                        (sim.end, sim.last) = (warp.now, w);
                    }
                }
                return Ok(());
            };
            let number = plan.region_of[first as usize];
            let region = &plan.regions[number as usize];
            let here: Vec<usize> =
                (0..warp.lanes.len()).filter(|&lane| warp.lanes[lane].front() == Some(first)).collect();
            let looks = |lane: &usize| !warp.lanes[*lane].is_through(region.last);
            if here.iter().any(looks) {
                let when = match warp.look {
                    Some(when) => when,
                    None => self.when_to_look(sim, w, region, &here),
                };
                let warp = &mut sim.warps[w];
                if when > at {
                    warp.look = Some(when);
                    self.schedule(sim, w, when);
                    return Ok(());
                }
                warp.look = None;
                let looks: Vec<usize> =
                    here.iter().copied().filter(|&lane| !warp.lanes[lane].is_through(region.last)).collect();
                for lane in looks {
                    match warp.lanes[lane].stop {
                        Stop::Look(_) => warp.lanes[lane].stop = Stop::Run,
                        stop => {
                            let what = format!("a thread is not through its region: {stop:?}");
                            return Err(self.fault(sim, Fault::Trap, what));
                        }
                    }
                }
                continue;
            }
            if sim.rank == 0 && sim.sm == 0 {
                self.touched.insert(number);
            }
            self.go_through(sim, w, &plan, region, &here)?;
            self.leave_cluster(sim, w);
            let now = sim.warps[w].now;
            self.schedule(sim, w, now);
            return Ok(());
        }
    }

    pub(crate) fn schedule(&mut self, sim: &mut SimBlock, w: usize, at: f64) {
        sim.warps[w].next = Some(at);
        self.push(at, Event::Warp(self.own, w));
    }

    /// Runs each thread of a warp that may run until it stops.
    fn run_threads(&mut self, sim: &mut SimBlock, w: usize) -> Result<(), LaunchError> {
        if !sim.warps[w].lanes.iter().any(|lane| lane.may_run()) {
            return Ok(());
        }
        for store in std::mem::take(&mut sim.pending) {
            self.arrive(store)?;
        }
        let function = self.run.kernel_of(sim.rank);
        let local = u64::from(self.program.module.functions[function].local_bytes);
        let shared = self.run.grid_of(sim.rank).shared_bytes.into();
        let mut context = self.run.context(&mut sim.block);
        for lane in 0..sim.warps[w].lanes.len() {
            // A thread that is ahead waits until its warp has replayed its notes.
            if !sim.warps[w].lanes[lane].may_run() {
                continue;
            }
            let thread = (w * WARP + lane) as u32;
            let notes = std::mem::take(&mut sim.warps[w].lanes[lane].notes);
            let frame = sim.block.frame(thread) as u64 + u64::from(FRAME_HEAD);
            if let Some(recorder) = &mut self.run.recorder {
                recorder.begin(notes, function as u64, &context, shared, (frame, local));
            }
            let why = self.run.resume(&mut context, &mut sim.block, thread);
            let notes = self.run.recorder.as_mut().map(|recorder| recorder.end()).unwrap_or_default();
            let own = &mut sim.warps[w].lanes[lane];
            own.blocks = notes.iter().filter(|note| matches!(note, Note::Block(_))).count() as u32;
            own.notes = notes;
            let at = context.request.at as u32;
            (own.stop, own.reached) = match why {
                reason::END => (Stop::Ended, u32::MAX),
                reason::POLL | reason::QUANTUM => (Stop::Again, u32::MAX),
                reason::LOOK => (Stop::Look(context.request.args[0]), at),
                reason::BARRIER | reason::WARP => {
                    sim.block.requests[thread as usize] = context.request;
                    (Stop::Meet, at + 1)
                }
                _ => return Err(self.run.failed(&context, &sim.block, thread)),
            };
            if why == reason::END {
                sim.block.states[thread as usize] = State::Ended;
                sim.block.left -= 1;
            }
        }
        Ok(())
    }

    /// Estimates when a region's look reaches the memory that it looks at.
    fn when_to_look(&self, sim: &SimBlock, w: usize, region: &Region, here: &[usize]) -> f64 {
        let warp = &sim.warps[w];
        let Some((needs, issues)) = &region.look else { return warp.now };
        let ready = needs.iter().map(|&reg| warp.values[reg as usize].ready).fold(warp.now, f64::max);
        let remote = here.iter().any(|&lane| match warp.lanes[lane].stop {
            Stop::Look(address) => self.fabric.home(address).is_some_and(|home| home != sim.rank),
            _ => false,
        });
        let way = match remote {
            true => self.machine.cycles(self.machine.remote_load_ns) / 2.0,
            false => self.machine.l2_cycles / 2.0,
        };
        ready.max(warp.ordered) + f64::from(*issues) * self.machine.alu_cycles + way
    }

    fn go_through(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        plan: &Plan,
        region: &Region,
        here: &[usize],
    ) -> Result<(), LaunchError> {
        let function = self.run.kernel_of(sim.rank);
        let count = (region.last - region.first) as usize;
        // For each instruction: the threads that execute it if it is guarded, and their accesses.
        let mut taken: Vec<Vec<usize>> = vec![Vec::new(); count];
        let mut parts: Vec<Vec<Part>> = vec![Vec::new(); count];
        for &lane in here {
            let own = &mut sim.warps[w].lanes[lane];
            if own.at.is_none() {
                own.notes.pop_front();
                own.blocks -= 1;
            }
            while let Some(&note) = own.notes.front() {
                match note {
                    Note::Taken(at) if at < region.last => taken[(at - region.first) as usize].push(lane),
                    Note::Access(access) if access.at < region.last => parts
                        [(access.at - region.first) as usize]
                        .push((access.address, access.bytes, access.value)),
                    _ => break,
                }
                own.notes.pop_front();
            }
            own.at = if region.ends { None } else { Some(region.last) };
        }
        let program = self.program;
        for &at in &region.order {
            let instr = &program.module.functions[function].code[at as usize];
            let i = (at - region.first) as usize;
            let lanes: &[usize] = if instr.guard.is_some() && !instr.ends_block() { &taken[i] } else { here };
            self.instruction(sim, w, plan, at, instr, lanes, &parts[i])?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn instruction(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        plan: &Plan,
        at: u32,
        instr: &Instr,
        lanes: &[usize],
        parts: &[Part],
    ) -> Result<(), LaunchError> {
        let cost = plan.costs[at as usize];
        let mut operands = Value::NONE;
        instr.reads(&mut |reg| {
            let value = sim.warps[w].values[reg as usize];
            if value.ready > operands.ready {
                operands = value;
            }
        });
        if cost.issues == 0 {
            if let Some(line) = parameter_line(instr) {
                let sm = &mut self.sms[sim.rank][sim.sm];
                if sm.lines.insert(line) {
                    let ready = sim.warps[w].now + self.machine.constant_cycles;
                    operands = Value { ready, cause: Cause::Constant, ..Value::NONE };
                }
            }
            instr.writes(&mut |reg| sim.warps[w].values[reg as usize] = operands);
            return Ok(());
        }
        let warp = &mut sim.warps[w];
        let accesses = matches!(
            instr.op,
            Op::Ld { .. }
                | Op::St { .. }
                | Op::Atom { .. }
                | Op::Fence { .. }
                | Op::MultimemLd { .. }
                | Op::MultimemSt { .. }
        );
        if accesses && warp.ordered > operands.ready {
            operands = Value { ready: warp.ordered, cause: Cause::Local, ..Value::NONE };
        }
        if operands.ready > warp.now {
            let Value { ready, cause, queue, looked } = operands;
            // Looks in flight together are waited for together: the last store of all counts.
            let after = looked.and_then(|looked| warp.last_waited(looked));
            warp.log.add(Segment { start: warp.now, end: ready, cause, queue, at }, after);
            warp.now = ready;
        }
        let start = warp.now;
        let slots = &mut self.sms[sim.rank][sim.sm].slots[w % 4];
        let mut issued = start;
        for _ in 0..cost.issues {
            issued = slots.take(warp.now);
            warp.now = issued + 1.0;
        }
        warp.counts.instructions += f64::from(cost.issues);
        warp.log.add(Segment { start, end: warp.now, cause: Cause::Issue, queue: 0.0, at }, None);
        let value = self.effect(sim, w, at, instr, lanes, parts, issued)?;
        let depth = cost.depth * self.machine.alu_cycles;
        let value = value.unwrap_or(Value { ready: issued + depth, ..Value::NONE });
        instr.writes(&mut |reg| sim.warps[w].values[reg as usize] = value);
        Ok(())
    }

    /// Executes an issued instruction. Returns its result, unless it is arithmetic.
    #[allow(clippy::too_many_arguments)]
    fn effect(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        at: u32,
        instr: &Instr,
        lanes: &[usize],
        parts: &[Part],
        issued: f64,
    ) -> Result<Option<Value>, LaunchError> {
        let machine = self.machine;
        Ok(match &instr.op {
            Op::Ld { access, .. } => {
                let asks =
                    Asks { order: access.order, strong: access.order.is_strong(), look: is_look(instr) };
                let value = self.load(sim, w, issued, parts, asks);
                if access.order == Order::Acquire {
                    sim.warps[w].ordered = value.ready;
                }
                Some(value)
            }
            Op::St { access, .. } if access.space == Space::Local => None,
            Op::St { access, .. } => {
                let mut issued = issued;
                if access.order == Order::Release && !lanes.is_empty() {
                    issued = self.fenced(sim, w, at, issued, (access.order, access.scope));
                }
                let asks = Asks { order: access.order, strong: access.order.is_strong(), look: false };
                self.store(sim, w, issued, parts, asks);
                None
            }
            Op::Atom { access, d, .. } => {
                let mut issued = issued;
                if matches!(access.order, Order::Release | Order::AcqRel | Order::SeqCst) && !lanes.is_empty()
                {
                    issued = self.fenced(sim, w, at, issued, (access.order, access.scope));
                }
                let value = self.update(sim, w, issued, parts);
                if matches!(access.order, Order::Acquire | Order::AcqRel | Order::SeqCst) && d.is_some() {
                    sim.warps[w].ordered = value.ready;
                }
                Some(value)
            }
            Op::MultimemLd { .. } | Op::MultimemSt { .. } if machine.switch_share == 0.0 => {
                return Err(self.fault(sim, Fault::Launch, "this machine has no switch that adds".into()));
            }
            Op::MultimemLd { .. } => Some(self.load_sums(sim, w, issued, parts)),
            Op::MultimemSt { .. } => {
                self.store_to_all(sim, w, issued, parts);
                None
            }
            // Costs the same as a fence at the GPU's scope: it compiles to membar.gl.
            Op::AliasFence if !lanes.is_empty() => {
                self.fenced(sim, w, at, issued, (Order::AcqRel, Scope::Gpu));
                None
            }
            Op::Fence { order, scope } if !lanes.is_empty() => {
                self.fenced(sim, w, at, issued, (*order, *scope));
                None
            }
            Op::MovSpecial { .. } => Some(Value { ready: issued + machine.special_cycles, ..Value::NONE }),
            Op::Dependents { waits } => {
                self.depend(sim, w, at, lanes, *waits);
                None
            }
            Op::Bar { .. } => {
                sim.warps[w].counts.syncs += 1.0;
                self.meet_block(sim, w, at, instr, lanes)?;
                None
            }
            Op::ClusterBar { waits, releases, .. } => {
                self.meet_cluster(sim, w, at, lanes, (*waits, *releases))?;
                None
            }
            Op::Warp { .. } => {
                self.meet_warp(sim, w, instr, lanes)?;
                Some(Value { ready: issued + machine.shared_cycles, cause: Cause::Shared, ..Value::NONE })
            }
            Op::Bra { .. } | Op::BrxIdx { .. } => {
                self.pass_time(sim, w, at, machine.branch_cycles, Cause::Arithmetic);
                None
            }
            Op::Nanosleep => {
                self.pass_time(sim, w, at, machine.cycles(20.0), Cause::Poll);
                None
            }
            _ => None,
        })
    }

    pub(crate) fn pass_time(&mut self, sim: &mut SimBlock, w: usize, at: u32, cycles: f64, cause: Cause) {
        let warp = &mut sim.warps[w];
        let (start, end) = (warp.now, warp.now + cycles);
        warp.log.add(Segment { start, end, cause, queue: 0.0, at }, None);
        warp.now = end;
    }

    pub(crate) fn fenced(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        at: u32,
        issued: f64,
        (order, scope): (Order, Scope),
    ) -> f64 {
        let done = self.fence(sim, issued, order, scope);
        let warp = &mut sim.warps[w];
        warp.counts.fences += 1.0;
        let segment = Segment { start: warp.now, end: done, cause: Cause::Fence, queue: 0.0, at };
        warp.log.add(segment, None);
        warp.now = warp.now.max(done);
        done
    }

    /// Brings threads to a barrier; the last arrival releases all.
    fn meet_block(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        at: u32,
        instr: &Instr,
        lanes: &[usize],
    ) -> Result<(), LaunchError> {
        let now = sim.warps[w].now;
        let id = lanes.first().map_or(0, |lane| sim.block.requests[w * WARP + lane].args[0] as usize % 16);
        let meeting = sim.meetings[id].get_or_insert(Meeting { last: now, by: w });
        if now >= meeting.last {
            *meeting = Meeting { last: now, by: w };
        }
        for &lane in lanes {
            let thread = w * WARP + lane;
            sim.block.states[thread] = State::AtBarrier;
            sim.warps[w].lanes[lane].stop = Stop::Waits;
            let met = together::arrive(instr, &mut sim.block, thread).map_err(|what| {
                let place = report::place(self.program, sim.block.requests[thread].at);
                self.fault(sim, Fault::Sync, format!("{place}: {what}"))
            })?;
            match met {
                Met::Waits => {}
                Met::Arrived => sim.warps[w].lanes[lane].stop = Stop::Run,
                Met::All(threads) => self.release(sim, id, at, instr, &threads),
            }
        }
        Ok(())
    }

    fn release(&mut self, sim: &mut SimBlock, id: usize, at: u32, instr: &Instr, threads: &[usize]) {
        let Some(meeting) = sim.meetings[id].take() else { return };
        let warps = threads.len().div_ceil(WARP) as f64;
        let end = meeting.last + self.machine.sync_cycles + self.machine.sync_warp_cycles * warps;
        let after =
            After { who: (self.own, meeting.by), issued: meeting.last, arrived: meeting.last, queue: 0.0 };
        let mut last = usize::MAX;
        for &thread in threads {
            let w = thread / WARP;
            let warp = &mut sim.warps[w];
            warp.lanes[thread % WARP].stop = Stop::Run;
            if w == last {
                continue;
            }
            last = w;
            let after = (meeting.by != w).then_some(after);
            warp.log.add(Segment { start: warp.now, end, cause: Cause::Sync, queue: 0.0, at }, after);
            warp.now = warp.now.max(end);
            instr.writes(&mut |reg| warp.values[reg as usize] = Value::NONE);
            self.schedule(sim, w, end);
        }
    }

    fn meet_warp(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        instr: &Instr,
        lanes: &[usize],
    ) -> Result<(), LaunchError> {
        for &lane in lanes {
            let thread = w * WARP + lane;
            sim.block.states[thread] = State::InWarp;
            sim.warps[w].lanes[lane].stop = Stop::Waits;
            if let Err(what) = together::arrive(instr, &mut sim.block, thread) {
                let place = report::place(self.program, sim.block.requests[thread].at);
                return Err(self.fault(sim, Fault::Sync, format!("{place}: {what}")));
            }
        }
        for (lane, own) in sim.warps[w].lanes.iter_mut().enumerate() {
            if own.stop == Stop::Waits && sim.block.states[w * WARP + lane] == State::Ready {
                own.stop = Stop::Run;
            }
        }
        Ok(())
    }
}

/// Returns the line of parameters that an instruction reads.
fn parameter_line(instr: &Instr) -> Option<u64> {
    match &instr.op {
        Op::Ld { addr: Addr { base: Base::Param, offset }, .. } => Some(*offset as u64 / LINE),
        // With a computed address: any line of the parameters.
        Op::Ld { access, addr, .. } if access.space == Space::Param => {
            Some(u64::MAX - addr.offset as u64 / LINE)
        }
        _ => None,
    }
}
