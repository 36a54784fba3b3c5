//! The axioms of the PTX memory model (PTX ISA 8.10), on one candidate execution. README.md lists what is
//! left out.

use crate::events::{Event, Events, Kind};
use crate::relation::Relation;

/// The writes from which a read gets its data and its tag. They differ only for a torn read of a packet's
/// word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sources {
    pub data: usize,
    pub tag: usize,
}

/// Reads-from, and what follows from it before coherence is chosen.
pub struct Execution<'a> {
    pub events: &'a Events,
    /// By event; `None` for events that are not reads.
    pub sources: Vec<Option<Sources>>,
    /// 8.9.5: causality order between accesses of one location.
    pub cause: Relation,
}

impl<'a> Execution<'a> {
    /// Creates an execution, or `None` if Fence-SC (8.10.2) is violated. `fences` is the Fence-SC order,
    /// transitive.
    pub fn new(events: &'a Events, sources: &[Option<Sources>], fences: &Relation) -> Option<Execution<'a>> {
        let observation = observation(events, sources);
        let synchronizes = synchronizes(events, &observation);
        // 8.9.5: program order, synchronizes, and their combinations. Barriers and API synchronization
        // (8.9.4) are already in `fixed_causality`.
        let base = events.fixed_causality.union(&synchronizes).union(fences).closure();
        let list = &events.list;
        for first in 0..list.len() {
            if fences.successors(first).any(|second| base.has(second, first)) {
                return None;
            }
        }
        let mut cause = Relation::empty(list.len());
        let same = |a: usize, b: usize| list[a].is_memory() && list[a].location == list[b].location;
        for first in 0..list.len() {
            base.successors(first)
                .filter(|&later| same(first, later) && events.preserves(&base, first, later))
                .for_each(|later| cause.add(first, later));
            for read in observation.successors(first) {
                base.successors(read)
                    .filter(|&later| same(first, later) && events.preserves(&base, read, later))
                    .for_each(|later| cause.add(first, later));
            }
        }
        Some(Execution { events, sources: sources.to_vec(), cause })
    }

    fn list(&self) -> &[Event] {
        &self.events.list
    }

    /// Returns all coherence orders (8.9.6) of one location that Coherence, Atomicity, SC per Location and
    /// Causality permit. These four axioms concern one location at a time, so locations need not be combined.
    pub fn coherence_orders(&self, location: usize) -> Vec<Relation> {
        let accesses = self.events.of_location(location);
        let writes: Vec<usize> =
            accesses.iter().copied().filter(|&event| self.list()[event].is_write()).collect();
        let mut forced = Relation::empty(self.list().len());
        for &first in &writes {
            // Coherence (8.10.1).
            writes
                .iter()
                .filter(|&&second| self.cause.has(first, second))
                .for_each(|&s| forced.add(first, s));
        }
        let mut orders = Vec::new();
        self.extend(&writes, forced.closure(), &mut orders);
        orders.retain(|order| self.location_is_consistent(order, &accesses));
        orders
    }

    /// Orders each pair of morally strong writes one way or the other; racing writes are not ordered.
    fn extend(&self, writes: &[usize], order: Relation, orders: &mut Vec<Relation>) {
        if !order.irreflexive() {
            return;
        }
        for (index, &a) in writes.iter().enumerate() {
            for &b in &writes[index + 1..] {
                if self.events.morally_strong.has(a, b) && !order.has(a, b) && !order.has(b, a) {
                    for (first, second) in [(a, b), (b, a)] {
                        let mut next = order.clone();
                        next.add_closed(first, second);
                        self.extend(writes, next, orders);
                    }
                    return;
                }
            }
        }
        orders.push(order);
    }

    fn location_is_consistent(&self, order: &Relation, accesses: &[usize]) -> bool {
        let strong = &self.events.morally_strong;
        let mut per_location = Relation::empty(self.list().len());
        for &a in accesses {
            for &b in accesses {
                let same_address = self.list()[a].alias == self.list()[b].alias;
                let in_program = self.events.program_order.has(a, b) && same_address;
                if in_program || (strong.has(a, b) && order.has(a, b)) {
                    per_location.add(a, b);
                }
            }
        }
        for &read in accesses {
            let Some(Sources { data, tag }) = self.sources[read] else { continue };
            // Single-copy Atomicity (8.10.3): no read of part of a write and part of an earlier one.
            if (strong.has(read, data) && order.has(tag, data))
                || (strong.has(read, tag) && order.has(data, tag))
            {
                return false;
            }
            for source in [data, tag] {
                // Causality (8.10.6), first clause.
                if self.cause.has(read, source) {
                    return false;
                }
                if strong.has(source, read) {
                    per_location.add(source, read);
                }
                for later in order.successors(source) {
                    // Causality, second clause.
                    if self.cause.has(later, read) {
                        return false;
                    }
                    if strong.has(read, later) {
                        per_location.add(read, later);
                    }
                }
            }
        }
        // SC per Location (8.10.5).
        per_location.acyclic()
    }

    /// Returns a data race (8.7.1), if there is one.
    pub fn race(&self) -> Option<(usize, usize)> {
        let list = self.list();
        for a in 0..list.len() {
            for b in a + 1..list.len() {
                let conflict = list[a].is_memory()
                    && list[a].location == list[b].location
                    && (list[a].is_write() || list[b].is_write());
                let ordered = self.cause.has(a, b) || self.cause.has(b, a);
                if conflict && !ordered && !self.events.morally_strong.has(a, b) {
                    return Some((a, b));
                }
            }
        }
        None
    }
}

/// Returns the closure of reads-from and dependencies, or `None` if it has a cycle: No Thin Air (8.10.4).
pub fn no_thin_air(events: &Events, sources: &[Option<Sources>]) -> Option<Relation> {
    let mut flow = events.dependencies.clone();
    for (read, sources) in sources.iter().enumerate() {
        if let Some(Sources { data, tag }) = *sources {
            flow.add(data, read);
            flow.add(tag, read);
        }
    }
    let flow = flow.closure();
    flow.irreflexive().then_some(flow)
}

/// Returns all Fence-SC orders (8.9.3): they relate every pair of morally strong fence.sc.
pub fn fence_orders(events: &Events) -> Vec<Relation> {
    let fences: Vec<usize> = (0..events.list.len())
        .filter(|&event| matches!(events.list[event].kind, Kind::Fence { sc: true }))
        .collect();
    let mut orders = vec![Relation::empty(events.list.len())];
    for (index, &a) in fences.iter().enumerate() {
        for &b in &fences[index + 1..] {
            if !events.morally_strong.has(a, b) {
                continue;
            }
            orders = orders
                .into_iter()
                .flat_map(|order| {
                    [(a, b), (b, a)].map(|(first, second)| {
                        let mut next = order.clone();
                        next.add_closed(first, second);
                        next
                    })
                })
                .filter(Relation::irreflexive)
                .collect();
        }
    }
    orders.dedup();
    orders
}

/// Returns the observation order (8.9.2), without read-modify-writes. A torn read does not observe any write.
fn observation(events: &Events, sources: &[Option<Sources>]) -> Relation {
    let mut result = Relation::empty(events.list.len());
    for (read, sources) in sources.iter().enumerate() {
        if let Some(Sources { data, tag }) = *sources {
            if data == tag && events.morally_strong.has(data, read) {
                result.add(data, read);
            }
        }
    }
    result
}

/// Returns the synchronization by release and acquire patterns (8.9.4): from the first operation of a release
/// pattern to the last one of an acquire pattern.
fn synchronizes(events: &Events, observation: &Relation) -> Relation {
    let mut result = Relation::empty(events.list.len());
    for write in 0..events.list.len() {
        for read in observation.successors(write) {
            for first in release_patterns(events, write) {
                for last in acquire_patterns(events, read) {
                    if events.morally_strong.has(first, last) {
                        result.add(first, last);
                    }
                }
            }
        }
    }
    result
}

/// Returns the first operations of the release patterns (8.8) that end in this write.
fn release_patterns(events: &Events, write: usize) -> Vec<usize> {
    let list = &events.list;
    let strong = list[write].scope.is_some();
    let begins = |first: usize| {
        if first == write {
            return list[first].synchronizing;
        }
        let release = list[first].is_write()
            && list[first].synchronizing
            && list[first].location == list[write].location;
        strong && (release || list[first].is_fence()) && events.program_order.has(first, write)
    };
    (0..list.len()).filter(|&first| begins(first)).collect()
}

/// Returns the last operations of the acquire patterns (8.8) that begin with this read.
fn acquire_patterns(events: &Events, read: usize) -> Vec<usize> {
    let list = &events.list;
    let strong = list[read].scope.is_some();
    let ends = |last: usize| {
        if last == read {
            return list[last].synchronizing;
        }
        let acquire =
            list[last].is_read() && list[last].synchronizing && list[last].location == list[read].location;
        strong && (acquire || list[last].is_fence()) && events.program_order.has(read, last)
    };
    (0..list.len()).filter(|&last| ends(last)).collect()
}
