//! Launches of the reference kernels in tests/references/references.cu.

use crate::abi::FA_BF16;
use crate::world::{homes, word_of, Bytes, Data, Reach};

const RANKS: usize = 8;
const BLOCKS: usize = 132;
/// Bytes of `Signals`: two arrays of flags, each in two generations, and epochs.
const SIGNALS: usize = 4 * BLOCKS * RANKS * 4 + BLOCKS * 4;
const SENTINEL: u32 = 0x8000_8000;
/// Room for packets of all ranks: three generations, or two generations of double-sized packets.
const GENERATIONS: usize = 4;

/// Memory of all ranks.
pub struct Reference {
    pub data: Data,
    signals: Vec<Bytes>,
    scratch: Vec<Bytes>,
    tables: Vec<Bytes>,
    packs: u32,
}

impl Reference {
    pub fn new(protocol: &str, ranks: usize, bytes: usize) -> Self {
        let all = |bytes: usize| (0..ranks).map(|_| Bytes::new(bytes)).collect::<Vec<_>>();
        let data = Data::new(ranks, bytes, word_of(FA_BF16));
        let mut tables = all(RANKS * 8);
        for table in &mut tables {
            for (rank, input) in data.inputs.iter().enumerate() {
                table.put(rank * 8, &input.address().to_le_bytes());
            }
        }
        let packets = match protocol {
            "flags_one_shot" => 0,
            "flags_two_shot" => bytes,
            _ => GENERATIONS * ranks * bytes,
        };
        let mut scratch = all(packets);
        if protocol.starts_with("sentinel") {
            scratch.iter_mut().for_each(|scratch| scratch.fill_words(SENTINEL));
        }
        Self { data, signals: all(SIGNALS), scratch, tables, packs: (bytes / 16) as u32 }
    }

    pub fn reach(&self) -> Reach {
        let all = [&self.signals, &self.scratch, &self.tables, &self.data.inputs, &self.data.outputs];
        Reach { homes: homes(&all.map(Vec::as_slice)), multicast: Vec::new() }
    }

    /// Returns the struct `Launch` of a rank.
    pub fn params(&self, rank: usize) -> Vec<u8> {
        let addresses = |all: &[Bytes]| {
            let known = all.iter().map(Bytes::address);
            known.chain(std::iter::repeat(0)).take(RANKS).flat_map(u64::to_le_bytes).collect::<Vec<u8>>()
        };
        let mut params = addresses(&self.signals);
        params.extend(self.tables[rank].address().to_le_bytes());
        params.extend(addresses(&self.scratch));
        params.extend(self.data.outputs[rank].address().to_le_bytes());
        params.extend((rank as u32).to_le_bytes());
        params.extend(self.packs.to_le_bytes());
        params
    }
}
