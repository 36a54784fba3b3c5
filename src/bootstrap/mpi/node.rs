//! Which ranks are on one node: those that can hand each other memory.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use ::mpi::environment::processor_name;

use super::library::turn;
use crate::bootstrap::place::SOCKET_DIRECTORY;
use crate::error::{Error, Result};

/// Ranks in which it differs are taken to be on different nodes.
const VARIABLE: &str = "FAST_ALLREDUCE_NODE";

/// Between what identifies a node and its name.
const SEPARATOR: u8 = 0;

/// This rank's place, for the others: what identifies the node, and its name.
///
/// One kernel, as memory is handed over in descriptors, and one place for the names of the sockets that they go through: the
/// `socket_directory`, whatever its path in each container, or else the network namespace.
pub(super) fn own(socket_directory: Option<&Path>) -> Result<Vec<u8>> {
    let read = |call, result: std::io::Result<String>| result.map_err(Error::io(call));
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let boot = read("reading /proc/sys/kernel/random/boot_id", boot)?;
    let names = match socket_directory {
        Some(path) => {
            let directory = std::fs::metadata(path).map_err(|_| Error::InvalidSetting {
                name: SOCKET_DIRECTORY,
                value: path.display().to_string(),
                expected: "a directory that exists, which all ranks share",
            })?;
            format!("{SOCKET_DIRECTORY} of device {} and inode {}", directory.dev(), directory.ino())
        }
        None => {
            let network =
                std::fs::read_link("/proc/self/ns/net").map(|link| link.to_string_lossy().into_owned());
            format!("network {}", read("reading /proc/self/ns/net", network)?)
        }
    };
    let mut identity = format!("boot {}, {names}", boot.trim());
    if let Some(given) = std::env::var_os(VARIABLE) {
        identity += &format!(", {VARIABLE}={}", given.to_string_lossy());
    }
    let name = {
        let _turn = turn()?;
        processor_name().unwrap_or_default()
    };
    Ok([identity.as_bytes(), &[SEPARATOR], name.as_bytes()].concat())
}

/// Whether two ranks' places are one.
pub(super) fn same(one: &[u8], other: &[u8]) -> bool {
    split(one).0 == split(other).0
}

fn split(place: &[u8]) -> (&[u8], &[u8]) {
    let mut parts = place.splitn(2, |&byte| byte == SEPARATOR);
    (parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
}

/// The refusal of a world whose ranks, in order, are at `places` that are not one.
pub(super) fn several(places: &[Vec<u8>]) -> Error {
    const NAMED: usize = 4;
    let mut nodes: Vec<(&[u8], usize)> = Vec::new();
    for place in places {
        match nodes.iter_mut().find(|(known, _)| same(known, place)) {
            Some((_, ranks)) => *ranks += 1,
            None => nodes.push((place, 1)),
        }
    }
    let describe = |(place, ranks): &(&[u8], usize)| {
        let (identity, name) = split(place);
        let is_unique = nodes.iter().filter(|(other, _)| split(other).1 == name).count() == 1;
        let name = String::from_utf8_lossy(name);
        match is_unique {
            true => format!("{ranks} on {name}"),
            false => format!("{ranks} on {name} ({})", String::from_utf8_lossy(identity)),
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
            places.len()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_told_by_name_or_by_what_makes_them_different() {
        let places = [&b"boot 1\0alpha"[..], b"boot 2\0beta", b"boot 1\0other name"].map(<[u8]>::to_vec);
        assert!(same(&places[0], &places[2]) && !same(&places[0], &places[1]));
        let error = several(&places).to_string();
        assert!(error.contains("of the 3 MPI ranks there are 2 on alpha, 1 on beta; "), "{error}");
        let places = [&b"boot 1\0alpha"[..], b"boot 2\0alpha", b"nonsense"].map(<[u8]>::to_vec);
        let error = several(&places).to_string();
        assert!(error.contains("1 on alpha (boot 1), 1 on alpha (boot 2), 1 on ; "), "{error}");
        let many: Vec<_> = (0..6).map(|node| format!("{node}\0n{node}").into_bytes()).collect();
        assert!(several(&many).to_string().contains(", 1 on n3, and 2 nodes more"));
    }
}
