//! The contenders of a comparison.

use super::row::Against;
use crate::arguments::RivalName;
use crate::failure::Failure;
use crate::harness::contender::{Contender, Rival};
use crate::harness::rivals::Compared;
use crate::harness::session::Session;
use crate::results::{LeftOut, MEMCPY};

/// The requested contenders that this machine and this build have.
pub struct Contenders<E: Compared> {
    others: Vec<Other<E>>,
    unavailable: Vec<LeftOut>,
}

/// A library, or `None` for a copy.
type Other<E> = Option<Box<dyn Rival<E>>>;

impl<E: Compared> Contenders<E> {
    /// Readies the named contenders, or the usual ones if none is named. Fails if there is none. Collective.
    pub fn new(names: &[RivalName], session: &Session, measured: &E) -> Result<Self, Failure> {
        let (mut others, mut unavailable) = (Vec::new(), Vec::new());
        if names.is_empty() {
            for &name in E::USUAL_RIVALS {
                if let Ok(rival) = ready(name, session, measured)? {
                    others.push(Some(rival));
                    break;
                }
            }
            others.push(None);
        }
        for &name in names {
            if name == RivalName::Memcpy {
                others.push(None);
                continue;
            }
            match ready(name, session, measured)? {
                Ok(rival) => others.push(Some(rival)),
                Err(reason) => unavailable.push(LeftOut::of_run(name.name(), reason)),
            }
        }
        if others.is_empty() {
            let reasons: Vec<_> =
                unavailable.iter().map(|left| format!("--vs {}: {}", left.name, left.reason)).collect();
            return Err(Failure::Usage(reasons.join("; ")));
        }
        Ok(Self { others, unavailable })
    }

    /// Returns the requested contenders that are not available, with the reasons.
    pub fn unavailable(&self) -> &[LeftOut] {
        &self.unavailable
    }

    /// Describes the contenders other than this crate.
    pub fn facts(&self) -> Vec<Against> {
        let fact = |other: &Other<E>| match other {
            None => Against { name: MEMCPY, library: None },
            Some(rival) => Against { name: rival.name(), library: Some(rival.library()) },
        };
        self.others.iter().map(fact).collect()
    }

    /// Returns this crate's measured ranks, then the other contenders. All use the memory of the first measured rank.
    pub fn all<'a>(&'a self, measured_ranks: &'a [E]) -> Vec<Contender<'a, E>> {
        let others = self.others.iter().map(|other| match other {
            None => Contender::Memcpy(&measured_ranks[0]),
            Some(rival) => Contender::Rival(&measured_ranks[0], &**rival),
        });
        measured_ranks.iter().map(Contender::Ours).chain(others).collect()
    }
}

/// Readies another library. Returns the reason if a rank does not have it. Collective.
fn ready<E: Compared>(
    name: RivalName,
    session: &Session,
    measured: &E,
) -> Result<Result<Box<dyn Rival<E>>, String>, Failure> {
    let rival = measured.rival(name, session);
    let reason = rival.as_ref().err().map_or("", |reason| reason);
    match first_reason(&session.exchange(reason.as_bytes())?) {
        None => Ok(rival),
        Some(reason) => Ok(Err(reason)),
    }
}

/// Returns the reason of the first rank that has one; with its number, unless all ranks have the same reason.
fn first_reason(all: &[Vec<u8>]) -> Option<String> {
    let (rank, reason) = all.iter().enumerate().find(|(_, reason)| !reason.is_empty())?;
    let text = String::from_utf8_lossy(reason);
    let is_shared = all.iter().all(|other| other == reason);
    Some(if is_shared { text.into_owned() } else { format!("rank {rank}: {text}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_names_its_rank_unless_all_share_it() {
        let said = |all: &[&str]| {
            let all: Vec<_> = all.iter().map(|reason| reason.as_bytes().to_vec()).collect();
            first_reason(&all)
        };
        assert_eq!(said(&["", ""]), None);
        assert_eq!(said(&["no", "no"]).as_deref(), Some("no"));
        assert_eq!(said(&["", "no", "not"]).as_deref(), Some("rank 1: no"));
    }
}
