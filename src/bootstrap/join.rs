//! How long ranks wait for each other to come, where the program does not say.

use std::time::Duration;

use crate::deadline::limit_named;
use crate::error::Result;

/// Limits it in the environment.
pub(super) const JOIN_TIMEOUT: &str = "FAST_ALLREDUCE_JOIN_TIMEOUT";

/// The limit where the environment says nothing.
const DEFAULT: Duration = Duration::from_secs(120);

/// What the environment says, else the default.
///
/// # Errors
///
/// [`Error::InvalidSetting`](crate::Error::InvalidSetting) if it says no number of seconds.
pub(super) fn limit() -> Result<Duration> {
    let named = limit_named(JOIN_TIMEOUT, std::env::var_os(JOIN_TIMEOUT).as_deref())?;
    Ok(named.map_or(DEFAULT, |limit| limit.unwrap_or(Duration::MAX)))
}
