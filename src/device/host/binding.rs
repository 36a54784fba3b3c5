//! Binding of ranks to cores: where the threads of a communicator's ranks run, as all ranks agree.
//!
//! If the scheduler puts two ranks on one core, they alternate on it, and each call waits for that. Ranks learn each
//! other's cores from what they exchange when they join, not from a launcher's numbering, so it does not matter how
//! they were started.

use std::cell::RefCell;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use super::cores;
use super::workers::Workers;
use crate::bootstrap::Bootstrap;
use crate::catalogue::settings::Bind;
use crate::error::{Error, Result};
use crate::topology::{formatted, Cpus};

/// Where the ranks of a communicator run. `Display` writes it as text: `core (0, 1)`, `none (not asked for)`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Binding {
    /// Each thread of a rank is bound to a core, or each rank to a NUMA node.
    Bound {
        /// Kind of binding; never [`Bind::None`].
        to: Bind,
        /// By rank: its cores. With [`Bind::Core`], one for each thread, in order; threads share them if they
        /// outnumber them.
        cores: Vec<Vec<usize>>,
    },
    /// A launcher had already given the ranks disjoint sets of cores, which were not changed.
    Launcher {
        /// By rank: its cores, ascending.
        cores: Vec<Vec<usize>>,
    },
    /// Ranks are not bound: they run on any core that their processes may use.
    Unbound {
        /// Why they are not bound.
        reason: String,
    },
}

impl Default for Binding {
    fn default() -> Self {
        Self::Unbound { reason: "no world yet".into() }
    }
}

impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (by, cores) = match self {
            Self::Bound { to, cores } => (to.name(), cores),
            Self::Launcher { cores } => ("launcher", cores),
            Self::Unbound { reason } => return write!(f, "none ({reason})"),
        };
        write!(f, "{by} ({})", lists(cores, ", "))
    }
}

/// Formats the cores of each rank. A rank's list is in brackets if it contains a comma.
fn lists(ranks: &[Vec<usize>], between: &str) -> String {
    let list = |cores: &Vec<usize>| {
        let mut ascending = cores.clone();
        ascending.sort_unstable();
        ascending.dedup();
        let text = formatted(&ascending);
        if text.contains(',') {
            format!("[{text}]")
        } else {
            text
        }
    };
    ranks.iter().map(list).collect::<Vec<_>>().join(between)
}

/// Cores that a thread may use, one bit each, and [`cores::quota`].
type Given = (Vec<u8>, usize);

thread_local! {
    /// Cores that [`bind`] bound this thread to, and what it had before.
    static BOUND: RefCell<Option<(Vec<u8>, Given)>> = const { RefCell::new(None) };
}

/// Returns the cores that this thread may use, one bit each: the current ones or, if [`bind`] has bound it, those from
/// before.
pub(super) fn given() -> Vec<u8> {
    given_with_quota().0
}

/// Returns [`given`], and the number of cores that a container's CPU quota allows, if that is less.
pub(super) fn given_with_quota() -> Given {
    let now = cores::of_this_thread();
    // At the end of a thread its variables are destroyed; then the current cores are taken.
    let before = BOUND.try_with(|bound| match &*bound.borrow() {
        // A later change of the binding takes precedence.
        Some((bound, before)) if *bound == now => Some(before.clone()),
        _ => None,
    });
    before.ok().flatten().unwrap_or_else(|| (now, cores::quota()))
}

/// Agrees on where the ranks run, with `threads` threads each. `given` has, by rank, the cores that the rank may use.
/// Collective. Rank 0 decides for all, by its view of the machine.
pub(super) fn agree(
    bind: Bind,
    given: &[Vec<u8>],
    threads: usize,
    bootstrap: &dyn Bootstrap,
    timeout: Duration,
) -> Result<Binding> {
    let given: Vec<_> = given.iter().map(|bits| cores::listed(bits)).collect();
    if bind == Bind::None {
        return Ok(not_requested(given));
    }
    let mut own = String::new();
    if bootstrap.rank() == 0 {
        let mut all = given.concat();
        all.sort_unstable();
        all.dedup();
        let cpus = Cpus::read(Path::new("/sys"), Some(&all));
        own = encode(&place(bind, &given, threads, given_with_quota().1, &cpus));
    }
    let answers = bootstrap.all_gather(own.as_bytes(), timeout)?;
    let decided = answers.first().and_then(|answer| decode(answer, given.len(), threads));
    decided.ok_or_else(|| Error::Malformed {
        rank: 0,
        reason: "its placement of the ranks on cores does not decode".into(),
    })
}

