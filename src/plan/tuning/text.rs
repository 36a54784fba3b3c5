//! Text of tuning files: TOML, parsed strictly.

use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::super::choice::{Choice, MAX};
use super::super::links::Links;
use super::super::table::{Row, Table};
use super::super::{Algorithm, DeviceKind, Machine};
use crate::abi::MAX_RANKS;
use crate::catalogue::PlannedCall;
use crate::topology::{quoted, LinkClass};

/// Version of the format. It is increased when an older reader would misread a file.
const FORMAT: i64 = 1;

const HEADER: &str = "\
# A plan that was measured on one machine, for the device and the version of fast-allreduce named here.
# It is used where `fast-allreduce tune` has installed it, or where FAST_ALLREDUCE_TUNING holds its path.

";

/// The way out for a file of another machine or version.
pub(super) const TUNE_AGAIN: &str = "run `fast-allreduce tune` on this machine";

/// Writes a file's text. [`parse`] returns equal values.
pub(super) fn write(machine: &Machine, table: &Table) -> Result<String, toml::ser::Error> {
    let content = Content {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        device: table.device.name().to_owned(),
        machine: Facts::of(machine),
        row: table.rows.iter().map(|row| Spanned::new(0..0, FileRow::of(row))).collect(),
    };
    Ok(format!("{HEADER}{}", toml::to_string(&content)?))
}

/// Writes the rows of a table without a machine, as ranks send them to each other.
pub(in crate::plan) fn write_table(table: &Table) -> Result<String, toml::ser::Error> {
    let row = table.rows.iter().map(|row| Spanned::new(0..0, FileRow::of(row))).collect();
    toml::to_string(&Rows { device: table.device.name().to_owned(), row })
}

/// Parses any text to a table, or to a reason on one line.
pub(in crate::plan) fn parse_table(text: &str) -> Result<Table, String> {
    let content: Rows = toml::from_str(text).map_err(|error| syntax_error(text, &error))?;
    table(text, &content.device, &content.row)
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    device: String,
    #[serde(default)]
    row: Vec<Spanned<FileRow>>,
}

/// Fields that are parsed first, so that a file of another format or version is refused for that reason.
#[derive(Deserialize)]
struct Preamble {
    format: Option<i64>,
    version: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: i64,
    version: String,
    device: String,
    machine: Facts,
    #[serde(default)]
    row: Vec<Spanned<FileRow>>,
}

/// Facts of the machine. A file has those of one device.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Facts {
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cores: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instruction_set: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpus: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
}

impl Facts {
    fn of(machine: &Machine) -> Self {
        match machine.clone() {
            Machine::Host { cpu, cores, instruction_set } => Self {
                cpu: Some(cpu),
                cores: Some(cores),
                instruction_set: Some(instruction_set),
                ..Self::default()
            },
            Machine::Cuda { gpu, gpus, link, driver } => Self {
                gpu: Some(gpu),
                gpus: Some(gpus),
                link: Some(link.name().to_owned()),
                driver: Some(driver),
                ..Self::default()
            },
        }
    }

