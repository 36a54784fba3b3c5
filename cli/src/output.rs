//! Files that are written as a whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A path that can be written.
pub struct Output {
    path: PathBuf,
}

impl Output {
    /// Checks that the path can be written, before anything is measured.
    pub fn check(path: &Path) -> Result<Self, Failure> {
        let output = Self { path: path.to_owned() };
        if path.exists() && !path.is_file() {
            return Err(Failure::File(output.path, io::Error::other("it exists and is no regular file")));
        }
        match output.create() {
            Ok((temporary, _)) => fs::remove_file(temporary).map_err(|error| output.failure(error))?,
            Err(error) => return Err(output.failure(error)),
        }
        Ok(output)
    }

    /// Replaces the file.
    pub fn write(&self, text: &str) -> Result<(), Failure> {
        let (temporary, mut file) = self.create().map_err(|error| self.failure(error))?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        written.and_then(|()| fs::rename(&temporary, &self.path)).map_err(|error| {
            // An error leaves a temporary file, and the first error is returned.
            let _ = fs::remove_file(&temporary);
            self.failure(error)
        })
    }

    /// Creates a temporary file next to the path.
    fn create(&self) -> io::Result<(PathBuf, File)> {
        let name = self.path.file_name().ok_or_else(|| io::Error::other("it names no file"))?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}", std::process::id()));
        let temporary = self.path.with_file_name(hidden);
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary)?;
        Ok((temporary, file))
    }

    fn failure(&self, error: io::Error) -> Failure {
        Failure::File(self.path.clone(), error)
    }
}
