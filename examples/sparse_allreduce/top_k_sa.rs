//! Split allgather: each rank adds the entries of one region, then all gather the regions' sums.
//!
//! Renggli et al., "SparCML: high-performance sparse communication for machine learning", SC 2019, section 5.3.2. The
//! fewer indexes the ranks have in common, the more of the sums is sent: up to as much as if every rank got every
//! rank's entries.

use fast_allreduce::Result;

use crate::regions::{cuts, even};
use crate::sparse::{sum, Sparse};
use crate::traffic::Traffic;

/// Exact: a region's owner adds in rank order, so the result has the bits of the dense sum.
pub fn reduce(traffic: &Traffic<'_>, own: &Sparse, _k: usize, output: &mut [f32]) -> Result<()> {
    let bounds = even(output.len(), traffic.ranks());
    let send: Vec<u32> = cuts(&own.indexes, &bounds).iter().map(|cut| cut.len() as u32).collect();
    let receive = lengths(&traffic.all_to_all(&send)?);
    let received = traffic.all_to_all_sparse(own, &lengths(&send), &receive)?;
    let mut first = 0;
    let parts = receive.iter().map(|length| {
        first += length;
        received.part(first - length..first)
    });
    let region = sum(parts);
    traffic.all_gather_sparse(&region)?.add_to(output);
    Ok(())
}

fn lengths(numbers: &[u32]) -> Vec<usize> {
    numbers.iter().map(|&number| number as usize).collect()
}
