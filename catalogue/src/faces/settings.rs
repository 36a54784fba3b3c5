//! `src/catalogue/settings/generated.rs`: the values of settings, by name, and the enums of their words.

use super::items::{begin_impl, columns, end_impl, enumeration, list, one_of, Column, COPY, NON_EXHAUSTIVE};
use super::{takes, GENERATED};
use crate::kernels::KERNELS;
use crate::settings::{Devices, Environment, Kind, Setting, Word, Words, CHOICES, SETTINGS};

const HEAD: &str = "\
use std::ffi::OsStr;
use std::path::PathBuf;

use super::{bytes, count, of_device, seconds, switch, variable, word, DeviceId, Limit, Text};
use crate::catalogue::{invalid, Algorithm};
use crate::error::{Error, Result};

";

/// Returns the library's file.
pub fn library() -> String {
    let mut text = format!("//! {GENERATED}\n\n{HEAD}");
    CHOICES.iter().for_each(|words| enum_of_words(&mut text, words));
    for one in SETTINGS {
        if let Environment::Reader(variable) = one.environment {
            let name = one.name.to_ascii_uppercase();
            text += &format!("/// Environment variable of `{}`.\n", one.name);
            text += &format!("pub(crate) const {name}_VARIABLE: &str = \"{variable}\";\n\n");
        }
    }
    text += "/// Values that the program or the environment has set.\n";
    text += "#[derive(Debug, Clone, Default)]\npub(crate) struct Values {\n";
    for one in SETTINGS {
        text += &format!("    pub {}: Option<{}>,\n", one.name, rust_type(one.kind));
    }
    text += "}\n\n";
    begin_impl(&mut text, "Values");
    set_and_get(&mut text);
    or_environment(&mut text);
    check_device(&mut text);
    compared(&mut text);
    end_impl(&mut text);
    rows(&mut text);
    text
}

fn set_and_get(text: &mut String) {
    let names: Vec<_> = SETTINGS.iter().map(|one| one.name).collect();
    *text += &format!("    pub const NAMES: &'static [&'static str] = &{names:?};\n\n");
    *text += "    /// Sets a setting by its name.\n";
    *text += "    pub fn set(&mut self, name: &str, text: &OsStr) -> Result<()> {\n        match name {\n";
    for Setting { name, kind, .. } in SETTINGS {
        *text += &format!("            \"{name}\" => self.{name} = Some({}?),\n", read(*kind, name, "text"));
    }
    let names = one_of(names.into_iter());
    *text += &format!("            _ => return Err(invalid(\"setting\", name, \"{names}\")),\n");
    *text += "        }\n        Ok(())\n    }\n\n    /// Returns the value of a setting, if it is set.\n";
    *text += "    pub fn get(&self, name: &str) -> Option<String> {\n        match name {\n";
    for Setting { name, .. } in SETTINGS {
        *text += &format!("            \"{name}\" => self.{name}.as_ref().map(Text::text),\n");
    }
    *text += "            _ => None,\n        }\n    }\n\n";
}

fn or_environment(text: &mut String) {
    *text += "    /// Fills in settings that are not set from the environment.\n";
    *text += "    pub fn or_environment(mut self) -> Result<Self> {\n";
    for one in SETTINGS {
        if let Environment::Variable(variable) = one.environment {
            let (name, read) = (one.name, read(one.kind, variable, "&text"));
            *text +=
                &format!("        if let (None, Some(text)) = (&self.{name}, variable(\"{variable}\")) {{\n");
            *text += &format!("            self.{name} = Some({read}?);\n        }}\n");
        }
    }
    *text += "        Ok(self)\n    }\n\n";
}

fn check_device(text: &mut String) {
    *text += "    /// Refuses settings that the device does not have, unless they have their defaults.\n";
    *text += "    pub fn check_device(&self, is_cuda: bool) -> Result<()> {\n        match is_cuda {\n";
    for (pattern, others) in [("true", Devices::Host), ("false", Devices::Cuda)] {
        *text += &format!("            {pattern} => {{\n");
        for one in SETTINGS.iter().filter(|one| one.devices == others) {
            let Setting { name, default, .. } = one;
            let is_cuda = others == Devices::Cuda;
            let value = if default.contains(' ') { "" } else { default };
            *text += &format!(
                "                of_device({is_cuda}, \"{name}\", self.get(\"{name}\"), \"{value}\")?;\n"
            );
        }
        *text += "            }\n";
    }
    *text += "        }\n        Ok(())\n    }\n\n";
}

