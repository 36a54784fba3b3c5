//! Messages between pairs of ranks: sender, receiver and data of each message of a call.

use std::mem::size_of;

use crate::abi::*;
use crate::world::World;

/// Message pattern of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pattern {
    /// Rank 0 sends to rank 1.
    Send,
    /// Each rank sends to the next rank.
    SendRecv,
    /// Each rank sends a share to every rank, itself included.
    AllToAll,
    /// All other ranks send a share to rank 0.
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

    /// Returns the message from one rank to another: offset in the input, offset in the output, and bytes.
    fn message(self, from: usize, to: usize, ranks: usize, bytes: usize) -> Option<(usize, usize, usize)> {
        let share = bytes / ranks / 16 * 16;
        match self {
            Self::Send => (from == 0 && to == 1).then_some((0, 0, bytes)),
            Self::SendRecv => (to == (from + 1) % ranks).then_some((0, 0, bytes)),
            Self::AllToAll => Some((to * share, from * share, share)),
            Self::Gather => (to == 0).then_some((0, from * share, share)),
        }
    }

    /// Returns a rank's messages, by channel.
    pub fn transfers(self, world: &World, rank: usize, bytes: usize, registered: bool) -> FaTransfers {
        let ranks = world.regions.len();
        // SAFETY: `FaTransfers` has only integer fields, for which zero is valid.
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

    /// Returns whether everything has been received correctly.
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

/// Returns the bytes of a struct of integers without padding: the form of a kernel's parameter.
pub fn bytes_of<T>(value: &T) -> Vec<u8> {
    // SAFETY: callers pass only structs of integers without padding, so that all bytes are initialised.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }.to_vec()
}
