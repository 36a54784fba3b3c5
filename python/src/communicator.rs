//! A rank's communicator: making it, parts of it, what it tells, and its end. Its calls are in `calls.rs`.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fast_allreduce::bootstrap::Local;
use fast_allreduce::{AnyCommunicator, DeviceId, Error, Settings};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::buffer::{Operand, Wanted};
use crate::errors::{invalid, raised};
use crate::interrupt::{drop_apart, in_call, waiting};
use crate::memory::RegisteredBuffer;
use crate::settings::settings as checked;
use crate::values::{self, UniqueId};

#[pyclass(module = "fast_allreduce", frozen, get_all)]
pub struct Counters {
    calls: u64,
    bytes: u64,
    waits: Vec<u64>,
    timeouts: Vec<u64>,
}

#[pymethods]
impl Counters {
    fn __repr__(&self) -> String {
        let Self { calls, bytes, waits, timeouts } = self;
        format!("Counters(calls={calls}, bytes={bytes}, waits={waits:?}, timeouts={timeouts:?})")
    }
}

#[pyclass(module = "fast_allreduce", frozen, weakref)]
pub struct Communicator {
    any: Mutex<Option<Arc<AnyCommunicator>>>,
    /// Set once: see `named.rs`.
    pub name: OnceLock<String>,
    pub place: DeviceId,
    pub rank: usize,
    pub world_size: usize,
}

impl Communicator {
    fn new(any: AnyCommunicator) -> Self {
        let (place, rank, world_size) = (any.device_id(), any.rank(), any.world_size());
        let (any, name) = (Mutex::new(Some(Arc::new(any))), OnceLock::new());
        Self { any, name, place, rank, world_size }
    }

    pub fn live(&self, py: Python<'_>) -> PyResult<Arc<AnyCommunicator>> {
        let any = self.any.lock().unwrap_or_else(PoisonError::into_inner).clone();
        any.ok_or_else(|| invalid(py, "the communicator has been destroyed"))
    }

    /// Makes a communicator of ranks that have met.
    fn built(py: Python<'_>, settings: Settings, bootstrap: Local) -> PyResult<Self> {
        let made = waiting(py, || settings.build(bootstrap))?;
        made.map(Self::new).map_err(|error| raised(py, error))
    }

    fn part<T: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&AnyCommunicator) -> fast_allreduce::Result<T> + Send,
    ) -> PyResult<T> {
        in_call(py, self.live(py)?, make)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // It waits for the other ranks to have closed what they have of it.
        if let Some(any) = self.any.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            drop_apart(any);
        }
    }
}

#[pymethods]
impl Communicator {
    #[staticmethod]
    #[pyo3(signature = (nranks, rank, unique_id, device = "cpu", **settings))]
    fn init(
        py: Python<'_>,
        nranks: usize,
        rank: usize,
        unique_id: &Bound<'_, UniqueId>,
        device: &str,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let settings = checked(py, device, settings)?;
        let (id, limit) = (unique_id.get().0, settings.meeting_timeout());
        let local = waiting(py, || Local::connect(&id, rank, nranks, limit))?;
        let local = local.map_err(|error| raised(py, error))?;
        Self::built(py, settings, local)
    }

