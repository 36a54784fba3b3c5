//! Values of arguments and buffers, as written on the command line.
//!
//! A value is a list of items, separated by commas and laid out as the members of a struct: each aligned to its
//! size. An item is `[type:]term[+offset][*count]`. The types are u8 to u64, f16, bf16 and f32; the default is
//! u64 for addresses, otherwise u32. A term is a number; `rank`, `ranks`, or `sum` (1 + 2 + ... + ranks); or an
//! address: `name`, the rank's own buffer; `name@2`, rank 2's; `name@next`, the next rank's; `name@all`, those of
//! all ranks in order; `name@multicast`, one that stands for all ranks' buffers.

/// Addresses of buffers, for values.
pub trait Addresses {
    /// Returns the address of a rank's buffer.
    fn of(&self, name: &str, rank: usize) -> Option<u64>;
    /// Returns the buffer's multicast address.
    fn multicast(&self, name: &str) -> Option<u64>;
}

/// The rank that a value is for, and the number of ranks.
#[derive(Debug, Clone, Copy)]
pub struct Who {
    pub rank: usize,
    pub ranks: usize,
}

/// The greatest count of an item. Buffers of any size are filled with a value, without a count.
const MOST: usize = 1 << 24;

/// Returns the bytes of a value.
///
/// # Errors
///
/// The first item that cannot be read.
pub fn value(text: &str, who: Who, addresses: &dyn Addresses) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    for item in text.split(',') {
        let wrong = || format!("{item:?} is not a value");
        let (one, count) = match item.split_once('*') {
            Some((one, count)) => (one, count.parse().map_err(|_| wrong())?),
            None => (item, 1usize),
        };
        if count == 0 || count > MOST {
            return Err(format!("{item:?} is not a value: the count is 1 to {MOST}"));
        }
        let words = words(one, who, addresses).ok_or_else(wrong)?;
        for word in (0..count).flat_map(|_| &words) {
            let aligned = bytes.len().next_multiple_of(word.len());
            bytes.resize(aligned, 0);
            bytes.extend(word);
        }
    }
    Ok(bytes)
}

fn words(item: &str, who: Who, addresses: &dyn Addresses) -> Option<Vec<Vec<u8>>> {
    let (ty, term) = match item.split_once(':') {
        Some((ty, term)) => (Some(ty), term),
        None => (None, item),
    };
    if let Some(value) = term.parse::<f64>().ok().filter(|_| ty.is_some_and(is_float)) {
        return Some(vec![encode(ty?, value, 0)?]);
    }
    let (name, offset) = match term.split_once('+') {
        Some((name, offset)) => (name, number(offset)?),
        None => (term, 0),
    };
    let plain = match name {
        "rank" => Some(who.rank as u64),
        "ranks" => Some(who.ranks as u64),
        "sum" => Some((1..=who.ranks as u64).sum()),
        _ => number(name),
    };
    if let Some(plain) = plain {
        let value = plain.wrapping_add(offset);
        return Some(vec![encode(ty.unwrap_or("u32"), value as f64, value)?]);
    }
    let (name, whose) = name.split_once('@').unwrap_or((name, ""));
    let all: Vec<u64> = match whose {
        "" => vec![addresses.of(name, who.rank)?],
        "all" => (0..who.ranks).map(|rank| addresses.of(name, rank)).collect::<Option<_>>()?,
        "next" => vec![addresses.of(name, (who.rank + 1) % who.ranks)?],
        "multicast" => vec![addresses.multicast(name)?],
        rank => vec![addresses.of(name, rank.parse().ok().filter(|&rank| rank < who.ranks)?)?],
    };
    let ty = ty.unwrap_or("u64");
    if ty != "u64" {
        return None;
    }
    all.into_iter().map(|address| encode(ty, 0.0, address.wrapping_add(offset))).collect()
}

/// Parses a number of bytes, or a number: `12`, `-1`, `0x1F`, `8K`, `1M`.
pub fn number(text: &str) -> Option<u64> {
    if let Some(text) = text.strip_prefix('-') {
        return number(text).map(u64::wrapping_neg);
    }
    if let Some(text) = text.strip_prefix("0x") {
        return u64::from_str_radix(text, 16).ok();
    }
    let (digits, unit) = match text.strip_suffix('K') {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn is_float(ty: &str) -> bool {
    matches!(ty, "f16" | "bf16" | "f32")
}

/// Encodes a number that is given both as a float and as an integer.
fn encode(ty: &str, float: f64, integer: u64) -> Option<Vec<u8>> {
    let single = float as f32;
    Some(match ty {
        "u8" => vec![integer as u8],
        "u16" => (integer as u16).to_le_bytes().into(),
        "u32" => (integer as u32).to_le_bytes().into(),
        "u64" => integer.to_le_bytes().into(),
        "f32" => single.to_le_bytes().into(),
        "bf16" => ((single.to_bits() >> 16) as u16).to_le_bytes().into(),
        // Zero and normal numbers: exponent and fraction move by 13 bits.
        "f16" if single == 0.0 => vec![0, 0],
        "f16" => {
            let bits = single.to_bits();
            let magnitude = (bits & 0x7FFF_FFFF).checked_sub(112 << 23)? >> 13;
            ((bits >> 16 & 0x8000 | magnitude) as u16).to_le_bytes().into()
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Table;

    impl Addresses for Table {
        fn of(&self, name: &str, rank: usize) -> Option<u64> {
            (name == "a").then_some(0x1000 + rank as u64 * 0x100)
        }

        fn multicast(&self, _: &str) -> Option<u64> {
            Some(0x9000)
        }
    }

    fn of(text: &str) -> Result<Vec<u8>, String> {
        value(text, Who { rank: 1, ranks: 3 }, &Table)
    }

    fn words(text: &str) -> Vec<u64> {
        of(text).unwrap().chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
    }

    #[test]
    fn items_are_laid_out_as_in_a_struct() {
        assert_eq!(of("u8:1,u32:2,u16:3").unwrap(), [1, 0, 0, 0, 2, 0, 0, 0, 3, 0]);
        assert_eq!(words("rank+1,a"), [2, 0x1100]);
        assert_eq!(words("a@all,u64:0*2"), [0x1000, 0x1100, 0x1200, 0, 0]);
        assert_eq!(words("a@next+16,a@0,a@multicast"), [0x1210, 0x1000, 0x9000]);
    }

    #[test]
    fn numbers_of_each_type() {
        assert_eq!(of("bf16:sum").unwrap(), [0xC0, 0x40]);
        assert_eq!(of("f16:-2").unwrap(), [0, 0xC0]);
        assert_eq!(of("f32:0.5").unwrap(), 0.5f32.to_le_bytes());
        assert_eq!(of("-1").unwrap(), [0xFF; 4]);
        assert_eq!((number("8K"), number("0x10"), number("x")), (Some(8192), Some(16), None));
    }

    #[test]
    fn what_is_no_value_is_named() {
        for text in ["b", "a@3", "u32:", "i32:1", "1*x", "", "f32:a", "u32:a", "u8:x"] {
            assert!(of(text).is_err(), "{text}");
        }
    }
}
