//! A rank's communicator: construction, sub-communicators, memory, state, and destruction. Its calls are in `calls/`.

pub mod named;
mod settings;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use fast_allreduce::bootstrap::Local;
use fast_allreduce::flight;
use fast_allreduce::{AnyCommunicator, DeviceId, Error, Settings};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::buffers::{Operand, RegisteredBuffer, Required};
use crate::errors::{invalid, raised, OrRaise};
use crate::interpreter::{drop_detached, in_call, waiting};
use crate::values::{self, Integer, UniqueId};

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

#[pyclass(module = "fast_allreduce", frozen, get_all)]
pub struct Progress {
    completed: u64,
    of_rank: Vec<Option<u64>>,
}

#[pymethods]
impl Progress {
    fn __repr__(&self) -> String {
        format!("Progress(completed={}, of_rank={:?})", self.completed, self.of_rank)
    }
}

impl From<fast_allreduce::Progress> for Progress {
    fn from(progress: fast_allreduce::Progress) -> Self {
        Self { completed: progress.completed, of_rank: progress.of_rank }
    }
}

/// Reads JSON.
fn of_json<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (json,))
}

/// The worlds of a process, or of a directory with flight records.
fn inspected(what: &Bound<'_, PyAny>) -> PyResult<Vec<flight::FlightRecord>> {
    let py = what.py();
    let read = match what.extract::<u32>() {
        Ok(process) => py.detach(|| flight::of_process(process)),
        Err(_) => {
            let directory: PathBuf = what.extract()?;
            py.detach(|| flight::of_directory(directory))
        }
    };
    read.or_raise(py)
}

#[pyfunction]
pub fn inspect<'py>(py: Python<'py>, what: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let worlds: Vec<_> = inspected(what)?.iter().map(flight::FlightRecord::to_json).collect();
    of_json(py, &format!("[{}]", worlds.join(",")))
}

#[pyfunction]
pub fn inspect_metrics(what: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(flight::metrics(&inspected(what)?))
}

#[pyclass(module = "fast_allreduce", frozen, weakref)]
pub struct Communicator {
    /// `None` once it has been destroyed.
    any: Mutex<Option<Arc<AnyCommunicator>>>,
    /// Set at most once: see `named.rs`.
    name: OnceLock<String>,
    pub device: DeviceId,
    pub rank: usize,
    pub world_size: usize,
}

impl Communicator {
    fn new(any: AnyCommunicator) -> Self {
        let (device, rank, world_size) = (any.device_id(), any.rank(), any.world_size());
        let (any, name) = (Mutex::new(Some(Arc::new(any))), OnceLock::new());
        Self { any, name, device, rank, world_size }
    }

    /// Returns the communicator, unless it has been destroyed.
    pub fn live(&self, py: Python<'_>) -> PyResult<Arc<AnyCommunicator>> {
        let any = self.any.lock().unwrap_or_else(PoisonError::into_inner).clone();
        any.ok_or_else(|| invalid(py, "the communicator has been destroyed"))
    }

    fn build(py: Python<'_>, settings: Settings, bootstrap: Local) -> PyResult<Self> {
        waiting(py, || settings.build(bootstrap)).map(Self::new)
    }

    /// Runs a collective step.
    fn step<T: Send>(
        &self,
        py: Python<'_>,
        step: impl FnOnce(&AnyCommunicator) -> fast_allreduce::Result<T> + Send,
    ) -> PyResult<T> {
        in_call(py, self.live(py)?, step)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // The drop waits until the other ranks have closed their mappings of this rank's memory.
        if let Some(any) = self.any.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            drop_detached(any);
        }
    }
}

#[pymethods]
impl Communicator {
    #[staticmethod]
    #[pyo3(signature = (nranks, rank, unique_id, device = "cpu", **settings))]
    fn init(
        py: Python<'_>,
        nranks: Integer,
        rank: Integer,
        unique_id: &Bound<'_, UniqueId>,
        device: &str,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let (nranks, rank) = (nranks.within(py, "nranks")?, rank.within(py, "rank")?);
        let settings = settings::checked(py, device, settings)?;
        let (id, limit) = (unique_id.get().0, settings.meeting_timeout());
        let local = waiting(py, || Local::connect(&id, rank, nranks, limit))?;
        Self::build(py, settings, local)
    }

    #[staticmethod]
    #[pyo3(signature = (unique_id, device = "cpu", **settings))]
    fn init_spare(
        py: Python<'_>,
        unique_id: &Bound<'_, UniqueId>,
        device: &str,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let settings = settings::checked(py, device, settings)?;
        let (id, limit) = (unique_id.get().0, settings.meeting_timeout());
        let local = waiting(py, || Local::spare(&id, limit))?;
        Self::build(py, settings, local)
    }

    #[staticmethod]
    #[pyo3(signature = (device = "cpu", **settings))]
    fn from_env(
        py: Python<'_>,
        device: &str,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Option<Self>> {
        let settings = settings::checked(py, device, settings)?;
        let limit = settings.join_timeout();
        let local = waiting(py, || limit.map_or_else(Local::from_env, Local::from_env_within))?;
        local.map(|local| Self::build(py, settings, local)).transpose()
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
        self.device.to_string()
    }

    #[getter]
    fn is_valid(&self) -> bool {
        self.any.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.live(py)?.check().or_raise(py)
    }

    fn alloc(&self, py: Python<'_>, nbytes: Integer) -> PyResult<RegisteredBuffer> {
        let nbytes = nbytes.within(py, "nbytes")?;
        let memory = self.step(py, |any| any.alloc(nbytes))?;
        Ok(RegisteredBuffer::new(memory, None, self.device))
    }

    fn register_buffer<'py>(
        &self,
        py: Python<'py>,
        buffer: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if buffer.is_instance_of::<RegisteredBuffer>() {
            return Ok(buffer);
        }
        let required = Required { name: "buffer", device: self.device, is_written: false, streams: None };
        let operand = Operand::of(&buffer, required)?;
        let (address, bytes) = (operand.address, operand.count * operand.dtype.size());
        // SAFETY: the operand holds the memory, and is kept with the registration.
        let memory = self.step(py, move |any| unsafe { any.register(address, bytes) })?;
        let registered = RegisteredBuffer::new(memory, Some(operand), self.device);
        Ok(Bound::new(py, registered)?.into_any())
    }

