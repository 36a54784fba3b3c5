//! The k largest entries of the sum of all ranks' k largest. A rank sends about 2k entries, whatever the world.
//!
//! Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022. Ranks agree on regions
//! that hold about as many of their entries each; each rank adds the entries of one region; the k largest of all sums
//! are gathered.
//!
//! The paper agrees on regions, and finds the threshold of the k largest, once for many iterations. Here there is one
//! iteration, and the threshold is exact: ranks count magnitudes together, digit by digit, so that the result is known
//! beforehand, and is checked to the bit. The paper also evens out the ranks' shares before the last gather, where they
//! differ by more than four times; here the gather takes them as they are.

use fast_allreduce::{ReduceOp, Result};

use crate::regions::{balanced, cuts};
use crate::selection::magnitude;
use crate::sparse::{sum, Sparse};
use crate::traffic::Traffic;

/// Peers that a rank sends to, and receives from, at the same time: more would crowd a receiver.
const PEERS_AT_ONCE: usize = 4;

pub fn reduce(traffic: &Traffic<'_>, own: &Sparse, k: usize, output: &mut [f32]) -> Result<()> {
    let bounds = agree_on_regions(traffic, own, output.len())?;
    let region = reduce_region(traffic, own, &bounds)?;
    let kept = select_globally(traffic, &region, k)?;
    traffic.all_gather_sparse(&kept)?.add_to(output);
    Ok(())
}

/// The averages of the boundaries that each rank would choose: they ascend, as the ranks' do.
fn agree_on_regions(traffic: &Traffic<'_>, own: &Sparse, count: usize) -> Result<Vec<u32>> {
    let mut inner = balanced(&own.indexes, count, traffic.ranks());
    traffic.all_reduce(&mut inner, ReduceOp::Avg)?;
    Ok([&[0], &inner[..], &[count as u32]].concat())
}

/// The sum of all ranks' entries in this rank's region, added in rank order.
fn reduce_region(traffic: &Traffic<'_>, own: &Sparse, bounds: &[u32]) -> Result<Sparse> {
    let (rank, ranks) = (traffic.rank(), traffic.ranks());
    let cuts = cuts(&own.indexes, bounds);
    let send: Vec<u32> = cuts.iter().map(|cut| cut.len() as u32).collect();
    let receive = traffic.all_to_all(&send)?;
    let mut parts: Vec<Sparse> = receive.iter().map(|&length| Sparse::zeros(length as usize)).collect();
    let mut slots: Vec<_> = parts.iter_mut().map(Some).collect();
    for group in groups(ranks) {
        // In each step every rank sends to another one.
        let outgoing = group.iter().map(|step| {
            let to = (rank + step) % ranks;
            (to, own.part(cuts[to].clone()))
        });
        let incoming = group.iter().filter_map(|step| {
            let from = (rank + ranks - step) % ranks;
            slots[from].take().map(|slot| (from, slot))
        });
        traffic.exchange(outgoing, incoming)?;
    }
    let of = |peer: usize| if peer == rank { own.part(cuts[rank].clone()) } else { parts[peer].whole() };
    Ok(sum((0..ranks).map(of)))
}

/// Distances to the peers, in groups that are sent at once.
fn groups(ranks: usize) -> Vec<Vec<usize>> {
    let distances: Vec<usize> = (1..ranks).collect();
    distances.chunks(PEERS_AT_ONCE).map(<[usize]>::to_vec).collect()
}

