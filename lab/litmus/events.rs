//! The events of a program, and the relations between them that every execution has.
//!
//! One program has several *paths*: either all threads run to their end, or some stay in one of their polls
//! for ever.

use std::collections::BTreeMap;

use crate::program::{Expression, Instruction, Pattern, Program, Scope, Strength, Value};
use crate::relation::Relation;

#[derive(Clone, Debug)]
pub enum Kind {
    /// The hypothetical write before all threads (PTX ISA 8.2.6).
    Initial(Value),
    Write(Expression),
    Read {
        register: String,
        until: Option<Pattern>,
    },
    Fence {
        sc: bool,
    },
    /// Between accesses of a location through different aliases.
    AliasFence,
    /// One side of a barrier or of a kernel boundary.
    Arrive,
    Wait,
}

#[derive(Clone, Debug)]
pub struct Event {
    pub kind: Kind,
    /// Scope of a strong operation.
    pub scope: Option<Scope>,
    /// A release write or an acquire read.
    pub synchronizing: bool,
    pub location: Option<usize>,
    /// Whether the access uses the location's second alias.
    pub alias: bool,
    /// Index of the program's thread; `None` for initial writes.
    pub thread: Option<usize>,
    /// Index of the rank's kernel. A PTX thread is (thread, launch).
    pub launch: usize,
    /// Index of the thread's instruction.
    pub instruction: usize,
}

impl Event {
    pub fn is_write(&self) -> bool {
        matches!(self.kind, Kind::Write(_) | Kind::Initial(_))
    }

    pub fn is_read(&self) -> bool {
        matches!(self.kind, Kind::Read { .. })
    }

    pub fn is_memory(&self) -> bool {
        self.location.is_some()
    }

    pub fn is_fence(&self) -> bool {
        matches!(self.kind, Kind::Fence { .. })
    }
}

/// For each thread, the index of the poll that it stays in, among the thread's polls.
pub type Stuck = Vec<Option<usize>>;

pub struct Events {
    pub list: Vec<Event>,
    pub locations: Vec<String>,
    /// Words that carry a tag; only single-copy atomicity keeps it together with the data.
    pub tagged: Vec<bool>,
    /// Program order (8.9.1), transitive. Elements of one vector access are unordered.
    pub program_order: Relation,
    /// Program order, barriers, kernel boundaries and initialization: base causality before any
    /// communication.
    pub fixed_causality: Relation,
    /// Moral strength (8.7).
    pub morally_strong: Relation,
    /// What No-Thin-Air counts in addition to reads-from.
    pub dependencies: Relation,
    /// The read that loads each register.
    pub registers: BTreeMap<(usize, String), usize>,
    /// The reads of each poll that a thread stays in.
    pub stuck: Vec<Vec<usize>>,
}

impl Events {
    /// Returns `None` if the path is not possible: a thread never reaches the poll that it should stay in.
    pub fn of(program: &Program, stuck: &Stuck) -> Option<Events> {
        let ends = ends(program, stuck)?;
        if stuck.iter().all(Option::is_none) {
            let met = ends.iter().all(|end| !end.in_rendezvous);
            assert!(met, "{}: the threads' barriers or launches do not match", program.name);
        }
        let mut builder = Builder::new(program);
        for (thread, &end) in ends.iter().enumerate() {
            builder.thread(thread, end, stuck[thread].is_some());
        }
        Some(builder.finish())
    }

    pub fn reads(&self) -> Vec<usize> {
        (0..self.list.len()).filter(|&event| self.list[event].is_read()).collect()
    }

    /// Returns whether the order between two accesses of a location is preserved for the thread of the later one
    /// (8.9.5, proxy-preserved base causality order): they use the same alias, or there is a proxy fence on
    /// the path. `base`: base causality. An initial write is through both aliases.
    pub fn preserves(&self, base: &Relation, first: usize, later: usize) -> bool {
        let (one, other) = (&self.list[first], &self.list[later]);
        let is_fence = |event: usize| matches!(self.list[event].kind, Kind::AliasFence);
        one.alias == other.alias
            || matches!(one.kind, Kind::Initial(_))
            || base.successors(first).any(|event| is_fence(event) && base.has(event, later))
    }

    /// Returns the accesses of one location.
    pub fn of_location(&self, location: usize) -> Vec<usize> {
        (0..self.list.len()).filter(|&event| self.list[event].location == Some(location)).collect()
    }
}

/// Where a thread ends on a path: before this instruction, or in it if it is a poll.
#[derive(Clone, Copy, PartialEq, Eq)]
struct End {
    instruction: usize,
    in_rendezvous: bool,
}

