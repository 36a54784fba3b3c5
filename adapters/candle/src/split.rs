//! Uneven shares of channels and attention heads.

use std::ops::Range;

use candle_core::Result;

/// Returns this rank's share of `count` items: contiguous ranges whose lengths differ by at most one, longer for lower
/// ranks.
pub fn share(count: usize, rank: usize, world_size: usize) -> Range<usize> {
    let (each, more) = (count / world_size, count % world_size);
    let start = rank * each + rank.min(more);
    start..start + each + usize::from(rank < more)
}

/// The attention heads of a rank, and the groups of keys and values that they read.
///
/// Heads are divided one by one, regardless of groups: a group whose heads are on several ranks is on each of them.
/// With 9 heads in 3 groups and 2 ranks, rank 0 has heads 0 to 4 and groups 0 and 1, rank 1 has heads 5 to 8 and groups
/// 1 and 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadShare {
    /// The query heads.
    pub heads: Range<usize>,
    /// The groups that they read.
    pub groups: Range<usize>,
    /// The index of each head's group, counted from the first of `groups`.
    pub group_of: Vec<usize>,
}

impl HeadShare {
    /// Returns the share of `heads` query heads in `groups` groups.
    ///
    /// # Errors
    ///
    /// An error if the number of heads is not a multiple of the groups, or is less than the number of ranks.
    pub fn new(heads: usize, groups: usize, rank: usize, world_size: usize) -> Result<Self> {
        if groups == 0 || heads == 0 || !heads.is_multiple_of(groups) {
            candle_core::bail!(
                "{heads} attention heads do not divide into {groups} groups of keys and values"
            )
        }
        if world_size > heads {
            candle_core::bail!(
                "{world_size} ranks are more than the model's {heads} attention heads: use {heads} ranks or fewer"
            )
        }
        let heads_of_group = heads / groups;
        let heads = share(heads, rank, world_size);
        let first = heads.start / heads_of_group;
        let groups = first..(heads.end - 1) / heads_of_group + 1;
        let group_of = heads.clone().map(|head| head / heads_of_group - first).collect();
        Ok(Self { heads, groups, group_of })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_once_and_differ_by_one() {
        for count in 0..40 {
            for world_size in 1..=16 {
                let shares: Vec<_> = (0..world_size).map(|rank| share(count, rank, world_size)).collect();
                let all: Vec<_> = shares.iter().cloned().flatten().collect();
                assert_eq!(all, Vec::from_iter(0..count), "{world_size} ranks");
                let (least, most) =
                    (shares.iter().map(Range::len).min(), shares.iter().map(Range::len).max());
                assert!(most.unwrap() - least.unwrap() <= 1, "{shares:?}");
            }
        }
    }

    #[test]
    fn a_group_is_where_its_heads_are() {
        for (heads, groups) in [(9, 3), (8, 8), (8, 1), (14, 2), (6, 3)] {
            for world_size in 1..=heads {
                let mut seen = vec![0; heads];
                for rank in 0..world_size {
                    let share = HeadShare::new(heads, groups, rank, world_size).unwrap();
                    assert_eq!(share.group_of.len(), share.heads.len());
                    for (head, local) in share.heads.clone().zip(&share.group_of) {
                        seen[head] += 1;
                        assert_eq!(share.groups.start + local, head / (heads / groups));
                        assert!(share.groups.contains(&(share.groups.start + local)));
                    }
                }
                assert_eq!(seen, vec![1; heads]);
            }
        }
    }

    #[test]
    fn what_cannot_be_divided_is_refused() {
        let error = HeadShare::new(9, 3, 0, 10).unwrap_err().to_string();
        assert!(error.contains("10 ranks") && error.contains("9 attention heads"), "{error}");
        for (heads, groups) in [(9, 2), (9, 0), (0, 1)] {
            assert!(HeadShare::new(heads, groups, 0, 1).is_err(), "{heads} {groups}");
        }
    }
}
