//! The k largest entries of a sum, by a binary tree that keeps k entries at each of its nodes.
//!
//! Shi et al., "A distributed synchronous SGD algorithm with global top-k sparsification for low bandwidth networks",
//! ICDCS 2019. What is dropped on the way up may have been among the k largest of the whole sum: the result is the
//! tree's, and not that sum's.

use fast_allreduce::Result;

use crate::selection::top_k_of;
use crate::sparse::{merge, Sparse};
use crate::traffic::Traffic;

/// What a rank does with its entries when the tree has come to ranks that are `distance` apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Send(usize),
    Receive(usize),
    /// Its partner would be beyond the last rank.
    Keep,
}

/// The steps of a rank, from the leaves: none after it has sent.
pub fn steps(rank: usize, ranks: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut distance = 1;
    while distance < ranks {
        if rank & distance != 0 {
            steps.push(Step::Send(rank - distance));
            break;
        }
        let partner = rank + distance;
        steps.push(if partner < ranks { Step::Receive(partner) } else { Step::Keep });
        distance *= 2;
    }
    steps
}

pub fn reduce(traffic: &Traffic<'_>, own: &Sparse, k: usize, output: &mut [f32]) -> Result<()> {
    let mut kept = own.clone();
    for step in steps(traffic.rank(), traffic.ranks()) {
        match step {
            Step::Send(to) => traffic.exchange([(to, kept.whole())], [])?,
            Step::Receive(from) => {
                // Two vectors of k entries have at least k indexes together: all nodes of the tree have exactly k.
                let mut theirs = Sparse::zeros(k);
                traffic.exchange([], [(from, &mut theirs)])?;
                kept = top_k_of(merge(kept.whole(), theirs.whole()).whole(), k);
            }
            Step::Keep => {}
        }
    }
    traffic.broadcast_sparse(&mut kept, 0)?;
    kept.add_to(output);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_but_the_first_sends_once_to_one_that_then_receives() {
        for ranks in 1..=16 {
            let all: Vec<_> = (0..ranks).map(|rank| steps(rank, ranks)).collect();
            assert!(!all[0].iter().any(|step| matches!(step, Step::Send(_))));
            for (rank, steps) in all.iter().enumerate().skip(1) {
                let Some(&Step::Send(to)) = steps.last() else {
                    panic!("rank {rank} of {ranks} sends nothing")
                };
                assert_eq!(all[to][steps.len() - 1], Step::Receive(rank), "in the same round");
            }
            let receives = all.iter().flatten().filter(|step| matches!(step, Step::Receive(_))).count();
            assert_eq!(receives, ranks - 1);
        }
    }

    #[test]
    fn five_ranks() {
        assert_eq!(steps(0, 5), [Step::Receive(1), Step::Receive(2), Step::Receive(4)]);
        assert_eq!(steps(2, 5), [Step::Receive(3), Step::Send(0)]);
        assert_eq!(steps(4, 5), [Step::Keep, Step::Keep, Step::Send(0)]);
    }
}
