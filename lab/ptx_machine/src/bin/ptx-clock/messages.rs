//! Messages between pairs of ranks: who sends what to whom in a call.

use std::mem::size_of;

use crate::abi::*;
use crate::world::World;

/// Which messages a call has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pattern {
    /// The first rank sends to the second.
    Send,
    /// Each rank sends to the next one.
    SendRecv,
    /// Each rank sends a share to each, itself included.
    AllToAll,
    /// All others send a share to the first.
    Gather,
}

impl Pattern {
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "send" => Self::Send,
            "send_recv" => Self::SendRecv,
            "all_to_all" => Self::AllToAll,
            "gather" => Self::Gather,
            _ => return None,
        })
    }

    /// The messages from one rank to another: where in its input, where in the other's output, and of how many bytes.
    fn message(self, from: usize, to: usize, ranks: usize, bytes: usize) -> Option<(usize, usize, usize)> {
        let share = bytes / ranks / 16 * 16;
        match self {
            Self::Send => (from == 0 && to == 1).then_some((0, 0, bytes)),
            Self::SendRecv => (to == (from + 1) % ranks).then_some((0, 0, bytes)),
            Self::AllToAll => Some((to * share, from * share, share)),
            Self::Gather => (to == 0).then_some((0, from * share, share)),
        }
    }

    /// The messages of a rank, by channel.
    pub fn transfers(self, world: &World, rank: usize, bytes: usize, registered: bool) -> FaTransfers {
        let ranks = world.regions.len();
        // SAFETY: a struct of integers.
        let mut packed: FaTransfers = unsafe { std::mem::zeroed() };
        let (mut next, mut stripes) = (0, 0);
        for channel in 0..2 * ranks {
            packed.first[channel] = next as u32;
            packed.stripes[channel] = stripes;
            let peer = channel / 2;
            let sends = channel % 2 == 0;
            let found = match sends {
                true => self.message(rank, peer, ranks, bytes).filter(|_| peer != rank),
                false => self.message(peer, rank, ranks, bytes),
            };
            let Some((input, output, bytes)) = found else { continue };
            let input = input as u64;
            let input_address = world.data.inputs[rank].address() + input;
            let output_address = world.data.outputs[rank].address() + output as u64;
            let transfer = &mut packed.transfer[next];
            transfer.address = if sends { input_address } else { output_address };
            transfer.bytes = bytes as u64;
            transfer.source = match (sends, peer == rank) {
                (false, true) => input_address,
                (true, false) if registered => (1 << FA_SOURCE_ID_SHIFT) + input,
                _ => 0,
            };
            let (part, count) = world.channels.parts(bytes);
            transfer.part = part;
            stripes += count;
            next += 1;
        }
        packed.first[2 * ranks..].fill(next as u32);
        packed.stripes[2 * ranks..].fill(stripes);
        packed
    }

    /// Whether all that was to be received is there.
    pub fn is_right(self, world: &World, bytes: usize) -> bool {
        let ranks = world.regions.len();
        let pairs = (0..ranks * ranks).map(|pair| (pair / ranks, pair % ranks));
        let mut received = pairs.filter_map(|(from, to)| {
            let (_, output, bytes) = self.message(from, to, ranks, bytes)?;
            Some(world.data.came_from(from, to, output, bytes))
        });
        received.all(|one| one)
    }
}

/// A struct of integers without padding, as a kernel takes it.
pub fn bytes_of<T>(value: &T) -> Vec<u8> {
    // SAFETY: the caller's types are such.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }.to_vec()
}
