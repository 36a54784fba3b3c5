//! `src/catalogue/settings/generated.rs`: the values of settings, by name, and the enums of their words.

use super::GENERATED;
use crate::kernels::KERNELS;
use crate::settings::{Devices, Environment, Kind, Setting, Words, CHOICES, SETTINGS};

/// The library's file.
pub fn library() -> String {
    let mut text = format!(
        "//! {GENERATED}\n\nuse std::ffi::OsStr;\nuse std::fmt;\nuse std::path::PathBuf;\nuse std::str::FromStr;\n\n\
         use super::{{bytes, count, of_device, seconds, switch, variable, word, Limit, DeviceId, Text}};\n\
         use crate::catalogue::{{invalid, Algorithm}};\nuse crate::error::{{Error, Result}};\n\n"
    );
    CHOICES.iter().for_each(|words| enumeration(&mut text, words));
    for one in SETTINGS {
        if let Environment::Reader(variable) = one.environment {
            let name = one.name.to_ascii_uppercase();
            text += &format!(
                "/// The environment variable of `{}`.\npub(crate) const {name}_VARIABLE: &str = \"{variable}\";\n\n",
                one.name
            );
        }
    }
    text += "/// What a program, or the environment, has set.\n#[derive(Debug, Clone, Default)]\npub(crate) struct Values {\n";
    for one in SETTINGS {
        text += &format!("    pub {}: Option<{}>,\n", one.name, rust_type(one.kind));
    }
    text += "}\n\nimpl Values {\n";
    set_and_get(&mut text);
    text += "\n    /// With what the environment sets of the rest.\n    pub fn or_environment(mut self) -> Result<Self> {\n";
    for one in SETTINGS {
        if let Environment::Variable(variable) = one.environment {
            let (name, read) = (one.name, read(one.kind, variable, "&text"));
            text += &format!(
                "        if let (None, Some(text)) = (&self.{name}, variable(\"{variable}\")) {{\n            \
                 self.{name} = Some({read}?);\n        }}\n"
            );
        }
    }
    text += "        Ok(self)\n    }\n\n    /// Refuses a setting that the device does not have, unless it has its default.\n    \
             pub fn check_device(&self, is_cuda: bool) -> Result<()> {\n        match is_cuda {\n";
    for (pattern, others) in [("true", Devices::Host), ("false", Devices::Cuda)] {
        text += &format!("            {pattern} => {{\n");
        for one in SETTINGS.iter().filter(|one| one.devices == others) {
            let Setting { name, default, .. } = one;
            let is_cuda = others == Devices::Cuda;
            let value = if default.contains(' ') { "" } else { default };
            text += &format!(
                "                of_device({is_cuda}, \"{name}\", self.get(\"{name}\"), \"{value}\")?;\n"
            );
        }
        text += "            }\n";
    }
    text +=
        "        }\n        Ok(())\n    }\n\n    /// Settings that ranks compare, each with its value.\n    \
             pub fn compared(&self) -> Vec<(&'static str, String)> {\n        vec![\n";
    let of_all =
        |one: &&Setting| one.agree && one.devices == Devices::Both && !matches!(one.kind, Kind::Device);
    for one in SETTINGS.iter().filter(of_all) {
        text += &format!(
            "            (\"{0}\", self.get(\"{0}\").unwrap_or_else(|| \"automatic\".into())),\n",
            one.name
        );
    }
    text += "        ]\n    }\n}\n\n";
    rows(&mut text);
    text
}

fn set_and_get(text: &mut String) {
    let names: Vec<_> = SETTINGS.iter().map(|one| one.name).collect();
    *text += &format!("    pub const NAMES: &'static [&'static str] = &{names:?};\n\n");
    *text += "    /// Sets one by its name.\n    pub fn set(&mut self, name: &str, text: &OsStr) -> Result<()> {\n        match name {\n";
    for Setting { name, kind, .. } in SETTINGS {
        *text += &format!("            \"{name}\" => self.{name} = Some({}?),\n", read(*kind, name, "text"));
    }
    *text += &format!(
        "            _ => return Err(invalid(\"setting\", name, \"one of {}\")),\n        }}\n        Ok(())\n    }}\n",
        names.join(", ")
    );
    *text += "\n    /// What one is set to.\n    pub fn get(&self, name: &str) -> Option<String> {\n        match name {\n";
    for Setting { name, .. } in SETTINGS {
        *text += &format!("            \"{name}\" => self.{name}.as_ref().map(Text::text),\n");
    }
    *text += "            _ => None,\n        }\n    }\n";
}

