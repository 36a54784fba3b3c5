//! Regions that exceed the memory limit of a container, in a real control group.

use std::path::{Path, PathBuf};

use fast_allreduce::{Error, Result};

use crate::launch::{this_test, Process};
use crate::runner::{Found, Missing};
use crate::world::build;

tests! {
    control_group => regions_beyond_the_limit_are_errors;
}

/// A control group with a memory limit, below one that this process may change.
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Result<Self, String> {
        let memberships = std::fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let bases = [(":memory:", "/sys/fs/cgroup/memory"), ("0::", "/sys/fs/cgroup")];
        let (mut tried, limits) = (Vec::new(), ["memory.limit_in_bytes", "memory.max"]);
        for (prefix, base) in bases {
            let own = memberships.lines().find_map(|line| line.split_once(prefix)).map(|(_, path)| path);
            for above in own.into_iter().flat_map(|own| Path::new(own).ancestors()) {
                let above = above.strip_prefix("/").unwrap_or(above);
                let folder =
                    Path::new(base).join(above).join(format!("fast-allreduce-{}", std::process::id()));
                if let Err(error) = std::fs::create_dir(&folder) {
                    tried.push(format!("{}: {error}", folder.display()));
                    continue;
                }
                let group = Self(folder);
                if limits.iter().any(|limit| std::fs::write(group.0.join(limit), bytes.to_string()).is_ok()) {
                    return Ok(group);
                }
                tried.push(format!("{}: no limit can be set", group.0.display()));
            }
        }
        Err(tried.join(", "))
    }

    fn enter(&self) {
        std::fs::write(self.0.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }

    fn leave(&self) {
        let above = self.0.parent().unwrap();
        std::fs::write(above.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A group that contains a process of a failed test stays until that process ends.
        let _ = std::fs::remove_dir(&self.0);
    }
}

const LIMIT: u64 = 64 << 20;

/// Set in the process that runs the test alone, since the limit applies to a whole process.
const ALONE: &str = "FAST_ALLREDUCE_TEST_ALONE";

fn control_group() -> Found<Group> {
    Group::new(LIMIT).map_err(|reason| Missing::new("control-group", reason))
}

/// One rank with a region that is too large, and several ranks with room for only some of their regions.
fn regions_beyond_the_limit_are_errors(group: Group) {
    if std::env::var_os(ALONE).is_none() {
        let mut command = this_test("control_groups::regions_beyond_the_limit_are_errors");
        Process::start(command.env(ALONE, "1")).finish().unwrap();
        return;
    }
    group.enter();
    let tried: [(usize, Vec<Result<()>>); 3] = [(1, 32 << 20), (4, 4 << 20), (2, 1 << 20)]
        .map(|(world_size, max_bytes)| (max_bytes, build(world_size, max_bytes)));
    group.leave();
    for (max_bytes, built) in &tried[..2] {
        let first = built[0].as_ref().unwrap_err();
        assert!(matches!(first, Error::Allocation { .. } | Error::PeerFailed { .. }), "{max_bytes}: {first}");
        for error in built.iter().map(|built| built.as_ref().unwrap_err().to_string()) {
            assert!(error.contains("67108864 that ") && error.contains("/memory."), "{max_bytes}: {error}");
        }
    }
    assert_eq!(tried[2].1, [Ok(()), Ok(())]);
}
