//! Detects data races by vector clocks: syncs of blocks and warps, releases and acquires, and fences, each
//! at its scope.
//!
//! Launches that run together are analysed on their own: their start and end order everything. Each launch
//! counts as one on a separate device. Threads take turns here, so a load always sees the last store.
//! Behaviour that needs another order or an older value shows up as unordered accesses.

use std::collections::HashMap;
use std::rc::Rc;

use crate::runtime::what;
use crate::types::{Order, Scope};

type Clock = Vec<u32>;

fn join(to: &mut Clock, from: &Clock) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to = (*to).max(from));
}

/// An access, as recorded for comparison with later ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Access {
    thread: u32,
    clock: u32,
    /// Scope of a strong access; None: weak.
    strong: Option<Scope>,
    /// Number of the instruction.
    at: u64,
}

#[derive(Clone, Default)]
struct Cell {
    write: Option<Access>,
    reads: Vec<Access>,
}

/// Clock published by a store to a word.
struct Published {
    thread: u32,
    scope: Scope,
    clock: Rc<Clock>,
}

/// Clocks of a thread.
struct Thread {
    clock: Clock,
    /// Scope and clock of its last fence.
    fenced: Option<(Scope, Rc<Clock>)>,
    /// Clocks that relaxed loads have read; the next fence acquires them.
    seen: Vec<(u32, Scope, Rc<Clock>)>,
}

/// Block, cluster and device of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub block: u32,
    pub cluster: u32,
    pub device: u32,
}

/// Returns whether a scope of one thread includes the other thread.
fn reaches(places: &[Place], scope: Scope, one: u32, other: u32) -> bool {
    let (own, other) = (places[one as usize], places[other as usize]);
    match scope {
        Scope::Sys => true,
        Scope::Gpu => own.device == other.device,
        Scope::Cluster => own.cluster == other.cluster,
        Scope::Cta => own.block == other.block,
    }
}

fn morally_strong(places: &[Place], a: &Access, b: &Access) -> bool {
    match (a.strong, b.strong) {
        (Some(x), Some(y)) => {
            reaches(places, x, a.thread, b.thread) && reaches(places, y, b.thread, a.thread)
        }
        _ => false,
    }
}

const PAGE: u64 = 4096;

pub(crate) struct Races {
    threads: Vec<Thread>,
    places: Vec<Place>,
    pages: HashMap<u64, Vec<Cell>>,
    words: HashMap<u64, Vec<Published>>,
    /// Clocks of bar.arrive, by block.
    arrived: HashMap<u32, Clock>,
    /// By cluster: the clock that arrivals in this phase of its barrier have released, and that of the last
    /// complete phase.
    arriving: HashMap<u32, Clock>,
    complete: HashMap<u32, Clock>,
}

/// A race: instruction and thread of the earlier access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Race {
    pub other: u32,
    pub at: u64,
}

impl Races {
    /// Creates the state for threads at `places`.
    pub fn new(places: Vec<Place>) -> Self {
        let thread = |own: usize| {
            let mut clock = vec![0; places.len()];
            clock[own] = 1;
            Thread { clock, fenced: None, seen: Vec::new() }
        };
        let threads = (0..places.len()).map(thread).collect();
        Self {
            threads,
            places,
            pages: HashMap::new(),
            words: HashMap::new(),
            arrived: HashMap::new(),
            arriving: HashMap::new(),
            complete: HashMap::new(),
        }
    }

    fn reaches(&self, scope: Scope, one: u32, other: u32) -> bool {
        reaches(&self.places, scope, one, other)
    }

    /// Records an access of `bytes` bytes by a thread; `code` is the encoding that compiled code uses.
    pub fn access(&mut self, thread: u32, address: u64, bytes: u32, code: u32, at: u64) -> Option<Race> {
        let (order, scope) = what::decode(code);
        let kind = what::kind(code);
        if kind == what::FENCE {
            self.fence(thread, scope);
            return None;
        }
        let clock = self.threads[thread as usize].clock[thread as usize];
        let own = Access { thread, clock, strong: order.is_strong().then_some(scope), at };
        let writes = kind != what::READ;
        if let Some(race) = self.meets(address, bytes, &own, writes) {
            return Some(race);
        }
        if order.is_strong() {
            // A strong vector access is a separate access to each word.
            for word in (address..address + u64::from(bytes)).step_by(4) {
                if kind != what::WRITE {
                    self.look(thread, word, order, scope);
                }
                if writes {
                    self.publish(thread, word, order, scope, kind == what::UPDATE);
                }
            }
        } else if writes {
            (address..address + u64::from(bytes))
                .step_by(4)
                .for_each(|word| _ = self.words.remove(&(word & !3)));
        }
        self.threads[thread as usize].clock[thread as usize] += u32::from(writes && order.is_strong());
        None
    }

