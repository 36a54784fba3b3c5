//! Limits on the memory and the files of this process: the machine, the control groups of its containers, `ulimit -f`
//! and `ulimit -d`.
//!
//! Shared memory is charged to the control group of the process that allocates it. Beyond a group's limit the kernel
//! kills a process instead of refusing memory. So the limits are read first, from the group of this process up to the
//! outermost visible one.

use std::fmt;
use std::path::{Component, Path, PathBuf};

use nix::sys::resource::{getrlimit, Resource};

/// Returns the memory in bytes that this process can still allocate: the minimum that the machine and each visible
/// control group have left, including page cache that can be reclaimed. Returns `None` if the system does not say.
/// Swap does not count.
///
/// ```
/// let bytes = fast_allreduce::device::host::available_memory();
/// println!("{bytes:?} bytes are available");
/// ```
pub fn available_memory() -> Option<u64> {
    Limits::of_this_process().least_room(u64::MAX).map(|room| room.bytes)
}

/// Returns an error if a file of this size would end the process by SIGXFSZ.
pub(super) fn refuse_file(bytes: u64) -> Result<(), String> {
    match getrlimit(Resource::RLIMIT_FSIZE) {
        // The kernel treats shared memory as a file.
        Ok((limit, most)) if bytes > limit => Err(format!(
            "a file of this process may have {limit} bytes (RLIMIT_FSIZE, hard limit {}): raise that with `ulimit -f`",
            if most == libc::RLIM_INFINITY { "unlimited".to_owned() } else { most.to_string() },
        )),
        _ => Ok(()),
    }
}

/// Returns an error if this amount of private memory would exceed a limit. Registered memory becomes private after a
/// failed call.
pub(super) fn refuse_data(bytes: u64) -> Result<(), String> {
    let Ok((limit, _)) = getrlimit(Resource::RLIMIT_DATA) else { return Ok(()) };
    if limit == libc::RLIM_INFINITY {
        return Ok(());
    }
    let status = read(Path::new("/proc/self/status")).unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmData:")?.trim().strip_suffix("kB"));
    let used = kib.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0).saturating_mul(1024);
    match used.saturating_add(bytes) > limit {
        true => Err(format!(
            "data of this process may have {limit} bytes (RLIMIT_DATA), of which {used} are in use: raise that with \
             `ulimit -d`"
        )),
        false => Ok(()),
    }
}

/// Files with the limits on this process's memory.
#[derive(Debug)]
pub(super) struct Limits {
    meminfo: PathBuf,
    counters: Vec<Counter>,
}

/// Memory that is left under a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Room {
    pub bytes: u64,
    /// The group's limit and its file; `None` for the machine.
    limit: Option<(u64, PathBuf)>,
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.limit {
            None => write!(f, "{} bytes of memory are available on this machine", self.bytes),
            Some((limit, file)) => write!(
                f,
                "{} bytes of memory are available of the {limit} that {} allows (raise the container's limit)",
                self.bytes,
                file.display()
            ),
        }
    }
}

/// A limit of a control group, and the files that count towards it.
#[derive(Debug)]
struct Counter {
    limit: PathBuf,
    usage: PathBuf,
    stat: PathBuf,
    /// Names in `stat` of the page cache of files.
    cache: &'static [&'static str],
}

/// Version of control groups; a machine may have both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// Returns the files of the limits and of the usage that they count. `memory.high` is not one of them: the kernel
    /// slows processes beyond it down, but does not kill them.
    fn counters(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::One => &[
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
                ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
            ],
            Self::Two => &[("memory.max", "memory.current")],
        }
    }

    /// Returns the names of the page cache of files on disk, of the group and the groups below it. Shared memory is
    /// on other lists.
    fn cache(self) -> &'static [&'static str] {
        match self {
            Self::One => &["total_inactive_file", "total_active_file"],
            Self::Two => &["inactive_file", "active_file"],
        }
    }
}

impl Limits {
    /// Returns the limits of this process.
    pub fn of_this_process() -> Self {
        Self::below(Path::new("/"))
    }

    /// Reads the limits from the files below `root`.
    pub fn below(root: &Path) -> Self {
        let proc = root.join("proc");
        let memberships = read(&proc.join("self/cgroup")).unwrap_or_default();
        let mounts = read(&proc.join("self/mountinfo")).unwrap_or_default();
        let mut counters = Vec::new();
        for mount in mounts.lines().filter_map(Mount::parse) {
            let Some(path) = membership(&memberships, mount.version) else { continue };
            for folder in mount.folders(path) {
                let folder = root.join(folder.strip_prefix("/").unwrap_or(&folder));
                counters.extend(Counter::all(mount.version, &folder));
                // Before Linux 5.11, a group could be configured not to count the groups below it.
                let above = folder.parent().and_then(|above| read(&above.join("memory.use_hierarchy")));
                if mount.version == Version::One && above.is_some_and(|above| above.trim() == "0") {
                    break;
                }
            }
        }
        Self { meminfo: proc.join("meminfo"), counters }
    }

