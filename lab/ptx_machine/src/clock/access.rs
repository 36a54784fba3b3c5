//! Memory accesses of a warp: their costs, and when loads and stores take effect.

use std::cmp::Reverse;

use super::fabric::{packets, Arrival, Packets};
use super::path::{After, Cause};
use super::simulate::{Event, Simulation};
use super::state::{SimBlock, Store, Time, Value};
use super::Traffic;
use crate::errors::LaunchError;
use crate::types::{Order, Scope};

/// One lane's part of an access: address, bytes, and stored values.
pub(crate) type Part = (u64, u32, [u64; 4]);

/// Cost of an access.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asks {
    pub order: Order,
    pub strong: bool,
    pub look: bool,
}

impl Simulation<'_> {
    fn is_shared(shared: (u64, u64), address: u64) -> bool {
        address >= shared.0 && address - shared.0 < shared.1
    }

    /// Groups the parts of an access by device; None: the thread's own memory.
    fn by_home(&self, parts: &[Part]) -> Vec<(Option<usize>, Vec<Part>)> {
        let mut homes: Vec<(Option<usize>, Vec<Part>)> = Vec::new();
        for part in parts {
            let home = self.fabric.home(part.0);
            match homes.iter_mut().find(|(other, _)| *other == home) {
                Some((_, all)) => all.push(*part),
                None => homes.push((home, vec![*part])),
            }
        }
        homes
    }

    fn wide(parts: &[Part]) -> Vec<(u64, u32)> {
        parts.iter().map(|&(address, bytes, _)| (address, bytes)).collect()
    }

    /// Performs loads that are issued at `at`.
    pub(crate) fn load(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        at: f64,
        parts: &[Part],
        asks: Asks,
    ) -> Value {
        let shared = self.shared_of(sim);
        if parts.is_empty() {
            return Value { ready: at, ..Value::NONE };
        }
        if Self::is_shared(shared, parts[0].0) {
            let bytes: u32 = parts.iter().map(|part| part.1).sum();
            let more = (f64::from(bytes) / 128.0 - 1.0).max(0.0);
            return Value {
                ready: at + self.machine.shared_cycles + more,
                cause: Cause::Shared,
                ..Value::NONE
            };
        }
        if self.is_in_cluster(sim, parts[0].0) {
            return self.load_in_cluster(sim, w, at, parts, asks);
        }
        let mut value = Value { ready: at, ..Value::NONE };
        for (home, parts) in self.by_home(parts) {
            let own = match home {
                None => Value { ready: at + self.machine.l1_cycles, cause: Cause::Local, ..Value::NONE },
                Some(home) => self.load_from(sim, w, at, home, &parts, asks),
            };
            if own.ready > value.ready {
                value = own;
            }
        }
        if asks.order == Order::Acquire {
            value.ready += self.machine.acquire_cycles;
            self.sms[sim.rank][sim.sm].l1.clear();
        }
        value
    }

    fn load_from(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        at: f64,
        home: usize,
        parts: &[Part],
        asks: Asks,
    ) -> Value {
        let rank = sim.rank;
        let remote = home != rank;
        let line = if remote { self.machine.link_packet_bytes as u64 } else { 128 };
        let mut wanted = Self::wide(parts);
        let sm = &mut self.sms[rank][sim.sm];
        let mut cached = at;
        if asks.order == Order::Weak && !remote {
            // Sectors that the first-level cache has or has requested are not requested again.
            wanted.retain(|&(address, _)| match sm.l1.get(&(address >> 5)) {
                Some(&ready) => {
                    cached = cached.max((at + self.machine.l1_cycles).max(ready));
                    false
                }
                None => true,
            });
        }
        let cause = if remote { Cause::Remote } else { Cause::Local };
        if wanted.is_empty() {
            return Value { ready: cached, cause, ..Value::NONE };
        }
        let mut packets = packets(&wanted, line);
        packets.bytes = packets.sectors * 32.0;
        let start = sm.room(at, packets.bytes, self.machine.sm_in_flight_bytes);
        let through = sm.load.pass(start, packets.bytes) - start;
        let trip = match remote {
            true => self.machine.cycles(self.machine.remote_load_ns),
            false if self.resident => self.machine.l2_cycles,
            false => self.machine.dram_cycles,
        };
        let mut queue = start - at;
        let mut wire = 0.0;
        if remote {
            let request = Packets { count: packets.count, ..Default::default() };
            let machine = self.machine;
            let asked = self.fabric.send(machine, rank, home, start, &request);
            let answer = Packets { masked: 0.0, ..packets };
            let answered = self.fabric.send(machine, home, rank, start + trip / 2.0, &answer);
            self.fabric.local(home, start + trip / 2.0, packets.bytes);
            queue += asked + answered.max(through);
            wire = packets.count * machine.link_header_bytes + packets.bytes;
        } else {
            queue += self.fabric.local(rank, start, packets.bytes).max(through);
        }
        let mut value = Value { ready: at + trip + queue, cause, queue, looked: asks.look.then_some(at) };
        let sm = &mut self.sms[rank][sim.sm];
        sm.waits.push((Reverse(Time(value.ready)), packets.bytes as u32));
        sm.in_flight += packets.bytes;
        if asks.order == Order::Weak && !remote {
            wanted.iter().for_each(|&(address, _)| _ = sm.l1.insert(address >> 5, value.ready));
        }
        if asks.look {
            self.look(sim, w, start, trip, parts, &mut value);
        }
        let traffic =
            Traffic { bytes: packets.bytes, sectors: packets.sectors, partial: packets.partial, wire };
        sim.warps[w].counts.loads.entry(home).or_default().add(&traffic);
        value.ready = value.ready.max(cached);
        value
    }

    /// Sees other threads' stores once they have arrived: the first look after the arrival sees them.
    pub(crate) fn look(
        &self,
        sim: &mut SimBlock,
        w: usize,
        start: f64,
        trip: f64,
        parts: &[Part],
        value: &mut Value,
    ) {
        sim.warps[w].counts.looks += 1.0;
        let there = start + trip / 2.0;
        let mut last: Option<Arrival> = None;
        for &(address, bytes, _) in parts {
            let arrival = self.fabric.last(address, bytes);
            let seen = arrival.map_or(f64::MIN, |arrival| arrival.at);
            let before = sim.warps[w].looked.insert(address, seen);
            let Some(arrival) = arrival else { continue };
            // Between two looks of a poll there is about one round trip. A look long after the arrival has not
            // waited for it, even if an earlier look came before.
            let is_poll = arrival.at > there - 2.0 * trip;
            let waited = arrival.at > there || (is_poll && before.is_some_and(|before| before < arrival.at));
            if waited && arrival.by != (self.own, w) && last.is_none_or(|last| last.at < arrival.at) {
                last = Some(arrival);
            }
        }
        if let Some(arrival) = last {
            value.ready = value.ready.max(arrival.at + trip / 2.0);
            let Arrival { at, issued, queue, by } = arrival;
            sim.warps[w].waited.push((start, After { who: by, issued, arrived: at, queue }));
        }
    }

    /// Performs stores that are issued at `at`. Returns when all of the warp's stores have left the
    /// multiprocessor.
    pub(crate) fn store(&mut self, sim: &mut SimBlock, w: usize, at: f64, parts: &[Part], asks: Asks) -> f64 {
        let shared = self.shared_of(sim);
        let mut left = at;
        if parts.is_empty() || Self::is_shared(shared, parts[0].0) {
            return at;
        }
        if self.is_in_cluster(sim, parts[0].0) {
            self.store_in_cluster(sim, w, at, parts, asks);
            return at;
        }
        for (home, parts) in self.by_home(parts) {
            let Some(home) = home else { continue };
            left = left.max(self.store_to(sim, w, at, home, parts, asks));
        }
        left
    }

    fn store_to(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        at: f64,
        home: usize,
        parts: Vec<Part>,
        asks: Asks,
    ) -> f64 {
        let (rank, machine) = (sim.rank, self.machine);
        let remote = home != rank;
        let line = if remote { machine.link_packet_bytes as u64 } else { 128 };
        let packets = packets(&Self::wide(&parts), line);
        let sm = &mut self.sms[rank][sim.sm];
        parts.iter().for_each(|part| _ = sm.l1.remove(&(part.0 >> 5)));
        let left = match remote {
            true => sm.remote.pass(at, packets.sectors * 32.0),
            false => sm.store.pass(at, packets.bytes),
        };
        let (arrives, back, queue, wire) = if remote {
            let queue = self.fabric.send(machine, rank, home, left, &packets);
            let arrives = left + queue + machine.cycles(machine.remote_store_ns);
            let answer = Packets { count: packets.count, ..Default::default() };
            self.fabric.send(machine, home, rank, arrives, &answer);
            self.fabric.local(home, arrives, packets.sectors * 32.0);
            let partial = packets.masked * machine.link_partial_bytes;
            let wire = packets.count * machine.link_header_bytes + packets.bytes + partial;
            (arrives, machine.cycles(machine.remote_load_ns) / 2.0, queue, wire)
        } else {
            let queue = self.fabric.local(rank, left, packets.sectors * 32.0);
            (left + queue + machine.l2_cycles / 2.0, machine.l2_cycles / 2.0, queue, 0.0)
        };
        sim.acks = sim.acks.max(arrives + back);
        let traffic =
            Traffic { bytes: packets.bytes, sectors: packets.sectors, partial: packets.partial, wire };
        sim.warps[w].counts.stores.entry(home).or_default().add(&traffic);
        let queue = queue + left - at;
        let store = Store { parts, strong: asks.strong, by: (self.own, w), issued: at, arrives, queue };
        let number = self.stores.len();
        self.stores.push(Some(store));
        if !remote {
            sim.pending.push(number);
        }
        self.push(arrives, Event::Arrive(number));
        left
    }

    /// Loads in-switch reductions (`multimem.ld_reduce`), which request data from all devices.
    pub(crate) fn load_sums(&mut self, sim: &mut SimBlock, w: usize, at: f64, parts: &[Part]) -> Value {
        let homes = self.by_home(parts);
        let Some((_, of_one)) = homes.first() else { return Value { ready: at, ..Value::NONE } };
        let (rank, machine) = (sim.rank, self.machine);
        let mut packets = packets(&Self::wide(of_one), machine.link_packet_bytes as u64);
        packets.bytes = packets.sectors * 32.0;
        let sm = &mut self.sms[rank][sim.sm];
        let start = sm.room(at, packets.bytes, machine.sm_in_flight_bytes);
        let through = sm.load.pass(start, packets.bytes) - start;
        let trip = machine.cycles(machine.remote_load_ns + machine.switch_ns);
        let from: Vec<usize> = homes.iter().filter_map(|(home, _)| *home).collect();
        let queue = start - at + self.fabric.gather(machine, &from, rank, start, trip, &packets).max(through);
        let value = Value { ready: at + trip + queue, cause: Cause::Remote, queue, looked: None };
        let sm = &mut self.sms[rank][sim.sm];
        sm.waits.push((Reverse(Time(value.ready)), packets.bytes as u32));
        sm.in_flight += packets.bytes;
        let Packets { bytes, sectors, partial, .. } = packets;
        let traffic = Traffic { bytes, sectors, partial, wire: bytes / machine.switch_share };
        from.iter().for_each(|&home| sim.warps[w].counts.loads.entry(home).or_default().add(&traffic));
        value
    }

    /// Performs multicast stores: the switch sends a copy to each device.
    pub(crate) fn store_to_all(&mut self, sim: &mut SimBlock, w: usize, at: f64, parts: &[Part]) {
        let homes = self.by_home(parts);
        let Some((_, to_one)) = homes.first() else { return };
        let (rank, machine) = (sim.rank, self.machine);
        let packets = packets(&Self::wide(to_one), machine.link_packet_bytes as u64);
        let left = self.sms[rank][sim.sm].remote.pass(at, packets.sectors * 32.0);
        let to: Vec<usize> = homes.iter().filter_map(|(home, _)| *home).collect();
        let later = self.fabric.spread(machine, rank, &to, left, &packets);
        let Packets { bytes, sectors, partial, masked, .. } = packets;
        let wire = (bytes + masked * machine.link_partial_bytes) / machine.switch_share;
        let traffic = Traffic { bytes, sectors, partial, wire };
        for ((home, parts), queue) in
            homes.into_iter().filter_map(|(home, parts)| Some((home?, parts))).zip(later)
        {
            let arrives = left + queue + machine.cycles(machine.remote_store_ns + machine.switch_ns);
            self.fabric.local(home, arrives, sectors * 32.0);
            sim.acks = sim.acks.max(arrives + machine.cycles(machine.remote_load_ns) / 2.0);
            sim.warps[w].counts.stores.entry(home).or_default().add(&traffic);
            let queue = queue + left - at;
            let store = Store { parts, strong: true, by: (self.own, w), issued: at, arrives, queue };
            let number = self.stores.len();
            self.stores.push(Some(store));
            self.push(arrives, Event::Arrive(number));
        }
    }

    /// Performs an atomic update; the thread has already changed the memory.
    pub(crate) fn update(&mut self, sim: &mut SimBlock, w: usize, at: f64, parts: &[Part]) -> Value {
        let asks = Asks { order: Order::Relaxed, strong: true, look: true };
        let value = self.load(sim, w, at, parts, asks);
        for &(address, bytes, _) in parts {
            let Some(home) = self.fabric.home(address) else { continue };
            let way = match home == sim.rank {
                true => self.machine.l2_cycles / 2.0,
                false => self.machine.cycles(self.machine.remote_store_ns),
            };
            let arrival = Arrival { at: at + way, issued: at, queue: 0.0, by: (self.own, w) };
            self.fabric.arrived(address, bytes, arrival);
            sim.acks = sim.acks.max(value.ready);
        }
        value
    }

    /// Returns when a fence that is issued at `at` completes.
    pub(crate) fn fence(&mut self, sim: &SimBlock, at: f64, order: Order, scope: Scope) -> f64 {
        let idle = match scope {
            Scope::Cta | Scope::Cluster => return at + self.machine.fence_block_cycles,
            Scope::Gpu => self.machine.fence_gpu_ns,
            Scope::Sys if order == Order::SeqCst => self.machine.fence_sc_system_ns,
            Scope::Sys => self.machine.fence_system_ns,
        };
        self.sms[sim.rank][sim.sm].l1.clear();
        (at + self.machine.cycles(idle)).max(sim.acks)
    }

    /// Writes a store to memory, unless that has been done.
    pub(crate) fn arrive(&mut self, number: usize) -> Result<(), LaunchError> {
        let Some(store) = self.stores[number].take() else { return Ok(()) };
        self.check_cluster(&store)?;
        let arrival = Arrival { at: store.arrives, issued: store.issued, queue: store.queue, by: store.by };
        for (address, bytes, value) in &store.parts {
            super::recorder::write(*address, *bytes, value);
            if store.strong {
                self.fabric.arrived(*address, *bytes, arrival);
            }
        }
        Ok(())
    }
}

impl Traffic {
    pub(crate) fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.sectors += other.sectors;
        self.partial += other.partial;
        self.wire += other.wire;
    }
}
