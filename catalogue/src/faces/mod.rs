//! Generators of the files that repeat facts of the catalogue, one module for each language.

mod c;
mod collectives;
mod cpp;
mod docs;
mod items;
mod mpi;
mod python;
mod rust;
mod settings;

use std::io;
use std::path::Path;

use crate::kernels::KERNELS;
use crate::settings::Kind;

/// Generated file of the checkout.
pub struct File {
    /// Path from the root of the checkout.
    pub path: &'static str,
    /// Generated part of the file.
    pub part: Part,
}

/// Generated part of a file.
pub enum Part {
    /// The whole file.
    Whole(String),
    /// The lines between `<!-- catalogue: NAME -->` and `<!-- catalogue: end -->`.
    Region {
        /// Name of the region.
        name: &'static str,
        /// Lines of the region.
        text: String,
    },
}

/// Generates all files. A file with several regions is listed once for each.
pub fn all() -> Vec<File> {
    let whole = |path, text: String| File { path, part: Part::Whole(items::filled(&text)) };
    let region = |path, name, text| File { path, part: Part::Region { name, text } };
    vec![
        whole("csrc/catalogue.h", cpp::header()),
        whole("csrc/algorithms/reducing.cuh", cpp::includes(true)),
        whole("csrc/algorithms/all.cuh", cpp::includes(false)),
        whole("src/catalogue/generated.rs", rust::library()),
        whole("src/catalogue/settings/generated.rs", settings::library()),
        whole("src/call/generated.rs", collectives::arguments()),
        whole("cli/src/harness/rivals/mpi_names.rs", mpi::names()),
        whole("capi/src/catalogue.rs", c::enums()),
        whole("python/lib/fast_allreduce/_catalogue.py", python::tables()),
        region("docs/tuning.md", "settings", docs::settings()),
        region("docs/tuning.md", "variables", docs::variables()),
        region("docs/algorithms.md", "algorithms", docs::algorithms()),
    ]
}

impl File {
    /// Returns the file's whole text, with the generated part replaced.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or lacks a region's markers.
    pub fn rendered(&self, root: &Path) -> io::Result<String> {
        match &self.part {
            Part::Whole(text) => Ok(text.clone()),
            part @ Part::Region { .. } => part.applied(&std::fs::read_to_string(root.join(self.path))?),
        }
    }
}

impl Part {
    /// Applies the generated part to `text`, the file's current text.
    ///
    /// # Errors
    ///
    /// If the text lacks the region's markers.
    pub fn applied(&self, text: &str) -> io::Result<String> {
        let (name, generated) = match self {
            Self::Whole(text) => return Ok(text.clone()),
            Self::Region { name, text } => (name, text),
        };
        let (begin, end) = (format!("<!-- catalogue: {name} -->\n"), "<!-- catalogue: end -->\n");
        let split =
            text.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(end)?.1)));
        let (before, after) = split
            .ok_or_else(|| io::Error::other(format!("it has no {} ... {}", begin.trim(), end.trim())))?;
        Ok(format!("{before}{begin}{generated}{end}{after}"))
    }
}

const GENERATED: &str =
    "Generated from catalogue/ by `cargo run -p fast-allreduce-catalogue --example generate`: do not edit.";

/// Describes the values of a setting.
fn takes(kind: Kind) -> String {
    match kind {
        Kind::Switch => "0 or 1".into(),
        Kind::Seconds => "seconds, such as 2.5, or 0 for no limit".into(),
        Kind::Bytes => "a number of bytes, with an optional suffix K, M or G".into(),
        Kind::Count(usize::MAX) => "a positive number".into(),
        Kind::Count(most) => format!("a number from 1 to {most}"),
        Kind::Choice(words) => items::one_of(words.all.iter().map(|word| word.name)),
        Kind::Algorithm => items::one_of(KERNELS.iter().filter_map(|kernel| Some(kernel.algorithm?.name))),
        Kind::Tuning => "the path of a tuning file, or built-in".into(),
        Kind::Device => "cpu, cuda or cuda:N".into(),
    }
}

/// Removes the links from Markdown, and keeps their texts.
fn without_links(markdown: &str) -> String {
    let mut parts = markdown.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text += part.split_once(')').map_or(part, |(_, rest)| rest);
    }
    text.replace('[', "")
}
