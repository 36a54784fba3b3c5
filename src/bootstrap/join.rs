//! Default limit on the wait for all ranks to join.

use std::time::Duration;

use crate::catalogue::settings::{seconds, variable, JOIN_TIMEOUT_VARIABLE};
use crate::error::Result;

/// Limit if the environment variable is not set.
const DEFAULT: Duration = Duration::from_secs(120);

/// Returns the limit that the environment sets, or the default.
///
/// # Errors
///
/// [`Error::InvalidSetting`](crate::Error::InvalidSetting) if the variable is not a number of seconds.
pub(super) fn limit() -> Result<Duration> {
    match variable(JOIN_TIMEOUT_VARIABLE) {
        Some(text) => Ok(seconds(JOIN_TIMEOUT_VARIABLE, &text)?.unwrap_or(Duration::MAX)),
        None => Ok(DEFAULT),
    }
}
