//! Collective checks: either all ranks go on, or all return an error.

use std::time::Duration;

use super::Bootstrap;
use crate::error::{Error, Result};

/// Checks that the facts are equal on all ranks. Collective. Each value is a single line of text.
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
                // A rank that splits its communicator sends binary colours and keys instead.
                let is_text = !value.contains(char::is_control);
                let theirs = if is_text { value } else { "another step" }.to_owned();
                let ours = ours.clone();
                return Err(Error::Disagreement { what, rank, theirs, own_rank, ours });
            }
        }
    }
    Ok(())
}

/// First byte of a rank's report: its own step failed, or its failure is a consequence of another rank's.
const OWN: u8 = b'!';
const CONSEQUENCE: u8 = b'~';

/// Returns the result of a step if the step succeeded on all ranks, and otherwise an error on all ranks, so that no
/// rank waits for one that failed. Collective.
///
/// # Errors
///
/// This rank's own error, or [`Error::PeerFailed`] with the first rank that failed. Ranks whose failure is a
/// consequence of another's are named only if there are no others.
pub(crate) fn all_succeeded<T>(step: Result<T>, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<T> {
    agreed(step, bootstrap, timeout, |error| error)
}

/// [`all_succeeded`] after an exchange of descriptors, which had half of `timeout`: a rank that has waited in vain is
/// then in time for this. An error that looks as if a rank had ended, though no rank has failed and the bootstrap
/// works, becomes [`Error::Unavailable`], with the remedy.
pub(crate) fn all_exchanged<T>(
    exchange: Result<T>,
    bootstrap: &dyn Bootstrap,
    timeout: Duration,
) -> Result<T> {
    agreed(exchange, bootstrap, timeout, |error| match error {
        Error::Timeout { .. } | Error::PeerLost { .. } | Error::Rendezvous { .. } => Error::Unavailable {
            what: "passing a file descriptor to every rank".into(),
            reason: format!(
                "{error}; ranks in different network namespaces need a shared folder for their sockets \
                 (FAST_ALLREDUCE_SOCKET_DIR)"
            ),
        },
        error => error,
    })
}

/// [`all_succeeded`]; `explain` converts this rank's own error.
fn agreed<T>(
    step: Result<T>,
    bootstrap: &dyn Bootstrap,
    timeout: Duration,
    explain: impl FnOnce(Error) -> Error,
) -> Result<T> {
    let is_consequence = |error: &Error| {
        matches!(error, Error::PeerLost { .. } | Error::PeerFailed { .. } | Error::Timeout { .. })
    };
    let report = match &step {
        Ok(_) => String::new(),
        Err(error) => format!("{}{error}", char::from(if is_consequence(error) { CONSEQUENCE } else { OWN })),
    };
    let reports = bootstrap.all_gather(report.as_bytes(), timeout)?;
    let has_own_failure = |report: &Vec<u8>| report.first() == Some(&OWN);
    let culprit = reports.iter().position(has_own_failure);
    match (step, culprit) {
        (Err(error), None) => Err(explain(error)),
        (Err(error), _) if !is_consequence(&error) => Err(explain(error)),
        (step, culprit) => match culprit.or_else(|| reports.iter().position(|report| !report.is_empty())) {
            None => step,
            Some(rank) => {
                let reason = String::from_utf8_lossy(reports[rank].get(1..).unwrap_or_default()).into_owned();
                Err(Error::PeerFailed { rank, reason })
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::LIMIT;
    use super::super::Threads;
    use super::*;

    #[test]
    fn bytes_of_another_step_are_not_shown() {
        let [fact, split] = <[Threads; 2]>::try_from(Threads::world(2).unwrap()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                split.all_gather(&[1, 0, 0, 0, 0, b'\n', 0], LIMIT).unwrap();
                split.barrier(LIMIT).unwrap();
            });
            let error = agree_on(&fact, &[("the step", "allocate number 0".into())], LIMIT).unwrap_err();
            let Error::Disagreement { rank: 1, theirs, ours, .. } = error else { panic!("{error}") };
            assert_eq!((&*theirs, &*ours), ("another step", "allocate number 0"));
            fact.barrier(LIMIT).unwrap();
        });
    }

    fn outcomes(steps: [Result<()>; 3]) -> Vec<Result<()>> {
        let ranks = Threads::world(steps.len()).unwrap();
        std::thread::scope(|scope| {
            let run = |(rank, step): (Threads, Result<()>)| {
                scope.spawn(move || {
                    let outcome = all_succeeded(step, &rank, LIMIT);
                    // Dropping the rank earlier could end the gather of the others.
                    rank.barrier(LIMIT).unwrap();
                    outcome
                })
            };
            let running: Vec<_> = ranks.into_iter().zip(steps).map(run).collect();
            running.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_rank_whose_own_step_failed_is_named() {
        let lost = |rank| Error::PeerLost { rank, reason: "it ended".into() };
        let own = Error::Allocation { bytes: 8, reason: "no memory".into() };
        let failed = |rank, error: &Error| Err(Error::PeerFailed { rank, reason: error.to_string() });
        assert_eq!(outcomes([Ok(()), Ok(()), Ok(())]), [Ok(()), Ok(()), Ok(())]);
        // Rank 0 fails because of rank 1, and rank 2 because of rank 0.
        let steps = [Err(lost(1)), Err(own.clone()), Err(lost(0))];
        assert_eq!(outcomes(steps), [failed(1, &own), Err(own.clone()), failed(1, &own)]);
        let steps = [Ok(()), Err(lost(2)), Err(own.clone())];
        assert_eq!(outcomes(steps), [failed(2, &own), failed(2, &own), Err(own.clone())]);
        // Each rank blames another.
        let steps = [Ok(()), Err(lost(2)), Err(lost(1))];
        assert_eq!(outcomes(steps), [failed(1, &lost(2)), Err(lost(2)), Err(lost(1))]);
    }
}