/// Returns how far each thread gets: a thread that waits in a barrier, or at a kernel's end, for one that does
/// not come stays there. `None` if a thread does not reach the poll that it should stay in.
fn ends(program: &Program, stuck: &Stuck) -> Option<Vec<End>> {
    let meets = |instruction: &Instruction| matches!(instruction, Instruction::Barrier | Instruction::Launch);
    let polls = |thread: usize| {
        let body = &program.threads[thread].body;
        body.iter().enumerate().filter(|(_, (_, instruction))| instruction.polls()).map(|(index, _)| index)
    };
    let full = |thread: usize| match stuck[thread] {
        Some(poll) => polls(thread).nth(poll).expect("a thread stays in a poll that it has"),
        None => program.threads[thread].body.len(),
    };
    let mut ends: Vec<End> = (0..program.threads.len())
        .map(|thread| End { instruction: full(thread), in_rendezvous: false })
        .collect();
    loop {
        let before = ends.clone();
        for (index, thread) in program.threads.iter().enumerate() {
            let body = &thread.body[..ends[index].instruction];
            let (mut barriers, mut launches) = (0, 0);
            for (at, (_, instruction)) in body.iter().enumerate() {
                if !meets(instruction) {
                    continue;
                }
                let launch = *instruction == Instruction::Launch;
                let all_come = (0..program.threads.len()).all(|other| {
                    let peer = &program.threads[other];
                    let partner = if launch { peer.rank == thread.rank } else { peer.cta == thread.cta };
                    !partner || arrives(&peer.body, before[other], instruction, [barriers, launches])
                });
                if !all_come {
                    ends[index] = End { instruction: at, in_rendezvous: true };
                    break;
                }
                *(if launch { &mut launches } else { &mut barriers }) += 1;
            }
        }
        if ends == before {
            break;
        }
    }
    let reached = (0..ends.len()).all(|thread| stuck[thread].is_none() || !ends[thread].in_rendezvous);
    reached.then_some(ends)
}

/// Returns whether the thread reaches its next barrier (or launch) after `passed` barriers and launches.
fn arrives(
    body: &[(Option<String>, Instruction)],
    end: End,
    kind: &Instruction,
    [barriers, launches]: [usize; 2],
) -> bool {
    let nth = if *kind == Instruction::Launch { launches } else { barriers };
    let at = body.iter().enumerate().filter(|(_, (_, instruction))| instruction == kind).nth(nth);
    let Some((at, _)) = at else { return false };
    at < end.instruction || (at == end.instruction && end.in_rendezvous)
}

/// Identifies one barrier or kernel boundary: (rank, cta, index of the launch, index of the barrier in it).
type Rendezvous = (usize, Option<usize>, usize, usize);

struct Builder<'a> {
    program: &'a Program,
    list: Vec<Event>,
    locations: Vec<String>,
    tagged: Vec<bool>,
    meetings: BTreeMap<Rendezvous, Vec<(usize, Option<usize>)>>,
    data: Vec<(usize, usize)>,
    registers: BTreeMap<(usize, String), usize>,
    stuck: Vec<Vec<usize>>,
}

