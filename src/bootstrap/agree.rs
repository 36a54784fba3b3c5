//! Steps that all ranks must survive: all go on, or all have an error.

use std::time::Duration;

use super::Bootstrap;
use crate::error::{Error, Result};

/// Compares facts that every rank must share. Collective; each is one line.
pub(crate) fn agree_on(
    bootstrap: &dyn Bootstrap,
    facts: &[(&'static str, String)],
    timeout: Duration,
) -> Result<()> {
    let own_rank = bootstrap.rank();
    let mine = facts.iter().map(|(_, value)| value.as_str()).collect::<Vec<_>>().join("\n");
    for (rank, theirs) in bootstrap.all_gather(mine.as_bytes(), timeout)?.into_iter().enumerate() {
        let theirs = String::from_utf8_lossy(&theirs);
        let mut values = theirs.split('\n');
        for (what, ours) in facts {
            let value = values.next().unwrap_or("nothing");
            if value != ours {
                let (theirs, ours) = (value.to_owned(), ours.clone());
                return Err(Error::Disagreement { what, rank, theirs, own_rank, ours });
            }
        }
    }
    Ok(())
}

/// Tells every rank whether a step succeeded on all: one that failed must not leave the others waiting.
///
/// Returns this rank's own error, or [`Error::PeerFailed`] naming the first that failed.
pub(crate) fn all_succeeded<T>(step: Result<T>, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<T> {
    let report = step.as_ref().err().map(Error::to_string).unwrap_or_default();
    let reports = bootstrap.all_gather(report.as_bytes(), timeout)?;
    let value = step?;
    match reports.iter().position(|report| !report.is_empty()) {
        None => Ok(value),
        Some(rank) => {
            Err(Error::PeerFailed { rank, reason: String::from_utf8_lossy(&reports[rank]).into_owned() })
        }
    }
}
