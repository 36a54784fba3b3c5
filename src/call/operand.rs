//! Memory that a call reads or writes on a rank: checks of addresses and lengths.

use crate::catalogue::DType;
use crate::error::{Error, Result};

/// Memory of one operand of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand {
    pub address: u64,
    pub bytes: u64,
}

impl Operand {
    /// Checks that `address` can be the address of `count` elements.
    pub fn new(which: &'static str, address: u64, count: usize, dtype: DType) -> Result<Self> {
        let element_size = dtype.size();
        let bytes = count.checked_mul(element_size).filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| Error::InvalidSetting {
            name: "count",
            value: count.to_string(),
            expected: "a number of elements that fits the address space",
        })? as u64;
        let problem = match address {
            _ if bytes == 0 => return Ok(Self { address, bytes }),
            0 => "null",
            // Element sizes are powers of two.
            _ if address & (element_size as u64 - 1) != 0 => "not aligned to its element",
            _ if address.checked_add(bytes).is_none() => "too near the end of the address space",
            _ => return Ok(Self { address, bytes }),
        };
        Err(Error::InvalidPointer { which, address: address as usize, problem, element_size })
    }

    /// Returns whether both operands have bytes in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        let empty = self.bytes == 0 || other.bytes == 0;
        !empty && self.address < other.address + other.bytes && other.address < self.address + self.bytes
    }
}

/// Refuses an input and an output of different lengths.
#[inline]
pub(crate) fn same_length(input: usize, output: usize) -> Result<()> {
    match input == output {
        true => Ok(()),
        false => Err(Error::LengthMismatch { input, output }),
    }
}
