//! State shared by ranks: links, second-level caches, and arrival times of stores.

use std::collections::HashMap;

use super::calendar::Pipe;
use super::constants::Machine;
use crate::runtime::Range;

/// Identifies a warp: index of its block among the simulated ones, and of the warp in the block.
pub(crate) type Who = (usize, usize);

/// The arrival of a store.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Arrival {
    pub at: f64,
    pub issued: f64,
    /// Part of the store's travel time spent waiting for links that are in use.
    pub queue: f64,
    pub by: Who,
}

/// The shared ports of a GPU.
struct Ports {
    out: Pipe,
    into: Pipe,
    cache: Pipe,
}

/// The packets of a warp's access to one device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Packets {
    pub count: f64,
    pub bytes: f64,
    /// Sectors of 32 bytes, and the number of partly accessed ones.
    pub sectors: f64,
    pub partial: f64,
    /// Packets that contain a partly accessed sector.
    pub masked: f64,
}

pub(crate) struct Fabric {
    ports: Vec<Ports>,
    homes: Vec<(Range, usize)>,
    /// For each word of 4 bytes: the last strong store to it.
    words: HashMap<u64, Arrival>,
    /// Number of blocks that each simulated block stands for.
    pub scale: f64,
}

impl Fabric {
    pub fn new(
        machine: &Machine,
        homes: &[(Range, usize)],
        devices: usize,
        scale: f64,
        resident: bool,
    ) -> Self {
        let link = machine.per_cycle(machine.link_gbps);
        let memory = machine.per_cycle(if resident { machine.l2_gbps } else { machine.dram_gbps });
        let ports = || Ports { out: Pipe::new(link), into: Pipe::new(link), cache: Pipe::new(memory) };
        let mut homes = homes.to_vec();
        homes.sort_by_key(|(range, _)| range.low);
        Self { ports: (0..devices).map(|_| ports()).collect(), homes, words: HashMap::new(), scale }
    }

    /// Returns the device whose memory contains an address.
    pub fn home(&self, address: u64) -> Option<usize> {
        let after = self.homes.partition_point(|(range, _)| range.low <= address);
        let (range, device) = after.checked_sub(1).and_then(|i| self.homes.get(i))?;
        range.holds(address, 1).then_some(*device)
    }

    /// Returns the delay of bytes from a device's second-level cache.
    pub fn local(&mut self, device: usize, at: f64, bytes: f64) -> f64 {
        self.ports[device].cache.pass(at, bytes * self.scale) - at
    }

    /// Returns the delay of packets from one device to another that reach the wire at `at`.
    pub fn send(&mut self, machine: &Machine, from: usize, to: usize, at: f64, packets: &Packets) -> f64 {
        let partial = packets.masked * machine.link_partial_bytes;
        let bytes = (packets.count * machine.link_header_bytes + packets.bytes + partial) * self.scale;
        let out = self.ports[from].out.pass(at, bytes);
        let into = self.ports[to].into.pass(at, bytes);
        out.max(into) - at
    }

    /// Returns the delay of an in-switch reduction for device `to`. The switch gets the request at `at` and the
    /// packets of all devices `from` half a round trip later, and sends one result.
    pub fn gather(
        &mut self,
        machine: &Machine,
        from: &[usize],
        to: usize,
        at: f64,
        trip: f64,
        packets: &Packets,
    ) -> f64 {
        let asks = packets.count * machine.link_header_bytes * self.scale;
        let data = packets.bytes / machine.switch_share * self.scale;
        let asked = self.ports[to].out.pass(at, asks) - at;
        let half = at + trip / 2.0;
        let mut answered = self.ports[to].into.pass(half, data) - half;
        for &device in from {
            let ports = &mut self.ports[device];
            ports.into.pass(at, asks);
            answered = answered.max(ports.out.pass(half, data) - half);
            self.local(device, half, packets.bytes);
        }
        asked + answered
    }

