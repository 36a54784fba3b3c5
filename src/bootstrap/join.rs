//! How long ranks wait for each other to come, where the program does not say.

use std::time::Duration;

use crate::catalogue::settings::{seconds, variable, JOIN_TIMEOUT_VARIABLE};
use crate::error::Result;

/// The limit where the environment says nothing.
const DEFAULT: Duration = Duration::from_secs(120);

/// What the environment says, else the default.
///
/// # Errors
///
/// [`Error::InvalidSetting`](crate::Error::InvalidSetting) if it says no number of seconds.
pub(super) fn limit() -> Result<Duration> {
    match variable(JOIN_TIMEOUT_VARIABLE) {
        Some(text) => Ok(seconds(JOIN_TIMEOUT_VARIABLE, &text)?.unwrap_or(Duration::MAX)),
        None => Ok(DEFAULT),
    }
}
