//! Regions of `docs/tuning.md`: the settings, and the other environment variables.

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