    #[pyo3(signature = (color = None, key = Integer::ZERO))]
    fn split(&self, py: Python<'_>, color: Option<Integer>, key: Integer) -> PyResult<Option<Self>> {
        let color = color.map(|color| color.within(py, "color")).transpose()?;
        let key = key.within(py, "key")?;
        Ok(self.step(py, |any| any.split(color, key))?.map(Self::new))
    }

    #[getter]
    fn survivors(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        Ok(self.live(py)?.survivors())
    }

    #[pyo3(signature = (exclude_ranks = None))]
    fn shrink(&self, py: Python<'_>, exclude_ranks: Option<Vec<Integer>>) -> PyResult<Self> {
        let world_size = self.world_size;
        let exclude_ranks = exclude_ranks
            .map(|ranks| Integer::all_within(&ranks, py, "a rank of exclude_ranks"))
            .transpose()?;
        if let Some(&rank) = exclude_ranks.iter().flatten().find(|&&rank| rank >= world_size) {
            return Err(raised(py, Error::RankOutOfRange { rank, world_size }));
        }
        let survivors = match exclude_ranks {
            Some(excluded) => (0..world_size).filter(|rank| !excluded.contains(rank)).collect(),
            None => self.live(py)?.survivors(),
        };
        self.step(py, |any| any.shrink(&survivors)).map(Self::new)
    }

    #[pyo3(signature = (nranks, timeout = 30.0))]
    fn grow(&self, py: Python<'_>, nranks: Integer, timeout: f64) -> PyResult<Self> {
        let nranks = nranks.within(py, "nranks")?;
        let limit = values::limit(py, timeout)?.unwrap_or(Duration::MAX);
        self.step(py, |any| any.grow(nranks, limit)).map(Self::new)
    }

    fn suspend(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.step(py, AnyCommunicator::suspend)?.bytes)
    }

    #[getter]
    fn is_suspended(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.live(py)?.is_suspended())
    }

    #[pyo3(signature = (timeout = 30.0))]
    fn resume(&self, py: Python<'_>, timeout: f64) -> PyResult<Progress> {
        let limit = values::limit(py, timeout)?.unwrap_or(Duration::MAX);
        self.step(py, |any| any.resume(limit)).map(Progress::from)
    }

    fn join_id(&self, py: Python<'_>) -> PyResult<UniqueId> {
        self.live(py)?.join_id().map(UniqueId).or_raise(py)
    }

    #[pyo3(signature = (survivors, timeout = 30.0))]
    fn join(&self, py: Python<'_>, survivors: Vec<Integer>, timeout: f64) -> PyResult<Progress> {
        let survivors = Integer::all_within(&survivors, py, "a rank of survivors")?;
        let limit = values::limit(py, timeout)?.unwrap_or(Duration::MAX);
        self.step(py, |any| any.join(&survivors, limit)).map(Progress::from)
    }

    fn progress(&self, py: Python<'_>) -> PyResult<Progress> {
        Ok(self.live(py)?.progress().into())
    }

    fn inherited(&self, py: Python<'_>) -> PyResult<Vec<(u64, usize)>> {
        let found = self.live(py)?.inherited();
        Ok(found.iter().filter(|one| one.is_registered).map(|one| (one.number, one.bytes)).collect())
    }

    fn inherit(&self, py: Python<'_>, number: Integer) -> PyResult<RegisteredBuffer> {
        let number = number.within(py, "number")?;
        let memory = self.live(py)?.inherit(number).or_raise(py)?;
        Ok(RegisteredBuffer::new(memory, None, self.device))
    }

    #[pyo3(signature = (timeout))]
    fn set_timeout(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = timeout.map_or(Ok(None), |timeout| values::limit(py, timeout))?;
        self.live(py)?.set_timeout(limit);
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

    fn destroy(&self, py: Python<'_>) {
        let any = self.any.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(any));
    }

    fn counters(&self, py: Python<'_>) -> PyResult<Counters> {
        let fast_allreduce::Counters { calls, bytes, waits, timeouts, .. } = self.live(py)?.counters();
        Ok(Counters { calls, bytes, waits, timeouts })
    }

    fn flight_record<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let any = self.live(py)?;
        of_json(py, &py.detach(|| any.flight_record().to_json()))
    }

    #[pyo3(signature = (path = None))]
    fn metrics(&self, py: Python<'_>, path: Option<PathBuf>) -> PyResult<String> {
        let any = self.live(py)?;
        let written = path.map_or(Ok(()), |path| py.detach(|| any.write_metrics(path)));
        written.or_raise(py)?;
        Ok(any.metrics())
    }

    fn plan(&self, py: Python<'_>, count: Integer, dtype: &Bound<'_, PyAny>) -> PyResult<(String, usize)> {
        let count = count.within(py, "count")?;
        let plan = self.live(py)?.plan(count, values::dtype(dtype)?);
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

    #[getter]
    fn nvls_refused(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.live(py)?.nvls().err().map(|error| error.to_string()))
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
        let Self { rank, world_size, device, .. } = self;
        format!("Communicator(rank={rank}, nranks={world_size}, device='{device}'{state})")
    }
}
