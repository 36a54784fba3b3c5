//! The programs as the host runs them, under the axioms of Arm, of C++, and of x86 with streaming stores.
//!
//! A block of the host is one thread: the threads of a CTA run one after the other between barriers, and a later launch
//! continues the same thread. Scopes mean nothing. g++ compiles a release store to STLR, an acquire load to LDAR, and
//! fences to DMB ISH; a poll's branch is a control dependency. README.md names the sources.

use crate::axioms::{no_thin_air, Sources};
use crate::enumerate::{candidates, values};
use crate::events::{Event, Events, Kind};
use crate::program::{Condition, Instruction, Place, Program, Strength, Thread, Value};
use crate::relation::Relation;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// External visibility and internal consistency of the Arm architecture, without addresses that depend on reads.
    Arm,
    /// RC11, without read-modify-writes and release sequences: coherence, SC fences, no thin air, data races.
    Cpp,
    /// x86, whose fences are SFENCE and MFENCE. Weak stores are streaming stores, all others are plain.
    X86Streams,
}

#[derive(Default, Debug)]
pub struct Verdict {
    pub executions: usize,
    pub outcome: bool,
    /// Always false for Arm, which defines racing accesses.
    pub race: bool,
}

/// Returns the host's form of a program, or why it has none.
pub fn program(gpu: &Program) -> Result<Program, &'static str> {
    let mut host = Program { threads: Vec::new(), ..gpu.clone() };
    let instructions =
        || gpu.threads.iter().flat_map(|thread| &thread.body).map(|(_, instruction)| instruction);
    let uses_alias = |instruction: &Instruction| match instruction {
        Instruction::Store(_, stores) => stores.iter().any(|store| store.alias),
        Instruction::Load(_, loads) => loads.iter().any(|load| load.alias),
        other => *other == Instruction::AliasFence,
    };
    if instructions().any(uses_alias) {
        return Err("windows");
    }
    let mut ctas: Vec<(usize, usize)> = gpu.threads.iter().map(|thread| (thread.rank, thread.cta)).collect();
    ctas.dedup();
    let several = ctas.windows(2).any(|pair| pair[0].0 == pair[1].0);
    if several && instructions().any(|instruction| *instruction == Instruction::Launch) {
        return Err("several blocks and launches");
    }
    for (rank, cta) in ctas {
        let threads: Vec<_> = gpu.threads.iter().filter(|thread| thread.cta == cta).collect();
        let mut body = Vec::new();
        let parts: Vec<Vec<Vec<Instruction>>> = threads.iter().map(|thread| parts(thread)).collect();
        if parts.iter().any(|own| own.len() != parts[0].len()) {
            return Err("threads that meet differently");
        }
        for part in 0..parts[0].len() {
            // Signals come before waits.
            let mut own: Vec<&Vec<Instruction>> = parts.iter().map(|parts| &parts[part]).collect();
            own.sort_by_key(|instructions| instructions.iter().any(Instruction::polls));
            body.extend(own.into_iter().flatten().map(|instruction| (None, instruction.clone())));
        }
        host.threads.push(Thread { name: format!("block {cta}"), rank, cta, body });
    }
    let block = |thread: &String| {
        let thread = gpu.threads.iter().find(|known| known.name == *thread);
        thread.map_or_else(String::new, |thread| format!("block {}", thread.cta))
    };
    for atom in host.outcome.iter_mut().flatten() {
        if let Place::Register { thread, register } = &mut atom.place {
            (*thread, *register) = (block(thread), format!("{thread}.{register}"));
        }
    }
    // Control dependencies are computed here.
    host.control_dependencies = false;
    Ok(host)
}

