//! Enumerates all executions of a program, and answers the questions about it.

use std::collections::{BTreeMap, BTreeSet};

use crate::axioms::{fence_orders, no_thin_air, Execution, Sources};
use crate::events::{Events, Kind, Stuck};
use crate::program::{Condition, Place, Program, Question, Value};
use crate::relation::Relation;

/// The result of an enumeration; each witness describes one execution.
#[derive(Default)]
pub struct Answer {
    /// Number of executions that end, counted by reads-from and Fence-SC order.
    pub executions: usize,
    /// Number of candidates that were checked, on all paths.
    pub candidates: usize,
    pub outcome: Option<String>,
    pub race: Option<String>,
    pub hang: Option<String>,
    /// The final register states: `thread.register=value`, in program order.
    pub states: BTreeSet<String>,
}

impl Answer {
    pub fn witness(&self, question: Question) -> Option<&String> {
        match question {
            Question::Outcome => self.outcome.as_ref(),
            Question::Race => self.race.as_ref(),
            Question::Hang => self.hang.as_ref(),
        }
    }
}

/// Enumerates all executions. `prune`: skip early what the fixed orders and the polls' constants exclude; no
/// answer depends on it.
pub fn enumerate(program: &Program, prune: bool) -> Answer {
    let mut answer = Answer::default();
    for stuck in paths(program) {
        if let Some(events) = Events::of(program, &stuck) {
            let fences = fence_orders(&events);
            let mut reads: Vec<(usize, Vec<Sources>)> =
                events.reads().into_iter().map(|read| (read, candidates(&events, read, prune))).collect();
            // Reads with few choices come first, so that the others are tried less often.
            reads.sort_by_key(|(_, candidates)| candidates.len());
            let sources = vec![None; events.list.len()];
            let (events, fences) = (&events, &fences);
            Search { program, events, fences, answer: &mut answer, reads, sources }.choose(0);
        }
    }
    answer
}

/// Returns all paths: each thread runs to its end or stays in one of its polls. On the first path all threads
/// end.
fn paths(program: &Program) -> Vec<Stuck> {
    let mut paths = vec![Vec::new()];
    for thread in &program.threads {
        let polls = thread.body.iter().filter(|(_, instruction)| instruction.polls()).count();
        let choices: Vec<_> = std::iter::once(None).chain((0..polls).map(Some)).collect();
        paths = paths
            .iter()
            .flat_map(|path: &Stuck| choices.iter().map(|&choice| [&path[..], &[choice]].concat()))
            .collect();
    }
    paths
}

