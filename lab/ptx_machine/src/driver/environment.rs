//! Settings of the machine inside a driver, from environment variables listed in README.md.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use std::time::Duration;

use crate::launch::run::Settings;

pub(crate) struct Environment {
    seed: u64,
    limit: Duration,
    tear: bool,
    pub race: bool,
    late_stores: bool,
    /// PTX file that replaces every module.
    pub module: Option<PathBuf>,
    /// PTX file whose kernels replace those of modules.
    pub kernels: Option<PathBuf>,
    /// Folder for notes of executed instructions.
    pub coverage: Option<PathBuf>,
    launches: AtomicU64,
}

pub(crate) fn environment() -> &'static Environment {
    static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();
    ENVIRONMENT.get_or_init(|| {
        let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
        let path = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        Environment {
            seed: number("PTX_MACHINE_SEED").unwrap_or(1),
            limit: Duration::from_secs(number("PTX_MACHINE_LIMIT").unwrap_or(120)),
            tear: number("PTX_MACHINE_TEAR") != Some(0),
            race: number("PTX_MACHINE_RACE").unwrap_or(0) != 0,
            late_stores: number("PTX_MACHINE_LATE").unwrap_or(0) != 0,
            module: path("PTX_MACHINE_MODULE"),
            kernels: path("PTX_MACHINE_KERNELS"),
            coverage: path("PTX_MACHINE_COVERAGE"),
            launches: AtomicU64::new(0),
        }
    })
}

impl Environment {
    /// Returns whether every access is reported to the runtime.
    pub fn observes(&self) -> bool {
        self.race || self.late_stores
    }

    /// Returns the settings of the next launch. Unless the seed is 0, each launch has a different order.
    pub fn settings(&self) -> Settings {
        let number = self.launches.fetch_add(1, Ordering::Relaxed);
        let seed = if self.seed == 0 { 0 } else { self.seed.wrapping_add(number) };
        Settings { seed, limit: self.limit, tear: self.tear, race: self.race, late_stores: self.late_stores }
    }
}
