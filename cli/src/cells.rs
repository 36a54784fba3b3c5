//! Columns and cells of results: written as lines of a table, as CSV, and on a page.

use std::fmt::Write as _;
use std::io::{self, Write};

/// A column of results.
pub struct Column {
    pub name: &'static str,
    pub unit: &'static str,
    /// 0 if the column is not in tables.
    width: usize,
    pub on_page: bool,
}

impl Column {
    pub const fn new(name: &'static str, unit: &'static str, width: usize) -> Self {
        Self { name, unit, width, on_page: true }
    }

    /// Leaves the column out of pages.
    pub const fn off_page(self) -> Self {
        Self { on_page: false, ..self }
    }
}

/// Columns under a common name, which may be empty.
pub struct Group {
    pub name: &'static str,
    pub columns: &'static [Column],
}

/// A value of a result.
pub enum Cell {
    Text(String),
    Bytes(usize),
    /// Microseconds.
    Time(f64),
    /// GB/s.
    Bandwidth(f64),
    Ratio(f64),
    Error(f64),
    /// Does not exist: `N/A` in tables.
    Missing,
    /// Does not apply: `-` in tables.
    None,
}

impl Cell {
    pub fn text(value: impl ToString) -> Self {
        Self::Text(value.to_string())
    }

    pub fn or_missing<T>(value: Option<T>, cell: impl FnOnce(T) -> Self) -> Self {
        value.map_or(Self::Missing, cell)
    }

    pub fn or_none<T>(value: Option<T>, cell: impl FnOnce(T) -> Self) -> Self {
        value.map_or(Self::None, cell)
    }

    fn in_table(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Bytes(bytes) => bytes.to_string(),
            Self::Time(us) => significant(*us),
            Self::Bandwidth(gbs) => format!("{gbs:.2}"),
            Self::Ratio(value) => ratio(*value),
            Self::Error(error) => distance(*error),
            Self::Missing => "N/A".into(),
            Self::None => "-".into(),
        }
    }

    fn in_csv(&self) -> String {
        match self {
            Self::Time(value) | Self::Ratio(value) => format!("{value:.4}"),
            Self::Bandwidth(gbs) => format!("{gbs:.6}"),
            Self::Error(error) => format!("{error:e}"),
            Self::Missing | Self::None => String::new(),
            cell => cell.in_table(),
        }
    }

    fn on_page(&self) -> String {
        match self {
            Self::Bytes(bytes) => size(*bytes),
            Self::Missing | Self::None => "–".into(),
            cell => cell.in_table(),
        }
    }
}

/// Formats a number with up to four significant digits, at most three of them decimals.
pub fn significant(value: f64) -> String {
    let decimals = match value {
        value if value < 10.0 => 3,
        value if value < 100.0 => 2,
        value if value < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// Formats a ratio with two decimals or two significant digits.
pub fn ratio(value: f64) -> String {
    let decimals = (1.0 - value.max(1e-9).log10().floor()).clamp(2.0, 6.0) as usize;
    format!("{value:.decimals$}")
}

/// Formats the error of a result.
pub fn distance(error: f64) -> String {
    if error == 0.0 {
        "0".into()
    } else {
        format!("{error:.2e}")
    }
}

/// Lays out one line of a table.
fn line(groups: &[Group], mut text: impl FnMut(usize, &Column) -> String) -> String {
    let (mut line, mut index) = (String::new(), 0);
    for group in groups {
        let start = line.len();
        for column in group.columns {
            if column.width > 0 {
                let _ = write!(line, " {:>width$}", text(index, column), width = column.width);
            }
            index += 1;
        }
        if line.len() > start {
            line.push_str("  ");
        }
    }
    line.truncate(line.trim_end().len());
    line
}

/// Writes the lines above a table: names of groups, names of columns, units.
pub fn write_table_header(out: &mut dyn Write, groups: &[Group]) -> io::Result<()> {
    let mut names = String::new();
    for group in groups {
        let width: usize =
            group.columns.iter().filter(|column| column.width > 0).map(|column| column.width + 1).sum();
        if width > 0 {
            let _ = write!(names, "{:^width$}  ", group.name);
        }
    }
    let unit = |column: &Column| match column.unit {
        "" => String::new(),
        unit => format!("({unit})"),
    };
    for text in [
        names.trim_end().to_owned(),
        line(groups, |_, column| column.name.into()),
        line(groups, |_, column| unit(column)),
    ] {
        writeln!(out, "#{}", text.strip_prefix(' ').unwrap_or(&text))?;
    }
    Ok(())
}

/// Writes a row of a table, and a remark behind it.
pub fn write_table_row(
    out: &mut dyn Write,
    groups: &[Group],
    cells: &[Cell],
    remark: Option<String>,
) -> io::Result<()> {
    let remark = remark.map_or(String::new(), |remark| format!("  # {remark}"));
    writeln!(out, "{}{remark}", line(groups, |index, _| cells[index].in_table()))
}

/// Writes the header of CSV: names such as `out_of_place_time_us`.
pub fn write_csv_header(out: &mut dyn Write, groups: &[Group]) -> io::Result<()> {
    let unit = |unit| match unit {
        "us" => "_us",
        "GB/s" => "_gbs",
        _ => "",
    };
    let name = |group: &Group, column: &Column| {
        let prefix = if group.name.is_empty() { String::new() } else { format!("{}_", group.name) };
        format!("{prefix}{}{}", column.name.trim_start_matches('#'), unit(column.unit)).replace('-', "_")
    };
    let columns = groups.iter().flat_map(|group| group.columns.iter().map(move |column| name(group, column)));
    write_csv_record(out, columns)
}

pub fn write_csv_row(out: &mut dyn Write, cells: &[Cell]) -> io::Result<()> {
    write_csv_record(out, cells.iter().map(Cell::in_csv))
}

fn write_csv_record(out: &mut dyn Write, cells: impl Iterator<Item = String>) -> io::Result<()> {
    let mut writer = csv::Writer::from_writer(out);
    writer.write_record(cells.map(String::into_bytes))?;
    writer.flush()
}

/// Returns the cells that pages show.
pub fn page_cells(groups: &[Group], cells: &[Cell]) -> Vec<String> {
    let columns = groups.iter().flat_map(|group| group.columns);
    columns.zip(cells).filter(|(column, _)| column.on_page).map(|(_, cell)| cell.on_page()).collect()
}

/// Formats a size in bytes, with the largest unit that divides it.
pub fn size(bytes: usize) -> String {
    const UNITS: [(usize, &str); 4] = [(1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")];
    let unit = UNITS.into_iter().find(|(unit, _)| bytes >= *unit && bytes % *unit == 0);
    unit.map_or_else(|| bytes.to_string(), |(unit, name)| format!("{} {name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_unit_that_divides_them() {
        let sizes = [0, 1000, 1024, 1536, 16 << 10, 4 << 20, 1 << 30].map(size);
        assert_eq!(sizes, ["0", "1000", "1 Ki", "1536", "16 Ki", "4 Mi", "1 Gi"]);
    }
}
