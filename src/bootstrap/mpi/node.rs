//! Which ranks are on one node: those that can hand each other memory.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use ::mpi::environment::processor_name;
use serde::{Deserialize, Serialize};

use super::library::turn;
use crate::bootstrap::place::SOCKET_DIRECTORY;
use crate::error::{Error, Result};

/// Ranks in which it differs are taken to be on different nodes.
const VARIABLE: &str = "FAST_ALLREDUCE_NODE";

/// Where a rank is, for the others to compare.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// The host's name, as MPI has it.
    host: String,
    /// The kernel, since memory is handed over in descriptors: by its boot id, which some containers hide.
    boot: Option<String>,
    /// Where the names of the sockets are by which that is done: the socket directory, whatever its path in each container, or else the
    /// network namespace. `None` where that cannot be read.
    names: Option<String>,
    /// What the environment adds.
    given: Option<String>,
}

impl Place {
    /// This rank's.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a directory that is not there.
    pub fn own(socket_directory: Option<&Path>) -> Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
        let boot = boot.map(|boot| boot.trim().to_owned()).filter(|boot| !boot.is_empty());
        let names = match socket_directory {
            Some(path) => {
                let directory = std::fs::metadata(path).map_err(|_| Error::InvalidSetting {
                    name: SOCKET_DIRECTORY,
                    value: path.display().to_string(),
                    expected: "a directory that exists, which all ranks share",
                })?;
                Some(format!(
                    "{SOCKET_DIRECTORY} of device {} and inode {}",
                    directory.dev(),
                    directory.ino()
                ))
            }
            None => {
                let network = std::fs::read_link("/proc/self/ns/net").ok();
                network.map(|link| format!("network {}", link.to_string_lossy()))
            }
        };
        let given = std::env::var_os(VARIABLE).map(|given| given.to_string_lossy().into_owned());
        let host = {
            let _turn = turn()?;
            processor_name().unwrap_or_default()
        };
        Ok(Self { host, boot, names, given })
    }

    /// As ranks send it.
    pub fn to_bytes(&self) -> Vec<u8> {
        // It grows as it must, and texts have a form: nothing can fail.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    pub fn from_bytes(rank: usize, bytes: &[u8]) -> Result<Self> {
        let reason = "where it is does not decode";
        postcard::from_bytes(bytes).map_err(|_| Error::Malformed { rank, reason: reason.into() })
    }
}

/// The places of all ranks, by rank, and by what they are compared.
pub(super) struct Places {
    places: Vec<Place>,
    /// Every rank's boot id is known. Else hosts are told apart by their names.
    by_boot: bool,
    by_names: bool,
}

impl Places {
    pub fn new(places: Vec<Place>) -> Self {
        // For all ranks alike: then they come to the same nodes.
        let by_boot = places.iter().all(|place| place.boot.is_some());
        let by_names = places.iter().all(|place| place.names.is_some());
        Self { places, by_boot, by_names }
    }

    /// The ranks on the node of this one, ascending.
    pub fn beside(&self, rank: usize) -> Vec<usize> {
        let own = self.node(&self.places[rank]);
        (0..self.places.len()).filter(|&other| self.node(&self.places[other]) == own).collect()
    }