impl Builder<'_> {
    /// Begins with the initial writes, so that event i is the initial write of location i.
    fn new(program: &Program) -> Builder<'_> {
        let mut locations: Vec<String> = Vec::new();
        let mut tagged: Vec<bool> = Vec::new();
        let mut note = |location: &String, tag: bool| match locations.iter().position(|l| l == location) {
            Some(index) => tagged[index] |= tag,
            None => {
                locations.push(location.clone());
                tagged.push(tag);
            }
        };
        for (_, instruction) in program.threads.iter().flat_map(|thread| &thread.body) {
            match instruction {
                Instruction::Store(_, stores) => {
                    stores.iter().for_each(|store| note(&store.location, store.value.tag.is_some()));
                }
                Instruction::Load(_, loads) => loads.iter().for_each(|load| note(&load.location, false)),
                _ => {}
            }
        }
        let list = (0..locations.len())
            .map(|location| {
                let given = program.initial.iter().find(|(name, _)| *name == locations[location]);
                let zero = Value { data: 0, tag: tagged[location].then_some(0) };
                Event {
                    kind: Kind::Initial(given.map_or(zero, |(_, value)| *value)),
                    scope: None,
                    synchronizing: false,
                    location: Some(location),
                    alias: false,
                    thread: None,
                    launch: 0,
                    instruction: 0,
                }
            })
            .collect();
        let (meetings, data, registers, stuck) = Default::default();
        Builder { program, list, locations, tagged, meetings, data, registers, stuck }
    }

    fn thread(&mut self, thread: usize, end: End, stuck: bool) {
        let program = self.program;
        let this = &program.threads[thread];
        let (mut launch, mut barrier) = (0, 0);
        for (index, (_, instruction)) in this.body.iter().enumerate() {
            let last = index == end.instruction;
            if index > end.instruction || (last && !stuck && !end.in_rendezvous) {
                break;
            }
            let blank = Event {
                kind: Kind::Arrive,
                scope: None,
                synchronizing: false,
                location: None,
                alias: false,
                thread: Some(thread),
                launch,
                instruction: index,
            };
            match instruction {
                Instruction::Nop => {}
                Instruction::Fence { sc, scope } => {
                    self.list.push(Event { kind: Kind::Fence { sc: *sc }, scope: Some(*scope), ..blank });
                }
                Instruction::AliasFence => self.list.push(Event { kind: Kind::AliasFence, ..blank }),
                Instruction::Store(strength, stores) => {
                    for store in stores {
                        for register in &store.value.registers {
                            self.data.push((self.registers[&(thread, register.clone())], self.list.len()));
                        }
                        let kind = Kind::Write(store.value.clone());
                        self.access(&blank, *strength, (&store.location, store.alias), kind);
                    }
                }
                Instruction::Load(strength, loads) => {
                    let first = self.list.len();
                    for load in loads {
                        let fresh = self.registers.insert((thread, load.register.clone()), self.list.len());
                        assert!(fresh.is_none(), "{}: {} is loaded twice", program.name, load.register);
                        let kind = Kind::Read { register: load.register.clone(), until: load.until };
                        self.access(&blank, *strength, (&load.location, load.alias), kind);
                    }
                    if last {
                        self.stuck.push((first..self.list.len()).collect());
                    }
                }
                Instruction::Barrier => {
                    self.meet((this.rank, Some(this.cta), launch, barrier), blank.clone(), blank, last);
                    barrier += 1;
                }
                Instruction::Launch => {
                    let start = Event { launch: launch + 1, ..blank.clone() };
                    self.meet((this.rank, None, launch, 0), blank, start, last);
                    launch += 1;
                    barrier = 0;
                }
            }
        }
    }

    fn access(&mut self, blank: &Event, strength: Strength, (location, alias): (&str, bool), kind: Kind) {
        let location = self.locations.iter().position(|l| l == location);
        let synchronizing = matches!(strength, Strength::Synchronizing(_));
        let scope = strength.scope();
        self.list.push(Event { kind, scope, synchronizing, location, alias, ..blank.clone() });
    }

    fn meet(&mut self, at: Rendezvous, arrive: Event, wait: Event, stays: bool) {
        let arrived = self.list.len();
        self.list.push(arrive);
        let waited = (!stays).then(|| {
            self.list.push(Event { kind: Kind::Wait, ..wait });
            arrived + 1
        });
        self.meetings.entry(at).or_default().push((arrived, waited));
    }

    fn finish(self) -> Events {
        let events = self.list.len();
        let (mut order, mut meet) = (Relation::empty(events), Relation::empty(events));
        for (a, first) in self.list.iter().enumerate() {
            for (b, second) in self.list.iter().enumerate() {
                let same = first.thread.is_some()
                    && first.thread == second.thread
                    && first.launch == second.launch
                    && a < b;
                let siblings = first.instruction == second.instruction && first.is_memory();
                if same && !siblings {
                    order.add(a, b);
                }
            }
        }
        for members in self.meetings.values() {
            for &(arrived, _) in members {
                members.iter().filter_map(|member| member.1).for_each(|waited| meet.add(arrived, waited));
            }
        }
        let runs = order.union(&meet).closure();
        let mut fixed = runs.clone();
        for initial in 0..self.locations.len() {
            (self.locations.len()..events).for_each(|event| fixed.add(initial, event));
        }
        let mut dependencies = Relation::empty(events);
        self.data.iter().for_each(|&(read, write)| dependencies.add(read, write));
        if self.program.control_dependencies {
            for (read, event) in self.list.iter().enumerate() {
                if matches!(event.kind, Kind::Read { until: Some(_), .. }) {
                    runs.successors(read).for_each(|later| dependencies.add(read, later));
                }
            }
        }
        Events {
            morally_strong: morally_strong(self.program, &self.list, &order),
            list: self.list,
            locations: self.locations,
            tagged: self.tagged,
            program_order: order,
            fixed_causality: fixed,
            dependencies,
            registers: self.registers,
            stuck: self.stuck,
        }
    }
}

fn morally_strong(program: &Program, list: &[Event], order: &Relation) -> Relation {
    let mut result = Relation::empty(list.len());
    for (a, first) in list.iter().enumerate() {
        for (b, second) in list.iter().enumerate() {
            let together = order.has(a, b)
                || order.has(b, a)
                || (includes(program, first, second) && includes(program, second, first));
            // All accesses of a location have the same size, so they overlap completely or not at all.
            let overlap = !first.is_memory() || !second.is_memory() || first.location == second.location;
            let same_address = first.alias == second.alias;
            if a != b && together && overlap && same_address {
                result.add(a, b);
            }
        }
    }
    result
}

/// Returns whether `strong` is a strong operation whose scope includes the thread of `other`.
fn includes(program: &Program, strong: &Event, other: &Event) -> bool {
    let (Some(scope), Some(thread), Some(peer)) = (strong.scope, strong.thread, other.thread) else {
        return false;
    };
    let (this, that) = (&program.threads[thread], &program.threads[peer]);
    match scope {
        Scope::Cta => this.cta == that.cta && strong.launch == other.launch,
        Scope::Gpu => program.gpus[this.rank] == program.gpus[that.rank],
        Scope::Sys => true,
    }
}
