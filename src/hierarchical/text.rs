//! Converts the ranks in errors of a node's communicator, or of the engine between nodes, to ranks of the whole world.

use crate::error::Error;

/// Renumbers all ranks in an error, including those in its text.
pub(super) fn renumbered(mut error: Error, number: impl Fn(usize) -> usize) -> Error {
    let in_text = |text: &mut String| *text = renumbered_text(text, &|rank| number(rank).to_string());
    match &mut error {
        Error::Timeout { missing, last_seen, .. } => {
            missing.iter_mut().for_each(|rank| *rank = number(*rank));
            in_text(last_seen);
        }
        Error::PeerLost { rank, reason }
        | Error::PeerFailed { rank, reason }
        | Error::Malformed { rank, reason } => {
            *rank = number(*rank);
            in_text(reason);
        }
        Error::Disagreement { rank, theirs, own_rank, ours, .. } => {
            *rank = number(*rank);
            *own_rank = number(*own_rank);
            in_text(theirs);
            in_text(ours);
        }
        Error::Unavailable { what, reason } => {
            in_text(what);
            in_text(reason);
        }
        Error::Rendezvous { reason } | Error::Refused { reason } => in_text(reason),
        _ => {}
    }
    error
}

/// Marks the ranks in a text, which already have their numbers in the whole world, so that [`renumbered`] on other
/// ranks of the node keeps the numbers.
pub(super) fn mark_world_ranks(text: &str) -> String {
    renumbered_text(text, &|rank| format!("{MARK}{rank}"))
}

/// Stands before such a number, as in "rank #3".
const MARK: char = '#';

/// Renumbers every "rank 3" and "ranks 3, 4" in a text, and removes marks. All errors write ranks in these forms.
fn renumbered_text(text: &str, number: &impl Fn(usize) -> String) -> String {
    const WORD: &str = "rank";
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(WORD) {
        let (before, after) = rest.split_at(at + WORD.len());
        let is_word = !rest[..at].ends_with(char::is_alphanumeric);
        result += before;
        rest = after;
        let (separator, is_list) = if rest.starts_with("s ") { ("s ", true) } else { (" ", false) };
        let mut next = rest.strip_prefix(separator).filter(|_| is_word);
        let mut separator = separator;
        while let Some((marked, rank, after)) = next.and_then(leading_number) {
            result += separator;
            result += &if marked { rank.to_string() } else { number(rank) };
            rest = after;
            separator = ", ";
            next = after.strip_prefix(separator).filter(|_| is_list);
        }
    }
    result + rest
}

/// Splits off the number at the start of a text. Returns whether it has the mark, the number, and the rest.
fn leading_number(text: &str) -> Option<(bool, usize, &str)> {
    let unmarked = text.strip_prefix(MARK);
    let digits = unmarked.unwrap_or(text);
    let end = digits.find(|character: char| !character.is_ascii_digit()).unwrap_or(digits.len());
    let (digits, after) = digits.split_at(end);
    Some((unmarked.is_some(), digits.parse().ok()?, after))
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_renumbered_text, |bytes| {
    renumbered_text(&String::from_utf8_lossy(bytes), &|rank| (rank / 2).to_string())
});

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn errors_name_ranks_of_the_whole_world() {
        let lost = Error::PeerLost { rank: 1, reason: "ended".into() };
        assert!(matches!(renumbered(lost, |local| 4 + local), Error::PeerLost { rank: 5, .. }));
        let (waited, last_seen) = (std::time::Duration::ZERO, String::new());
        let late = Error::Timeout { operation: "", epoch: 0, missing: vec![0, 2], waited, last_seen };
        let Error::Timeout { missing, .. } = renumbered(late, |node| node * 2 + 1) else { panic!() };
        assert_eq!(missing, [1, 5]);
        assert_eq!(renumbered(Error::Aborted, |_| 9), Error::Aborted);
    }

    #[test]
    fn texts_name_ranks_of_the_whole_world() {
        let renumbered = |text: &str| renumbered_text(text, &|local| (10 + local).to_string());
        assert_eq!(
            renumbered("rank 1 returned from call 7, all_gather of 3 f32, rank 0 is in call 8"),
            "rank 11 returned from call 7, all_gather of 3 f32, rank 10 is in call 8"
        );
        assert_eq!(renumbered("waiting for ranks 1, 2, 15: rank 1"), "waiting for ranks 11, 12, 25: rank 11");
        assert_eq!(renumbered("rank 2 found: rank 0 is gone"), "rank 12 found: rank 10 is gone");
        for same in [
            "",
            "rank",
            "ranks ",
            "a crank 3",
            "Frank 3",
            "counts by rank with the digest 0012",
            "3 ranks, 2 of them late",
            "rank 99999999999999999999999",
        ] {
            assert_eq!(renumbered(same), same);
        }
        // Only "ranks" introduces a list.
        assert_eq!(renumbered("rank 1, 2 others"), "rank 11, 2 others");
        // Numbers of the whole world are kept, once.
        let text = "ranks 1, 2: rank 3 is gone";
        assert_eq!(renumbered(&mark_world_ranks(text)), text);
    }

    proptest! {
        #[test]
        fn text_is_unchanged_if_no_number_changes(text in "(rank|ranks|s| |, |[0-9]|\\PC){0,20}") {
            // Leading zeros of numbers and marks would be lost.
            prop_assume!(!text.contains(['0', MARK]));
            prop_assert_eq!(renumbered_text(&text, &|rank| rank.to_string()), text);
        }
    }
}