/// Splits a thread's body at barriers and launches, and gives registers names that are unique in the block.
fn parts(thread: &Thread) -> Vec<Vec<Instruction>> {
    let named = |register: &mut String| *register = format!("{}.{register}", thread.name);
    let mut parts = vec![Vec::new()];
    for (_, instruction) in &thread.body {
        let mut instruction = instruction.clone();
        match &mut instruction {
            Instruction::Barrier | Instruction::Launch => {
                parts.push(Vec::new());
                continue;
            }
            Instruction::Load(_, loads) => loads.iter_mut().for_each(|load| named(&mut load.register)),
            Instruction::Store(_, stores) => {
                stores.iter_mut().flat_map(|store| &mut store.value.registers).for_each(named);
            }
            _ => {}
        }
        parts.last_mut().expect("there is a part").push(instruction);
    }
    parts
}

/// The planted bug: no store releases, and there are no fences.
pub fn without_releases(host: &Program) -> Program {
    let mut weak = host.clone();
    for (_, instruction) in weak.threads.iter_mut().flat_map(|thread| &mut thread.body) {
        match instruction {
            Instruction::Store(strength @ Strength::Synchronizing(_), _) => {
                *strength = Strength::Relaxed(strength.scope().expect("it is strong"));
            }
            Instruction::Fence { .. } => *instruction = Instruction::Nop,
            _ => {}
        }
    }
    weak
}

/// Executes a host's program in every way that the model permits.
pub fn enumerate(host: &Program, model: Model) -> Verdict {
    let all_end = vec![None; host.threads.len()];
    let events = Events::of(host, &all_end).expect("all threads run to their end");
    let whole = |sources: &Sources| sources.data == sources.tag;
    let mut reads: Vec<(usize, Vec<Sources>)> = events
        .reads()
        .into_iter()
        .map(|read| (read, candidates(&events, read, true).into_iter().filter(whole).collect()))
        .collect();
    reads.sort_by_key(|(_, choices)| choices.len());
    let sources = vec![None; events.list.len()];
    let order = Fixed::of(&events);
    let mut search =
        Search { host, model, events: &events, fixed: order, reads, sources, verdict: Verdict::default() };
    search.choose(0);
    search.verdict
}

/// What every execution has.
struct Fixed {
    program: Relation,
    /// Program order between accesses of one location.
    same_location: Relation,
    /// Arm: dependency-ordered-before and barrier-ordered-before, except for what follows reads from own writes.
    arm: Relation,
    /// x86: preserved program order, and the order of fences.
    x86: Relation,
    data: Relation,
}

impl Fixed {
    fn of(events: &Events) -> Self {
        let list = &events.list;
        // Several kernels of a GPU would have no order here; the host's form has one thread and one kernel.
        let program = events.program_order.closure();
        let data = events.dependencies.clone();
        let mut same_location = Relation::empty(list.len());
        let mut arm = data.clone();
        let mut x86 = Relation::empty(list.len());
        for (first, one) in list.iter().enumerate() {
            let polls = matches!(one.kind, Kind::Read { until: Some(_), .. });
            for later in program.successors(first) {
                let other = &list[later];
                if one.is_memory() && one.location == other.location {
                    same_location.add(first, later);
                }
                let acquires = one.is_read() && one.synchronizing;
                let releases = other.is_write() && other.synchronizing;
                let both = one.is_write() && one.synchronizing && other.is_read() && other.synchronizing;
                if acquires
                    || releases
                    || both
                    || one.is_fence()
                    || other.is_fence()
                    || (polls && other.is_write())
                {
                    arm.add(first, later);
                }
                let streams = |event: &Event| event.is_write() && event.scope.is_none();
                let kept = match (one.is_fence(), other.is_fence()) {
                    // SFENCE orders stores only, MFENCE what follows as well.
                    (true, _) => other.is_write() || matches!(one.kind, Kind::Fence { sc: true }),
                    (_, true) => true,
                    _ => one.is_read() || (other.is_write() && !streams(one) && !streams(other)),
                };
                if kept {
                    x86.add(first, later);
                }
            }
        }
        Self { program, same_location, arm, x86, data }
    }
}

struct Search<'a> {
    host: &'a Program,
    model: Model,
    events: &'a Events,
    fixed: Fixed,
    reads: Vec<(usize, Vec<Sources>)>,
    sources: Vec<Option<Sources>>,
    verdict: Verdict,
}