struct Search<'a> {
    program: &'a Program,
    events: &'a Events,
    answer: &'a mut Answer,
    /// Each read, and the writes that it may read from.
    reads: Vec<(usize, Vec<Sources>)>,
    fences: &'a [Relation],
    sources: Vec<Option<Sources>>,
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
        self.answer.candidates += 1;
        let Some(flow) = no_thin_air(self.events, &self.sources) else { return };
        let values = values(self.events, &self.sources, &flow);
        if !self.polls_agree(&values) {
            return;
        }
        for fences in self.fences {
            let Some(execution) = Execution::new(self.events, &self.sources, fences) else { continue };
            let mut coherence = Vec::new();
            for location in 0..self.events.locations.len() {
                coherence.push(execution.coherence_orders(location));
            }
            if coherence.iter().any(Vec::is_empty) {
                continue;
            }
            if self.events.stuck.is_empty() {
                self.ended(&execution, &values, &coherence);
            } else if self.answer.hang.is_none() && self.stays(&coherence) {
                self.answer.hang = Some(self.describe_reads(&values));
            }
        }
    }

    /// Returns whether polls that ended saw a value that they wait for, and the others a different one.
    fn polls_agree(&self, values: &[Value]) -> bool {
        let matches = |read: usize| match self.events.list[read].kind {
            Kind::Read { until: Some(until), .. } => until.matches(values[read]),
            _ => true,
        };
        let stuck = &self.events.stuck;
        stuck.iter().all(|poll| poll.iter().any(|&read| !matches(read)))
            && self.reads.iter().all(|&(read, _)| stuck.iter().flatten().any(|&s| s == read) || matches(read))
    }

    /// Returns whether the polls that have not ended read the last writes, and thus never end. Every write is
    /// eventually seen, so an order in which a poll's source has a successor is not a hang.
    fn stays(&self, coherence: &[Vec<Relation>]) -> bool {
        (0..coherence.len()).all(|location| {
            coherence[location].iter().any(|order| {
                self.events.stuck.iter().flatten().all(|&read| {
                    let sources = self.sources[read].expect("all reads have sources");
                    self.events.list[read].location != Some(location)
                        || [sources.data, sources.tag].iter().all(|&s| order.successors(s).next().is_none())
                })
            })
        })
    }

    fn ended(&mut self, execution: &Execution, values: &[Value], coherence: &[Vec<Relation>]) {
        self.answer.executions += 1;
        let registers = self.register_states(values);
        self.answer.states.insert(registers);
        if self.answer.race.is_none() {
            if let Some((a, b)) = execution.race() {
                let pair = format!("{} and {} race; ", self.describe(a), self.describe(b));
                self.answer.race = Some(pair + &self.describe_reads(values));
            }
        }
        if self.answer.outcome.is_none() && self.satisfies(&self.program.outcome, values, coherence) {
            self.answer.outcome = Some(self.describe_reads(values));
        }
    }

    fn satisfies(&self, condition: &Condition, values: &[Value], coherence: &[Vec<Relation>]) -> bool {
        condition.iter().any(|all| {
            all.iter().all(|atom| match &atom.place {
                Place::Register { thread, register } => {
                    let value = values[self.register(thread, register)];
                    atom.pattern.matches(value) == atom.equal
                }
                Place::Memory(name) => {
                    let finals = self.finals(name, values, coherence);
                    finals.iter().any(|&value| atom.pattern.matches(value) == atom.equal)
                }
            })
        })
    }

    fn register(&self, thread: &str, register: &str) -> usize {
        let index = self.program.threads.iter().position(|t| t.name == thread);
        let index = index.unwrap_or_else(|| panic!("{}: no thread {thread}", self.program.name));
        let read = self.events.registers.get(&(index, register.to_string()));
        *read.unwrap_or_else(|| panic!("{}: no register {thread}.{register}", self.program.name))
    }

    /// Returns the values that a word may end with: those of writes without a successor.
    fn finals(&self, name: &str, values: &[Value], coherence: &[Vec<Relation>]) -> Vec<Value> {
        let location = self.events.locations.iter().position(|l| l == name);
        let location = location.unwrap_or_else(|| panic!("{}: no word [{name}]", self.program.name));
        let accesses = self.events.of_location(location);
        let mut finals = Vec::new();
        for order in &coherence[location] {
            let last = accesses.iter().filter(|&&event| {
                self.events.list[event].is_write() && order.successors(event).next().is_none()
            });
            finals.extend(last.map(|&event| values[event]));
        }
        finals
    }

    fn register_states(&self, values: &[Value]) -> String {
        let mut states: BTreeMap<usize, String> = BTreeMap::new();
        for ((thread, register), &read) in &self.events.registers {
            let thread = &self.program.threads[*thread].name;
            states.insert(read, format!("{thread}.{register}={}", values[read]));
        }
        states.into_values().collect::<Vec<_>>().join(" ")
    }

    fn describe_reads(&self, values: &[Value]) -> String {
        let mut parts = Vec::new();
        for read in self.events.reads() {
            let Sources { data, tag } = self.sources[read].expect("all reads have sources");
            let mut part = format!("{} = {} from {}", self.describe(read), values[read], self.describe(data));
            if tag != data {
                part += &format!(" with the tag of {}", self.describe(tag));
            }
            parts.push(part);
        }
        parts.join("; ")
    }

    fn describe(&self, event: usize) -> String {
        let this = &self.events.list[event];
        let location = this.location.map_or("", |location| self.events.locations[location].as_str());
        match (this.thread, &this.kind) {
            (None, _) => "the initial value".to_string(),
            (Some(thread), Kind::Read { register, .. }) => {
                format!("{}.{register}[{location}]", self.program.threads[thread].name)
            }
            (Some(thread), _) => format!(
                "{}'s store to [{location}] at {}",
                self.program.threads[thread].name, this.instruction
            ),
        }
    }
}

