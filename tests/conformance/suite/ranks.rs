//! The ranks that one thread drives: one rank of a world of threads or processes, or all ranks of a single launch.

use std::ops::Range;

use fast_allreduce::{DType, Plan, Result};

use super::message::{poison, MemoryKind, Message, Placement};

/// The input or the output of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Input,
    Output,
}

/// A rank's part of a call: the addresses of its input and output. In place they are in one allocation.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub placement: Placement,
    pub input: u64,
    pub output: u64,
}

/// Ranks of one communicator, with memory for calls.
pub trait Ranks {
    /// Bytes of a pack, the device's unit of work.
    const PACK_BYTES: usize;

    /// Returns which of the world's ranks these are.
    fn ranks(&self) -> Range<usize>;

    fn world_size(&self) -> usize;

    /// Returns the plan of a call.
    fn plan(&self, count: usize, dtype: DType) -> Plan;

    /// Returns the placement of a rank's part of a call. A device whose ranks cannot differ in these ways uses a
    /// similar one.
    fn placement(&self, placements: &[Placement], rank: usize) -> Placement {
        placements[rank]
    }

    /// Allocates `bytes` bytes of each kind for each side, and drops the previous memory. All ranks must call this.
    fn make_room(&mut self, bytes: usize);

    /// Returns the address of a rank's memory, aligned to 64 bytes.
    fn base(&mut self, rank: usize, kind: MemoryKind, side: Side) -> u64;

    fn write(&mut self, address: u64, bytes: &[u8]);

    fn read(&mut self, address: u64, bytes: usize) -> Vec<u8>;

    /// Makes the call on each of the ranks with these parts, and waits until it ends.
    fn call(&mut self, message: &Message, parts: &[Part]) -> Result<()>;
}

/// Bytes on each side of a buffer that are checked to stay unchanged.
const GUARD: usize = 128;
/// Bytes for offsets: 63 elements of 8 bytes fit.
const OFFSETS: usize = 512;
const CANARY: u8 = 0xA5;

/// Returns the memory that messages of up to `bytes` bytes need.
pub fn room_for(bytes: usize) -> usize {
    bytes + OFFSETS + 2 * GUARD
}

/// Makes one call, and compares its result and the bytes around it with the expected ones.
///
/// # Panics
///
/// If anything differs from what is expected.
pub fn check<R: Ranks>(ranks: &mut R, message: &Message, placements: &[Placement]) {
    if let Err((rank, problem)) = try_check(ranks, message, placements) {
        let Message { collective, dtype, count, .. } = message;
        let (world, plan) = (ranks.world_size(), ranks.plan(*count, *dtype));
        let placement = ranks.placement(placements, rank);
        panic!(
            "rank {rank} of {world}: {problem}; {count} x {dtype} {collective:?}, {placement:?}, {plan:?}"
        );
    }
}

fn try_check<R: Ranks>(
    ranks: &mut R,
    message: &Message,
    placements: &[Placement],
) -> std::result::Result<(), (usize, String)> {
    let size = message.dtype.size();
    let framed = |bytes: &[u8]| [&[CANARY; GUARD], bytes, &[CANARY; GUARD]].concat();
    let mut parts = Vec::new();
    // If a rank has no output, its memory is checked up to the largest possible output.
    let untouched = vec![CANARY; message.bytes()];
    for rank in ranks.ranks() {
        let placement = ranks.placement(placements, rank);
        let mut address = |place: super::message::Place, side| {
            assert!(place.offset * size <= OFFSETS, "the offset does not fit");
            ranks.base(rank, place.kind, side) + (GUARD + place.offset * size) as u64
        };
        let poison = poison(message.expected(rank));
        let memory = address(placement.input, Side::Input);
        let (input, output) = match (placement.output, message.in_place(rank)) {
            (None, Some((input, output))) => {
                let both = overlaid((&poison, output), (message.input(rank), input));
                ranks.write(memory - GUARD as u64, &framed(&both));
                (memory + input as u64, memory + output as u64)
            }
            (output, _) => {
                let output = address(output.unwrap_or(placement.input), Side::Output);
                let before = if poison.is_empty() { &untouched } else { &poison };
                ranks.write(output - GUARD as u64, &framed(before));
                ranks.write(memory - GUARD as u64, &framed(message.input(rank)));
                (memory, output)
            }
        };
        parts.push(Part { placement, input, output });
    }
    ranks.call(message, &parts).map_err(|error| (ranks.ranks().start, error.to_string()))?;
    for (rank, Part { placement, input, output }) in ranks.ranks().zip(parts) {
        let mut compare = |what: &str, address: u64, should_be: &[u8]| {
            let is = ranks.read(address - GUARD as u64, should_be.len() + 2 * GUARD);
            if is[..GUARD] != [CANARY; GUARD] || is[GUARD + should_be.len()..] != [CANARY; GUARD] {
                return Err((rank, format!("{what} was written outside of its bounds")));
            }
            difference(&is[GUARD..GUARD + should_be.len()], should_be, size)
                .map_or(Ok(()), |problem| Err((rank, format!("{what}{problem}"))))
        };
        let expected = message.expected(rank);
        match message.in_place(rank) {
            Some((before, after)) if placement.output.is_none() => {
                let both = overlaid((message.input(rank), before), (expected, after));
                compare("the output", input - before as u64, &both)?;
            }
            _ => {
                compare("the output", output, if expected.is_empty() { &untouched } else { expected })?;
                compare("the input afterwards", input, message.input(rank))?;
            }
        }
    }
    Ok(())
}

/// Returns the bytes of `under` at an offset, overwritten by those of `over` at another.
fn overlaid((under, under_at): (&[u8], usize), (over, over_at): (&[u8], usize)) -> Vec<u8> {
    let mut bytes = vec![CANARY; (under_at + under.len()).max(over_at + over.len())];
    bytes[under_at..][..under.len()].copy_from_slice(under);
    bytes[over_at..][..over.len()].copy_from_slice(over);
    bytes
}

/// Describes the first difference, as `[3] is 01 and not 02; 5 differ`.
fn difference(is: &[u8], should_be: &[u8], size: usize) -> Option<String> {
    if is == should_be {
        return None;
    }
    let mut pairs = is.chunks(size).zip(should_be.chunks(size)).enumerate().filter(|(_, (a, b))| a != b);
    let (at, (is, should_be)) = pairs.next()?;
    let hex = |bytes: &[u8]| bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>();
    Some(format!("[{at}] is {} and not {}; {} differ", hex(is), hex(should_be), pairs.count() + 1))
}
