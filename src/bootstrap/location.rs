//! Determines which ranks are on one node: those that can share memory.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::socket_name::SOCKET_DIRECTORY;
use crate::error::{Error, Result};

/// Environment variable: ranks with different values count as different nodes.
const VARIABLE: &str = "FAST_ALLREDUCE_NODE";

/// Where a rank runs, for comparison among the ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RankLocation {
    /// The host name.
    host: String,
    /// The boot id of the kernel; `None` if it cannot be read, as in some containers. Ranks share memory by file
    /// descriptors, which needs the same kernel.
    boot: Option<String>,
    /// The namespace of the sockets that pass descriptors: the socket directory (by device and inode, since its path
    /// differs by container), or the network namespace. `None` if it cannot be read.
    namespace: Option<String>,
    /// The value of `FAST_ALLREDUCE_NODE`.
    given: Option<String>,
}

impl RankLocation {
    /// Finds the location of this rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if the socket directory does not exist.
    pub fn own(socket_directory: Option<&Path>) -> Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
        let boot = boot.map(|boot| boot.trim().to_owned()).filter(|boot| !boot.is_empty());
        let namespace = match socket_directory {
            Some(path) => {
                let directory = std::fs::metadata(path).map_err(|_| Error::InvalidSetting {
                    name: SOCKET_DIRECTORY,
                    value: path.display().to_string(),
                    expected: "an existing directory that all ranks share",
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
        let host = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { host, boot, namespace, given })
    }

    /// Encodes the location for the other ranks.
    pub fn to_bytes(&self) -> Vec<u8> {
        // This cannot fail: the vector grows, and postcard can encode text.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    pub fn from_bytes(rank: usize, bytes: &[u8]) -> Result<Self> {
        let reason = "its location does not decode";
        postcard::from_bytes(bytes).map_err(|_| Error::Malformed { rank, reason: reason.into() })
    }
}

/// The locations of all ranks, and how to compare them.
pub(super) struct RankLocations {
    locations: Vec<RankLocation>,
    /// Compare boot ids, since those of all ranks are known; otherwise host names.
    by_boot: bool,
    /// Compare the namespaces of sockets, since those of all ranks are known.
    by_namespace: bool,
}

impl RankLocations {
    pub fn new(locations: Vec<RankLocation>) -> Self {
        // Decided for all ranks together, so that all ranks find the same nodes.
        let by_boot = locations.iter().all(|location| location.boot.is_some());
        let by_namespace = locations.iter().all(|location| location.namespace.is_some());
        Self { locations, by_boot, by_namespace }
    }

    /// Returns the ranks on the node of `rank`, in ascending order.
    pub fn on_node_of(&self, rank: usize) -> Vec<usize> {
        let own = self.node(&self.locations[rank]);
        (0..self.locations.len()).filter(|&other| self.node(&self.locations[other]) == own).collect()
    }

    /// Returns for each rank the first rank on its node, by which the node is named.
    pub fn nodes(&self) -> Vec<usize> {
        let first = |rank| self.on_node_of(rank).first().copied().unwrap_or(rank);
        (0..self.locations.len()).map(first).collect()
    }

    /// Returns what all ranks of a node have in common.
    fn node<'a>(&self, location: &'a RankLocation) -> (Option<&'a str>, Option<&'a str>, Option<&'a str>) {
        let kernel = if self.by_boot { location.boot.as_deref() } else { Some(location.host.as_str()) };
        (kernel, location.namespace.as_deref().filter(|_| self.by_namespace), location.given.as_deref())
    }

    /// Describes how a node differs from other nodes with the same host name.
    #[cfg(any(feature = "mpi", test))]
    fn described(&self, location: &RankLocation) -> String {
        let (kernel, namespace, given) = self.node(location);
        let kernel = kernel.filter(|_| self.by_boot).map(|boot| format!("boot {boot}"));
        let given = given.map(|given| format!("{VARIABLE}={given}"));
        let facts: Vec<_> = [kernel, namespace.map(str::to_owned), given].into_iter().flatten().collect();
        facts.join(", ")
    }

    /// Returns the error for a world of MPI ranks that are on several nodes.
    #[cfg(any(feature = "mpi", test))]
    pub fn refusal(&self) -> Error {
        const NAMED: usize = 4;
        let mut nodes: Vec<(&RankLocation, usize)> = Vec::new();
        for location in &self.locations {
            match nodes.iter_mut().find(|(known, _)| self.node(known) == self.node(location)) {
                Some((_, ranks)) => *ranks += 1,
                None => nodes.push((location, 1)),
            }
        }
        let describe = |(location, ranks): &(&RankLocation, usize)| {
            let is_unique = nodes.iter().filter(|(other, _)| other.host == location.host).count() == 1;
            match is_unique {
                true => format!("{ranks} on {}", location.host),
                false => format!("{ranks} on {} ({})", location.host, self.described(location)),
            }
        };
        let mut list = nodes.iter().take(NAMED).map(describe).collect::<Vec<_>>().join(", ");
        if nodes.len() > NAMED {
            list += &format!(", and {} more nodes", nodes.len() - NAMED);
        }
        Error::Unavailable {
            what: "a world of several nodes".into(),
            reason: format!(
                "of the {} MPI ranks there are {list}; this bootstrap joins ranks of one node: start all on one node, \
                 or create a world for each node with Mpi::of_node; containers of one machine with separate \
                 network namespaces need a shared directory, named by {SOCKET_DIRECTORY}",
                self.locations.len()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(host: &str, boot: Option<&str>, network: Option<&str>) -> RankLocation {
        let [boot, namespace] = [boot, network].map(|text| text.map(str::to_owned));
        RankLocation { host: host.into(), boot, namespace, given: None }
    }

    fn refusal(locations: Vec<RankLocation>) -> String {
        RankLocations::new(locations).refusal().to_string()
    }

    #[test]
    fn nodes_are_described_by_host_name_or_by_their_differences() {
        let locations = [("alpha", "1"), ("beta", "2"), ("another name", "1")];
        let locations = locations.map(|(host, boot)| location(host, Some(boot), Some("n"))).to_vec();
        let all = RankLocations::new(locations.clone());
        assert_eq!(
            (all.on_node_of(0), all.on_node_of(1), all.on_node_of(2)),
            (vec![0, 2], vec![1], vec![0, 2])
        );
        let error = refusal(locations);
        assert!(error.contains("of the 3 MPI ranks there are 2 on alpha, 1 on beta; "), "{error}");
        let error = refusal(["1", "2"].map(|boot| location("alpha", Some(boot), Some("n"))).to_vec());
        assert!(error.contains("1 on alpha (boot 1, n), 1 on alpha (boot 2, n); "), "{error}");
        let many = (0..6).map(|node| location(&format!("n{node}"), Some(&node.to_string()), None)).collect();
        assert!(refusal(many).contains(", 1 on n3, and 2 more nodes"));
    }

    /// Simulates containers with their own host names that hide the kernel's files.
    #[test]
    fn host_names_count_only_where_a_boot_id_cannot_be_read() {
        let renamed = [location("a", Some("1"), Some("n")), location("b", Some("1"), Some("n"))];
        assert_eq!(RankLocations::new(renamed.to_vec()).on_node_of(0), [0, 1]);
        let hidden = [
            location("a", None, Some("n")),
            location("a", Some("1"), Some("n")),
            location("b", None, Some("n")),
        ];
        let hidden = RankLocations::new(hidden.to_vec());
        assert_eq!(
            (hidden.on_node_of(0), hidden.on_node_of(1), hidden.on_node_of(2)),
            (vec![0, 1], vec![0, 1], vec![2])
        );
        let networks = [location("a", Some("1"), None), location("a", Some("1"), Some("n"))];
        assert_eq!(RankLocations::new(networks.to_vec()).on_node_of(1), [0, 1]);
    }

    #[test]
    fn the_error_for_several_networks_of_one_machine_names_the_directory() {
        let error = refusal(["1", "2"].map(|network| location("a", Some("1"), Some(network))).to_vec());
        assert!(error.contains("1 on a (boot 1, 1)") && error.contains(SOCKET_DIRECTORY), "{error}");
    }

    #[test]
    fn locations_decode_to_what_was_encoded() {
        let own = RankLocation { given: Some("x".into()), ..location("a", Some("1"), None) };
        assert_eq!(RankLocation::from_bytes(0, &own.to_bytes()), Ok(own));
        assert!(matches!(RankLocation::from_bytes(3, b"\xff"), Err(Error::Malformed { rank: 3, .. })));
    }
}
