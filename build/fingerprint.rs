//! A fingerprint of the kernels' sources, to detect ranks that run different builds.

use std::fs;
use std::io;
use std::path::Path;

/// Returns the 64-bit FNV-1a hash of the names and contents of all files below `folder`, in order of their
/// names.
pub fn of(folder: &Path) -> io::Result<u64> {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    add(folder, &mut hash)?;
    Ok(hash)
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
            for byte in name.as_encoded_bytes().iter().chain(&[0]).chain(&contents) {
                *hash = (*hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
    }
    Ok(())
}
