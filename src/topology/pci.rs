//! PCI addresses, which identify a GPU in NVML, CUDA and the kernel.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// Address of a device on the PCI bus.
///
/// It is parsed from `[domain:]bus:device[.function]` in hexadecimal, the formats of NVML (`00000000:18:00.0`) and CUDA
/// (`0000:18:00.0`), and written in the format of NVML.
///
/// ```
/// use fast_allreduce::topology::PciAddress;
///
/// let address: PciAddress = "0000:AF:00.0".parse()?;
/// assert_eq!(address.to_string(), "00000000:AF:00.0");
/// # Ok::<_, fast_allreduce::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// The domain (segment).
    pub domain: u32,
    /// The bus, 0 to 0xff.
    pub bus: u8,
    /// The device on the bus, 0 to 0x1f.
    pub device: u8,
    /// The function of the device, 0 to 7; 0 for GPUs.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:08X}:{bus:02X}:{device:02X}.{function}")
    }
}

impl FromStr for PciAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        read(text).ok_or_else(|| Error::InvalidSetting {
            name: "PCI address",
            value: super::matrix::quoted(text),
            expected: "[domain:]bus:device[.function] in hexadecimal",
        })
    }
}

fn read(text: &str) -> Option<PciAddress> {
    let (address, function) = text.rsplit_once('.').unwrap_or((text, "0"));
    let mut parts = address.rsplit(':');
    let device = hexadecimal(parts.next()?, 2, 0x1f)? as u8;
    let bus = hexadecimal(parts.next()?, 2, 0xff)? as u8;
    let domain = parts.next().map_or(Some(0), |domain| hexadecimal(domain, 8, u32::MAX))?;
    let function = hexadecimal(function, 1, 7)? as u8;
    parts.next().is_none().then_some(PciAddress { domain, bus, device, function })
}

fn hexadecimal(digits: &str, most: usize, max: u32) -> Option<u32> {
    // `from_str_radix` also accepts a sign.
    let plain = (1..=most).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    plain.then(|| u32::from_str_radix(digits, 16).ok()).flatten().filter(|&value| value <= max)
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_pci_address, |bytes| {
    if let Some(address) = read(&String::from_utf8_lossy(bytes)) {
        assert_eq!(read(&address.to_string()), Some(address));
    }
});

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::damaged::damaged;

    proptest! {
        #[test]
        fn any_text_is_refused_or_an_address(text in damaged(vec![b"00000000:AF:1F.7".into(), b"af:00.0".into()])) {
            if let Ok(address) = String::from_utf8_lossy(&text).parse::<PciAddress>() {
                prop_assert!(address.device <= 0x1f && address.function <= 7);
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }
    }

    #[test]
    fn the_formats_of_nvml_cuda_and_lspci_are_parsed() {
        let address = PciAddress { domain: 0, bus: 0xaf, device: 0, function: 0 };
        for text in ["00000000:AF:00.0", "0000:af:00.0", "af:00.0", "0000:AF:00"] {
            assert_eq!(text.parse::<PciAddress>().unwrap(), address, "{text}");
        }
        assert_eq!(address.to_string().parse::<PciAddress>().unwrap(), address);
    }

    #[test]
    fn other_text_is_refused() {
        for text in ["", ":", "00", "0:0:0:0", "+1:00.0", "100:00.0", "00:20.0", "00:00.8", "00:00.", "0:ä.0"]
        {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}
