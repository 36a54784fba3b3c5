//! Splits a list of transfers that is too long for one launch into several.

use crate::abi::FA_MAX_TRANSFERS;
use crate::call::{Direction, Transfer};

/// Splits transfers into launches. Each channel (a peer and a direction) is cut into groups, in the order of tags, and
/// launch i has group i of every channel. So what one rank sends in its launch i, the other receives in its launch i,
/// and neither waits for a launch that the other has yet to start.
pub(super) fn rounds(mut transfers: Vec<Transfer>, world_size: usize) -> Vec<Vec<Transfer>> {
    let most = FA_MAX_TRANSFERS as usize;
    if transfers.len() <= most {
        return vec![transfers];
    }
    // At least one: a world has at most 16 ranks, and so 32 channels.
    let each = most / (2 * world_size);
    transfers.sort_by_key(|transfer| transfer.tag);
    let mut rounds: Vec<Vec<Transfer>> = Vec::new();
    let mut seen = vec![[0; 2]; world_size];
    for transfer in transfers {
        let seen = &mut seen[transfer.peer][usize::from(transfer.direction == Direction::Recv)];
        let round = *seen / each;
        *seen += 1;
        if round == rounds.len() {
            rounds.push(Vec::new());
        }
        rounds[round].push(transfer);
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::DType;

    fn transfer(direction: Direction, peer: usize, tag: u32) -> Transfer {
        Transfer { direction, peer, address: 64, count: 1, dtype: DType::U8, tag }
    }

    #[test]
    fn a_list_that_fits_is_one_launch_in_its_order() {
        let list: Vec<_> = (0..64).map(|tag| transfer(Direction::Send, 1, 100 - tag)).collect();
        assert_eq!(rounds(list.clone(), 2), [list]);
    }

    #[test]
    fn both_ranks_have_a_message_in_the_same_launch() {
        for world in [2, 3, 16] {
            // Rank 0 lists its messages by falling tags, all sends first. Its peers list theirs by rising tags.
            let own: Vec<_> = [Direction::Send, Direction::Recv]
                .into_iter()
                .flat_map(|direction| (1..world).map(move |peer| (direction, peer)))
                .flat_map(|(direction, peer)| (0..70).rev().map(move |tag| transfer(direction, peer, tag)))
                .collect();
            let theirs: Vec<_> = (0..70)
                .flat_map(|tag| {
                    [Direction::Recv, Direction::Send].map(|direction| transfer(direction, 0, tag))
                })
                .collect();
            let (own, theirs) = (rounds(own, world), rounds(theirs, world));
            assert!(own.iter().chain(&theirs).all(|round| round.len() <= 64));
            assert_eq!(own.len(), theirs.len());
            for (own, theirs) in own.iter().zip(&theirs) {
                let tags = |round: &[Transfer], direction, peer| -> Vec<u32> {
                    let of = |one: &&Transfer| one.direction == direction && one.peer == peer;
                    round.iter().filter(of).map(|one| one.tag).collect()
                };
                for peer in 1..world {
                    assert_eq!(tags(own, Direction::Send, peer), tags(theirs, Direction::Recv, 0));
                    assert_eq!(tags(own, Direction::Recv, peer), tags(theirs, Direction::Send, 0));
                }
            }
        }
    }
}
