//! `--report`: results as one HTML page that needs nothing else, with charts in SVG.

mod chart;
mod escape;
mod origin;
mod render;
mod scale;

pub use self::render::render;
use crate::results::cells::Group;

/// What is on a page.
pub struct Page {
    pub heading: String,
    /// What was measured, in half a sentence.
    pub subject: String,
    /// Wrong elements; `None` if nothing was checked.
    pub wrong: Option<u64>,
    /// What the numbers say, a sentence each.
    pub findings: Vec<String>,
    /// What a reader must not overlook.
    pub warnings: Vec<String>,
    /// What the numbers depend on, by name.
    pub facts: Vec<(String, String)>,
    /// One for each type and operation.
    pub panels: Vec<Panel>,
    /// What the columns are.
    pub notes: &'static str,
}

/// Two charts, and the numbers.
pub struct Panel {
    pub title: String,
    pub series: Vec<Series>,
    pub table: Table,
}

/// A line in each chart.
#[derive(Debug, Clone)]
pub struct Series {
    pub name: String,
    /// What the others are measured by, rather than one of them.
    pub is_floor: bool,
    pub points: Vec<Point>,
}

/// One size.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    pub bytes: usize,
    pub latency_us: f64,
    pub busbw_gbs: f64,
}

/// The numbers of a panel.
pub struct Table {
    /// Columns that are not on pages are skipped.
    pub groups: &'static [Group],
    /// The cells of the columns on the page.
    pub rows: Vec<Vec<String>>,
}

/// A size in bytes, in the units that divide it.
pub fn size(bytes: usize) -> String {
    const UNITS: [(usize, &str); 4] = [(1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")];
    let unit = UNITS.into_iter().find(|(unit, _)| bytes >= *unit && bytes % unit == 0);
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