/// Returns the writes that a read may read from.
pub fn candidates(events: &Events, read: usize, prune: bool) -> Vec<Sources> {
    let location = events.list[read].location.expect("a read has a location");
    let accesses = events.of_location(location);
    let fixed = &events.fixed_causality;
    let before = |first, later| fixed.has(first, later) && events.preserves(fixed, first, later);
    let excluded = |write: usize| {
        // By Causality and, if there is a write in between, Coherence.
        let overwritten = |&between: &usize| {
            events.list[between].is_write() && before(write, between) && before(between, read)
        };
        before(read, write) || accesses.iter().any(overwritten)
    };
    let writes: Vec<usize> = accesses
        .iter()
        .copied()
        .filter(|&write| events.list[write].is_write() && !(prune && excluded(write)))
        .collect();
    let Kind::Read { until, .. } = &events.list[read].kind else { panic!("not a read") };
    let stuck = events.stuck.iter().flatten().any(|&s| s == read);
    let until = until.filter(|_| prune && !stuck);
    let data = |write: usize| match (until.and_then(|until| until.data), &events.list[write].kind) {
        (Some(wanted), Kind::Initial(value)) => value.data == wanted,
        (Some(wanted), Kind::Write(value)) => !value.registers.is_empty() || value.constant == wanted,
        _ => true,
    };
    let tag = |write: usize| match (until.and_then(|until| until.tag), &events.list[write].kind) {
        (Some(wanted), Kind::Initial(value)) => value.tag == Some(wanted),
        (Some(wanted), Kind::Write(value)) => value.tag == Some(wanted),
        _ => true,
    };
    let mut result = Vec::new();
    for &first in writes.iter().filter(|&&write| data(write)) {
        for &second in writes.iter().filter(|&&write| tag(write)) {
            if first == second || (events.tagged[location] && !(prune && whole(events, read, first, second)))
            {
                result.push(Sources { data: first, tag: second });
            }
        }
    }
    result
}

/// Returns whether Atomicity forbids this torn read under every coherence order: the writes are related in all
/// of them, and the later one is morally strong with the read.
fn whole(events: &Events, read: usize, data: usize, tag: usize) -> bool {
    let (strong, fixed) = (&events.morally_strong, &events.fixed_causality);
    fixed.has(data, tag) && strong.has(read, tag)
        || fixed.has(tag, data) && strong.has(read, data)
        || strong.has(data, tag) && strong.has(read, data) && strong.has(read, tag)
}

/// Returns the values of all accesses. `flow` (reads-from and dependencies) is acyclic, so each value is computed
/// after those that it depends on.
pub fn values(events: &Events, sources: &[Option<Sources>], flow: &Relation) -> Vec<Value> {
    let count = events.list.len();
    let mut order: Vec<usize> = (0..count).collect();
    let before: Vec<usize> =
        (0..count).map(|event| (0..count).filter(|&other| flow.has(other, event)).count()).collect();
    order.sort_by_key(|&event| before[event]);
    let mut values = vec![Value { data: 0, tag: None }; count];
    for event in order {
        values[event] = match &events.list[event].kind {
            Kind::Initial(value) => *value,
            Kind::Write(expression) => {
                let thread = events.list[event].thread.expect("a write has a thread");
                let read = |register: &String| values[events.registers[&(thread, register.clone())]].data;
                let sum: i64 = expression.registers.iter().map(read).sum();
                Value { data: expression.constant + sum, tag: expression.tag }
            }
            Kind::Read { .. } => {
                let Sources { data, tag } = sources[event].expect("all reads have sources");
                Value { data: values[data].data, tag: values[tag].tag }
            }
            _ => continue,
        };
    }
    values
}
