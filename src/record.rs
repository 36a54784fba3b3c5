//! Recordings of calls: files with what the calls of a rank read and wrote.
//!
//! [`Communicator::record`](crate::Communicator::record) writes them, and
//! [`Communicator::replay`](crate::Communicator::replay) makes their calls again.

pub use crate::call::recording::{compare, Comparison, Entry, Options, Recording};
use crate::communicator::Builder;
pub use crate::communicator::Difference;
use crate::device::Host;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::plan::{self, DeviceKind};
use crate::settings::Settings;

impl Recording {
    /// Returns a builder and a device of a communicator that plans calls as the recorded one did.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] and [`Error::Malformed`] for settings or plans that this build cannot use.
    pub fn builder(&self) -> Result<(Builder, Host)> {
        let mut settings = Settings::new();
        self.header.settings.iter().try_for_each(|(name, value)| settings.set(name, value))?;
        let plans = vec![self.header.table.clone().into_bytes()];
        let table = plan::agree(DeviceKind::Host, &plans)?.table;
        Ok((settings.builder()?.table(table), settings.host()?))
    }
}
