//! The file that is written: all of it, or none.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A path that a file can be written to.
pub struct Output {
    path: PathBuf,
}

impl Output {
    /// Refuses a path that cannot be written, before anything is measured.
    pub fn check(path: &Path) -> Result<Self, Failure> {
        let output = Self { path: path.to_owned() };
        if path.exists() && !path.is_file() {
            return Err(Failure::File(output.path, io::Error::other("it is there and no regular file")));
        }
        match output.create() {
            Ok((temporary, _)) => fs::remove_file(temporary).map_err(|error| output.failure(error))?,
            Err(error) => return Err(output.failure(error)),
        }
        Ok(output)
    }

    /// Writes the whole file in the place of what was there.
    pub fn write(&self, text: &str) -> Result<(), Failure> {
        let (temporary, mut file) = self.create().map_err(|error| self.failure(error))?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        written.and_then(|()| fs::rename(&temporary, &self.path)).map_err(|error| {
            // It is of no use, and there is no more to say if it stays.
            let _ = fs::remove_file(&temporary);
            self.failure(error)
        })
    }

    /// A file beside it that nobody else has.
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
