//! Clusters: accesses to other blocks' shared memory, and the barrier.

use super::access::{Asks, Part};
use super::path::{After, Cause, Segment};
use super::simulate::{Event, Simulation};
use super::state::{ClusterMeeting, SimBlock, Stop, Store, Value};
use crate::errors::{Fault, LaunchError};
use crate::launch::block::{Block, State};
use crate::launch::cluster::Cluster;
use crate::launch::report;
use crate::types::{Order, Scope};

const WARP: usize = 32;

impl Simulation<'_> {
    /// Puts a new block, which will have this number, into its cluster.
    pub(crate) fn join_cluster(&mut self, block: &mut Block, number: usize, first: bool) {
        if first {
            self.run.clusters.push(Cluster::default());
            self.clusters.push(ClusterMeeting::default());
        }
        block.cluster = self.clusters.len() - 1;
        self.run.clusters[block.cluster].add(block);
        self.clusters[block.cluster].blocks.push(number);
    }

    /// Returns whether an address is in the shared memory of another block of the cluster.
    pub(crate) fn is_in_cluster(&self, sim: &SimBlock, address: u64) -> bool {
        let cluster = &self.run.clusters[sim.block.cluster];
        cluster.windows.len() > 1 && cluster.holder(address, 1).is_some()
    }

    pub(crate) fn load_in_cluster(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        at: f64,
        parts: &[Part],
        asks: Asks,
    ) -> Value {
        let trip = self.machine.cluster_cycles;
        let looked = asks.look.then_some(at);
        let mut value = Value { ready: at + trip, cause: Cause::Shared, looked, ..Value::NONE };
        if asks.look {
            self.look(sim, w, at, trip, parts, &mut value);
        }
        value
    }

    pub(crate) fn store_in_cluster(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        at: f64,
        parts: &[Part],
        asks: Asks,
    ) {
        let arrives = at + self.machine.cluster_cycles / 2.0;
        sim.acks = sim.acks.max(at + self.machine.cluster_cycles);
        let (parts, by) = (parts.to_vec(), (self.own, w));
        self.stores.push(Some(Store { parts, strong: asks.strong, by, issued: at, arrives, queue: 0.0 }));
        self.push(arrives, Event::Arrive(self.stores.len() - 1));
    }

    /// Refuses a store that arrives in the shared memory of a block that has ended.
    pub(crate) fn check_cluster(&self, store: &Store) -> Result<(), LaunchError> {
        let Some(sim) = self.blocks[store.by.0].as_deref() else { return Ok(()) };
        let windows = &self.run.clusters[sim.block.cluster].windows;
        let Some(&(address, bytes, _)) = store.parts.first() else { return Ok(()) };
        match windows.iter().find(|window| window.range.holds(address, bytes)) {
            Some(window) if window.ended => {
                let what = format!("{} bytes at {address:#x}, from block {:?}", bytes, sim.block.index);
                Err(self.fault(sim, Fault::EndedBlock, what))
            }
            _ => Ok(()),
        }
    }

    /// Brings threads to the barrier of their cluster: to arrive, or to wait.
    pub(crate) fn meet_cluster(
        &mut self,
        sim: &mut SimBlock,
        w: usize,
        at: u32,
        lanes: &[usize],
        (waits, releases): (bool, bool),
    ) -> Result<(), LaunchError> {
        if lanes.is_empty() {
            return Ok(());
        }
        let number = sim.block.cluster;
        if !waits && releases {
            // ptxas emits MEMBAR.ALL.GPU before the arrival.
            let now = sim.warps[w].now;
            self.fenced(sim, w, at, now, (Order::AcqRel, Scope::Gpu));
        }
        let mut complete = false;
        for &lane in lanes {
            let thread = w * WARP + lane;
            let cluster = &mut self.run.clusters[number];
            let arrivals = &mut sim.block.arrivals[thread];
            let met = match waits {
                true => cluster.wait(arrivals).map(|()| false),
                false => cluster.arrive(arrivals),
            };
            complete |= met.map_err(|what| {
                let place = report::place(self.program, sim.block.requests[thread].at);
                self.fault(sim, Fault::Sync, format!("{place}: {what}"))
            })?;
            let is_over = self.run.clusters[number].is_over(sim.block.arrivals[thread]);
            let stops = waits && !is_over;
            sim.block.states[thread] = if stops { State::InCluster } else { State::Ready };
            sim.warps[w].lanes[lane].stop = if stops { Stop::Waits } else { Stop::Run };
        }
        if !waits {
            sim.warps[w].counts.syncs += 1.0;
            self.arrived_in_cluster(sim, w, complete);
        } else if sim.warps[w].lanes.iter().all(|lane| lane.stop != Stop::Waits) {
            self.leave_cluster_barrier(sim, w, at);
        } else {
            sim.warps[w].depends = at;
        }
        Ok(())
    }

    /// Tells the cluster of threads of a warp that have ended.
    pub(crate) fn leave_cluster(&mut self, sim: &mut SimBlock, w: usize) {
        let number = sim.block.cluster;
        let mut complete = false;
        for lane in 0..sim.warps[w].lanes.len() {
            let (own, thread) = (&sim.warps[w].lanes[lane], w * WARP + lane);
            if own.stop == Stop::Ended && own.front().is_none() && !sim.gone[thread] {
                sim.gone[thread] = true;
                complete |= self.run.clusters[number].leave(sim.block.arrivals[thread]);
            }
        }
        if complete {
            self.arrived_in_cluster(sim, w, true);
        }
    }

    fn arrived_in_cluster(&mut self, sim: &mut SimBlock, w: usize, complete: bool) {
        let now = sim.warps[w].now;
        let meeting = &mut self.clusters[sim.block.cluster];
        if now >= meeting.last {
            (meeting.last, meeting.by) = (now, (self.own, w));
        }
        if !complete {
            return;
        }
        let (last, who) = (meeting.last, meeting.by);
        meeting.over = last + self.machine.cluster_sync_cycles;
        meeting.after = Some(After { who, issued: last, arrived: last, queue: 0.0 });
        let own = self.own;
        for block in meeting.blocks.clone() {
            if block == own {
                self.release_from_cluster(sim);
                continue;
            }
            let Some(mut other) = self.blocks[block].take() else { continue };
            self.own = block;
            self.release_from_cluster(&mut other);
            self.own = own;
            self.blocks[block] = Some(other);
        }
    }

    /// Lets the threads of a block that wait for their cluster go on.
    fn release_from_cluster(&mut self, sim: &mut SimBlock) {
        for w in 0..sim.warps.len() {
            let mut any = false;
            for lane in 0..sim.warps[w].lanes.len() {
                let thread = w * WARP + lane;
                if sim.block.states.get(thread) == Some(&State::InCluster) {
                    sim.block.states[thread] = State::Ready;
                    sim.warps[w].lanes[lane].stop = Stop::Run;
                    any = true;
                }
            }
            if any {
                let at = sim.warps[w].depends;
                self.leave_cluster_barrier(sim, w, at);
                let now = sim.warps[w].now;
                self.schedule(sim, w, now);
            }
        }
    }

    fn leave_cluster_barrier(&mut self, sim: &mut SimBlock, w: usize, at: u32) {
        let ClusterMeeting { over, after, .. } = self.clusters[sim.block.cluster];
        // The wait acquires.
        self.sms[sim.rank][sim.sm].l1.clear();
        let warp = &mut sim.warps[w];
        if over > warp.now {
            let after = after.filter(|after| after.who != (self.own, w));
            let segment = Segment { start: warp.now, end: over, cause: Cause::Sync, queue: 0.0, at };
            warp.log.add(segment, after);
            warp.now = over;
        }
    }
}
