//! Tables of `docs/`: the settings, the other environment variables, and the algorithms.

use crate::facts::ReadsInputs;
use crate::kernels::KERNELS;
use crate::settings::{Devices, Kind, Setting, OTHER_VARIABLES, SETTINGS};

/// Returns the table of settings.
pub fn settings() -> String {
    let mut text = header(&["setting", "values", "default", "environment variable", "devices", "ranks", ""]);
    for one in SETTINGS {
        let Setting { name, kind, default, doc, .. } = one;
        let variable = one.environment.name().map_or(String::new(), |variable| format!("`{variable}`"));
        let devices = match one.devices {
            Devices::Both => "all",
            Devices::Host => "CPUs",
            Devices::Cuda => "GPUs",
        };
        let ranks = if one.agree { "equal" } else { "" };
        // Shorter than in errors, for the width of the table.
        let values = match kind {
            Kind::Algorithm => "an [algorithm](algorithms.md)".to_owned(),
            Kind::Seconds => "seconds (0: none)".to_owned(),
            Kind::Bytes => "bytes, such as 64K, 8M".to_owned(),
            Kind::Tuning => "a path, or built-in".to_owned(),
            kind => super::takes(*kind).replace("one of ", ""),
        };
        let cells = [&format!("`{name}`"), &values, *default, &variable, devices, ranks, doc];
        text += &row(&cells);
    }
    text
}

/// Returns the table of other variables.
pub fn variables() -> String {
    let mut text = header(&["variable", ""]);
    for (names, doc) in OTHER_VARIABLES {
        let names: Vec<_> = names.split(", ").map(|name| format!("`{name}`")).collect();
        text += &row(&[&names.join(", "), doc]);
    }
    text
}

/// Returns the table of algorithms in `docs/algorithms.md`.
pub fn algorithms() -> String {
    let mut text = header(&["name", "same bits", "barriers", "bytes to or from each rank", "input"]);
    for algorithm in KERNELS.iter().filter_map(|kernel| kernel.algorithm) {
        let input = match algorithm.reads_inputs {
            ReadsInputs::Never => "any pointer",
            ReadsInputs::OutOfPlace | ReadsInputs::Always => "staged or registered",
        };
        let bits = if algorithm.direct { "yes" } else { "no" };
        text += &row(&[&format!("`{}`", algorithm.name), bits, algorithm.barriers, algorithm.bytes, input]);
    }
    text
}

fn header(columns: &[&str]) -> String {
    format!("{}|{}\n", row(columns), "---|".repeat(columns.len()))
}

fn row(cells: &[&str]) -> String {
    let cells: String = cells
        .iter()
        .map(|cell| if cell.is_empty() { " |".to_owned() } else { format!(" {cell} |") })
        .collect();
    format!("|{cells}\n")
}
