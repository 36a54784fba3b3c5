//! The constants of a link, from the rates of stores whose packets carry different payloads.

/// A link as the GPU model describes it (lab/gpu-model.md).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bandwidth in GB/s, before deducting headers.
    pub gbps: f64,
    /// Header of a packet.
    pub header_bytes: f64,
    /// Additional bytes of a packet with a partial sector.
    pub partial_bytes: f64,
}

/// Bytes of a line, the largest payload that is measured; of a sector; and of a part of a sector.
pub const PAYLOADS: [f64; 3] = [128.0, 32.0, 16.0];

/// Returns the link on which stores to [`PAYLOADS`] bytes of each line have these payload rates, in GB/s.
///
/// A packet with p bytes takes p + h bytes of the link's bandwidth L. So the rates are L p / (p + h), and for a part of
/// a sector L p / (p + h + partial).
///
/// # Errors
///
/// Returns why the rates are not those of a link.
pub fn link([line, sector, part]: [f64; 3]) -> Result<Link, String> {
    let [line_bytes, sector_bytes, part_bytes] = PAYLOADS;
    let ratio = line / sector;
    let most = line_bytes / sector_bytes;
    // Rates beyond these limits have no header that is at least 0.
    if !(ratio > 1.0 && ratio < most && part > 0.0) {
        return Err(format!(
            "stores of {line_bytes}, {sector_bytes} and {part_bytes} B have {line:.1}, {sector:.1} and {part:.1} GB/s, \
             which are not limited by the packets of a link"
        ));
    }
    let header_bytes = line_bytes * (ratio - 1.0) / (most - ratio);
    let gbps = line * (line_bytes + header_bytes) / line_bytes;
    let partial_bytes = (part_bytes * gbps / part - part_bytes - header_bytes).max(0.0);
    Ok(Link { gbps, header_bytes, partial_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_found_from_its_rates() {
        for (gbps, header, partial) in [(450.0, 16.0, 16.0), (60.0, 24.0, 0.0), (900.0, 40.0, 8.0)] {
            let rate = |payload: f64, more: f64| gbps * payload / (payload + header + more);
            let found = link([rate(128.0, 0.0), rate(32.0, 0.0), rate(16.0, partial)]).unwrap();
            assert!((found.gbps - gbps).abs() < 1e-6, "{found:?}");
            assert!((found.header_bytes - header).abs() < 1e-6, "{found:?}");
            assert!((found.partial_bytes - partial).abs() < 1e-6, "{found:?}");
        }
    }

    #[test]
    fn rates_without_packets_are_refused() {
        for rates in [[100.0, 100.0, 100.0], [100.0, 110.0, 50.0], [400.0, 100.0, 50.0], [f64::NAN, 1.0, 1.0]]
        {
            assert!(link(rates).unwrap_err().contains("not limited by the packets"), "{rates:?}");
        }
    }
}
