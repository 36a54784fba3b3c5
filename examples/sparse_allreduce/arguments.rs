//! The command line.

use std::str::FromStr;

use crate::path::{Path, PATHS};

pub const USAGE: &str = "\
Sparse allreduce of gradients between threads, each path checked against the dense allreduce of what it kept.

  --ranks N        ranks, 1 to 16 (default 4)
  --count N        elements of a rank's vector (default 25000000)
  --density X      the share of the elements that is kept, above 0 and up to 1 (default 0.01)
  --seed N         of the vectors (default 1)
  --iterations N   times that each path runs; medians are printed (default 3)
  --path NAME      one path, or all (default)
";

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub ranks: usize,
    pub count: usize,
    pub density: f64,
    pub seed: u64,
    pub iterations: usize,
    /// `None`: all.
    path: Option<&'static Path>,
}

impl Default for Options {
    fn default() -> Self {
        Self { ranks: 4, count: 25_000_000, density: 0.01, seed: 1, iterations: 3, path: None }
    }
}

impl Options {
    /// `None` where help is asked for.
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let mut options = Self::default();
        while let Some(name) = arguments.next() {
            if name == "--help" || name == "-h" {
                return Ok(None);
            }
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--ranks" => options.ranks = number(&name, &value)?,
                "--count" => options.count = number(&name, &value)?,
                "--density" => options.density = number(&name, &value)?,
                "--seed" => options.seed = number(&name, &value)?,
                "--iterations" => options.iterations = number(&name, &value)?,
                "--path" => options.path = path(&value)?,
                _ => return Err(format!("unknown argument {name}\n\n{USAGE}")),
            }
        }
        options.check().map(|()| Some(options))
    }

    fn check(&self) -> Result<(), String> {
        if !(1..=fast_allreduce::MAX_RANKS).contains(&self.ranks) {
            return Err(format!("--ranks {}: 1 to {} are supported", self.ranks, fast_allreduce::MAX_RANKS));
        }
        // Indexes are 32-bit numbers, and so are the counts of entries.
        if self.count == 0 || u32::try_from(self.count).is_err() {
            return Err(format!("--count {}: 1 to {} are supported", self.count, u32::MAX));
        }
        if !(self.density > 0.0 && self.density <= 1.0) {
            return Err(format!("--density {}: it is above 0 and at most 1", self.density));
        }
        if self.iterations == 0 {
            return Err("--iterations 0: a path runs at least once".into());
        }
        Ok(())
    }

    /// The number of entries that a rank is to keep.
    pub fn kept(&self) -> usize {
        ((self.count as f64 * self.density).round() as usize).clamp(1, self.count)
    }

    pub fn paths(&self) -> impl Iterator<Item = &'static Path> + '_ {
        PATHS.iter().filter(|path| self.path.is_none_or(|chosen| chosen.name == path.name))
    }
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{name} {value}: not such a number"))
}

fn path(value: &str) -> Result<Option<&'static Path>, String> {
    if value == "all" {
        return Ok(None);
    }
    let found = PATHS.iter().find(|path| path.name == value);
    let names = || PATHS.iter().map(|path| path.name).collect::<Vec<_>>().join(", ");
    found.map(Some).ok_or_else(|| format!("--path {value}: there are all, {}", names()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Option<Options>, String> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn what_is_said_is_taken_and_the_rest_is_the_default() {
        let options = parse("--ranks 3 --path gtop-k --count 1000").unwrap().unwrap();
        assert_eq!((options.ranks, options.count, options.seed, options.kept()), (3, 1000, 1, 10));
        assert_eq!(options.paths().map(|path| path.name).collect::<Vec<_>>(), ["gtop-k"]);
        assert_eq!(parse("--path all").unwrap().unwrap().paths().count(), PATHS.len());
        assert!(parse("--seed 2 --help").unwrap().is_none());
    }

    #[test]
    fn what_is_out_of_range_is_refused_by_name() {
        for line in
            ["--ranks 0", "--ranks 17", "--count 0", "--count 4294967296", "--density 0", "--density 1.5"]
                .into_iter()
                .chain(["--density NaN", "--iterations 0", "--path none", "--seed -1", "--seed", "--other 1"])
        {
            let error = parse(line).unwrap_err();
            assert!(error.contains(line.split(' ').next().unwrap()), "{line}: {error}");
        }
    }

    #[test]
    fn at_least_one_entry_is_kept() {
        let options = parse("--count 7 --density 0.000001").unwrap().unwrap();
        assert_eq!(options.kept(), 1);
    }
}
