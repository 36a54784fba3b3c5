//! `src/catalogue/settings/generated.rs`: the values of settings, by name, and the enums of their words.

use super::items::{begin_impl, columns, end_impl, enumeration, list, names, Column, COPY, NON_EXHAUSTIVE};
use super::{takes, GENERATED};
use crate::kernels::KERNELS;
use crate::settings::{Devices, Environment, Kind, Setting, Word, Words, CHOICES, SETTINGS};

const HEAD: &str = "\
use std::path::PathBuf;

use super::{bytes, count, path, seconds, switch, word, DeviceId, Limit, Row, Text};
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
    text += "settings! {\n";
    for one in SETTINGS {
        text += &format!("    {}: {} = {};\n", one.name, rust_type(one.kind), parser(one.kind));
    }
    text += "}\n\n";
    names(&mut text, "NAMES", SETTINGS.iter().map(|one| one.name));
    rows(&mut text);
    text
}

/// Adds the table of facts.
fn rows(text: &mut String) {
    *text += "/// Facts about all settings.\n";
    *text += &format!("pub(crate) const ROWS: [Row; {}] = [\n", SETTINGS.len());
    for one in SETTINGS {
        let (name, variable, other) = (one.name, one.environment.name(), other(one));
        let is_read = matches!(one.environment, Environment::Variable(_));
        let is_cuda = match one.devices {
            Devices::Both => None,
            Devices::Host => Some(false),
            Devices::Cuda => Some(true),
        };
        let is_compared = one.agree && is_cuda.is_none() && !matches!(one.kind, Kind::Device);
        let default = if one.default.contains(' ') { "" } else { one.default };
        let refuses = !matches!(one.kind, Kind::Tuning);
        *text += &format!(
            "    Row {{ name: \"{name}\", variable: {variable:?}, is_read: {is_read}, is_cuda: {is_cuda:?}, \
             is_compared: {is_compared}, default: \"{default}\", other: \"{other}\", refuses: {refuses} }},\n"
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

/// Returns the function that parses a value.
fn parser(kind: Kind) -> String {
    match kind {
        Kind::Switch => "switch".into(),
        Kind::Seconds => "seconds".into(),
        Kind::Bytes => "bytes".into(),
        Kind::Count(most) => {
            let most = if most == usize::MAX { "usize::MAX".to_owned() } else { most.to_string() };
            format!("|name, text| count(name, text, {most}, \"{}\")", takes(kind))
        }
        Kind::Choice(_) | Kind::Algorithm | Kind::Device => "word".into(),
        Kind::Tuning => "path".into(),
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
