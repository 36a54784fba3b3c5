//! Regions of `docs/`: the settings, the other environment variables, and the algorithms.

use crate::facts::ReadsInputs;
use crate::kernels::KERNELS;
use crate::settings::{Devices, Setting, OTHER_VARIABLES, SETTINGS};

/// The table of settings.
pub fn settings() -> String {
    let mut text =
        "| setting | takes | default | environment variable | |\n|---|---|---|---|---|\n".to_owned();
    for one in SETTINGS {
        let Setting { name, kind, default, doc, .. } = one;
        let variable = one.environment.name().map_or(String::new(), |variable| format!("`{variable}`"));
        let devices = match one.devices {
            Devices::Both => "",
            Devices::Host => " CPUs only.",
            Devices::Cuda => " GPUs only.",
        };
        let agree = if one.agree { " All ranks must have the same." } else { "" };
        text += &format!(
            "| `{name}` | {} | {default} | {variable} | {doc}{devices}{agree} |\n",
            super::takes(*kind)
        );
    }
    text
}

/// The table of other variables.
pub fn variables() -> String {
    let mut text = "| variable | |\n|---|---|\n".to_owned();
    for (names, doc) in OTHER_VARIABLES {
        let names: Vec<_> = names.split(", ").map(|name| format!("`{name}`")).collect();
        text += &format!("| {} | {doc} |\n", names.join(", "));
    }
    text
}

/// The table of algorithms in `docs/algorithms.md`.
pub fn algorithms() -> String {
    let mut text =
        "| name | same bits | barriers | bytes to or from each rank | input |\n|---|---|---|---|---|\n"
            .to_owned();
    for algorithm in KERNELS.iter().filter_map(|kernel| kernel.algorithm) {
        let input = match algorithm.reads_inputs {
            ReadsInputs::Never => "any pointer",
            ReadsInputs::OutOfPlace | ReadsInputs::Always => "staged or registered",
        };
        let bits = if algorithm.direct { "yes" } else { "no" };
        text += &format!(
            "| `{}` | {bits} | {} | {} | {input} |\n",
            algorithm.name, algorithm.barriers, algorithm.bytes
        );
    }
    text
}