/// This rank's entries among the `k` of the largest magnitude in all regions. Of equal ones the first are taken.
fn select_globally(traffic: &Traffic<'_>, region: &Sparse, k: usize) -> Result<Sparse> {
    let magnitudes: Vec<u32> = region.values.iter().map(|&value| magnitude(value)).collect();
    let mut search = Search::new(k);
    while let Some(digit) = search.next_digit() {
        let mut histogram = digit.histogram(&magnitudes);
        traffic.all_reduce(&mut histogram, ReduceOp::Sum)?;
        search.narrow(digit, &histogram);
    }
    // Regions ascend with ranks, so the first entries are those of the first ranks.
    let equal = magnitudes.iter().filter(|&&magnitude| magnitude == search.threshold).count();
    let all_equal = traffic.all_gather(&[equal as u32])?;
    let before: usize = all_equal[..traffic.rank()].iter().map(|&equal| equal as usize).sum();
    let mut left = search.wanted.saturating_sub(before);
    let mut kept = Sparse::default();
    for (entry, &magnitude) in magnitudes.iter().enumerate() {
        if magnitude > search.threshold || (magnitude == search.threshold && left > 0) {
            left -= usize::from(magnitude == search.threshold);
            kept.push(region.indexes[entry], region.values[entry]);
        }
    }
    Ok(kept)
}

/// A search for the k-th largest magnitude, from its highest digit on.
struct Search {
    /// The digits found so far, and zeros.
    threshold: u32,
    /// How many are wanted of the magnitudes that begin with those digits.
    wanted: usize,
    digits: std::slice::Iter<'static, (u32, u32)>,
}

/// Some bits of magnitudes that begin with known ones.
#[derive(Clone, Copy)]
struct Digit {
    known: u32,
    shift: u32,
    bits: u32,
}

impl Search {
    fn new(k: usize) -> Self {
        // Lowest bit and length of each digit: 31 bits together.
        const DIGITS: [(u32, u32); 4] = [(24, 7), (16, 8), (8, 8), (0, 8)];
        Self { threshold: 0, wanted: k, digits: DIGITS.iter() }
    }

    fn next_digit(&mut self) -> Option<Digit> {
        let known = self.threshold;
        self.digits.next().map(|&(shift, bits)| Digit { known, shift, bits })
    }

    /// Takes the digit that the k-th has, by how many there are of each. Where there are fewer than k, all are wanted.
    fn narrow(&mut self, digit: Digit, histogram: &[u32]) {
        for (value, &number) in histogram.iter().enumerate().rev() {
            if self.wanted <= number as usize || value == 0 {
                self.threshold |= (value as u32) << digit.shift;
                return;
            }
            self.wanted -= number as usize;
        }
    }
}

impl Digit {
    /// How many of the magnitudes have each value of this digit.
    fn histogram(self, magnitudes: &[u32]) -> Vec<u32> {
        let above = self.shift + self.bits;
        let mut histogram = vec![0; 1 << self.bits];
        for magnitude in magnitudes {
            if u64::from(magnitude ^ self.known) >> above == 0 {
                histogram[(magnitude >> self.shift & ((1 << self.bits) - 1)) as usize] += 1;
            }
        }
        histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::gradient;

    fn kth(magnitudes: &[u32], k: usize) -> (u32, usize) {
        let mut search = Search::new(k);
        while let Some(digit) = search.next_digit() {
            search.narrow(digit, &digit.histogram(magnitudes));
        }
        (search.threshold, search.wanted)
    }

    #[test]
    fn the_search_finds_the_kth_magnitude() {
        let mut magnitudes: Vec<u32> = gradient(3, 0, 3000).into_iter().map(magnitude).collect();
        magnitudes.extend([0, 0, 1, 0x7F80_0000, 0x7F80_0000, 0x7FFF_FFFF]);
        let mut sorted = magnitudes.clone();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        for k in (1..=sorted.len()).filter(|k| *k < 9 || k % 61 == 0 || *k > 2990) {
            let larger = sorted.iter().filter(|&&magnitude| magnitude > sorted[k - 1]).count();
            assert_eq!(kth(&magnitudes, k), (sorted[k - 1], k - larger), "k = {k}");
        }
    }

    #[test]
    fn where_there_are_fewer_all_are_wanted() {
        let (threshold, wanted) = kth(&[5, 9], 7);
        assert!(threshold == 0 && wanted > 0);
    }

    #[test]
    fn groups_are_bounded_and_reach_every_peer() {
        for ranks in 1..=16 {
            let groups = groups(ranks);
            assert!(groups.iter().all(|group| group.len() <= PEERS_AT_ONCE));
            assert_eq!(groups.concat(), (1..ranks).collect::<Vec<_>>());
        }
    }
}
