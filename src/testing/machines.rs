//! Files of `/sys/devices` of machines, in the form in which Linux writes them. They are made, not recorded: numbers of
//! cores, threads, caches and nodes are as published for these products, distances and package numbers are examples.
//! Tests of other crates include this file by its path.
#![allow(dead_code, reason = "each test uses a part of it")]

use super::temporary::Folder;

/// A machine. CPUs are numbered from 0; sets are written in the kernel's notation.
pub struct Machine {
    pub cpus: usize,
    pub package: fn(usize) -> usize,
    /// Distance between two of its hardware threads; 0: a core has one.
    pub second_thread: usize,
    /// Number of consecutive CPUs, from a multiple of it, that share a third-level cache; 0: none is described.
    pub cache: usize,
    /// CPUs of each NUMA node.
    pub nodes: &'static [&'static str],
    pub memory: &'static str,
    pub distances: &'static [&'static str],
    /// Other files, and their text.
    pub others: &'static [(&'static str, &'static str)],
}

/// Two EPYC 9654: 96 cores each, third-level caches of 8 cores, one node for each socket (NPS1).
pub const EPYC: Machine = Machine {
    cpus: 384,
    package: |cpu| cpu / 96 % 2,
    second_thread: 192,
    cache: 8,
    nodes: &["0-95,192-287", "96-191,288-383"],
    memory: "0-1",
    distances: &["10 32", "32 10"],
    others: &[],
};

/// Two Xeon Platinum 8480+ of 56 cores, sub-NUMA clustering off.
pub const XEON: Machine = Machine {
    cpus: 224,
    package: |cpu| cpu / 56 % 2,
    second_thread: 112,
    cache: 56,
    nodes: &["0-55,112-167", "56-111,168-223"],
    memory: "0-1",
    distances: &["10 21", "21 10"],
    others: &[],
};

/// Two Xeons of 28 cores, two sub-NUMA clusters each: the cores of a cluster are not consecutive.
pub const XEON_CLUSTERS: Machine = Machine {
    cpus: 112,
    package: |cpu| cpu / 28 % 2,
    second_thread: 56,
    cache: 28,
    nodes: &[
        "0-3,7-9,14-17,21-23,56-59,63-65,70-73,77-79",
        "4-6,10-13,18-20,24-27,60-62,66-69,74-76,80-83",
        "28-31,35-37,42-45,49-51,84-87,91-93,98-101,105-107",
        "32-34,38-41,46-48,52-55,88-90,94-97,102-104,108-111",
    ],
    memory: "0-3",
    distances: &["10 11 21 21", "11 10 21 21", "21 21 10 11", "21 21 11 10"],
    others: &[],
};

/// Core i9-13900K: 8 fast cores of two threads with consecutive numbers, 16 efficient ones.
pub const HYBRID: Machine = Machine {
    cpus: 32,
    package: |_| 0,
    second_thread: 1,
    cache: 32,
    nodes: &["0-31"],
    memory: "0",
    distances: &["10"],
    others: &[("cpu_core/cpus", "0-15"), ("cpu_atom/cpus", "16-31")],
};

/// Two sockets of 16 cores. Socket 1 has no memory; node 2 is a memory expander on it, without CPUs.
pub const WITHOUT_MEMORY: Machine = Machine {
    cpus: 32,
    package: |cpu| cpu / 16,
    second_thread: 0,
    cache: 16,
    nodes: &["0-15", "16-31", ""],
    memory: "0,2",
    distances: &["10 21 24", "21 10 14", "24 14 10"],
    others: &[],
};

/// Two Ampere Altra of 80 cores: package numbers are offsets of a firmware table, no third-level cache is described.
pub const ALTRA: Machine = Machine {
    cpus: 160,
    package: |cpu| [36, 3180][cpu / 80],
    second_thread: 0,
    cache: 0,
    nodes: &["0-79", "80-159"],
    memory: "0-1",
    distances: &["10 20", "20 10"],
    others: &[],
};

/// Two sockets of four cores, for tests that write many machines.
pub const SMALL: Machine = Machine {
    cpus: 8,
    package: |cpu| cpu / 4,
    second_thread: 0,
    cache: 4,
    nodes: &["0-3", "4-7"],
    memory: "0-1",
    distances: &["10 21", "21 10"],
    others: &[],
};

/// RK3588: four Cortex-A55 and four Cortex-A76.
pub const BIG_LITTLE: Machine = Machine {
    cpus: 8,
    package: |_| 0,
    second_thread: 0,
    cache: 8,
    nodes: &["0-7"],
    memory: "0",
    distances: &["10"],
    others: &[
        ("system/cpu/cpu0/cpu_capacity", "530"),
        ("system/cpu/cpu1/cpu_capacity", "530"),
        ("system/cpu/cpu2/cpu_capacity", "530"),
        ("system/cpu/cpu3/cpu_capacity", "530"),
        ("system/cpu/cpu4/cpu_capacity", "1024"),
        ("system/cpu/cpu5/cpu_capacity", "1024"),
        ("system/cpu/cpu6/cpu_capacity", "1024"),
        ("system/cpu/cpu7/cpu_capacity", "1024"),
    ],
};

impl Machine {
    /// Writes the files below a folder that stands for `/sys`.
    pub fn write(&self) -> Folder {
        let folder = Folder::new();
        let write = |path: &str, text: &str| {
            folder.write(format!("devices/{path}"), text.to_owned() + "\n");
        };
        write("system/cpu/online", &format!("0-{}", self.cpus - 1));
        write(
            "system/node/online",
            &match self.nodes.len() {
                1 => "0".to_owned(),
                nodes => format!("0-{}", nodes - 1),
            },
        );
        write("system/node/has_memory", self.memory);
        for (node, cpus) in self.nodes.iter().enumerate() {
            write(&format!("system/node/node{node}/cpulist"), cpus);
            write(&format!("system/node/node{node}/distance"), self.distances[node]);
        }
        for cpu in 0..self.cpus {
            let of = format!("system/cpu/cpu{cpu}");
            write(&format!("{of}/topology/physical_package_id"), &(self.package)(cpu).to_string());
            write(&format!("{of}/topology/thread_siblings_list"), &self.siblings(cpu));
            if self.cache > 0 {
                let write = |file: &str, text: &str| write(&format!("{of}/cache/index3/{file}"), text);
                write("level", "3");
                write("type", "Unified");
                write("shared_cpu_list", &self.sharers(cpu));
            }
        }
        self.others.iter().for_each(|(path, text)| write(path, text));
        folder
    }

    /// Returns the hardware threads of a CPU's core. With consecutive numbers, only the first half of a hybrid machine
    /// has two.
    fn siblings(&self, cpu: usize) -> String {
        match self.second_thread {
            0 => cpu.to_string(),
            1 if cpu < self.cpus / 2 => format!("{}-{}", cpu & !1, cpu | 1),
            1 => cpu.to_string(),
            apart => format!("{},{}", cpu % apart, cpu % apart + apart),
        }
    }

    fn sharers(&self, cpu: usize) -> String {
        let range = |first: usize| format!("{first}-{}", first + self.cache - 1);
        match self.second_thread {
            0 | 1 => range(cpu / self.cache * self.cache),
            apart => {
                let first = cpu % apart / self.cache * self.cache;
                format!("{},{}", range(first), range(first + apart))
            }
        }
    }
}
