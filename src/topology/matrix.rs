//! The text format of `nvidia-smi topo -m`: formatting and parsing.

use std::fmt;

use super::{Gpu, Link, PcieDistance, Topology, MAX_NVLINKS};
use crate::error::{Error, Result};

const MAX_TEXT_BYTES: usize = 256 << 10;
const MAX_GPUS: usize = 64;

const LEGEND: &str = "
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  PSB  = Connection traversing a single on-board PCIe switch
  NV#  = Connection traversing a bonded set of # NVLinks
";

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for gpu in &self.gpus {
            write!(f, "\tGPU{}", gpu.number)?;
        }
        writeln!(f)?;
        for (gpu, links) in self.gpus.iter().zip(self.links.chunks(self.gpus.len())) {
            write!(f, "GPU{}", gpu.number)?;
            for link in links {
                write!(f, "\t{link}")?;
            }
            writeln!(f)?;
        }
        f.write_str(LEGEND)
    }
}

/// Writes a link as a cell of the matrix.
impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SameDevice => f.write_str(" X "),
            Self::NvLink { lanes } | Self::NvSwitch { lanes } => write!(f, "NV{lanes}"),
            Self::Pcie { distance } => f.write_str(distance.name()),
            Self::None => f.write_str("N/A"),
        }
    }
}

impl Topology {
    /// Parses the output of `nvidia-smi topo -m`. Text around the matrix, network cards and affinities are ignored.
    ///
    /// The text does not say whether NVLinks end in the other GPU or in a switch. If a GPU has more links to all its
    /// peers together than a GPU can have, they are taken to end in a switch. A part of such a machine with fewer GPUs
    /// looks as if it were connected directly, and performs in the same way. The text does not describe peer access
    /// either: every pair with a link is taken as reachable.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] with the line and the problem: an unknown link; a row that is missing, too short or
    /// repeated; different cells for one pair; more than 64 GPUs or 256 KiB.
    ///
    /// ```
    /// use fast_allreduce::topology::{Link, Topology};
    ///
    /// let topology = Topology::parse("  GPU0 GPU1\nGPU0 X NV12\nGPU1 NV12 X")?;
    /// assert_eq!(topology.link(0, 1), Some(Link::NvLink { lanes: 12 }));
    /// # Ok::<_, fast_allreduce::Error>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(invalid(1, format!("a text of {} bytes", text.len()), "at most 256 KiB"));
        }
        let mut lines = text.lines().map(without_escapes).enumerate().map(|(line, text)| (line + 1, text));
        let (header, numbers) =
            lines.by_ref().find_map(|(line, text)| Some((line, columns(&text)?))).ok_or_else(|| {
                invalid(1, "no line of GPU columns in the text".into(), "the output of nvidia-smi topo -m")
            })?;
        if numbers.len() > MAX_GPUS {
            return Err(invalid(header, format!("{} GPUs", numbers.len()), "at most 64"));
        }
        if let Some(twice) = (1..numbers.len()).find(|&i| numbers[..i].contains(&numbers[i])) {
            return Err(invalid(
                header,
                format!("a second column GPU{}", numbers[twice]),
                "one for each GPU",
            ));
        }
        let mut rows: Vec<Option<Row>> = vec![None; numbers.len()];
        for (line, text) in lines {
            let mut cells = text.split_whitespace();
            let Some(number) = cells.next().and_then(gpu_number) else { continue };
            let index = numbers.iter().position(|&column| column == number).ok_or_else(|| {
                invalid(line, format!("a row GPU{number}"), "rows for the GPUs that have columns")
            })?;
            if rows[index].is_some() {
                return Err(invalid(line, format!("a second row GPU{number}"), "one for each GPU"));
            }
            rows[index] = Some(Row { line, links: row(line, index, &numbers, cells)? });
            if rows.iter().all(Option::is_some) {
                break;
            }
        }
        if let Some(missing) = rows.iter().position(Option::is_none) {
            let fact = format!("no row GPU{} after it", numbers[missing]);
            return Err(invalid(header, fact, "a row for every column"));
        }
        symmetric(rows.into_iter().flatten().collect(), &numbers)
    }
}

#[derive(Clone)]
struct Row {
    line: usize,
    links: Vec<Link>,
}

