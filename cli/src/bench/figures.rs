//! Numbers as tables show them.

/// Formats a bandwidth in GB/s.
pub fn bandwidth(gigabytes_per_second: f64) -> String {
    format!("{gigabytes_per_second:.2}")
}

/// Formats a number with four significant digits.
pub fn significant(value: f64) -> String {
    let decimals = match value {
        value if value < 10.0 => 3,
        value if value < 100.0 => 2,
        value if value < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}
