//! Settings of a communicator, as keyword arguments.

use std::path::PathBuf;
use std::time::Duration;

use fast_allreduce::bootstrap::Bootstrap;
#[cfg(feature = "cuda")]
use fast_allreduce::device::cuda::current::CallersContext;
use fast_allreduce::device::host::Bind;
use fast_allreduce::plan::Tuning;
#[cfg(feature = "cuda")]
use fast_allreduce::Cuda;
#[cfg(not(feature = "cuda"))]
use fast_allreduce::Error;
use fast_allreduce::{AnyCommunicator, Builder, Communicator, Host, Order, Wait};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{invalid, raised};
use crate::place::{place, Place};
use crate::values;

/// How long ranks wait for each other to come at all, where the caller sets no limit.
const MEETING: Duration = Duration::from_secs(30);

pub struct Settings {
    builder: Builder,
    place: Place,
    workers: usize,
    wait: Wait,
    bind: Bind,
    max_blocks: Option<usize>,
    one_at_a_time: bool,
    programmatic_launch: bool,
    pub meeting: Duration,
    /// How long ranks wait for each other to come, where that is to be another limit.
    pub joining: Option<Duration>,
}

impl Settings {
    pub fn of(py: Python<'_>, device: &str, given: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut settings = Self {
            builder: Communicator::builder(),
            place: place(py, device)?,
            workers: 1,
            wait: Wait::Auto,
            bind: Bind::None,
            max_blocks: None,
            one_at_a_time: false,
            programmatic_launch: false,
            meeting: MEETING,
            joining: None,
        };
        for (name, value) in given.into_iter().flatten() {
            settings = settings.with(py, &name.extract::<String>()?, &value)?;
        }
        let of_gpus = settings.max_blocks.is_some() || settings.one_at_a_time || settings.programmatic_launch;
        if settings.place == Place::Cpu && of_gpus {
            return Err(invalid(
                py,
                "max_blocks, one_at_a_time and programmatic_launch are settings of GPUs, and the device is cpu",
            ));
        }
        let of_cpus = (settings.workers, settings.wait, settings.bind) != (1, Wait::Auto, Bind::None);
        if settings.place != Place::Cpu && of_cpus {
            let problem =
                format!("workers, wait and bind are settings of CPUs, and the device is {}", settings.place);
            return Err(invalid(py, problem));
        }
        Ok(settings)
    }

    /// With one keyword; None is its default.
    fn with(mut self, py: Python<'_>, name: &str, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let text = || value.extract::<Option<String>>();
        match name {
            "timeout" => {
                if let Some(limit) = value.extract()? {
                    self.meeting = values::seconds(py, limit)?;
                    self.builder = self.builder.timeout(self.meeting);
                }
            }
            "join_timeout" => {
                let limit = value.extract::<Option<f64>>()?;
                self.joining = limit.map(|limit| values::seconds(py, limit)).transpose()?;
            }
            "max_bytes" => {
                if let Some(bytes) = value.extract()? {
                    self.builder = self.builder.max_bytes(bytes);
                }
            }
            "algorithm" => {
                self.builder = self.builder.algorithm(values::algorithm(py, text()?.as_deref())?);
            }
            "check" => self.builder = self.builder.check(value.extract::<Option<bool>>()?),
            "order" => {
                let order = text()?.map(|name| name.parse::<Order>()).transpose();
                self.builder = self.builder.order(order.map_err(|error| raised(py, error))?);
            }
            "direct_reads" => {
                self.builder = self.builder.direct_reads(value.extract::<Option<bool>>()?);
            }
            "max_blocks" => match value.extract::<Option<usize>>()? {
                Some(0) => return Err(invalid(py, "max_blocks = 0 is not valid: at least 1")),
                blocks => self.max_blocks = blocks,
            },
            "one_at_a_time" => self.one_at_a_time = value.extract::<Option<bool>>()?.unwrap_or(false),
            "programmatic_launch" => {
                self.programmatic_launch = value.extract::<Option<bool>>()?.unwrap_or(false);
            }
            "calibrate" => self.builder = self.builder.calibrate(value.extract::<Option<bool>>()?),
            "tuning" => {
                if let Some(path) = value.extract::<Option<PathBuf>>()? {
                    let tuning = Tuning::load(path).map_err(|error| raised(py, error))?;
                    self.builder = self.builder.tuning(tuning);
                }
            }
            "workers" => self.workers = value.extract::<Option<usize>>()?.unwrap_or(1),
            "wait" => self.wait = text()?.map_or(Ok(Wait::Auto), |name| values::wait(py, &name))?,
            "bind" => {
                let bind = text()?.map_or(Ok(Bind::None), |name| name.parse());
                self.bind = bind.map_err(|error| raised(py, error))?;
            }
            other => {
                return Err(PyTypeError::new_err(format!("Communicator has no setting {other:?}")));
            }
        }
        Ok(self)
    }

    pub fn build(self, bootstrap: impl Bootstrap + 'static) -> fast_allreduce::Result<AnyCommunicator> {
        match self.place {
            Place::Cpu => {
                let host = Host::new().workers(self.workers)?.wait(self.wait).bind(self.bind);
                self.builder.build(host, bootstrap).map(AnyCommunicator::from)
            }
            #[cfg(feature = "cuda")]
            Place::Cuda(ordinal) => {
                let _context = CallersContext::keep_if_any();
                let mut device = Cuda::open(ordinal)?.programmatic_launch(self.programmatic_launch);
                if let Some(blocks) = self.max_blocks {
                    device = device.max_blocks(blocks);
                }
                if self.one_at_a_time {
                    device = device.one_at_a_time();
                }
                self.builder.build(device, bootstrap).map(AnyCommunicator::from)
            }
            #[cfg(not(feature = "cuda"))]
            Place::Cuda(_) => Err(Error::Unavailable {
                what: "the CUDA device".into(),
                reason: "this wheel was built without the feature `cuda`".into(),
            }),
        }
    }
}