    /// Checks the bytes of an access. It is aligned, and so within one page.
    fn meets(&mut self, address: u64, bytes: u32, own: &Access, writes: bool) -> Option<Race> {
        let Self { threads, places, pages, .. } = self;
        let clock = &threads[own.thread as usize].clock;
        let is_before = |earlier: &Access| {
            earlier.thread == own.thread || earlier.clock <= clock[earlier.thread as usize]
        };
        let races = |other: &Access| !is_before(other) && !morally_strong(places, other, own);
        let page = pages.entry(address / PAGE).or_insert_with(|| vec![Cell::default(); PAGE as usize]);
        let first = (address % PAGE) as usize;
        for cell in &mut page[first..first + bytes as usize] {
            let others = cell.write.iter().chain(cell.reads.iter().filter(|_| writes));
            if let Some(other) = others.into_iter().find(|other| races(other)) {
                return Some(Race { other: other.thread, at: other.at });
            }
            // Accesses ordered after this one are also ordered after the earlier reads.
            cell.reads.retain(|read| !is_before(read));
            if writes {
                cell.write = Some(*own);
            } else {
                cell.reads.push(*own);
            }
        }
        None
    }

    fn fence(&mut self, thread: u32, scope: Scope) {
        let seen = std::mem::take(&mut self.threads[thread as usize].seen);
        for (other, of_store, clock) in seen {
            if self.reaches(scope, thread, other) && self.reaches(of_store, other, thread) {
                join(&mut self.threads[thread as usize].clock, &clock);
            }
        }
        let own = &mut self.threads[thread as usize];
        own.fenced = Some((scope, Rc::new(own.clock.clone())));
        own.clock[thread as usize] += 1;
    }

    /// Publishes a clock by a strong store: a release publishes the thread's whole clock, a relaxed store
    /// that of the last fence.
    fn publish(&mut self, thread: u32, word: u64, order: Order, scope: Scope, update: bool) {
        let own = &self.threads[thread as usize];
        let published = match order {
            Order::Release | Order::AcqRel | Order::SeqCst => {
                Some(Published { thread, scope, clock: Rc::new(own.clock.clone()) })
            }
            _ => own.fenced.as_ref().map(|(fence, clock)| Published {
                thread,
                scope: (*fence).min(scope),
                clock: Rc::clone(clock),
            }),
        };
        let all = self.words.entry(word).or_default();
        // An atomic update continues the release sequence that it reads from.
        if !update {
            all.clear();
        }
        all.extend(published);
    }

    fn look(&mut self, thread: u32, word: u64, order: Order, scope: Scope) {
        let Some(published) = self.words.get(&word) else { return };
        let mut seen = Vec::new();
        for one in published {
            if self.reaches(scope, thread, one.thread) && self.reaches(one.scope, one.thread, thread) {
                seen.push((one.thread, one.scope, Rc::clone(&one.clock)));
            }
        }
        let own = &mut self.threads[thread as usize];
        match order {
            Order::Acquire | Order::AcqRel | Order::SeqCst => {
                seen.iter().for_each(|(_, _, clock)| join(&mut own.clock, clock))
            }
            // A poll reads the same word repeatedly.
            _ => {
                seen.retain(|new| !own.seen.iter().any(|old| Rc::ptr_eq(&old.2, &new.2) && old.1 == new.1));
                own.seen.extend(seen);
            }
        }
    }

    /// Synchronises threads that have met: everything before the meeting is ordered before everything after
    /// it.
    pub fn meet(&mut self, threads: &[u32]) {
        let Some(&first) = threads.first() else { return };
        let mut all = self.threads[first as usize].clock.clone();
        threads.iter().for_each(|&thread| join(&mut all, &self.threads[thread as usize].clock));
        if let Some(arrived) = self.arrived.remove(&self.places[first as usize].block) {
            join(&mut all, &arrived);
        }
        for &thread in threads {
            self.threads[thread as usize].clock.clone_from(&all);
            self.threads[thread as usize].clock[thread as usize] += 1;
        }
    }

    /// Records that a thread has arrived at a barrier without waiting.
    pub fn arrive(&mut self, thread: u32) {
        let clock = self.threads[thread as usize].clock.clone();
        let count = clock.len();
        let to = self.arrived.entry(self.places[thread as usize].block).or_insert_with(|| vec![0; count]);
        join(to, &clock);
        self.threads[thread as usize].clock[thread as usize] += 1;
    }

