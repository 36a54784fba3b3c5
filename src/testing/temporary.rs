//! Temporary folders for tests of the library and of the program. Tests of other crates include this file by its path.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A new folder. Dropping it deletes the folder and its contents.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static FOLDERS: AtomicU32 = AtomicU32::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let name = format!("fast-allreduce-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the names of its entries.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Writes a file, creates the folders of its path, and returns the path.
    pub fn write(&self, name: impl AsRef<Path>, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // An error means that the test has removed it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