/// Rows for tests that walk all settings.
fn rows(text: &mut String) {
    *text += &format!(
        "/// All settings, for tests.\n\
         #[cfg(test)]\npub(crate) const ROWS: [super::Row; {}] = [\n",
        SETTINGS.len()
    );
    for one in SETTINGS {
        let is_read = matches!(one.environment, Environment::Variable(_));
        let lacks = match one.devices {
            Devices::Both => "None",
            Devices::Host => "Some(DeviceId::Cuda(0))",
            Devices::Cuda => "Some(DeviceId::Cpu)",
        };
        let refuses = !matches!(one.kind, Kind::Tuning);
        *text += &format!(
            "    super::Row {{ name: \"{}\", variable: {:?}, is_read: {is_read}, other: \"{}\", refuses: {refuses}, lacks: {lacks} }},\n",
            one.name,
            one.environment.name(),
            other(one)
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

/// The call that reads a value of the setting or variable `name`.
fn read(kind: Kind, name: &str, text: &str) -> String {
    let of = |function: &str| format!("{function}(\"{name}\", {text})");
    match kind {
        Kind::Switch => of("switch"),
        Kind::Seconds => of("seconds"),
        Kind::Bytes => of("bytes"),
        Kind::Count(most) => format!("count(\"{name}\", {text}, {most}, \"{}\")", super::takes(kind)),
        Kind::Choice(words) => of(&format!("word::<{}>", words.name)),
        Kind::Algorithm => of("word::<Algorithm>"),
        Kind::Tuning => format!("Ok::<_, Error>(PathBuf::from({text}))"),
        Kind::Device => of("word::<DeviceId>"),
    }
}

/// A value other than the default.
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

fn enumeration(text: &mut String, words: &'static Words) {
    let Words { name, doc, has_default, all } = words;
    let default = if *has_default { ", Default" } else { "" };
    *text += &format!(
        "/// {doc}\n#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash{default})]\n#[non_exhaustive]\npub enum {name} {{\n"
    );
    for (index, word) in all.iter().enumerate() {
        let default = if *has_default && index == 0 { "    #[default]\n" } else { "" };
        *text += &format!("    /// {}\n{default}    {},\n", word.doc, word.variant);
    }
    *text += &format!(
        "}}\n\nimpl {name} {{\n    /// All, in the order of the table.\n    pub const ALL: [Self; {}] = [",
        all.len()
    );
    let variants: Vec<_> = all.iter().map(|word| format!("Self::{}", word.variant)).collect();
    *text += &format!("{}];\n\n    /// Its name in settings.\n    pub const fn name(self) -> &'static str {{\n        match self {{\n", variants.join(", "));
    for word in *all {
        *text += &format!("            Self::{} => \"{}\",\n", word.variant, word.name);
    }
    let (lower, takes) = (name.to_ascii_lowercase(), super::takes(Kind::Choice(words)));
    *text += &format!(
        "        }}\n    }}\n}}\n\nimpl fmt::Display for {name} {{\n    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {{\n        \
         f.pad(self.name())\n    }}\n}}\n\nimpl FromStr for {name} {{\n    type Err = Error;\n\n    \
         fn from_str(name: &str) -> Result<Self> {{\n        \
         Self::ALL.into_iter().find(|one| one.name() == name).ok_or_else(|| invalid(\"{lower}\", name, \"{takes}\"))\n    }}\n}}\n\n\
         impl Text for {name} {{\n    fn text(&self) -> String {{\n        self.name().into()\n    }}\n}}\n\n"
    );
}