    /// Returns the smallest amount that is left under any limit; `None` if the system does not say. Results above
    /// `enough` may be too low, because page cache is not counted then.
    pub fn least_room(&self, enough: u64) -> Option<Room> {
        let machine = read(&self.meminfo).and_then(|text| meminfo_available(&text));
        let machine = machine.map(|bytes| Room { bytes, limit: None });
        let groups = self.counters.iter().filter_map(|counter| counter.room(enough));
        machine.into_iter().chain(groups).min_by_key(|room| room.bytes)
    }
}

impl Counter {
    /// Returns the counters of a group that have a limit.
    fn all(version: Version, folder: &Path) -> impl Iterator<Item = Self> + '_ {
        let counter = move |&(limit, usage): &(&str, &str)| Self {
            limit: folder.join(limit),
            usage: folder.join(usage),
            stat: folder.join("memory.stat"),
            cache: version.cache(),
        };
        let is_limited = |counter: &Self| read(&counter.limit).and_then(|text| number(&text)).is_some();
        version.counters().iter().map(counter).filter(is_limited)
    }

    /// Returns the amount that is left. Page cache counts as left if there is less than `enough` without it.
    fn room(&self, enough: u64) -> Option<Room> {
        let limit = number(&read(&self.limit)?)?;
        let usage = number(&read(&self.usage)?)?;
        let mut bytes = limit.saturating_sub(usage);
        if bytes < enough {
            let cache = read(&self.stat).map_or(0, |stat| sum_of(&stat, self.cache));
            bytes = limit.saturating_add(cache).saturating_sub(usage).min(limit);
        }
        Some(Room { bytes, limit: Some((limit, self.limit.clone())) })
    }
}

/// Mount of a control-group file system with the memory controller.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The group at the root of the mount.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// Parses a line of `/proc/self/mountinfo`.
    fn parse(line: &str) -> Option<Self> {
        let (mount, system) = line.split_once(" - ")?;
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1)?);
        let version = match kind {
            "cgroup2" => Version::Two,
            "cgroup" if options.split(',').any(|option| option == "memory") => Version::One,
            _ => return None,
        };
        let mut paths = mount.split(' ').skip(3).map(unescaped).map(PathBuf::from);
        let (root, point) = (paths.next()?, paths.next()?);
        root.is_absolute().then_some(Self { version, root, point })
    }

    /// Returns the folders of the group `path` and of those above it, innermost first; none if the group is not in
    /// the mount.
    fn folders(&self, path: &str) -> Vec<PathBuf> {
        let Ok(inner) = Path::new(path).strip_prefix(&self.root) else { return Vec::new() };
        // The group is above the root of this namespace, so visible groups do not limit this process.
        if inner.components().any(|component| component == Component::ParentDir) {
            return Vec::new();
        }
        inner.ancestors().map(|inner| self.point.join(inner)).collect()
    }
}

/// Returns the path of this process's group, from `/proc/self/cgroup`.
fn membership(text: &str, version: Version) -> Option<&str> {
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_it = match version {
            Version::One => controllers.split(',').any(|controller| controller == "memory"),
            Version::Two => hierarchy == "0" && controllers.is_empty(),
        };
        is_it.then_some(path)
    })
}

/// Resolves the kernel's octal escapes.
fn unescaped(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(field.to_owned(), |field, (escape, character)| field.replace(escape, character))
}

/// Parses a number of bytes. Returns `None` for "max", and for numbers larger than any memory, which mean no limit in
/// version 1.
fn number(text: &str) -> Option<u64> {
    const NO_LIMIT: u64 = 1 << 62;
    text.trim().parse().ok().filter(|&bytes| bytes < NO_LIMIT)
}

/// Returns the sum of these lines of a `memory.stat`.
fn sum_of(stat: &str, names: &[&str]) -> u64 {
    let values = stat.lines().filter_map(|line| {
        let (name, value) = line.split_once(' ')?;
        names.contains(&name).then(|| number(value)).flatten()
    });
    values.fold(0, u64::saturating_add)
}

/// Returns `MemAvailable` of `/proc/meminfo`.
fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn read(path: &Path) -> Option<String> {
    std::fs::read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_memory_limits, |bytes| {
    let text = String::from_utf8_lossy(bytes);
    for version in [Version::One, Version::Two] {
        let path = membership(&text, version).unwrap_or("/");
        let _: Vec<_> = text.lines().filter_map(Mount::parse).map(|mount| mount.folders(path)).collect();
        let _ = (sum_of(&text, version.cache()), meminfo_available(&text), number(&text));
    }
});

#[cfg(test)]
mod tests;
