//! Settings of a communicator by name, for languages and programs that have them as text.

use std::ffi::OsStr;
use std::time::Duration;

use crate::any::AnyCommunicator;
use crate::bootstrap::Bootstrap;
use crate::catalogue::settings::{DeviceId, Values};
use crate::communicator::Builder;
#[cfg(feature = "cuda")]
use crate::device::cuda::{driver::current::CallersContext, Cuda};
use crate::device::host::Host;
use crate::error::Result;

/// How long ranks with an id wait for each other to come, where nothing is set.
const MEETING: Duration = Duration::from_secs(30);

/// Settings of a communicator, and of its device, by name.
///
/// The table of all is in `docs/tuning.md`, with the values that each takes. [`Builder`], [`Host`] and [`Cuda`](crate::device::cuda)
/// have methods for the same settings.
///
/// ```
/// use fast_allreduce::bootstrap::Threads;
/// use fast_allreduce::Settings;
///
/// let mut settings = Settings::new();
/// settings.set("timeout", "2.5")?;
/// settings.set("order", "fixed")?;
/// let [rank] = Threads::world(1)?.try_into().ok().unwrap();
/// let communicator = settings.build(rank)?;
/// communicator.barrier()?;
/// assert!(settings.set("colour", "red").is_err());
/// # Ok::<_, fast_allreduce::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Settings {
    values: Values,
}

