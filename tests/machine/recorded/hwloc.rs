//! hwloc's view of a machine, as `lstopo -v` prints it or as its XML has it.

use std::collections::{BTreeMap, BTreeSet};

use crate::temporary::Folder;

pub type Set = BTreeSet<usize>;

/// A machine as hwloc describes it: the CPUs of each unit.
#[derive(Default)]
pub struct Recorded {
    pub all: Set,
    pub packages: Vec<Set>,
    pub caches: Vec<Set>,
    pub cores: Vec<Set>,
    /// By the system's number.
    nodes: Vec<(usize, Set)>,
}

/// A unit with its number and the unit that contains it.
struct Object {
    kind: String,
    number: Option<usize>,
    above: Option<usize>,
    cpus: Set,
}

impl Recorded {
    /// Parses either form.
    pub fn parse(text: &str) -> Self {
        let mut objects = Vec::new();
        match text.starts_with("<?xml") {
            true => parse_xml(text, &mut objects),
            false => parse_lines(text, &mut objects),
        }
        let mut recorded = Self::default();
        for index in 0..objects.len() {
            let Object { kind, number, .. } = &objects[index];
            let Some(cpu) = number.filter(|_| kind == "PU") else { continue };
            recorded.all.insert(cpu);
            let mut next = Some(index);
            while let Some(above) = next {
                objects[above].cpus.insert(cpu);
                next = objects[above].above;
            }
        }
        for index in 0..objects.len() {
            // Memory has the CPUs of the unit that it belongs to.
            let mut of = index;
            while objects[of].cpus.is_empty() {
                of = objects[of].above.expect("a unit has CPUs");
            }
            let cpus = objects[of].cpus.clone();
            let units = match objects[index].kind.as_str() {
                "Package" => &mut recorded.packages,
                "L3Cache" => &mut recorded.caches,
                "Core" => &mut recorded.cores,
                "NUMANode" => {
                    recorded.nodes.push((objects[index].number.expect("a node has a number"), cpus));
                    continue;
                }
                _ => continue,
            };
            units.push(cpus);
        }
        recorded
    }

    pub fn node_sets(&self) -> Vec<Set> {
        self.nodes.iter().map(|(_, cpus)| cpus.clone()).collect()
    }

    /// Returns the index of a CPU's package.
    pub fn package(&self, cpu: usize) -> Option<usize> {
        self.packages.iter().position(|package| package.contains(&cpu))
    }

    /// Returns the nodes that a CPU belongs to: one of them has its number in sysfs.
    pub fn nodes(&self, cpu: usize) -> Vec<usize> {
        self.nodes.iter().filter(|(_, cpus)| cpus.contains(&cpu)).map(|&(number, _)| number).collect()
    }

    /// Returns the cores that CPUs belong to.
    pub fn cores_of(&self, cpus: &Set) -> Set {
        (0..self.cores.len()).filter(|&core| !self.cores[core].is_disjoint(cpus)).collect()
    }

    /// Writes the files in which Linux describes such a machine.
    pub fn write(&self, sys: &Folder) {
        let list = |cpus: &Set| cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",") + "\n";
        let write = |path: &str, text: String| {
            sys.write(format!("devices/system/{path}"), text);
        };
        write("cpu/online", list(&self.all));
        write("node/online", list(&self.nodes.iter().map(|&(number, _)| number).collect()));
        // CPUs are on one node each. Others with them, such as memory inside of the package, have none.
        let mut placed = Set::new();
        for (number, cpus) in &self.nodes {
            write(&format!("node/node{number}/cpulist"), list(&(cpus - &placed)));
            placed.extend(cpus);
        }
        let units =
            [("topology/thread_siblings_list", &self.cores), ("cache/index3/shared_cpu_list", &self.caches)];
        for &cpu in &self.all {
            if let Some(package) = self.package(cpu) {
                write(&format!("cpu/cpu{cpu}/topology/physical_package_id"), format!("{package}\n"));
            }
            for (file, units) in units {
                if let Some(unit) = units.iter().find(|unit| unit.contains(&cpu)) {
                    write(&format!("cpu/cpu{cpu}/{file}"), list(unit));
                }
            }
            write(&format!("cpu/cpu{cpu}/cache/index3/level"), "3\n".into());
        }
    }
}

/// Parses lines such as `    Package L#0 (P#0 total=...)`, indented by level.
fn parse_lines(text: &str, objects: &mut Vec<Object>) {
    let mut open: Vec<(usize, usize)> = Vec::new();
    for line in text.lines().take_while(|line| !line.starts_with("depth 0:")) {
        let rest = line.trim_start();
        let indentation = line.len() - rest.len();
        let kind: String = rest.chars().take_while(char::is_ascii_alphanumeric).collect();
        let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
        let number = rest.split_once("(P#").and_then(|(_, rest)| digits(rest).parse().ok());
        open.retain(|&(other, _)| other < indentation);
        let above = open.last().map(|&(_, index)| index);
        open.push((indentation, objects.len()));
        objects.push(Object { kind, number, above, cpus: Set::new() });
    }
}

/// Parses elements such as `<object type="Package" os_index="0" ...>`, which are nested.
fn parse_xml(text: &str, objects: &mut Vec<Object>) {
    let mut open: Vec<usize> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with("<object ") {
            let attributes: BTreeMap<_, _> = line
                .split('"')
                .collect::<Vec<_>>()
                .chunks_exact(2)
                .map(|pair| (pair[0].rsplit(' ').next().unwrap_or_default().to_owned(), pair[1].to_owned()))
                .collect();
            let number = attributes.get("os_index=").and_then(|number| number.parse().ok());
            let kind = attributes["type="].clone();
            let above = open.last().copied();
            if !line.ends_with("/>") {
                open.push(objects.len());
            }
            objects.push(Object { kind, number, above, cpus: Set::new() });
        } else if line == "</object>" {
            open.pop();
        }
    }
}