    fn machine(self, device: DeviceKind) -> Result<Machine, String> {
        match (device, self) {
            (
                DeviceKind::Host,
                Self {
                    cpu: Some(cpu),
                    cores: Some(cores),
                    instruction_set: Some(instruction_set),
                    gpu: None,
                    gpus: None,
                    link: None,
                    driver: None,
                },
            ) => Ok(Machine::Host { cpu, cores, instruction_set }),
            (
                DeviceKind::Cuda,
                Self {
                    gpu: Some(gpu),
                    gpus: Some(gpus),
                    link: Some(link),
                    driver: Some(driver),
                    cpu: None,
                    cores: None,
                    instruction_set: None,
                },
            ) => Ok(Machine::Cuda { gpu, gpus, link: read_link(&link)?, driver }),
            (DeviceKind::Host, _) => {
                Err("[machine] of the host has cpu, cores and instruction_set".to_owned())
            }
            (DeviceKind::Cuda, _) => Err("[machine] of cuda has gpu, gpus, link and driver".to_owned()),
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileRow {
    #[serde(skip_serializing_if = "Option::is_none")]
    calls: Option<String>,
    // Not an array: the parser would accept a longer list.
    ranks: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    links: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    up_to: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm: Option<String>,
    blocks: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    piece_bytes: Option<u64>,
}

impl FileRow {
    fn of(row: &Row) -> Self {
        let Row { calls, ranks: (first, last), links, max_bytes, choice } = *row;
        let is_all_reduce = calls == PlannedCall::AllReduce;
        let is_cuda = choice.threads > 1;
        Self {
            calls: (!is_all_reduce).then(|| calls.name().to_owned()),
            ranks: vec![first as u64, last as u64],
            links: is_cuda.then(|| links.iter().map(|link| link.name().to_owned()).collect()),
            up_to: (max_bytes < MAX).then_some(max_bytes),
            algorithm: is_all_reduce.then(|| choice.algorithm.name().to_owned()),
            blocks: choice.blocks,
            threads: is_cuda.then_some(choice.threads),
            block_bytes: (!is_cuda).then_some(choice.block_bytes),
            piece_bytes: (!is_cuda).then_some(choice.piece_bytes),
        }
    }

    fn calls(&self) -> Result<PlannedCall, String> {
        let Some(name) = &self.calls else { return Ok(PlannedCall::AllReduce) };
        PlannedCall::ALL.into_iter().find(|calls| calls.name() == name).ok_or_else(|| {
            let names = PlannedCall::ALL.map(PlannedCall::name).join(", ");
            format!("calls = {} is none of {names}", quoted(name))
        })
    }

    fn row(&self, device: DeviceKind) -> Result<Row, String> {
        let calls = self.calls()?;
        let algorithm = match (calls, &self.algorithm) {
            (PlannedCall::AllReduce, Some(name)) => name.parse::<Algorithm>().map_err(|_| {
                let names = Algorithm::ALL.map(Algorithm::name).join(", ");
                format!("algorithm = {} is none of {names}", quoted(name))
            })?,
            (PlannedCall::AllReduce, None) => return Err("missing field `algorithm`".to_owned()),
            (_, None) => Algorithm::OneShotPull,
            (_, Some(_)) => return Err(format!("{calls} has no choice of algorithms")),
        };
        let (links, choice) = match (device, self) {
            (
                DeviceKind::Host,
                Self {
                    block_bytes: Some(block_bytes),
                    piece_bytes: Some(piece_bytes),
                    links: None,
                    threads: None,
                    ..
                },
            ) => (Links::ALL, Choice::host(algorithm, self.blocks, *block_bytes, *piece_bytes)),
            (
                DeviceKind::Cuda,
                Self {
                    links: Some(links), threads: Some(threads), block_bytes: None, piece_bytes: None, ..
                },
            ) => (read_links(links)?, Choice::cuda(algorithm, self.blocks, *threads)),
            (DeviceKind::Host, _) => {
                return Err(
                    "a row of the host has block_bytes and piece_bytes, not links or threads".to_owned()
                )
            }
            (DeviceKind::Cuda, _) => {
                return Err("a row of cuda has links and threads, not block_bytes or piece_bytes".to_owned())
            }
        };
        choice.check(device)?;
        let &[first, last] = &self.ranks[..] else {
            return Err(format!("ranks has {} numbers, not a first and a last", self.ranks.len()));
        };
        if first < 1 || first > last || last > MAX_RANKS as u64 {
            return Err(format!("ranks = [{first}, {last}] is no range within 1 to {MAX_RANKS}"));
        }
        let ranks = (first as usize, last as usize);
        Ok(Row { calls, ranks, links, max_bytes: self.up_to.unwrap_or(MAX), choice })
    }
}

/// Parses any text to a machine and its table, or to a reason on one line.
pub(in crate::plan) fn parse(text: &str) -> Result<(Machine, Table), String> {
    let preamble: Preamble = toml::from_str(text).map_err(|error| syntax_error(text, &error))?;
    match preamble.format {
        Some(FORMAT) => {}
        Some(other) => return Err(format!("format = {other}, this library reads {FORMAT}; {TUNE_AGAIN}")),
        None => return Err(format!("it has no format = {FORMAT}: it is no tuning file")),
    }
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    match preamble.version.as_deref() {
        Some(VERSION) => {}
        Some(other) => {
            let other = quoted(other);
            return Err(format!("it was measured with version {other}, this is {VERSION:?}; {TUNE_AGAIN}"));
        }
        None => return Err(format!("it has no version, this is {VERSION:?}; {TUNE_AGAIN}")),
    }
    let content: Content = toml::from_str(text).map_err(|error| syntax_error(text, &error))?;
    let table = table(text, &content.device, &content.row)?;
    Ok((content.machine.machine(table.device)?, table))
}

/// Creates a table from rows, or describes what is wrong in which row.
fn table(text: &str, device: &str, rows: &[Spanned<FileRow>]) -> Result<Table, String> {
    let found = DeviceKind::ALL.into_iter().find(|known| known.name() == device);
    let device = found.ok_or_else(|| format!("device = {} is not host or cuda", quoted(device)))?;
    let location =
        |index: usize| format!("row {} ({})", index + 1, line_number(text, rows[index].span().start));
    let parsed = rows.iter().enumerate().map(|(index, row)| {
        row.get_ref().row(device).map_err(|reason| format!("{}: {reason}", location(index)))
    });
    Table::new(device, parsed.collect::<Result<_, _>>()?).map_err(|(row, reason)| match row {
        Some(index) => format!("{}: {reason}", location(index)),
        None => reason,
    })
}

fn line_number(text: &str, offset: usize) -> String {
    let before = text.get(..offset).unwrap_or(text);
    format!("line {}", before.bytes().filter(|&byte| byte == b'\n').count() + 1)
}

fn syntax_error(text: &str, error: &toml::de::Error) -> String {
    let location = error.span().map_or(String::new(), |span| format!("{}: ", line_number(text, span.start)));
    const LONGEST: usize = 200;
    format!("{location}{}", on_one_line(error.message(), LONGEST))
}

fn read_link(name: &str) -> Result<LinkClass, String> {
    LinkClass::ALL.into_iter().find(|link| link.name() == name).ok_or_else(|| {
        let names = LinkClass::ALL.map(LinkClass::name).join(", ");
        format!("link {} is none of {names}", quoted(name))
    })
}

fn read_links(names: &[String]) -> Result<Links, String> {
    let links = names.iter().try_fold(Links::NONE, |links, name| {
        let link = read_link(name)?;
        match links.contains(link) {
            true => Err(format!("link {} is there twice", quoted(name))),
            false => Ok(links.with(link)),
        }
    })?;
    match links {
        Links::NONE => Err("links is empty".to_owned()),
        _ => Ok(links),
    }
}

/// Returns the first `longest` characters of a text on one line. The text may contain parts of a file.
pub(in crate::plan) fn on_one_line(message: &str, longest: usize) -> String {
    let plain = message.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(longest).collect()
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_tuning_file, |bytes| parse(&String::from_utf8_lossy(bytes)));
