//! Kernels that nvcc has compiled earlier: a folder of fatbins with the file `FACTS`, which says what they were
//! compiled from. A build by nvcc writes it; a build with the feature `prebuilt` reads it.

use std::fmt;
use std::fs;
use std::path::Path;

use crate::fingerprint;

/// The name of the file that describes a folder of kernels.
pub const FILE: &str = "FACTS";

/// What a folder of kernels contains, and what it was compiled from.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The fingerprint of `csrc`.
    pub sources: u64,
    /// The fingerprint of nvcc's flags.
    pub flags: u64,
    /// Such as `13.0.88`.
    pub nvcc: String,
    /// The architectures, the newest last.
    pub archs: Vec<String>,
    /// The name and the fingerprint of each file.
    pub fatbins: Vec<(String, u64)>,
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "sources {:016x}\nflags {:016x}", self.sources, self.flags)?;
        writeln!(f, "nvcc {}\narchs {}", self.nvcc, self.archs.join(" "))?;
        self.fatbins.iter().try_for_each(|(name, hash)| writeln!(f, "{name} {hash:016x}"))
    }
}

impl Facts {
    /// Parses what `Display` writes. It is `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let mut value = |key: &str| lines.next()?.strip_prefix(key)?.strip_prefix(' ');
        let hash = |text| u64::from_str_radix(text, 16).ok();
        let (sources, flags) = (hash(value("sources")?)?, hash(value("flags")?)?);
        let (nvcc, archs) = (value("nvcc")?.into(), value("archs")?.split(' ').map(Into::into).collect());
        let fatbins =
            lines.map(|line| line.split_once(' ').and_then(|(name, text)| Some((name.into(), hash(text)?))));
        let facts = Self { sources, flags, nvcc, archs, fatbins: fatbins.collect::<Option<_>>()? };
        // Nothing is accepted that would not be written.
        (facts.to_string() == text).then_some(facts)
    }

    /// Copies the files `names` of a folder of kernels to `out_dir`, and returns the folder's facts and the number of
    /// bytes copied.
    ///
    /// # Errors
    ///
    /// Says which file is missing or damaged, or that the kernels are not those of `of`: the fingerprints of the
    /// sources and of the flags.
    pub fn copy(
        folder: &Path,
        of: (u64, u64),
        names: &[String],
        out_dir: &Path,
    ) -> Result<(Self, u64), String> {
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let damaged = |name: &str| format!("{} is damaged", folder.join(name).display());
        let text = String::from_utf8(read(FILE)?).map_err(|_| damaged(FILE))?;
        let facts = Self::parse(&text).ok_or_else(|| damaged(FILE))?;
        if (facts.sources, facts.flags) != of {
            return Err(format!(
                "the prebuilt kernels in {} are of other sources (fingerprints {:016x} {:016x}) than this crate \
                 ({:016x} {:016x}): use the same version of both crates, or name an nvcc in FAST_ALLREDUCE_NVCC, \
                 which compiles them",
                folder.display(),
                facts.sources,
                facts.flags,
                of.0,
                of.1,
            ));
        }
        let mut bytes = 0;
        for name in names {
            let fatbin = read(name)?;
            let expected = facts.fatbins.iter().find(|(file, _)| file == name);
            if expected.map(|&(_, hash)| hash) != Some(fingerprint::of_bytes(&fatbin)) {
                return Err(damaged(name));
            }
            bytes += fatbin.len() as u64;
            let to = out_dir.join(name);
            fs::write(&to, fatbin).map_err(|error| format!("{}: {error}", to.display()))?;
        }
        Ok((facts, bytes))
    }
}
