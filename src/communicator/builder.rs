//! How communicators are made, and what ranks must agree on first.

use std::ffi::OsStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{Closing, Communicator};
use crate::bootstrap::Bootstrap;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::plan::Algorithm;
use crate::region::{Layout, Region};
use crate::registry::Endpoint;
use crate::MAX_RANKS;

/// Bounds the steps of making a communicator whose calls wait for ever.
const SETUP_TIMEOUT: Duration = Duration::from_secs(30);

/// Forces an algorithm where the program does not.
const ALGORITHM_VARIABLE: &str = "FAST_ALLREDUCE_ALGO";

/// The algorithm that the environment names, if it does.
fn algorithm_named(value: Option<&OsStr>) -> Result<Option<Algorithm>> {
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let value = value.to_string_lossy();
    value.parse().map(Some).map_err(|error| match error {
        Error::InvalidSetting { value, expected, .. } => {
            Error::InvalidSetting { name: ALGORITHM_VARIABLE, value, expected }
        }
        error => error,
    })
}

/// How a [`Communicator`] is made. All ranks must use the same settings.
#[derive(Debug, Clone)]
pub struct Builder {
    max_bytes: Option<usize>,
    timeout: Option<Duration>,
    algorithm: Option<Algorithm>,
    last_epoch: u32,
}

impl Default for Builder {
    fn default() -> Self {
        Self { max_bytes: None, timeout: Some(SETUP_TIMEOUT), algorithm: None, last_epoch: 0 }
    }
}

impl Builder {
    /// Bytes that one launch can take through the region (default: 1 MiB on the host, 8 MiB on a GPU). Larger messages pass
    /// in pieces. A region takes at most 4 x max_bytes + 1 MiB on each rank.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = Some(max_bytes);
        self
    }

    /// The longest that a call, or a step of making the communicator, waits for other ranks (default 30 s). `None`: for
    /// ever, in calls; making the communicator is always bounded.
    #[must_use]
    pub fn timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.timeout = timeout.into();
        self
    }

    /// Uses one algorithm for all calls, instead of the best for each. Where it is not set, the environment variable
    /// `FAST_ALLREDUCE_ALGO` may name one.
    #[must_use]
    pub fn algorithm(mut self, algorithm: impl Into<Option<Algorithm>>) -> Self {
        self.algorithm = algorithm.into();
        self
    }

    /// Numbers launches from after `epoch` instead of 0, so that a test can pass the wrap-around.
    #[doc(hidden)]
    #[must_use]
    pub fn first_epoch(mut self, epoch: u32) -> Self {
        self.last_epoch = epoch;
        self
    }

    /// Makes this rank's communicator. Collective: every rank of the bootstrap calls it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for settings out of range, [`Error::Disagreement`] where ranks have different ones,
    /// [`Error::Allocation`] if the region cannot be allocated, and the errors of the bootstrap.
    pub fn build<D: Device>(
        self,
        mut device: D,
        bootstrap: impl Bootstrap + 'static,
    ) -> Result<Communicator<D>> {
        let (rank, world_size) = (bootstrap.rank(), bootstrap.world_size());
        if !(1..=MAX_RANKS).contains(&world_size) {
            return Err(Error::WorldSize { world_size });
        }
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let setup_timeout = self.timeout.unwrap_or(SETUP_TIMEOUT);
        let max_bytes = self.max_bytes.unwrap_or(D::DEFAULT_MAX_BYTES);
        let layout = Layout::new(max_bytes, D::PACKING.slot_bytes)?;
        let forced = match self.algorithm {
            Some(algorithm) => Some(algorithm),
            None => algorithm_named(std::env::var_os(ALGORITHM_VARIABLE).as_deref())?,
        };
        let algorithm = forced.map_or("automatic", Algorithm::name);
        let facts = [
            ("the crate's version", env!("CARGO_PKG_VERSION").to_owned()),
            // A region has no other version than the code that lays it out and the kernels that use it.
            ("the build (fingerprint of the kernels' sources)", env!("FAST_ALLREDUCE_SOURCES").to_owned()),
            ("the device", D::NAME.to_owned()),
            ("the device's settings", device.shared_facts()),
            ("max_bytes", max_bytes.to_string()),
            ("the algorithm", algorithm.to_owned()),
        ];
        agree(&bootstrap, &facts, setup_timeout)?;

        device.join(&bootstrap, setup_timeout)?;
        let region = Region::new(&device, layout, self.last_epoch, &bootstrap, setup_timeout)?;
        // No rank launches before all have set their epochs.
        bootstrap.barrier(setup_timeout)?;
        let closing = Closing { exports: device.exports(), bootstrap: Box::new(bootstrap) };
        Ok(Communicator {
            endpoint: Arc::new(Endpoint::new(device, region)),
            failed: OnceLock::new(),
            rank,
            world_size,
            algorithm: forced,
            timeout: self.timeout,
            setup_timeout,
            closing,
        })
    }
}

/// Compares facts that every rank must share. Collective; each is one line.
pub(super) fn agree(
    bootstrap: &dyn Bootstrap,
    facts: &[(&'static str, String)],
    timeout: Duration,
) -> Result<()> {
    let own_rank = bootstrap.rank();
    let mine = facts.iter().map(|(_, value)| value.as_str()).collect::<Vec<_>>().join("\n");
    for (rank, theirs) in bootstrap.all_gather(mine.as_bytes(), timeout)?.into_iter().enumerate() {
        let theirs = String::from_utf8_lossy(&theirs);
        let mut values = theirs.split('\n');
        for (what, ours) in facts {
            let value = values.next().unwrap_or("nothing");
            if value != ours {
                let (theirs, ours) = (value.to_owned(), ours.clone());
                return Err(Error::Disagreement { what, rank, theirs, own_rank, ours });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_may_name_an_algorithm() {
        let named = |value: &str| algorithm_named(Some(OsStr::new(value)));
        assert_eq!(algorithm_named(None), Ok(None));
        assert_eq!(named(""), Ok(None));
        for algorithm in Algorithm::ALL {
            assert_eq!(named(algorithm.name()), Ok(Some(algorithm)));
        }
        let error = named("ring").unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name: ALGORITHM_VARIABLE, .. }), "{error}");
    }
}
