//! Where a page goes.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{render, Page};
use crate::failure::Failure;

/// A file that can be written. It has its old contents or all of its new ones.
pub struct Destination {
    path: PathBuf,
    /// Beside it, and of this process alone.
    temporary: PathBuf,
}

impl Destination {
    /// Finds out now whether it can be written, so that nobody measures in vain.
    pub fn new(path: &Path) -> Result<Self, Failure> {
        let refuse = |reason: &str| Failure::Usage(format!("--report {}: {reason}", path.display()));
        let name = path.file_name().filter(|_| !path.is_dir());
        let name = name.ok_or_else(|| refuse("this is no name of a file"))?;
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}", std::process::id()));
        let destination = Self { path: path.into(), temporary: path.with_file_name(temporary) };
        let file = File::create_new(&destination.temporary);
        file.and_then(|_| fs::remove_file(&destination.temporary))
            .map_err(|error| refuse(&error.to_string()))?;
        Ok(destination)
    }

    /// Writes the page.
    pub fn write(&self, page: &Page) -> Result<(), Failure> {
        let written = self.replace(render(page).as_bytes());
        if written.is_err() {
            // It may not have come to be.
            let _ = fs::remove_file(&self.temporary);
        }
        written.map_err(|error| Failure::File(self.path.clone(), error))
    }

    fn replace(&self, contents: &[u8]) -> io::Result<()> {
        let mut file = File::create_new(&self.temporary)?;
        file.write_all(contents)?;
        file.sync_all()?;
        fs::rename(&self.temporary, &self.path)
    }
}