impl Search<'_> {
    fn choose(&mut self, index: usize) {
        let Some((read, choices)) = self.reads.get(index).cloned() else {
            return self.check();
        };
        for choice in choices {
            self.sources[read] = Some(choice);
            self.choose(index + 1);
        }
        self.sources[read] = None;
    }

    fn check(&mut self) {
        // Values need an order in which they are computed; both models forbid its absence.
        let Some(flow) = no_thin_air(self.events, &self.sources) else { return };
        let values = values(self.events, &self.sources, &flow);
        let agrees = |&(read, _): &(usize, Vec<Sources>)| match self.events.list[read].kind {
            Kind::Read { until: Some(until), .. } => until.matches(values[read]),
            _ => true,
        };
        if !self.reads.iter().all(agrees) {
            return;
        }
        let orders: Vec<Vec<Relation>> =
            (0..self.events.locations.len()).map(|location| self.coherence_orders(location)).collect();
        let empty = Relation::empty(self.events.list.len());
        self.combine(&orders, &empty, &values);
    }

    /// Chooses a coherence order of each remaining location.
    fn combine(&mut self, orders: &[Vec<Relation>], chosen: &Relation, values: &[Value]) {
        let Some((first, rest)) = orders.split_first() else {
            return self.judge(chosen, values);
        };
        for order in first {
            self.combine(rest, &chosen.union(order), values);
        }
    }

    /// Returns the total orders of a location's writes with which accesses of that location are consistent.
    fn coherence_orders(&self, location: usize) -> Vec<Relation> {
        let accesses = self.events.of_location(location);
        // The first is the initial write.
        let writes: Vec<usize> =
            accesses.into_iter().filter(|&event| self.events.list[event].is_write()).collect();
        let mut found = Vec::new();
        permute(&writes[1..], &mut vec![writes[0]], &mut |order| {
            let mut coherence = Relation::empty(self.events.list.len());
            for (index, &write) in order.iter().enumerate() {
                order[index + 1..].iter().for_each(|&later| coherence.add(write, later));
            }
            let communication = self.communication(&coherence, |_, _| true);
            if self.fixed.same_location.union(&communication).acyclic() {
                found.push(coherence);
            }
        });
        found
    }

    /// Returns reads-from, coherence and from-reads, where `keep` permits.
    fn communication(&self, coherence: &Relation, keep: impl Fn(usize, usize) -> bool) -> Relation {
        let mut result = Relation::empty(self.events.list.len());
        let mut add = |from: usize, to: usize| {
            if keep(from, to) {
                result.add(from, to);
            }
        };
        for event in 0..self.events.list.len() {
            coherence.successors(event).for_each(|later| add(event, later));
            if let Some(Sources { data, .. }) = self.sources[event] {
                add(data, event);
                coherence.successors(data).for_each(|later| add(event, later));
            }
        }
        result
    }

    fn judge(&mut self, coherence: &Relation, values: &[Value]) {
        let (consistent, race) = match self.model {
            Model::Arm => (self.arm(coherence), false),
            Model::Cpp => self.cpp(coherence),
            Model::X86Streams => (self.x86(coherence), false),
        };
        if consistent {
            self.verdict.executions += 1;
            self.verdict.race |= race;
            self.verdict.outcome |= self.satisfies(&self.host.outcome, values, coherence);
        }
    }

    /// Arm: ordered-before is acyclic. Internal visibility has been checked by location.
    fn arm(&self, coherence: &Relation) -> bool {
        let list = &self.events.list;
        let external =
            |from: usize, to: usize| list[from].thread.is_none() || list[from].thread != list[to].thread;
        let mut before = self.fixed.arm.union(&self.communication(coherence, external));
        // A write's data, and the reads of that write by its own thread.
        for (read, sources) in self.sources.iter().enumerate() {
            let Some(Sources { data: write, .. }) = *sources else { continue };
            if !external(write, read) {
                let from = (0..list.len()).filter(|&from| self.fixed.data.has(from, write));
                from.for_each(|from| before.add(from, read));
            }
        }
        before.acyclic()
    }

    /// x86: a global order of all events exists. Internal visibility has been checked by location.
    fn x86(&self, coherence: &Relation) -> bool {
        let list = &self.events.list;
        let external =
            |from: usize, to: usize| list[from].thread.is_none() || list[from].thread != list[to].thread;
        self.fixed.x86.union(&self.communication(coherence, external)).acyclic()
    }

    /// RC11: whether the execution is consistent, and whether it has a data race.
    fn cpp(&self, coherence: &Relation) -> (bool, bool) {
        let list = &self.events.list;
        let count = list.len();
        let program = &self.fixed.program;
        let mut happens = program.clone();
        (0..self.events.locations.len()).for_each(|initial| {
            (self.events.locations.len()..count).for_each(|event| happens.add(initial, event))
        });
        let mut thin = program.clone();
        let is_atomic = |event: usize| list[event].scope.is_some();
        for (read, sources) in self.sources.iter().enumerate() {
            let Some(Sources { data: write, .. }) = *sources else { continue };
            thin.add(write, read);
            if !is_atomic(write) || !is_atomic(read) {
                continue;
            }
            let begins = |event: usize| {
                (event == write && list[write].synchronizing)
                    || (list[event].is_fence() && program.has(event, write))
            };
            let ends = |event: usize| {
                (event == read && list[read].synchronizing)
                    || (list[event].is_fence() && program.has(read, event))
            };
            for first in (0..count).filter(|&event| begins(event)) {
                (0..count).filter(|&event| ends(event)).for_each(|last| happens.add(first, last));
            }
        }
        let happens = happens.closure();
        let extended = self.communication(coherence, |_, _| true).closure();
        let coherent = (0..count).all(|a| happens.successors(a).all(|b| b != a && !extended.has(b, a)));
        // Fences of sequential consistency: ordered by what happens before them and what is seen between them.
        let is_sc = |event: usize| matches!(list[event].kind, Kind::Fence { sc: true });
        let mut fences = Relation::empty(count);
        for first in (0..count).filter(|&event| is_sc(event)) {
            for a in happens.successors(first) {
                if is_sc(a) {
                    fences.add(first, a);
                }
                for b in extended.successors(a) {
                    happens
                        .successors(b)
                        .filter(|&last| is_sc(last))
                        .for_each(|last| fences.add(first, last));
                }
            }
        }
        let races = |a: usize, b: usize| {
            list[a].is_memory()
                && list[a].location == list[b].location
                && (list[a].is_write() || list[b].is_write())
                && !(is_atomic(a) && is_atomic(b))
                && !happens.has(a, b)
                && !happens.has(b, a)
        };
        let race = (0..count).any(|a| (a + 1..count).any(|b| races(a, b)));
        (coherent && thin.acyclic() && fences.acyclic(), race)
    }

    fn satisfies(&self, condition: &Condition, values: &[Value], coherence: &Relation) -> bool {
        let value = |place: &Place| match place {
            Place::Register { thread, register } => {
                let thread = self.host.threads.iter().position(|known| known.name == *thread);
                values[self.events.registers[&(thread.expect("a thread"), register.clone())]]
            }
            Place::Memory(name) => {
                let location = self.events.locations.iter().position(|known| known == name).expect("a word");
                let last = |&event: &usize| {
                    self.events.list[event].is_write() && coherence.successors(event).next().is_none()
                };
                values[self.events.of_location(location).into_iter().find(last).expect("a last write")]
            }
        };
        condition
            .iter()
            .any(|all| all.iter().all(|atom| atom.pattern.matches(value(&atom.place)) == atom.equal))
    }
}

/// Visits `begun`, extended by the rest in every order.
fn permute(rest: &[usize], begun: &mut Vec<usize>, visit: &mut impl FnMut(&[usize])) {
    if rest.is_empty() {
        return visit(begun);
    }
    for index in 0..rest.len() {
        let mut left = rest.to_vec();
        begun.push(left.remove(index));
        permute(&left, begun, visit);
        begun.pop();
    }
}
