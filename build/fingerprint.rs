//! A fingerprint of the kernels' sources, to detect ranks that run different builds.

use std::fs;
use std::io;
use std::path::Path;

const EMPTY: u64 = 0xcbf2_9ce4_8422_2325;

/// Returns the 64-bit FNV-1a hash of the names and contents of all files below `folder`, in order of their
/// names.
pub fn of(folder: &Path) -> io::Result<u64> {
    let mut hash = EMPTY;
    add(folder, &mut hash)?;
    Ok(hash)
}

/// Returns the 64-bit FNV-1a hash of bytes.
pub fn of_bytes(bytes: &[u8]) -> u64 {
    let mut hash = EMPTY;
    add_bytes(bytes, &mut hash);
    hash
}

fn add_bytes<'a>(bytes: impl IntoIterator<Item = &'a u8>, hash: &mut u64) {
    for byte in bytes {
        *hash = (*hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
}

fn add(folder: &Path, hash: &mut u64) -> io::Result<()> {
    let mut entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            add(&entry.path(), hash)?;
        } else {
            let contents = fs::read(entry.path())?;
            add_bytes(name.as_encoded_bytes().iter().chain(&[0]).chain(&contents), hash);
        }
    }
    Ok(())
}
