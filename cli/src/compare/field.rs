//! Who takes part in a comparison.

use super::line::{Against, LeftOut};
use crate::arguments::RivalName;
use crate::bench::contender::{Contender, Rival};
use crate::bench::device::Endpoint;
use crate::bench::session::Session;
use crate::failure::Failure;

/// Those that this machine and this build have, of those asked for.
pub struct Field<E: Endpoint> {
    entrants: Vec<Entrant<E::Rival>>,
    unavailable: Vec<LeftOut>,
}

enum Entrant<R> {
    Memcpy,
    Library(R),
}

impl<E: Endpoint> Field<E> {
    /// Refuses to go on if there is none. Collective.
    pub fn new(names: &[RivalName], session: &Session, endpoint: &E) -> Result<Self, Failure> {
        let (mut entrants, mut unavailable) = (Vec::new(), Vec::new());
        for &name in names {
            if name == RivalName::Memcpy {
                entrants.push(Entrant::Memcpy);
                continue;
            }
            let rival = endpoint.rival(name, session);
            let reason = rival.as_ref().err().map_or("", |reason| reason);
            match (first_reason(&session.exchange(reason.as_bytes())?), rival) {
                (None, Ok(rival)) => entrants.push(Entrant::Library(rival)),
                (reason, rival) => {
                    let reason = reason.or(rival.err()).unwrap_or_default();
                    unavailable.push(LeftOut::of_run(name.name(), &reason));
                }
            }
        }
        if entrants.is_empty() {
            let reasons: Vec<_> =
                unavailable.iter().map(|left| format!("--vs {}: {}", left.name, left.reason)).collect();
            return Err(Failure::Usage(reasons.join("; ")));
        }
        Ok(Self { entrants, unavailable })
    }

    /// Those that were asked for in vain, and why.
    pub fn unavailable(&self) -> &[LeftOut] {
        &self.unavailable
    }

    /// Those that this crate is compared with.
    pub fn facts(&self) -> Vec<Against> {
        let fact = |entrant: &Entrant<E::Rival>| match entrant {
            Entrant::Memcpy => Against { name: "memcpy", library: None },
            Entrant::Library(rival) => Against { name: rival.name(), library: Some(rival.library()) },
        };
        self.entrants.iter().map(fact).collect()
    }

    /// This crate's, then the others, all on the memory of the first endpoint.
    pub fn contenders<'a>(&'a self, endpoints: &'a [E]) -> Vec<Contender<'a, E>> {
        let others = self.entrants.iter().map(|entrant| match entrant {
            Entrant::Memcpy => Contender::Memcpy(&endpoints[0]),
            Entrant::Library(rival) => Contender::Rival(&endpoints[0], rival),
        });
        endpoints.iter().map(Contender::Ours).chain(others).collect()
    }
}

/// What the first rank that has a reason says; which one, unless all say the same.
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
