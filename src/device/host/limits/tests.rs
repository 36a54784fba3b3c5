use super::*;

use proptest::prelude::*;

use crate::testing::damaged::damaged;
use crate::testing::temporary::Folder;

/// A machine's files, below a temporary folder.
struct Machine(Folder);

impl Machine {
    fn new(files: &[(&str, &str)]) -> Self {
        let root = Folder::new();
        for (path, text) in files {
            root.write(path, text);
        }
        Self(root)
    }

    /// Returns the smallest amount that is left, and the file that limits it.
    fn room(&self, enough: u64) -> Option<(u64, Option<String>)> {
        let room = Limits::below(self.0.path()).least_room(enough)?;
        let file =
            room.limit.map(|(_, file)| file.strip_prefix(self.0.path()).unwrap().display().to_string());
        Some((room.bytes, file))
    }
}

const MEMINFO: (&str, &str) =
    ("proc/meminfo", "MemTotal: 9 kB\nMemFree: 2 kB\nMemAvailable:    4000000 kB\nBuffers: 7 kB\n");

const V2_MOUNT: &str = "\
23 64 0:22 / /proc rw,nosuid,nodev,noexec,relatime shared:14 - proc proc rw\n\
29 25 0:26 / /sys/fs/cgroup rw,nosuid,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n";

const V2_STAT: &str = "anon 5000\nfile 900000\nkernel 4096\nshmem 100000\ninactive_anon 5000\n\
    inactive_file 300000\nactive_file 200000\nunevictable 0\nslab_reclaimable 1000\n";

#[test]
fn a_machine_without_groups_has_its_memory() {
    let machine = Machine::new(&[MEMINFO]);
    assert_eq!(machine.room(u64::MAX), Some((4_096_000_000, None)));
    assert_eq!(Machine::new(&[("proc/meminfo", "MemTotal: 3 kB\n")]).room(u64::MAX), None);
    assert_eq!(Limits::below(Path::new("/nowhere")).least_room(0), None);
}

#[test]
fn version_2_with_the_least_left_in_the_middle() {
    let machine = Machine::new(&[
        MEMINFO,
        ("proc/self/cgroup", "0::/kubepods.slice/pod.slice/container\n"),
        ("proc/self/mountinfo", V2_MOUNT),
        ("sys/fs/cgroup/memory.stat", V2_STAT),
        ("sys/fs/cgroup/kubepods.slice/memory.max", "9000000\n"),
        ("sys/fs/cgroup/kubepods.slice/memory.current", "2000000\n"),
        ("sys/fs/cgroup/kubepods.slice/memory.stat", V2_STAT),
        ("sys/fs/cgroup/kubepods.slice/pod.slice/memory.max", "3000000\n"),
        ("sys/fs/cgroup/kubepods.slice/pod.slice/memory.current", "2000000\n"),
        ("sys/fs/cgroup/kubepods.slice/pod.slice/memory.stat", V2_STAT),
        ("sys/fs/cgroup/kubepods.slice/pod.slice/container/memory.max", "max\n"),
        ("sys/fs/cgroup/kubepods.slice/pod.slice/container/memory.current", "2000000\n"),
    ]);
    let file = Some("sys/fs/cgroup/kubepods.slice/pod.slice/memory.max".to_owned());
    // Page cache counts if it is needed; shared memory does not.
    assert_eq!(machine.room(1_000_000), Some((1_000_000, file.clone())));
    assert_eq!(machine.room(1_000_001), Some((1_500_000, file)));
    let room = Limits::below(machine.0.path()).least_room(u64::MAX).unwrap();
    assert!(
        room.to_string().starts_with("1500000 bytes of memory are available of the 3000000 that "),
        "{room}"
    );
}

#[test]
fn version_1_counts_swap_with_memory_too() {
    let mountinfo = "\
30 23 0:27 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755\n\
34 30 0:31 /docker/4be1 /sys/fs/cgroup/cpu,cpuacct ro,nosuid - cgroup cgroup rw,cpu,cpuacct\n\
36 30 0:33 /docker/4be1 /sys/fs/cgroup/memory ro,nosuid,nodev,noexec,relatime master:18 - cgroup cgroup rw,memory\n";
    let files = [
        MEMINFO,
        // Paths in the host's namespace; only the container's part of the hierarchy is mounted.
        (
            "proc/self/cgroup",
            "11:memory:/docker/4be1\n4:cpu,cpuacct:/docker/4be1\n1:name=systemd:/docker/4be1\n",
        ),
        ("proc/self/mountinfo", mountinfo),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "50000000\n"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "10000000\n"),
        ("sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "60000000\n"),
        ("sys/fs/cgroup/memory/memory.memsw.usage_in_bytes", "40000000\n"),
        (
            "sys/fs/cgroup/memory/memory.stat",
            "inactive_file 9\ntotal_inactive_file 3000\ntotal_active_file 700\n",
        ),
    ];
    let file = "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes".to_owned();
    assert_eq!(Machine::new(&files).room(u64::MAX), Some((20_003_700, Some(file))));
}