fn compared(text: &mut String) {
    *text += "    /// Returns the names and values of the settings that ranks compare.\n";
    *text += "    pub fn compared(&self) -> Vec<(&'static str, String)> {\n        vec![\n";
    let of_all =
        |one: &&Setting| one.agree && one.devices == Devices::Both && !matches!(one.kind, Kind::Device);
    for one in SETTINGS.iter().filter(of_all) {
        let name = one.name;
        *text += &format!(
            "            (\"{name}\", self.get(\"{name}\").unwrap_or_else(|| \"automatic\".into())),\n"
        );
    }
    *text += "        ]\n    }\n";
}

/// Adds rows for tests that iterate over all settings.
fn rows(text: &mut String) {
    *text += "/// All settings, for tests.\n";
    *text += &format!("#[cfg(test)]\npub(crate) const ROWS: [super::Row; {}] = [\n", SETTINGS.len());
    for one in SETTINGS {
        let (name, variable, other) = (one.name, one.environment.name(), other(one));
        let is_read = matches!(one.environment, Environment::Variable(_));
        let lacks = match one.devices {
            Devices::Both => "None",
            Devices::Host => "Some(DeviceId::Cuda(0))",
            Devices::Cuda => "Some(DeviceId::Cpu)",
        };
        let refuses = !matches!(one.kind, Kind::Tuning);
        *text += &format!(
            "    super::Row {{ name: \"{name}\", variable: {variable:?}, is_read: {is_read}, other: \"{other}\", \
             refuses: {refuses}, lacks: {lacks} }},\n"
        );
    }
    *text += "];\n";
}

fn rust_type(kind: Kind) -> &'static str {
    match kind {
        Kind::Switch => "bool",
        Kind::Seconds => "Limit",
        Kind::Bytes | Kind::Count(_) => "usize",
        Kind::Choice(words) => words.name,
        Kind::Algorithm => "Algorithm",
        Kind::Tuning => "PathBuf",
        Kind::Device => "DeviceId",
    }
}

/// Returns the call that parses a value of the setting or variable `name`.
fn read(kind: Kind, name: &str, text: &str) -> String {
    let of = |function: &str| format!("{function}(\"{name}\", {text})");
    match kind {
        Kind::Switch => of("switch"),
        Kind::Seconds => of("seconds"),
        Kind::Bytes => of("bytes"),
        Kind::Count(most) => {
            let most = if most == usize::MAX { "usize::MAX".to_owned() } else { most.to_string() };
            format!("count(\"{name}\", {text}, {most}, \"{}\")", takes(kind))
        }
        Kind::Choice(words) => of(&format!("word::<{}>", words.name)),
        Kind::Algorithm => of("word::<Algorithm>"),
        Kind::Tuning => format!("Ok::<_, Error>(PathBuf::from({text}))"),
        Kind::Device => of("word::<DeviceId>"),
    }
}

/// Returns a value other than the default.
fn other(one: &Setting) -> &'static str {
    match one.kind {
        Kind::Switch if one.default == "1" => "0",
        Kind::Switch => "1",
        Kind::Count(_) => "2",
        Kind::Seconds => "2.5",
        Kind::Bytes => "65536",
        Kind::Choice(words) => words.all[words.all.len() - 1].name,
        Kind::Algorithm => KERNELS.iter().find_map(|kernel| kernel.algorithm).map_or("", |one| one.name),
        Kind::Tuning => "built-in",
        Kind::Device => "cuda:1",
    }
}

fn enum_of_words(text: &mut String, words: &'static Words) {
    let Words { name, doc, has_default, all } = words;
    let derive = if *has_default { COPY.replace(')', ", Default)") } else { COPY.to_owned() };
    let variants = all.iter().enumerate().map(|(index, word)| {
        let default = if *has_default && index == 0 { "#[default]\n    " } else { "" };
        (word.doc.to_owned(), format!("{default}{}", word.variant))
    });
    enumeration(text, doc, &[&derive, NON_EXHAUSTIVE], name, variants);
    begin_impl(text, name);
    let all = || all.iter().map(|word| (word.variant, word));
    list(text, "All of them.", "pub const ALL", all().map(|(variant, _)| variant));
    let name_of: Column<&Word> =
        ("Returns the name in settings.", "pub const fn name(self) -> &'static str", &|word| {
            format!("\"{}\"", word.name)
        });
    columns(text, &[name_of], all);
    end_impl(text);
    let (setting, takes) = (name.to_ascii_lowercase(), takes(Kind::Choice(words)));
    *text += &format!("words!({name}, \"{setting}\", \"{takes}\");\n\n");
}