    #[staticmethod]
    #[pyo3(signature = (device = "cpu", **settings))]
    fn from_env(
        py: Python<'_>,
        device: &str,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Option<Self>> {
        let settings = checked(py, device, settings)?;
        let limit = settings.join_timeout();
        let join = move || limit.map_or_else(Local::from_env, Local::from_env_within);
        match waiting(py, join)?.map_err(|error| raised(py, error))? {
            Some(local) => Self::built(py, settings, local).map(Some),
            None => Ok(None),
        }
    }

    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    #[getter]
    fn nranks(&self) -> usize {
        self.world_size
    }

    #[getter]
    fn device(&self) -> String {
        self.place.to_string()
    }

    #[getter]
    pub fn is_valid(&self) -> bool {
        self.any.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Raises what has gone wrong so far, also in calls on streams that nobody has waited for.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let checked = self.live(py)?.check();
        checked.map_err(|error| raised(py, error))
    }

    fn alloc(&self, py: Python<'_>, nbytes: usize) -> PyResult<RegisteredBuffer> {
        let memory = self.part(py, |any| any.alloc(nbytes))?;
        Ok(RegisteredBuffer::new(memory, None, self.place))
    }

    fn register_buffer<'py>(
        &self,
        py: Python<'py>,
        buffer: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if buffer.is_instance_of::<RegisteredBuffer>() {
            return Ok(buffer);
        }
        let wanted = Wanted { name: "buffer", place: self.place, written: false, streams: None };
        let operand = Operand::of(&buffer, wanted)?;
        let (address, bytes) = (operand.address, operand.count * operand.dtype.size());
        // SAFETY: the operand, which is kept with the registration, holds the memory.
        let memory = self.part(py, move |any| unsafe { any.register(address, bytes) })?;
        let made = RegisteredBuffer::new(memory, Some(operand), self.place);
        Ok(Bound::new(py, made)?.into_any())
    }

    #[pyo3(signature = (color = None, key = 0))]
    fn split(&self, py: Python<'_>, color: Option<u32>, key: i64) -> PyResult<Option<Self>> {
        Ok(self.part(py, |any| any.split(color, key))?.map(Self::new))
    }

    #[getter]
    fn survivors(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        Ok(self.live(py)?.survivors())
    }

    #[pyo3(signature = (exclude_ranks = None))]
    fn shrink(&self, py: Python<'_>, exclude_ranks: Option<Vec<usize>>) -> PyResult<Self> {
        let world_size = self.world_size;
        if let Some(&rank) = exclude_ranks.iter().flatten().find(|&&rank| rank >= world_size) {
            return Err(raised(py, Error::RankOutOfRange { rank, world_size }));
        }
        let left = match exclude_ranks {
            Some(gone) => (0..self.world_size).filter(|rank| !gone.contains(rank)).collect(),
            None => self.live(py)?.survivors(),
        };
        self.part(py, |any| any.shrink(&left)).map(Self::new)
    }

    #[pyo3(signature = (timeout))]
    fn set_timeout(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = timeout.map(|timeout| values::seconds(py, timeout)).transpose()?;
        self.live(py)?.set_timeout(timeout);
        Ok(())
    }

    #[getter]
    fn behind(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        Ok(self.live(py)?.behind())
    }

    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let any = self.live(py)?;
        py.detach(|| any.abort());
        Ok(())
    }

    /// Closes it, when calls of other threads have ended. A second time is nothing.
    fn destroy(&self, py: Python<'_>) {
        let any = self.any.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(any));
    }

    fn counters(&self, py: Python<'_>) -> PyResult<Counters> {
        let told = self.live(py)?.counters();
        Ok(Counters { calls: told.calls, bytes: told.bytes, waits: told.waits, timeouts: told.timeouts })
    }

    /// What an allreduce of so many elements does, in words.
    fn plan(&self, py: Python<'_>, count: usize, dtype: &Bound<'_, PyAny>) -> PyResult<(String, usize)> {
        let dtype = values::dtype(py, dtype.str()?.to_str()?)?;
        let plan = self.live(py)?.plan(count, dtype);
        Ok((plan.algorithm.to_string(), plan.piece_bytes))
    }

    #[getter]
    fn plan_source(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.live(py)?.plan_source().to_string())
    }

    #[getter]
    fn binding(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.live(py)?.binding().map(ToString::to_string))
    }

    /// None where the switch between the GPUs can add up (NVLS); else why it does not.
    #[getter]
    fn nvls_refused(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let told = self.live(py)?.nvls();
        Ok(told.err().map(|error| error.to_string()))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.destroy(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.is_valid() { "" } else { ", destroyed" };
        format!(
            "Communicator(rank={}, nranks={}, device='{}'{state})",
            self.rank, self.world_size, self.place
        )
    }
}