/// Returns the numbers of the leading GPU columns, if the line is a header.
fn columns(line: &str) -> Option<Vec<u32>> {
    let names = line.split_whitespace().map(gpu_number).collect::<Vec<_>>();
    let leading = names.iter().copied().map_while(|number| number).collect::<Vec<_>>();
    // "GPU0 X ..." is the first row of a matrix without its header, and "GPU0" alone may be prose.
    let is_row =
        leading.len() == 1 && line.split_whitespace().nth(1).is_some_and(|cell| link(cell).is_some());
    (!leading.is_empty() && !is_row).then_some(leading)
}

/// Parses the links of row `index`.
fn row<'a>(
    line: usize,
    index: usize,
    numbers: &[u32],
    mut cells: impl Iterator<Item = &'a str>,
) -> Result<Vec<Link>> {
    let between = |column: usize| format!("between GPU{} and GPU{}", numbers[index], numbers[column]);
    let read = |column: usize| {
        let cell = cells.next().ok_or_else(|| {
            let fact = format!("{column} cells in row GPU{}", numbers[index]);
            invalid(line, fact, "a cell for every GPU column")
        })?;
        let link = link(cell).ok_or_else(|| {
            let fact = format!("{} {}", quoted(cell), between(column));
            invalid(line, fact, "one of X, NV1 to NV255, PSB, PIX, PXB, PHB, NODE, SYS, SOC, N/A")
        })?;
        if (link == Link::SameDevice) != (index == column) {
            let fact = format!("{} {}", quoted(cell), between(column));
            return Err(invalid(line, fact, "X on the diagonal and nowhere else"));
        }
        Ok(link)
    };
    (0..numbers.len()).map(read).collect()
}

/// Checks that both cells of every pair agree, and distinguishes switches from direct links.
fn symmetric(rows: Vec<Row>, numbers: &[u32]) -> Result<Topology> {
    for (a, row) in rows.iter().enumerate() {
        for (b, link) in row.links.iter().enumerate().take(a) {
            let other = rows[b].links[a];
            if *link != other {
                let (one, two) = (numbers[a], numbers[b]);
                let fact = format!("{link} from GPU{one} to GPU{two} but {other} in line {}", rows[b].line);
                return Err(invalid(row.line, fact, "the same link both ways"));
            }
        }
    }
    let switched = rows.iter().map(|row| row.links.iter().map(lanes).sum::<u32>() > MAX_NVLINKS);
    let switched = switched.collect::<Vec<_>>();
    let gpus = numbers.iter().map(|&number| Gpu { number, name: None, pci: None }).collect();
    Ok(Topology::new(gpus, |a, b| match rows[a].links[b] {
        Link::NvLink { lanes } if switched[a] && switched[b] => Link::NvSwitch { lanes },
        link => link,
    }))
}

fn lanes(link: &Link) -> u32 {
    match link {
        Link::NvLink { lanes } | Link::NvSwitch { lanes } => *lanes,
        _ => 0,
    }
}

fn link(cell: &str) -> Option<Link> {
    if let Some(lanes) = cell.strip_prefix("NV") {
        return Some(Link::NvLink { lanes: decimal(lanes).filter(|lanes| (1..=255).contains(lanes))? });
    }
    match cell {
        "X" => Some(Link::SameDevice),
        "N/A" => Some(Link::None),
        // The name of SYS in drivers before 384.
        "SOC" => Some(Link::Pcie { distance: PcieDistance::System }),
        _ => {
            let distance = PcieDistance::ALL.into_iter().find(|distance| distance.name() == cell)?;
            Some(Link::Pcie { distance })
        }
    }
}

fn gpu_number(cell: &str) -> Option<u32> {
    decimal(cell.strip_prefix("GPU")?)
}

/// Parses a number of at most four digits.
fn decimal(digits: &str) -> Option<u32> {
    let plain = (1..=4).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten()
}

/// Removes terminal escapes: nvidia-smi underlines the header, in some versions even if the output is a file.
fn without_escapes(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("\x1b[") {
        plain.push_str(before);
        rest = after.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        let mut end = rest.chars();
        end.next();
        rest = end.as_str();
    }
    plain + rest
}

/// Quotes the start of a foreign text, printable.
pub(crate) fn quoted(text: &str) -> String {
    const LONGEST: usize = 24;
    let start = text.chars().take(LONGEST).collect::<String>();
    let cut = if start.len() < text.len() { "..." } else { "" };
    format!("{start:?}{cut}")
}

fn invalid(line: usize, fact: String, expected: &'static str) -> Error {
    Error::InvalidSetting { name: "topology", value: format!("line {line}: {fact}"), expected }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_topology_matrix, |bytes| Topology::parse(&String::from_utf8_lossy(bytes)));