    /// Records an arrival at a cluster's barrier: a releasing one publishes everything before it, another what
    /// the thread's last fence publishes.
    pub fn arrive_in_cluster(&mut self, thread: u32, releases: bool) {
        let own = &self.threads[thread as usize];
        let clock = match releases {
            true => Some(own.clock.clone()),
            false => {
                let fenced = own.fenced.as_ref().filter(|(scope, _)| *scope >= Scope::Cluster);
                fenced.map(|(_, clock)| (**clock).clone())
            }
        };
        let count = own.clock.len();
        let cluster = self.places[thread as usize].cluster;
        let to = self.arriving.entry(cluster).or_insert_with(|| vec![0; count]);
        clock.iter().for_each(|clock| join(to, clock));
        self.threads[thread as usize].clock[thread as usize] += 1;
    }

    /// Records that a phase of a cluster's barrier is complete.
    pub fn complete(&mut self, cluster: usize) {
        if let Some(clock) = self.arriving.remove(&(cluster as u32)) {
            self.complete.insert(cluster as u32, clock);
        }
    }

    /// Records that a thread has waited for its cluster's barrier, which acquires.
    pub fn leave_cluster_barrier(&mut self, thread: u32) {
        if let Some(clock) = self.complete.get(&self.places[thread as usize].cluster) {
            join(&mut self.threads[thread as usize].clock, clock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: u64 = 0x1000;
    const FLAG: u64 = 0x2000;

    fn place((block, device): (u32, u32)) -> Place {
        Place { block, cluster: block, device }
    }

    fn code(kind: u32, order: Order, scope: Scope) -> u32 {
        what::code(kind, order, scope)
    }

    /// Runs two ranks in one thread each: the first writes data and a flag, the second reads the flag and
    /// the data.
    fn passes(store: (Order, Scope), load: (Order, Scope), fence: Option<Scope>) -> bool {
        let mut races = Races::new([(0, 0), (1, 1)].map(place).to_vec());
        let weak_write = code(what::WRITE, Order::Weak, Scope::Sys);
        assert_eq!(races.access(0, DATA, 16, weak_write, 1), None);
        if let Some(scope) = fence {
            races.access(0, 0, 0, code(what::FENCE, Order::SeqCst, scope), 2);
        }
        assert_eq!(races.access(0, FLAG, 4, code(what::WRITE, store.0, store.1), 3), None);
        let flag = races.access(1, FLAG, 4, code(what::READ, load.0, load.1), 4);
        flag.is_none() && races.access(1, DATA + 8, 4, code(what::READ, Order::Weak, Scope::Sys), 5).is_none()
    }

    #[test]
    fn release_and_acquire_order_and_weaker_ones_do_not() {
        let (sys, gpu) = (Scope::Sys, Scope::Gpu);
        assert!(passes((Order::Release, sys), (Order::Acquire, sys), None));
        assert!(passes((Order::Relaxed, sys), (Order::Acquire, sys), Some(sys)));
        assert!(!passes((Order::Relaxed, sys), (Order::Acquire, sys), None));
        assert!(!passes((Order::Release, sys), (Order::Relaxed, sys), None));
        assert!(!passes((Order::Release, gpu), (Order::Acquire, sys), None));
        assert!(!passes((Order::Release, sys), (Order::Acquire, gpu), None));
        assert!(!passes((Order::Relaxed, sys), (Order::Acquire, sys), Some(gpu)));
        assert!(!passes((Order::Weak, sys), (Order::Acquire, sys), Some(sys)));
    }

    #[test]
    fn a_sync_orders_and_reads_do_not_race() {
        let mut races = Races::new([(0, 0), (0, 0)].map(place).to_vec());
        let (write, read) =
            (code(what::WRITE, Order::Weak, Scope::Sys), code(what::READ, Order::Weak, Scope::Sys));
        assert_eq!(races.access(0, DATA, 4, write, 1), None);
        races.meet(&[0, 1]);
        assert_eq!(races.access(1, DATA, 4, read, 2), None);
        assert_eq!(races.access(0, DATA, 4, read, 3), None);
        assert_eq!(races.access(0, DATA + 2, 2, write, 4), Some(Race { other: 1, at: 2 }));
        races.meet(&[0, 1]);
        assert_eq!(races.access(0, DATA + 2, 2, write, 5), None);
    }

    #[test]
    fn strong_accesses_race_only_beyond_their_scopes() {
        let mut races = Races::new([(0, 0), (1, 1)].map(place).to_vec());
        assert_eq!(races.access(0, FLAG, 8, code(what::WRITE, Order::Relaxed, Scope::Sys), 1), None);
        assert_eq!(races.access(1, FLAG, 8, code(what::UPDATE, Order::Relaxed, Scope::Sys), 2), None);
        let narrow = races.access(0, FLAG, 8, code(what::READ, Order::Relaxed, Scope::Gpu), 3);
        assert_eq!(narrow, Some(Race { other: 1, at: 2 }));
    }
}
