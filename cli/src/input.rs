//! Files that are read as a whole, up to a limit.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::failure::Failure;

/// The most bytes of a file. Reports of all steps have some hundred kilobytes.
const MOST: u64 = 16 << 20;

/// Reads a file, or returns `None` if it does not exist.
///
/// # Errors
///
/// A file that cannot be read, or has more than 16 MiB: a device could have no end.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, Failure> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(MOST + 1).read_to_end(&mut bytes)) {
        Ok(_) if bytes.len() as u64 > MOST => Err(failure(path, "it has more than 16 MiB")),
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failure(path, error)),
    }
}

/// Returns the failure to read a file.
pub fn failure(path: &Path, problem: impl std::fmt::Display) -> Failure {
    Failure::Usage(format!("cannot read {}: {problem}", path.display()))
}