#[test]
fn version_1_without_a_limit_and_a_parent_that_does_not_count_its_children() {
    let mountinfo = "36 30 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
    let files = [
        MEMINFO,
        ("proc/self/cgroup", "4:memory:/a/b\n"),
        ("proc/self/mountinfo", mountinfo),
        ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "5000\n"),
        ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "100000\n"),
        ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "5000\n"),
        ("sys/fs/cgroup/memory/a/memory.use_hierarchy", "0\n"),
    ];
    assert_eq!(Machine::new(&files).room(u64::MAX), Some((4_096_000_000, None)));
    let nested = files.map(|(path, text)| (path, if text == "0\n" { "1\n" } else { text }));
    let file = Some("sys/fs/cgroup/memory/a/memory.limit_in_bytes".to_owned());
    assert_eq!(Machine::new(&nested).room(u64::MAX), Some((95_000, file)));
}

#[test]
fn a_hybrid_machine_has_memory_in_one_of_the_two() {
    let mountinfo = "\
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
    let files = [
        MEMINFO,
        ("proc/self/cgroup", "9:name=systemd:/\n4:memory:/job\n0::/\n"),
        ("proc/self/mountinfo", mountinfo),
        ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "8000\n"),
        ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "9000\n"),
        ("sys/fs/cgroup/unified/cgroup.controllers", "hugetlb\n"),
    ];
    let file = Some("sys/fs/cgroup/memory/job/memory.limit_in_bytes".to_owned());
    assert_eq!(Machine::new(&files).room(u64::MAX), Some((0, file)));
}

#[test]
fn groups_outside_of_the_namespace_limit_nothing() {
    let files = [
        MEMINFO,
        ("proc/self/cgroup", "0::/../..\n"),
        ("proc/self/mountinfo", V2_MOUNT),
        ("sys/fs/cgroup/memory.max", "5000\n"),
        ("sys/fs/cgroup/memory.current", "0\n"),
    ];
    assert_eq!(Machine::new(&files).room(u64::MAX), Some((4_096_000_000, None)));
    let mount =
        |root: &str| Mount { version: Version::Two, root: root.into(), point: "/sys/fs/cgroup".into() };
    let is = |root, path, expected: &[&str]| {
        assert_eq!(mount(root).folders(path), expected.iter().map(PathBuf::from).collect::<Vec<_>>());
    };
    is("/", "/", &["/sys/fs/cgroup"]);
    is("/..", "/../a", &["/sys/fs/cgroup/a", "/sys/fs/cgroup"]);
    is("/docker/a", "/docker/b", &[]);
    is("/", "/a/../../b", &[]);
    is("/docker/a", "/docker/a/b", &["/sys/fs/cgroup/b", "/sys/fs/cgroup"]);
}

#[test]
fn escapes_of_mounts_are_resolved() {
    let mount = Mount::parse("1 2 0:3 /a\\040b /mnt/x\\134y rw shared:1 master:2 - cgroup2 none rw").unwrap();
    assert_eq!((mount.root, mount.point), ("/a b".into(), "/mnt/x\\y".into()));
}

#[test]
fn a_mount_without_the_path_of_a_group_is_none() {
    assert_eq!(Mount::parse("1 2 0:3  /mnt rw - cgroup2 none rw"), None);
    assert_eq!(Mount::parse("1 2 0:3 a /mnt rw - cgroup2 none rw"), None);
}

#[test]
fn malformed_files_limit_nothing() {
    for (limit, usage) in
        [("", "5"), ("-1", "5"), ("1e9", "5"), ("99999999999999999999", "5"), ("7", ""), ("7", "x")]
    {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "nonsense\n1:memory\n::\n0::/a\n"),
            (
                "proc/self/mountinfo",
                "- - - cgroup2\n1 2 3 - cgroup2 x rw\n29 25 0:26 / /c rw - cgroup2 c rw\n",
            ),
            ("c/a/memory.max", limit),
            ("c/a/memory.current", usage),
        ];
        assert_eq!(Machine::new(&files).room(u64::MAX), Some((4_096_000_000, None)), "{limit:?}");
    }
}

#[test]
fn this_machine_has_memory() {
    let available = available_memory().unwrap();
    assert!((1 << 20..1 << 50).contains(&available), "{available}");
}

fn texts() -> Vec<Vec<u8>> {
    [V2_MOUNT, V2_STAT, "0::/a/b\n4:memory:/x\n", MEMINFO.1].map(Vec::from).into()
}

proptest! {
    #[test]
    fn any_text_is_read_or_ignored(bytes in damaged(texts())) {
        let text = String::from_utf8_lossy(&bytes);
        for version in [Version::One, Version::Two] {
            let path = membership(&text, version).unwrap_or("/");
            for mount in text.lines().filter_map(Mount::parse) {
                let folders = mount.folders(path);
                prop_assert!(folders.iter().all(|folder| folder.starts_with(&mount.point)));
            }
            let _ = (sum_of(&text, version.cache()), meminfo_available(&text), number(&text));
        }
    }
}
