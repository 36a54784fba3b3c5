//! Indexes and values in one message: where messages are small, half as many cost half as much.
//!
//! The exchange of `top_k_a_opt` for what `gaussian_k` selects, with each rank's entries as one array of words: its
//! indexes, then the bits of its values.

use fast_allreduce::Result;

use crate::sparse::Sparse;
use crate::traffic::Traffic;

/// An all_gather of the sizes, then one all_gather_v. Added in rank order, the result has the bits of the dense sum.
pub fn reduce(traffic: &Traffic<'_>, own: &Sparse, _k: usize, output: &mut [f32]) -> Result<()> {
    let words: Vec<u32> = own.indexes.iter().copied().chain(own.values.iter().map(|v| v.to_bits())).collect();
    let (all, lengths) = traffic.all_gather_v(&words)?;
    let mut rest = &all[..];
    for length in lengths {
        let (words, others) = rest.split_at(length);
        let (indexes, values) = words.split_at(length / 2);
        let values = values.iter().map(|&bits| f32::from_bits(bits)).collect();
        Sparse { indexes: indexes.to_vec(), values }.add_to(output);
        rest = others;
    }
    Ok(())
}
