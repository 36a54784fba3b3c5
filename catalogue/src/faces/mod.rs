//! The files that are made from the catalogue.

mod c;
mod cpp;
mod python;
mod rust;

use std::io;
use std::path::Path;

/// A file of the checkout.
pub struct File {
    /// Its path from the root of the checkout.
    pub path: &'static str,
    /// What of it is generated.
    pub part: Part,
}

/// What of a file is generated.
pub enum Part {
    /// All of it.
    Whole(String),
    /// The lines between `<!-- catalogue: NAME -->` and `<!-- catalogue: end -->`.
    Region {
        /// The region's name.
        name: &'static str,
        /// Its lines.
        text: String,
    },
}

/// Every file. A file with several regions stands once for each.
pub fn all() -> Vec<File> {
    let whole = |path, text| File { path, part: Part::Whole(text) };
    vec![
        whole("csrc/catalogue.h", cpp::header()),
        whole("csrc/algorithms/reducing.cuh", cpp::includes(true)),
        whole("csrc/algorithms/all.cuh", cpp::includes(false)),
        whole("src/catalogue/generated.rs", rust::library()),
        whole("capi/src/catalogue.rs", c::enums()),
        whole("python/lib/fast_allreduce/_catalogue.py", python::tables()),
    ]
}

impl File {
    /// The file's whole text, with what is generated in its place.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, or lacks a region's markers.
    pub fn rendered(&self, root: &Path) -> io::Result<String> {
        match &self.part {
            Part::Whole(text) => Ok(text.clone()),
            part @ Part::Region { .. } => part.applied(&std::fs::read_to_string(root.join(self.path))?),
        }
    }
}

impl Part {
    /// `text` with what is generated in its place.
    ///
    /// # Errors
    ///
    /// When it lacks the region's markers.
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
