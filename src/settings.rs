//! Settings of a communicator by name, for languages and programs that get them as text.

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

/// The default limit on the wait for all ranks to join, where they are given an id.
const DEFAULT_MEETING_TIMEOUT: Duration = Duration::from_secs(30);

/// Settings of a communicator and its device, set by name.
///
/// `docs/tuning.md` has the table of all settings, with the values that each takes. [`Builder`], [`Host`] and
/// [`Cuda`](crate::device) have methods for the same settings.
///
/// ```
/// use fast_allreduce::bootstrap::Threads;
/// use fast_allreduce::{DeviceId, Settings};
///
/// let mut settings = Settings::new();
/// for (name, value) in [("device", "cpu"), ("timeout", "2.5"), ("join_timeout", "60")] {
///     settings.set(name, value)?;
/// }
/// let error = settings.set("colour", "red").unwrap_err(); // Its text lists `Settings::NAMES`.
/// assert!(error.to_string().contains("timeout") && Settings::NAMES.contains(&"timeout"));
///
/// settings.check()?; // Before the rank joins the others.
/// assert_eq!((settings.device(), settings.meeting_timeout().as_secs()), (DeviceId::Cpu, 60));
/// assert_eq!(settings.join_timeout(), Some(settings.meeting_timeout()));
/// # let [bootstrap] = Threads::world(1)?.try_into().ok().unwrap();
/// let communicator = settings.build(bootstrap)?; // An `AnyCommunicator`.
/// communicator.barrier()?;
///
/// # let [bootstrap] = Threads::world(1)?.try_into().ok().unwrap();
/// // A `Communicator<Host>`.
/// let communicator = settings.builder()?.build(settings.host()?, bootstrap)?;
/// communicator.all_reduce_in_place(&mut [1.0_f32], fast_allreduce::ReduceOp::Sum)?;
/// # Ok::<_, fast_allreduce::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Settings {
    values: Values,
}

impl Settings {
    /// The names of all settings.
    pub const NAMES: &'static [&'static str] = Values::NAMES;

    /// Creates settings without values: each setting comes from the environment, or else has its default.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the setting `name` to the value that `value` describes.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting), which lists all names if there is no setting of this
    /// name, or else the values that the setting takes.
    pub fn set(&mut self, name: &str, value: impl AsRef<OsStr>) -> Result<()> {
        self.values.set(name, value.as_ref())
    }

    /// Returns the device of the ranks' buffers.
    pub fn device(&self) -> DeviceId {
        self.values.device.unwrap_or_default()
    }

    /// Returns the longest wait for all ranks to join, if it is set.
    pub fn join_timeout(&self) -> Option<Duration> {
        self.values.join_timeout.map(|limit| limit.unwrap_or(Duration::MAX))
    }

    /// Returns the longest wait for all ranks to join where they are given an id: `join_timeout`, else `timeout`, else
    /// 30 s.
    pub fn meeting_timeout(&self) -> Duration {
        self.join_timeout().or(self.values.timeout.flatten()).unwrap_or(DEFAULT_MEETING_TIMEOUT)
    }

    /// Checks the settings before a rank joins the others with them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) for a setting that the device does not have;
    /// [`Error::Tuning`](crate::Error::Tuning) for a tuning file that cannot be used.
    pub fn check(&self) -> Result<()> {
        self.builder().map(drop)
    }

    /// Makes this rank's communicator, on the device that is set. It does not change the current CUDA context.
    ///
    /// # Errors
    ///
    /// Those of [`Settings::check`], of the device ([`Settings::host`] or `Settings::cuda`) and of [`Builder::build`];
    /// [`Error::Unavailable`](crate::Error::Unavailable) for a GPU, in a build without the feature `cuda`.
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

    /// Returns a builder with these settings. [`Settings::host`] and `Settings::cuda` make its device.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) for a setting that the device does not have;
    /// [`Error::Tuning`](crate::Error::Tuning) for a tuning file that cannot be used.
    pub fn builder(&self) -> Result<Builder> {
        self.values.check_device(matches!(self.device(), DeviceId::Cuda(_)))?;
        Builder::of(self.values.clone())
    }

    /// Creates a host device with these settings.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) for a number of workers that [`Host::workers`] refuses.
    pub fn host(&self) -> Result<Host> {
        let Values { workers, wait, bind, .. } = self.values;
        Ok(Host::new()
            .workers(workers.unwrap_or(1))?
            .wait(wait.unwrap_or_default())
            .bind(bind.unwrap_or_default()))
    }

    /// Opens the GPU with this ordinal, with these settings.
    ///
    /// ```no_run
    #[doc = include_str!("example_cuda.txt")]
    /// # fn example(settings: &Settings, local: bootstrap::Local) -> Result<()> {
    /// // A `Communicator<Cuda>`.
    /// let communicator = settings.builder()?.build(settings.cuda(0)?, local)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) without a driver, or in a build without kernels for GPUs;
    /// [`Error::Driver`](crate::Error::Driver) if there is no such GPU.
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
    fn settings_are_refused_on_devices_that_lack_them() {
        for row in &ROWS {
            for (device, is_cuda) in [(DeviceId::Cpu, false), (DeviceId::Cuda(0), true)] {
                let lacks = row.is_cuda == Some(!is_cuda);
                let mut settings = with("device", &device.to_string()).unwrap();
                let example = if row.name == "device" { device.to_string() } else { row.other.to_owned() };
                settings.set(row.name, &example).unwrap();
                match settings.builder() {
                    Ok(_) => assert!(!lacks, "{}", row.name),
                    Err(Error::InvalidSetting { name, value, .. }) => {
                        assert_eq!((lacks, name, &*value), (true, row.name, row.other));
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
    fn a_communicator_uses_what_was_set() {
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
    fn limits_on_joining_are_those_that_were_set() {
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