impl Binding {
    /// Returns where `ranks` ranks of `threads` threads each would run, if all of them may use all of these CPUs.
    ///
    /// ```
    /// use fast_allreduce::device::host::{Bind, Binding};
    /// use fast_allreduce::topology::Cpus;
    ///
    /// let cpus = Cpus::read("/sys".as_ref(), None);
    /// println!("{}", Binding::planned(&cpus, Bind::Core, 2, 1));
    /// ```
    pub fn planned(cpus: &Cpus, bind: Bind, ranks: usize, threads: usize) -> Self {
        let given = vec![cpus.all(); ranks];
        match bind {
            Bind::None => not_requested(given),
            bind => place(bind, &given, threads, usize::MAX, cpus),
        }
    }

    /// Returns the cores of each rank, by rank; `None` if ranks are not bound.
    ///
    /// ```
    /// assert_eq!(fast_allreduce::Host::new().binding().cores(), None);
    /// ```
    pub fn cores(&self) -> Option<&[Vec<usize>]> {
        match self {
            Self::Bound { cores, .. } | Self::Launcher { cores } => Some(cores),
            Self::Unbound { .. } => None,
        }
    }

    /// Returns, by rank, whether one of its `threads` threads may have to share its core with another thread of the
    /// ranks. `given` has, by rank, the cores that the rank may use if it is not bound.
    pub(super) fn sharing(&self, given: &[Vec<u8>], threads: usize) -> Vec<bool> {
        let of_rank = |rank: usize| match self.cores() {
            Some(cores) => cores[rank].clone(),
            None => cores::listed(&given[rank]),
        };
        let by_rank: Vec<_> = (0..given.len()).map(of_rank).collect();
        let has_core_each = matches!(self, Self::Bound { to: Bind::Core, .. });
        let of_thread = |cores: &'_ Vec<usize>, thread: usize| match has_core_each {
            true => thread..thread + 1,
            false => 0..cores.len(),
        };
        let sets: Vec<_> = by_rank
            .iter()
            .flat_map(|cores| (0..threads).map(move |thread| &cores[of_thread(cores, thread)]))
            .collect();
        cores::shared(&sets).chunks(threads).map(|own| own.contains(&true)).collect()
    }

    /// Binds this thread and the rank's workers. If the system refuses that on any rank, no rank is bound.
    /// Collective.
    pub(super) fn bind_all(
        &mut self,
        workers: Option<&Workers>,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<()> {
        let Self::Bound { to, cores: by_rank } = self else { return Ok(()) };
        let own = &by_rank[bootstrap.rank()];
        let before = given_with_quota();
        let bound = bind(workers, |thread| match to {
            Bind::Core => &own[thread..=thread],
            _ => &own[..],
        });
        let refused = bound.err().map(|errno| errno.desc()).unwrap_or_default();
        let all = bootstrap.all_gather(refused.as_bytes(), timeout)?;
        let Some(rank) = all.iter().position(|refused| !refused.is_empty()) else {
            let _ = BOUND.try_with(|bound| bound.replace(Some((cores::of_this_thread(), before))));
            return Ok(());
        };
        let cores = cores::listed(&before.0);
        // If the system refuses this too, it had not bound the threads.
        let _ = bind(workers, |_| &cores);
        let reason = format!("refused on rank {rank}: {}", String::from_utf8_lossy(&all[rank]));
        *self = Self::Unbound { reason };
        Ok(())
    }
}

/// Binds this thread and the rank's workers, each to the cores that `of_thread` returns for it.
fn bind<'a>(workers: Option<&Workers>, of_thread: impl Fn(usize) -> &'a [usize]) -> nix::Result<()> {
    let bound = cores::bind_this_thread(of_thread(0));
    let Some(workers) = workers else { return bound };
    (0..workers.count()).fold(bound, |bound, index| bound.and(workers.bind(index, of_thread(index + 1))))
}

/// Returns the binding if none was requested: the launcher's, if it gave the ranks disjoint cores.
fn not_requested(given: Vec<Vec<usize>>) -> Binding {
    match given.len() > 1 && are_disjoint(&given) {
        true => Binding::Launcher { cores: given },
        false => Binding::Unbound { reason: "not asked for".into() },
    }
}

fn are_disjoint(sets: &[Vec<usize>]) -> bool {
    let all: std::collections::BTreeSet<_> = sets.iter().flatten().collect();
    all.len() == sets.iter().map(Vec::len).sum::<usize>() && sets.iter().all(|set| !set.is_empty())
}