impl Settings {
    /// The names of all settings.
    pub const NAMES: &'static [&'static str] = Values::NAMES;

    /// Nothing is set: what the environment says holds, else defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets one.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) with the names of all settings where there is none of this name, and with
    /// the values that it takes where this is none.
    pub fn set(&mut self, name: &str, value: impl AsRef<OsStr>) -> Result<()> {
        self.values.set(name, value.as_ref())
    }

    /// Where the ranks' buffers are.
    pub fn device(&self) -> DeviceId {
        self.values.device.unwrap_or_default()
    }

    /// The longest wait for all ranks to come, where that is set.
    pub fn join_timeout(&self) -> Option<Duration> {
        self.values.join_timeout.map(|limit| limit.unwrap_or(Duration::MAX))
    }

    /// The longest wait for all ranks to come where they are given an id: `join_timeout`, else `timeout`, else 30 s.
    pub fn meeting_timeout(&self) -> Duration {
        self.join_timeout().or(self.values.timeout.flatten()).unwrap_or(MEETING)
    }

    /// Refuses what [`Settings::build`] would, before a rank joins with it.
    ///
    /// # Errors
    ///
    /// As [`Settings::builder`].
    pub fn check(&self) -> Result<()> {
        self.builder().map(drop)
    }

    /// Makes the communicator of this rank, on the device that is set. A GPU's context that is current stays so.
    ///
    /// # Errors
    ///
    /// As [`Settings::builder`], [`Settings::host`], `Settings::cuda` and [`Builder::build`]; [`Error::Unavailable`](crate::Error::Unavailable) for a GPU in a
    /// build without the feature `cuda`.
    pub fn build(&self, bootstrap: impl Bootstrap + 'static) -> Result<AnyCommunicator> {
        let builder = self.builder()?;
        match self.device() {
            DeviceId::Cpu => Ok(builder.build(self.host()?, bootstrap)?.into()),
            #[cfg(feature = "cuda")]
            DeviceId::Cuda(ordinal) => {
                let _context = CallersContext::keep_if_any();
                Ok(builder.build(self.cuda(ordinal)?, bootstrap)?.into())
            }
            #[cfg(not(feature = "cuda"))]
            DeviceId::Cuda(_) => Err(crate::Error::Unavailable {
                what: "the CUDA device".into(),
                reason: "this library was built without the feature `cuda`".into(),
            }),
        }
    }

    /// What makes the communicator. Its device is [`Settings::host`] or [`Settings::cuda`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) for a setting that the device does not have,
    /// [`Error::Tuning`](crate::Error::Tuning) for a tuning file that cannot be used.
    pub fn builder(&self) -> Result<Builder> {
        self.values.check_device(matches!(self.device(), DeviceId::Cuda(_)))?;
        Builder::of(self.values.clone())
    }

    /// The host device.
    ///
    /// # Errors
    ///
    /// As [`Host::workers`].
    pub fn host(&self) -> Result<Host> {
        let Values { workers, wait, bind, .. } = self.values;
        Ok(Host::new()
            .workers(workers.unwrap_or(1))?
            .wait(wait.unwrap_or_default())
            .bind(bind.unwrap_or_default()))
    }

    /// The GPU with this ordinal.
    ///
    /// # Errors
    ///
    /// As [`Cuda::open`].
    #[cfg(feature = "cuda")]
    pub fn cuda(&self, ordinal: usize) -> Result<Cuda> {
        let Values { max_blocks, one_at_a_time, programmatic_launch, sharing, .. } = self.values;
        let mut device = Cuda::open(ordinal)?.programmatic_launch(programmatic_launch.unwrap_or(false));
        if let Some(blocks) = max_blocks {
            device = device.max_blocks(blocks);
        }
        if let Some(sharing) = sharing {
            device = device.sharing(sharing);
        }
        Ok(if one_at_a_time == Some(true) { device.one_at_a_time() } else { device })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::Threads;
    use crate::catalogue::settings::ROWS;
    use crate::error::Error;

    fn with(name: &str, value: &str) -> Result<Settings> {
        let mut settings = Settings::new();
        settings.set(name, value).map(|()| settings)
    }

    #[test]
    fn unknown_names_list_all_settings() {
        let error = with("colour", "red").unwrap_err();
        let Error::InvalidSetting { name: "setting", value, expected } = &error else { panic!("{error}") };
        assert_eq!(value, "colour");
        let listed: Vec<_> = expected.trim_start_matches("one of ").split(", ").collect();
        assert_eq!((&*listed, listed.len()), (Settings::NAMES, ROWS.len()));
    }

    #[test]
    fn every_setting_is_of_its_devices() {
        for row in &ROWS {
            for place in [DeviceId::Cpu, DeviceId::Cuda(0)] {
                let mut settings = with("device", &place.to_string()).unwrap();
                let example = if row.name == "device" { place.to_string() } else { row.other.to_owned() };
                settings.set(row.name, &example).unwrap();
                match settings.builder() {
                    Ok(_) => assert_ne!(row.lacks, Some(place), "{}", row.name),
                    Err(Error::InvalidSetting { name, value, .. }) => {
                        assert_eq!((row.lacks, name, &*value), (Some(place), row.name, row.other));
                    }
                    Err(error) => panic!("{}: {error}", row.name),
                }
            }
        }
        let mut defaults = Settings::new();
        defaults.set("one_at_a_time", "0").unwrap();
        defaults.builder().unwrap();
    }

    #[test]
    fn a_communicator_has_what_was_set() {
        let mut settings = Settings::new();
        let set = [
            ("order", "any"),
            ("max_bytes", "64K"),
            ("algorithm", "ring"),
            ("workers", "2"),
            ("wait", "yield"),
        ];
        for (name, value) in set {
            settings.set(name, value).unwrap();
        }
        let [rank] = Threads::world(1).unwrap().try_into().ok().unwrap();
        let made = settings.builder().unwrap().build(settings.host().unwrap(), rank).unwrap();
        assert_eq!(made.order(), crate::Order::Any);
        assert_eq!(made.plan(1 << 20, crate::DType::F32).algorithm, crate::Algorithm::Ring);
        assert_eq!(made.device().wait_mode(), crate::Wait::Yield);
        let builder = with("tuning", "built-in").unwrap().builder().unwrap();
        let [rank] = Threads::world(1).unwrap().try_into().ok().unwrap();
        let source = builder.build(Host::new(), rank).unwrap().plan_source().to_string();
        assert!(
            source.starts_with("built-in for ") && source.contains("the program asks for it"),
            "{source}"
        );
        assert!(matches!(with("tuning", "/nonexistent").unwrap().builder(), Err(Error::Tuning { .. })));
    }

    #[test]
    fn ranks_wait_for_each_other_as_long_as_is_set() {
        let limits = |set: &[(&str, &str)]| {
            let mut settings = Settings::new();
            set.iter().for_each(|(name, value)| settings.set(name, value).unwrap());
            (settings.meeting_timeout().as_secs_f64(), settings.join_timeout().is_some())
        };
        assert_eq!(limits(&[]), (30.0, false));
        assert_eq!(limits(&[("timeout", "0")]), (30.0, false));
        assert_eq!(limits(&[("timeout", "2.5")]), (2.5, false));
        assert_eq!(limits(&[("timeout", "2.5"), ("join_timeout", "0.25")]), (0.25, true));
        assert_eq!(limits(&[("join_timeout", "0")]), (Duration::MAX.as_secs_f64(), true));
    }
}
