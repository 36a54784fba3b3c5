//! `--report`: results, or a timeline of calls, as one HTML page without references to other files, with charts in SVG.

mod chart;
mod escape;
mod origin;
mod render;
mod scale;
mod timeline;

pub use self::render::render;
pub use self::timeline::timeline;
use crate::cells::Group;

/// The content of a page.
pub struct Page {
    pub heading: String,
    /// What was measured: half a sentence.
    pub subject: String,
    /// Wrong elements; `None` if nothing was checked.
    pub wrong: Option<u64>,
    /// Conclusions, a sentence each.
    pub findings: Vec<String>,
    /// Warnings about the results.
    pub warnings: Vec<String>,
    /// Facts that the numbers depend on, by name.
    pub facts: Vec<(String, String)>,
    /// One for each collective, type and operation.
    pub panels: Vec<Panel>,
    /// The explanation of the columns.
    pub notes: &'static str,
}

/// Two charts and a table.
pub struct Panel {
    pub title: String,
    pub series: Vec<Series>,
    pub table: Table,
}

/// A line in each chart.
#[derive(Debug, Clone)]
pub struct Series {
    pub name: String,
    /// A lower bound that the other lines are compared with.
    pub is_floor: bool,
    pub points: Vec<Point>,
}

/// The results of one size.
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
