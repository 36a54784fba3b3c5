//! The plan's table as text: the file that a tuned plan is kept in.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use super::{Choice, Links, Row, Table, KIB, MAX, MAX_THREADS, MIB, WARP};
use crate::abi::FA_MAX_BLOCKS;
use crate::error::{Error, Result};
use crate::plan::Algorithm;
use crate::topology::{quoted, LinkClass};
use crate::MAX_RANKS;

const HEADER: &str = "fast-allreduce plan 1";
const COLUMNS: [&str; 6] = ["# ranks", "links", "up to", "algorithm", "blocks", "threads"];
const MAX_TEXT_BYTES: usize = 64 << 10;

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows.iter().map(|row| {
            let Choice { algorithm, blocks, threads } = row.choice;
            let (ranks, links) = (ranks(row.ranks), row.links.to_string());
            [
                ranks,
                links,
                size(row.max_bytes, ""),
                algorithm.to_string(),
                blocks.to_string(),
                threads.to_string(),
            ]
        });
        let lines = std::iter::once(COLUMNS.map(str::to_owned)).chain(rows).collect::<Vec<_>>();
        let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
        let widths: [usize; COLUMNS.len()] = std::array::from_fn(width);
        writeln!(f, "{HEADER}")?;
        for line in &lines {
            let (last, cells) = line.split_last().expect("a line has a cell for every column");
            for (cell, width) in cells.iter().zip(widths) {
                write!(f, "{cell:width$}  ")?;
            }
            writeln!(f, "{last}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = LinkClass::ALL.into_iter().filter(|&link| self.contains(link)).map(LinkClass::name);
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

fn ranks((first, last): (usize, usize)) -> String {
    if first == last {
        first.to_string()
    } else {
        format!("{first}-{last}")
    }
}

/// A size in the largest unit that is exact.
pub(super) fn size(bytes: u64, before_unit: &str) -> String {
    match bytes {
        MAX => "max".to_owned(),
        0 => "0".to_owned(),
        _ if bytes % MIB == 0 => format!("{}{before_unit}MiB", bytes / MIB),
        _ if bytes % KIB == 0 => format!("{}{before_unit}KiB", bytes / KIB),
        _ => bytes.to_string(),
    }
}

impl Table {
    /// Reads a table from its text.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] with the line and what is wrong there: another version, a cell that does not read or is out
    /// of its range, sizes that do not increase, a world size and link class without a row up to `max`, more than 64 KiB.
    pub fn parse(text: &str) -> Result<Self> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(invalid(1, format!("a text of {} bytes", text.len()), "at most 64 KiB"));
        }
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(line, text)| (line + 1, text.trim()))
            .filter(|(_, text)| !text.is_empty() && !text.starts_with('#'));
        match lines.next() {
            Some((_, HEADER)) => {}
            Some((line, other)) => return Err(invalid(line, quoted(other), "fast-allreduce plan 1")),
            None => return Err(invalid(1, "nothing".into(), "fast-allreduce plan 1")),
        }
        let rows = lines.map(|(line, text)| Ok((line, read_row(line, text)?))).collect::<Result<Vec<_>>>()?;
        check_cover(&rows)?;
        Ok(Self { rows: Cow::Owned(rows.into_iter().map(|(_, row)| row).collect()) })
    }
}

