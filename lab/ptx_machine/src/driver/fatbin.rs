//! Reads PTX from the fatbin container that nvcc embeds. The layout is inferred from nvcc's output.

/// Identification of the file; then sizes of the headers of the file and of an entry.
const MAGIC: u32 = 0xBA55_ED50;
const HEADER: usize = 16;
const ENTRY: usize = 64;
const KIND_PTX: u16 = 1;
/// Compressed by LZ4 or zstd.
const COMPRESSED: u64 = 0x2000 | 0x8000;

/// Returns whether an image is a fatbin container.
pub fn is_fatbin(image: &[u8]) -> bool {
    image.len() >= 4 && word(image, 0) == Some(MAGIC)
}

/// Returns the size of a container, from its header of at least 16 bytes.
pub fn size(header: &[u8]) -> Option<usize> {
    let size = usize::try_from(long(header, 8)?).ok()?;
    size.checked_add(half(header, 6)?.into())
}

/// Returns the PTX texts, without trailing zeros.
///
/// # Errors
///
/// The container is truncated, the PTX is compressed, or is not text.
pub fn texts(image: &[u8]) -> Result<Vec<&str>, String> {
    if !is_fatbin(image) {
        return Err("the image is not a fatbin".into());
    }
    let cut = || "the fatbin is truncated".to_owned();
    let end = size(image).filter(|&end| end <= image.len()).ok_or_else(cut)?;
    let mut at = usize::from(half(image, 6).ok_or_else(cut)?);
    if at < HEADER {
        return Err("the header of the fatbin is too short".into());
    }
    let mut texts = Vec::new();
    while at < end {
        let entry = image.get(at..end).filter(|entry| entry.len() >= ENTRY).ok_or_else(cut)?;
        let kind = half(entry, 0).ok_or_else(cut)?;
        let header = word(entry, 4).ok_or_else(cut)? as usize;
        let bytes = long(entry, 8).and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(cut)?;
        let last = header
            .checked_add(bytes)
            .filter(|&last| header >= ENTRY && last <= entry.len())
            .ok_or_else(cut)?;
        if kind == KIND_PTX {
            if long(entry, 40).ok_or_else(cut)? & COMPRESSED != 0 {
                return Err(
                    "the PTX of the fatbin is compressed: compile with nvcc --compress-mode=none".into()
                );
            }
            let text =
                std::str::from_utf8(&entry[header..last]).map_err(|error| format!("the PTX: {error}"))?;
            texts.push(text.trim_end_matches('\0'));
        }
        at += last;
    }
    Ok(texts)
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn container(flags: u64, text: &[u8]) -> Vec<u8> {
        let mut entry = vec![0; ENTRY];
        entry[0] = 1;
        entry[4] = ENTRY as u8;
        entry[8..16].copy_from_slice(&(text.len() as u64).to_le_bytes());
        entry[40..48].copy_from_slice(&flags.to_le_bytes());
        entry.extend(text);
        let mut image = MAGIC.to_le_bytes().to_vec();
        image.extend([1, 0, 16, 0]);
        image.extend((entry.len() as u64).to_le_bytes());
        image.extend(entry);
        image
    }

    #[test]
    fn the_text_of_an_entry() {
        assert_eq!(texts(&container(0, b".version 9.0\n\0\0")), Ok(vec![".version 9.0\n"]));
    }

    #[test]
    fn what_is_not_all_there_is_an_error() {
        let image = container(0, b".version 9.0\n");
        for length in 0..image.len() {
            assert!(texts(&image[..length]).is_err(), "{length}");
        }
        assert!(texts(&container(0x8000, b"x")).unwrap_err().contains("compressed"));
        assert!(texts(&container(0, &[0xFF])).is_err());
    }
}
