//! The resources of a process: growth is a leak.

use std::io;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Mappings that the allocator may add: arenas, and the stacks of threads that it caches.
const SLACK_MAPPINGS: u64 = 64;

/// Resident memory that the allocator may keep; runs of some minutes took half a MiB.
const SLACK_KIB: u64 = 8 << 10;

/// The resources at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub descriptors: u64,
    pub threads: u64,
    /// Mappings of memory that is shared with peers.
    pub shared_mappings: u64,
    pub mappings: u64,
    pub resident_kib: u64,
}

impl Usage {
    /// Reads the resources of this process.
    pub fn now() -> Result<Self, Failure> {
        Self::read().map_err(|error| Failure::System("reading /proc/self", error))
    }

    fn read() -> io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok())
                .ok_or_else(|| io::Error::other(format!("no {name} in its status")))
        };
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        Ok(Self {
            descriptors: std::fs::read_dir("/proc/self/fd")?.count() as u64,
            threads: field("Threads")?,
            shared_mappings: maps.lines().filter(|line| line.contains("/memfd:")).count() as u64,
            mappings: maps.lines().count() as u64,
            resident_kib: field("VmRSS")?,
        })
    }

    /// Returns for each resource its name, both counts, and the growth that is allowed: none for resources that
    /// only the library takes.
    fn pairs(&self, before: &Self) -> [(&'static str, u64, u64, u64); 5] {
        [
            ("file descriptors", before.descriptors, self.descriptors, 0),
            ("threads", before.threads, self.threads, 0),
            ("shared mappings", before.shared_mappings, self.shared_mappings, 0),
            ("mappings", before.mappings, self.mappings, SLACK_MAPPINGS),
            ("KiB of resident memory", before.resident_kib, self.resident_kib, SLACK_KIB),
        ]
    }

    /// Describes the resources that have grown.
    pub fn growth(&self, before: &Self) -> Option<String> {
        let pairs = self.pairs(before);
        let grown = pairs.iter().filter(|(_, before, after, slack)| *after > before + slack);
        let words: Vec<_> =
            grown.map(|(name, before, after, _)| format!("{after} {name} after {before}")).collect();
        (!words.is_empty()).then(|| words.join(", "))
    }

    /// Describes all resources, before and now.
    pub fn compared(&self, before: &Self) -> String {
        self.pairs(before).map(|(name, before, after, _)| format!("{name} {before} to {after}")).join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_are_counted() {
        let before = Usage::now().unwrap();
        assert!(before.descriptors >= 3 && before.threads >= 1 && before.resident_kib > 100, "{before:?}");
        // More than other tests of this process open and close.
        let kept: Vec<_> = (0..100).map(|_| std::fs::File::open("/proc/self/status").unwrap()).collect();
        let after = Usage::now().unwrap();
        assert!(after.descriptors > before.descriptors + 50, "{before:?} {after:?}");
        drop(kept);
    }

    #[test]
    fn growth_beyond_slack_is_reported() {
        let before =
            Usage { descriptors: 10, threads: 1, shared_mappings: 0, mappings: 100, resident_kib: 9000 };
        assert_eq!(before.growth(&before), None);
        let after = Usage { mappings: 110, resident_kib: 9900, ..before };
        assert_eq!(after.growth(&before), None);
        let after = Usage { descriptors: 11, shared_mappings: 4, ..before };
        assert_eq!(after.growth(&before).unwrap(), "11 file descriptors after 10, 4 shared mappings after 0");
        let after = Usage { threads: 2, mappings: 1000, resident_kib: 90_000, ..before };
        let grown = "2 threads after 1, 1000 mappings after 100, 90000 KiB of resident memory after 9000";
        assert_eq!(after.growth(&before).unwrap(), grown);
    }
}