    /// Returns the delay, for each of the devices, of packets that the switch multicasts to them.
    pub fn spread(
        &mut self,
        machine: &Machine,
        from: usize,
        to: &[usize],
        at: f64,
        packets: &Packets,
    ) -> Vec<f64> {
        let partial = packets.masked * machine.link_partial_bytes;
        let data = (packets.bytes + partial) / machine.switch_share * self.scale;
        let answers = packets.count * machine.link_header_bytes * self.scale;
        let out = self.ports[from].out.pass(at, data) - at;
        self.ports[from].into.pass(at, answers);
        let mut later = Vec::with_capacity(to.len());
        for &device in to {
            let ports = &mut self.ports[device];
            later.push(out.max(ports.into.pass(at, data) - at));
            ports.out.pass(at, answers);
        }
        later
    }

    pub fn arrived(&mut self, address: u64, bytes: u32, arrival: Arrival) {
        for word in (address..address + u64::from(bytes)).step_by(4) {
            let last = self.words.entry(word & !3).or_insert(arrival);
            if arrival.at >= last.at {
                *last = arrival;
            }
        }
    }

    /// Returns the latest arrival among the stores that a look at these bytes sees.
    pub fn last(&self, address: u64, bytes: u32) -> Option<Arrival> {
        let words = (address..address + u64::from(bytes)).step_by(4);
        words.filter_map(|word| self.words.get(&(word & !3))).copied().max_by(|a, b| a.at.total_cmp(&b.at))
    }
}

/// Returns the packets of a warp's accesses to one device: one per line of at most `line` bytes.
pub(crate) fn packets(accesses: &[(u64, u32)], line: u64) -> Packets {
    // Address and byte mask of each sector.
    let mut sectors: Vec<(u64, u32)> = Vec::with_capacity(accesses.len() * 2);
    for &(address, bytes) in accesses {
        let last = address + u64::from(bytes);
        let mut at = address;
        while at < last {
            let end = last.min((at | 31) + 1);
            let mask = ((1u64 << (end - at)) - 1) << (at & 31);
            sectors.push((at >> 5, mask as u32));
            at = end;
        }
    }
    sectors.sort_unstable();
    let mut merged: Vec<(u64, u32)> = Vec::with_capacity(sectors.len());
    for (sector, mask) in sectors {
        match merged.last_mut() {
            Some(last) if last.0 == sector => last.1 |= mask,
            _ => merged.push((sector, mask)),
        }
    }
    let mut packets = Packets::default();
    let mut last = None;
    let mut masked = false;
    for &(sector, mask) in &merged {
        let own = sector * 32 / line;
        if last != Some(own) {
            packets.masked += f64::from(u8::from(masked));
            masked = false;
            packets.count += 1.0;
            last = Some(own);
        }
        packets.sectors += 1.0;
        packets.bytes += f64::from(mask.count_ones().next_multiple_of(16));
        if mask != u32::MAX {
            packets.partial += 1.0;
            masked = true;
        }
    }
    packets.masked += f64::from(u8::from(masked));
    packets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warp_that_writes_in_a_row_fills_its_packets() {
        let row: Vec<(u64, u32)> = (0..32).map(|lane| (0x1000 + lane * 16, 16)).collect();
        let whole = Packets { count: 4.0, bytes: 512.0, sectors: 16.0, partial: 0.0, masked: 0.0 };
        assert_eq!(packets(&row, 128), whole);
        // Every other half of a sector.
        let halves: Vec<(u64, u32)> = (0..32).map(|lane| (0x1000 + lane * 32, 16)).collect();
        let partial = Packets { count: 8.0, bytes: 512.0, sectors: 32.0, partial: 32.0, masked: 8.0 };
        assert_eq!(packets(&halves, 128), partial);
        let flag = Packets { count: 1.0, bytes: 16.0, sectors: 1.0, partial: 1.0, masked: 1.0 };
        assert_eq!(packets(&[(0x1004, 4)], 128), flag);
    }
}
