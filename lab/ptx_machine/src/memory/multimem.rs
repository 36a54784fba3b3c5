//! Executes multimem accesses on each unicast address of a multicast address. The order of an in-switch
//! reduction is undefined: here it is from the last to the first, which is not the order of ranks.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::context::{Context, MOST_PARTS};
use crate::errors::Fault;
use crate::ir::AtomOp;
use crate::launch::run::Run;
use crate::runtime::{record, what};
use crate::soft;
use crate::types::Type;

const TYPES: [Type; 10] = [
    Type::F32,
    Type::F16x2,
    Type::Bf16x2,
    Type::B32,
    Type::B64,
    Type::U32,
    Type::U64,
    Type::S32,
    Type::S64,
    Type::F64,
];
const OPS: [AtomOp; 4] = [AtomOp::Add, AtomOp::And, AtomOp::Or, AtomOp::Xor];

/// An encoded multimem instruction, for compiled code. A store has no operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spec {
    pub op: Option<AtomOp>,
    /// Whether halves are summed in f32.
    pub wide: bool,
    pub ty: Type,
    pub count: u32,
}

impl Spec {
    pub fn encode(self) -> u32 {
        let index = |found: Option<usize>| found.unwrap_or(0) as u32;
        let op = self.op.map_or(0, |op| 1 + index(OPS.iter().position(|&known| known == op)));
        let ty = index(TYPES.iter().position(|&known| known == self.ty));
        op | u32::from(self.wide) << 3 | ty << 4 | self.count << 8
    }

    fn decode(code: u32) -> Self {
        let op = (code & 7).checked_sub(1).map(|op| OPS[op as usize % OPS.len()]);
        let ty = TYPES[(code >> 4 & 15) as usize % TYPES.len()];
        Self { op, wide: code >> 3 & 1 != 0, ty, count: code >> 8 }
    }

    /// Combines two elements.
    fn combine(self, a: u64, b: u64) -> u64 {
        let op = self.op.unwrap_or(AtomOp::Add);
        let bits = match (op, self.ty) {
            (AtomOp::And, _) => a & b,
            (AtomOp::Or, _) => a | b,
            (AtomOp::Xor, _) => a ^ b,
            (_, Type::F32) => soft::add_f32(a as u32, b as u32).into(),
            (_, Type::F64) => (f64::from_bits(a) + f64::from_bits(b)).to_bits(),
            (_, Type::F16x2 | Type::Bf16x2) => soft::add_halves(self.ty, a as u32, b as u32).into(),
            _ => a.wrapping_add(b),
        };
        if self.ty.bytes() == 4 {
            bits & 0xFFFF_FFFF
        } else {
            bits
        }
    }

    /// Reduces an element of all addresses.
    fn reduce(self, parts: impl DoubleEndedIterator<Item = u64>) -> u64 {
        if self.wide {
            return soft::sum_of_halves(self.ty, parts.rev().map(|bits| bits as u32)).into();
        }
        parts.rev().reduce(|a, b| self.combine(a, b)).unwrap_or(0)
    }
}

/// Reads an element.
///
/// # Safety
///
/// For `read` and `update`: the runtime has found the address in memory that outlives the launch, and it is
/// aligned to the element.
unsafe fn read(address: u64, bytes: u32) -> u64 {
    // SAFETY: the caller fulfils the conditions above.
    unsafe {
        match bytes {
            4 => (*(address as *const AtomicU32)).load(Ordering::Relaxed).into(),
            _ => (*(address as *const AtomicU64)).load(Ordering::Relaxed),
        }
    }
}

unsafe fn update(address: u64, bytes: u32, next: impl Fn(u64) -> u64) {
    let order = Ordering::SeqCst;
    // SAFETY: see `read`.
    unsafe {
        match bytes {
            4 => {
                let word = &*(address as *const AtomicU32);
                let _ = word.fetch_update(order, order, |old| Some(next(old.into()) as u32));
            }
            _ => {
                let word = &*(address as *const AtomicU64);
                let _ = word.fetch_update(order, order, |old| Some(next(old)));
            }
        }
    }
}

/// Executes an instruction whose values (to store, or loaded) are in the context.
pub(crate) unsafe extern "C" fn multimem(
    context: *mut Context,
    address: u64,
    spec: u32,
    code: u32,
    at: u64,
) -> u32 {
    // SAFETY: as in `runtime::access`.
    let context = unsafe { &mut *context };
    // SAFETY: as in `runtime::access`.
    let run = unsafe { &mut *context.run.cast::<Run>() };
    let spec = Spec::decode(spec);
    let size = spec.ty.bytes();
    let bytes = size * spec.count;
    if !address.is_multiple_of(bytes.into()) {
        return record(context, Fault::Misaligned, bytes, at, address);
    }
    let mut parts = [0; MOST_PARTS];
    let count = run.multicast(address, bytes, &mut parts);
    let parts = &parts[..count];
    if parts.is_empty() {
        return record(context, Fault::IllegalAddress, bytes, at, address);
    }
    for &part in parts {
        if let Some(fault) = run.observe_if_asked(part, bytes, code, at) {
            return record(context, fault, bytes, at, part);
        }
        if what::kind(code) == what::READ {
            continue;
        }
        for i in 0..spec.count {
            let value = context.values[i as usize];
            let next = |old| if spec.op.is_some() { spec.combine(old, value) } else { value };
            // SAFETY: the memory that resolves `parts` vouches for the bytes of the access at each.
            unsafe { update(part + u64::from(i * size), size, next) };
        }
    }
    if what::kind(code) == what::READ {
        for i in 0..spec.count {
            // SAFETY: as for the update above.
            let all = parts.iter().map(|&part| unsafe { read(part + u64::from(i * size), size) });
            context.values[i as usize] = spec.reduce(all);
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_as_numbers() {
        for ty in TYPES {
            for op in OPS.map(Some).into_iter().chain([None]) {
                for (wide, count) in [(false, 1), (true, 4), (true, 2)] {
                    let spec = Spec { op, wide, ty, count };
                    assert_eq!(Spec::decode(spec.encode()), spec);
                }
            }
        }
    }

    #[test]
    fn halves_are_rounded_once_or_each_time() {
        // 2048 + 1 + 1: in f16, 2048 + 1 rounds to 2048.
        let [large, one] = [0x6800u64, 0x3C00];
        let sum = |wide| {
            let spec = Spec { op: Some(AtomOp::Add), wide, ty: Type::F16x2, count: 1 };
            spec.reduce([one | one << 16, one, large | large << 16].into_iter())
        };
        assert_eq!((sum(true), sum(false)), (0x6800_6801, 0x6800_6800));
    }
}
