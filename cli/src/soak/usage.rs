//! What a process holds: what grows is a leak.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Mappings that the allocator may add with its arenas and the stacks that it keeps, for threads at new moments.
const SLACK_MAPPINGS: u64 = 64;

/// Resident memory that the allocator may keep; runs of some minutes have been seen to take half a MiB.
const SLACK_KIB: u64 = 8 << 10;

/// Counts of one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub descriptors: u64,
    pub threads: u64,
    /// Of memory that is shared with peers.
    pub shared_mappings: u64,
    pub mappings: u64,
    pub resident_kib: u64,
}

impl Usage {
    /// Of this process.
    pub fn now() -> Result<Self, Failure> {
        Self::read(Path::new("/proc/self")).map_err(|error| Failure::System("reading /proc/self", error))
    }

    fn read(process: &Path) -> io::Result<Self> {
        let status = std::fs::read_to_string(process.join("status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok())
                .ok_or_else(|| io::Error::other(format!("no {name} in its status")))
        };
        let maps = std::fs::read_to_string(process.join("maps"))?;
        Ok(Self {
            descriptors: std::fs::read_dir(process.join("fd"))?.count() as u64,
            threads: field("Threads")?,
            shared_mappings: maps.lines().filter(|line| line.contains("/memfd:")).count() as u64,
            mappings: maps.lines().count() as u64,
            resident_kib: field("VmRSS")?,
        })
    }

    /// What has grown since, in words. What only the library takes may not grow at all.
    pub fn growth(&self, since: &Self) -> Option<String> {
        let counts = [
            ("file descriptors", since.descriptors, self.descriptors, 0),
            ("threads", since.threads, self.threads, 0),
            ("shared mappings", since.shared_mappings, self.shared_mappings, 0),
            ("mappings", since.mappings, self.mappings, SLACK_MAPPINGS),
            ("KiB of resident memory", since.resident_kib, self.resident_kib, SLACK_KIB),
        ];
        let grown = counts.iter().filter(|(_, before, after, slack)| *after > before + slack);
        let words: Vec<_> =
            grown.map(|(what, before, after, _)| format!("{after} {what} after {before}")).collect();
        (!words.is_empty()).then(|| words.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_counted() {
        let before = Usage::now().unwrap();
        assert!(before.descriptors >= 3 && before.threads >= 1 && before.resident_kib > 100, "{before:?}");
        // More than other tests of this process open and close.
        let kept: Vec<_> = (0..100).map(|_| std::fs::File::open("/proc/self/status").unwrap()).collect();
        let after = Usage::now().unwrap();
        assert!(after.descriptors > before.descriptors + 50, "{before:?} {after:?}");
        drop(kept);
    }

    #[test]
    fn growth_is_told_and_slack_is_not() {
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
