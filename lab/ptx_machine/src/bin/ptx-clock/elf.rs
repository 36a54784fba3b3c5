//! Code sizes of the kernels in a cubin (an ELF file with one section `.text.NAME` for each kernel).

/// Returns the bytes of code of each kernel.
///
/// # Errors
///
/// The image is not a 64-bit ELF file, or is truncated.
pub fn code_sizes(image: &[u8]) -> Result<Vec<(String, usize)>, String> {
    if image.get(..5) != Some(&[0x7F, b'E', b'L', b'F', 2]) {
        return Err("not a 64-bit ELF file".into());
    }
    let cut = || "the file is truncated".to_owned();
    let number = |at: usize, bytes: usize| -> Result<usize, String> {
        let part = image.get(at..at.checked_add(bytes).ok_or_else(cut)?).ok_or_else(cut)?;
        let value = part.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
        usize::try_from(value).map_err(|_| cut())
    };
    let (table, each, count) = (number(0x28, 8)?, number(0x3A, 2)?, number(0x3C, 2)?);
    let section = |i: usize| i.checked_mul(each).and_then(|at| at.checked_add(table)).ok_or_else(cut);
    let names = number(section(number(0x3E, 2)?)?.saturating_add(0x18), 8)?;
    let mut sizes = Vec::new();
    for i in 0..count {
        let at = section(i)?;
        let name = names.checked_add(number(at, 4)?).ok_or_else(cut)?;
        let text = image.get(name..).ok_or_else(cut)?;
        let end = text.iter().position(|&byte| byte == 0).ok_or_else(cut)?;
        let name = String::from_utf8_lossy(&text[..end]);
        if let Some(kernel) = name.strip_prefix(".text.") {
            sizes.push((kernel.to_owned(), number(at.saturating_add(0x20), 8)?));
        }
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an ELF file with two sections: section names, and 48 bytes of code.
    fn image() -> Vec<u8> {
        let mut image = vec![0; 64 + 2 * 64];
        image[..5].copy_from_slice(&[0x7F, b'E', b'L', b'F', 2]);
        (image[0x28], image[0x3A], image[0x3C], image[0x3E]) = (64, 64, 2, 0);
        let names = image.len() as u8;
        (image[64 + 0x18], image[128], image[128 + 0x20]) = (names, 1, 48);
        image.extend(b"\0.text.k\0");
        image
    }

    #[test]
    fn the_size_of_a_kernel() {
        assert_eq!(code_sizes(&image()), Ok(vec![("k".to_owned(), 48)]));
    }

    #[test]
    fn what_is_cut_off_is_an_error() {
        let image = image();
        for length in 0..image.len() {
            assert!(code_sizes(&image[..length]).is_err(), "{length}");
        }
        let mut far = image;
        far[0x28..0x30].fill(0xFF);
        assert!(code_sizes(&far).is_err());
    }
}