/// As [`Table::parse`].
impl FromStr for Table {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

fn read_row(line: usize, text: &str) -> Result<Row> {
    let cells = text.split_whitespace().collect::<Vec<_>>();
    let [ranks, links, bytes, algorithm, blocks, threads] = cells[..] else {
        let expected = "six cells: ranks, links, up to, algorithm, blocks, threads";
        return Err(invalid(line, format!("{} cells", cells.len()), expected));
    };
    let invalid =
        |column: &str, cell, expected| invalid(line, format!("{column} {}", quoted(cell)), expected);
    let choice = Choice {
        algorithm: algorithm.parse::<Algorithm>().map_err(|_| {
            let expected = "one of one-shot-pull, two-shot-pull, one-shot-push, two-shot-push";
            invalid("algorithm", algorithm, expected)
        })?,
        blocks: number(blocks, 1, FA_MAX_BLOCKS).ok_or_else(|| invalid("blocks", blocks, "1 to 64"))?,
        threads: number(threads, WARP, MAX_THREADS)
            .filter(|threads| threads % WARP == 0)
            .ok_or_else(|| invalid("threads", threads, "a multiple of 32 from 32 to 512"))?,
    };
    Ok(Row {
        ranks: read_ranks(ranks).ok_or_else(|| invalid("ranks", ranks, "1 to 16, or a range such as 6-8"))?,
        links: read_links(links).ok_or_else(|| {
            let expected = "a list of same-device, nvswitch, nvlink-mesh, pcie, unreachable, without spaces";
            invalid("links", links, expected)
        })?,
        max_bytes: read_size(bytes)
            .ok_or_else(|| invalid("size", bytes, "bytes, KiB as in 64KiB, MiB as in 2MiB, or max"))?,
        choice,
    })
}

/// The invariant of a table: the first row that fits exists, and is not hidden by another.
fn check_cover(rows: &[(usize, Row)]) -> Result<()> {
    for world_size in 1..=MAX_RANKS {
        for link in LinkClass::ALL {
            let mut covered = None;
            for (line, row) in rows.iter().filter(|(_, row)| row.is_for(world_size, link)) {
                if covered.is_some_and(|(_, bytes)| row.max_bytes <= bytes) {
                    let fact = format!("{} for {world_size} ranks, {link}", size(row.max_bytes, " "));
                    return Err(invalid(*line, fact, "a larger size than in the row before it"));
                }
                covered = Some((*line, row.max_bytes));
            }
            if let Some((line, bytes)) = covered.filter(|&(_, bytes)| bytes < MAX) {
                let fact = format!("nothing above {} for {world_size} ranks, {link}", size(bytes, " "));
                return Err(invalid(line, fact, "rows up to max"));
            }
            if covered.is_none() {
                let line = rows.last().map_or(1, |(line, _)| *line);
                let fact = format!("the end, and no row for {world_size} ranks, {link}");
                return Err(invalid(line, fact, "rows for 1 to 16 ranks and every link"));
            }
        }
    }
    Ok(())
}

fn read_ranks(cell: &str) -> Option<(usize, usize)> {
    let (first, last) = cell.split_once('-').unwrap_or((cell, cell));
    let (first, last) = (number(first, 1, MAX_RANKS as u32)?, number(last, 1, MAX_RANKS as u32)?);
    (first <= last).then_some((first as usize, last as usize))
}

fn read_links(cell: &str) -> Option<Links> {
    let read = |name| LinkClass::ALL.into_iter().find(|link| link.name() == name);
    cell.split(',').try_fold(Links(0), |links, name| {
        let link = read(name).filter(|&link| !links.contains(link))?;
        Some(Links(links.0 | 1 << link as u8))
    })
}

fn read_size(cell: &str) -> Option<u64> {
    if cell == "max" {
        return Some(MAX);
    }
    let (digits, unit) = match cell.strip_suffix("KiB") {
        Some(digits) => (digits, KIB),
        None => cell.strip_suffix("MiB").map_or((cell, 1), |digits| (digits, MIB)),
    };
    decimal(digits)?.checked_mul(unit)
}

fn number(cell: &str, least: u32, most: u32) -> Option<u32> {
    let value = u32::try_from(decimal(cell)?).ok()?;
    (least..=most).contains(&value).then_some(value)
}

fn decimal(digits: &str) -> Option<u64> {
    // `parse` takes a sign as well.
    digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

fn invalid(line: usize, fact: String, expected: &'static str) -> Error {
    Error::InvalidSetting { name: "plan table", value: format!("line {line}: {fact}"), expected }
}
