//! The columns of the tables of norms and formats.

/// A norm's row.
pub(super) struct NormFacts {
    pub name: &'static str,
    pub takes_unit_offset: bool,
    pub takes_bias: bool,
}

/// A format's row.
pub(super) struct ScalingFacts {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub bits: usize,
    pub is_given: bool,
    /// Elements that have a scale in common; `None`: all of a row.
    pub group: Option<usize>,
    pub is_tiled: bool,
}