    /// What ranks of one node have in common.
    fn node<'a>(&self, place: &'a Place) -> (Option<&'a str>, Option<&'a str>, Option<&'a str>) {
        let kernel = if self.by_boot { place.boot.as_deref() } else { Some(place.host.as_str()) };
        (kernel, place.names.as_deref().filter(|_| self.by_names), place.given.as_deref())
    }

    /// What makes a node different from others of its host's name, in words.
    fn described(&self, place: &Place) -> String {
        let (kernel, names, given) = self.node(place);
        let kernel = kernel.filter(|_| self.by_boot).map(|boot| format!("boot {boot}"));
        let given = given.map(|given| format!("{VARIABLE}={given}"));
        let facts: Vec<_> = [kernel, names.map(str::to_owned), given].into_iter().flatten().collect();
        facts.join(", ")
    }

    /// The refusal of a world whose ranks are on several nodes.
    pub fn refusal(&self) -> Error {
        const NAMED: usize = 4;
        let mut nodes: Vec<(&Place, usize)> = Vec::new();
        for place in &self.places {
            match nodes.iter_mut().find(|(known, _)| self.node(known) == self.node(place)) {
                Some((_, ranks)) => *ranks += 1,
                None => nodes.push((place, 1)),
            }
        }
        let describe = |(place, ranks): &(&Place, usize)| {
            let is_unique = nodes.iter().filter(|(other, _)| other.host == place.host).count() == 1;
            match is_unique {
                true => format!("{ranks} on {}", place.host),
                false => format!("{ranks} on {} ({})", place.host, self.described(place)),
            }
        };
        let mut list = nodes.iter().take(NAMED).map(describe).collect::<Vec<_>>().join(", ");
        if nodes.len() > NAMED {
            list += &format!(", and {} nodes more", nodes.len() - NAMED);
        }
        Error::Unavailable {
            what: "a world of several nodes".into(),
            reason: format!(
                "of the {} MPI ranks there are {list}; this version joins ranks of one node: start all on one, or make a \
                 world of each node's ranks with Mpi::of_node; containers of one machine with networks of their own need a \
                 directory in common, named by {SOCKET_DIRECTORY}",
                self.places.len()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(host: &str, boot: Option<&str>, network: Option<&str>) -> Place {
        let [boot, names] = [boot, network].map(|text| text.map(str::to_owned));
        Place { host: host.into(), boot, names, given: None }
    }

    fn refusal(places: Vec<Place>) -> String {
        Places::new(places).refusal().to_string()
    }

    #[test]
    fn nodes_are_told_by_name_or_by_what_makes_them_different() {
        let places = [("alpha", "1"), ("beta", "2"), ("another name", "1")];
        let places = places.map(|(host, boot)| place(host, Some(boot), Some("n"))).to_vec();
        let all = Places::new(places.clone());
        assert_eq!((all.beside(0), all.beside(1), all.beside(2)), (vec![0, 2], vec![1], vec![0, 2]));
        let error = refusal(places);
        assert!(error.contains("of the 3 MPI ranks there are 2 on alpha, 1 on beta; "), "{error}");
        let error = refusal(["1", "2"].map(|boot| place("alpha", Some(boot), Some("n"))).to_vec());
        assert!(error.contains("1 on alpha (boot 1, n), 1 on alpha (boot 2, n); "), "{error}");
        let many = (0..6).map(|node| place(&format!("n{node}"), Some(&node.to_string()), None)).collect();
        assert!(refusal(many).contains(", 1 on n3, and 2 nodes more"));
    }

    /// As in containers that name themselves and hide the kernel's files.
    #[test]
    fn host_names_count_only_where_a_boot_id_cannot_be_read() {
        let renamed = [place("a", Some("1"), Some("n")), place("b", Some("1"), Some("n"))];
        assert_eq!(Places::new(renamed.to_vec()).beside(0), [0, 1]);
        let hidden =
            [place("a", None, Some("n")), place("a", Some("1"), Some("n")), place("b", None, Some("n"))];
        let hidden = Places::new(hidden.to_vec());
        assert_eq!((hidden.beside(0), hidden.beside(1), hidden.beside(2)), (vec![0, 1], vec![0, 1], vec![2]));
        let networks = [place("a", Some("1"), None), place("a", Some("1"), Some("n"))];
        assert_eq!(Places::new(networks.to_vec()).beside(1), [0, 1]);
    }

    #[test]
    fn networks_of_one_machine_are_told_of_the_directory() {
        let error = refusal(["1", "2"].map(|network| place("a", Some("1"), Some(network))).to_vec());
        assert!(error.contains("1 on a (boot 1, 1)") && error.contains(SOCKET_DIRECTORY), "{error}");
    }

    #[test]
    fn places_travel() {
        let own = Place { given: Some("x".into()), ..place("a", Some("1"), None) };
        assert_eq!(Place::from_bytes(0, &own.to_bytes()), Ok(own));
        assert!(matches!(Place::from_bytes(3, b"\xff"), Err(Error::Malformed { rank: 3, .. })));
    }
}