/// Places ranks on the cores that they may use. Ranks with the same set of cores share the set: each gets a part of
/// it.
fn place(bind: Bind, given: &[Vec<usize>], threads: usize, quota: usize, cpus: &Cpus) -> Binding {
    let unbound = |reason: String| Binding::Unbound { reason };
    if given.len() == 1 {
        return unbound("one rank waits for no other".into());
    }
    if given.iter().any(Vec::is_empty) {
        return unbound("the system does not say which cores a rank may use".into());
    }
    if are_disjoint(given) {
        return Binding::Launcher { cores: given.to_vec() };
    }
    let mut sets = given.to_vec();
    sets.sort_unstable();
    sets.dedup();
    if !are_disjoint(&sets) {
        return unbound("ranks may use different cores, of which some are the same".into());
    }
    let all = given.len() * threads;
    if all > quota {
        return unbound(format!("{all} threads, and a quota of {quota} cores"));
    }
    let mut cores = vec![Vec::new(); given.len()];
    for set in &sets {
        let members: Vec<_> = (0..given.len()).filter(|&rank| given[rank] == *set).collect();
        match bind {
            Bind::Numa => {
                let Some(nodes) = on_nodes(set, members.len(), threads, cpus) else {
                    return unbound("a NUMA node has fewer cores than its ranks have threads".into());
                };
                members.iter().zip(nodes).for_each(|(&rank, node)| cores[rank] = node);
            }
            _ => {
                let parts = cpus.divide(set, members.len(), threads);
                let parts = parts.unwrap_or_else(|| shared(set, members.len(), threads, cpus));
                members.iter().zip(parts).for_each(|(&rank, part)| cores[rank] = part);
            }
        }
    }
    Binding::Bound { to: bind, cores }
}

/// Gives each of `ranks` ranks a core for each thread, where threads outnumber cores: consecutive threads share a core,
/// and no core has two threads more than another. The scheduler balances processes that yield less well: 4 ranks are
/// often 3 on one core and 1 on the other.
fn shared(set: &[usize], ranks: usize, threads: usize, cpus: &Cpus) -> Vec<Vec<usize>> {
    let cores = cpus.divide(set, set.len(), 1).unwrap_or_default().concat();
    let of_thread = |thread: usize| cores[thread * cores.len() / (ranks * threads)];
    (0..ranks).map(|rank| (rank * threads..(rank + 1) * threads).map(of_thread).collect()).collect()
}

/// Assigns ranks to NUMA nodes, consecutive ranks to the same node. Returns, by rank, all cores of its node in the
/// set; `None` if a node has fewer cores than its ranks have threads.
fn on_nodes(set: &[usize], ranks: usize, threads: usize, cpus: &Cpus) -> Option<Vec<Vec<usize>>> {
    let mut nodes = std::collections::BTreeMap::<usize, Vec<usize>>::new();
    for &core in set {
        nodes.entry(cpus.node(core)).or_default().push(core);
    }
    let nodes: Vec<_> = nodes.into_values().collect();
    let place = |rank: usize| rank * nodes.len() / ranks;
    // With fewer ranks than nodes, each rank has a separate node, and some nodes have no rank.
    let fits =
        |node: usize| (0..ranks).filter(|&rank| place(rank) == node).count() * threads <= nodes[node].len();
    (0..nodes.len()).all(fits).then(|| (0..ranks).map(|rank| nodes[place(rank)].clone()).collect())
}

/// Encodes a binding for the other ranks: its kind and the cores of each rank, or the reason for none.
fn encode(binding: &Binding) -> String {
    let line = |cores: &Vec<usize>| cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let (word, cores) = match binding {
        Binding::Unbound { reason } => return format!("unbound;{reason}"),
        Binding::Bound { to, cores } => (to.name(), cores),
        Binding::Launcher { cores } => ("launcher", cores),
    };
    let lines: Vec<_> = cores.iter().map(line).collect();
    format!("{word};{}", lines.join(";"))
}

/// Decodes a binding. Returns `None` unless every rank has cores, and with [`Bind::Core`] one for each thread.
fn decode(bytes: &[u8], world_size: usize, threads: usize) -> Option<Binding> {
    let (word, rest) = std::str::from_utf8(bytes).ok()?.split_once(';')?;
    if word == "unbound" {
        return Some(Binding::Unbound { reason: rest.to_owned() });
    }
    let list = |line: &str| line.split(',').map(|core| core.parse().ok()).collect::<Option<Vec<usize>>>();
    let cores: Vec<_> = rest.split(';').map(list).collect::<Option<_>>()?;
    if cores.len() != world_size || cores.iter().any(Vec::is_empty) {
        return None;
    }
    match word {
        "launcher" => Some(Binding::Launcher { cores }),
        "numa" => Some(Binding::Bound { to: Bind::Numa, cores }),
        "core" if cores.iter().all(|own| own.len() == threads) => {
            Some(Binding::Bound { to: Bind::Core, cores })
        }
        _ => None,
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_binding, |bytes| decode(bytes, 3, 2));

#[cfg(test)]
mod tests;
