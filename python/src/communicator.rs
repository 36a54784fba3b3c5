//! A rank's communicator.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fast_allreduce::bootstrap::{Bootstrap, Local};
#[cfg(feature = "cuda")]
use fast_allreduce::Cuda;
use fast_allreduce::{Builder, Collective, DType, Direction, Error, Host, ReduceOp, Transfer};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::any::{on_any, Any};
use crate::buffer::{place, Operand, Place, Wanted};
use crate::errors::{invalid, raised};
use crate::group::gathered;
use crate::interrupt::{elsewhere, waiting, Wait};
use crate::memory::RegisteredBuffer;
use crate::values::{self, Op, UniqueId};

/// How long ranks wait for each other to come at all, where the caller sets no limit.
const MEETING: Duration = Duration::from_secs(30);

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

#[pyclass(module = "fast_allreduce", frozen)]
pub struct Communicator {
    any: Mutex<Option<Arc<Any>>>,
    place: Place,
    rank: usize,
    world_size: usize,
}

/// Settings as keyword arguments.
struct Settings {
    builder: Builder,
    place: Place,
    workers: usize,
    wait: fast_allreduce::Wait,
    meeting: Duration,
}

impl Settings {
    #[expect(clippy::too_many_arguments, reason = "they are keywords of Python's")]
    fn of(
        py: Python<'_>,
        device: &str,
        timeout: Option<f64>,
        max_bytes: Option<usize>,
        algorithm: Option<&str>,
        check: Option<bool>,
        workers: usize,
        wait: &str,
    ) -> PyResult<Self> {
        let mut builder =
            fast_allreduce::Communicator::builder().algorithm(values::algorithm(py, algorithm)?).check(check);
        let timeout = timeout.map(|timeout| values::seconds(py, timeout)).transpose()?;
        if let Some(timeout) = timeout {
            builder = builder.timeout(timeout);
        }
        if let Some(max_bytes) = max_bytes {
            builder = builder.max_bytes(max_bytes);
        }
        let meeting = timeout.unwrap_or(MEETING);
        Ok(Self { builder, place: place(py, device)?, workers, wait: values::wait(py, wait)?, meeting })
    }

    fn build(self, bootstrap: Arc<dyn Bootstrap>) -> fast_allreduce::Result<Any> {
        match self.place {
            Place::Cpu => {
                let host = Host::new().workers(self.workers)?.wait(self.wait);
                self.builder.build(host, bootstrap).map(Any::Host)
            }
            #[cfg(feature = "cuda")]
            Place::Cuda(ordinal) => {
                self.builder.build(Cuda::open(ordinal)?, bootstrap).map(|made| Any::Cuda(made, ordinal))
            }
            #[cfg(not(feature = "cuda"))]
            Place::Cuda(_) => Err(Error::Unavailable {
                what: "the CUDA device".into(),
                reason: "this wheel was built without the feature `cuda`".into(),
            }),
        }
    }
}

impl Communicator {
    fn new(any: Any) -> Self {
        let (place, rank, world_size) = (any.place(), any.rank(), any.world_size());
        Self { any: Mutex::new(Some(Arc::new(any))), place, rank, world_size }
    }

    fn live(&self, py: Python<'_>) -> PyResult<Arc<Any>> {
        let any = self.any.lock().unwrap_or_else(PoisonError::into_inner).clone();
        any.ok_or_else(|| invalid(py, "the communicator has been destroyed"))
    }

    /// Makes a communicator of ranks that have met.
    fn built(py: Python<'_>, settings: Settings, bootstrap: Arc<dyn Bootstrap>) -> PyResult<Self> {
        let interruptible = Arc::clone(&bootstrap);
        let made = waiting(py, || Wait::SetUp(interruptible), || settings.build(bootstrap))?;
        made.map(Self::new).map_err(|error| raised(py, error))
    }

    fn read<'py>(&self, name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Operand> {
        Operand::of(object, Wanted { name, place: self.place, written: false })
    }

    fn written<'py>(&self, name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Operand> {
        Operand::of(object, Wanted { name, place: self.place, written: true })
    }

    /// Carries out a collective between two buffers, which may be one. Without one there are no elements on that side.
    fn carry_out(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        collective: Collective<'_>,
        (input, output): (Option<&Operand>, Option<&Operand>),
        count: usize,
    ) -> PyResult<()> {
        let any = self.live(py)?;
        let dtype = match (input, output) {
            (Some(input), Some(output)) if input.dtype != output.dtype => {
                let (input, output) = (input.dtype, output.dtype);
                return Err(invalid(
                    py,
                    format!("sendbuf has elements of type {input}, recvbuf of type {output}"),
                ));
            }
            (Some(operand), _) | (_, Some(operand)) => operand.dtype,
            (None, None) => DType::U8,
        };
        let (rank, world_size) = (self.rank, self.world_size);
        let sides = [
            ("sendbuf", input, collective.input_len(count, rank, world_size)),
            ("recvbuf", output, collective.output_len(count, rank, world_size)),
        ];
        for (name, operand, expected) in sides {
            let has = operand.map_or(0, |operand| operand.count);
            if operand.is_some() && has != expected {
                return Err(invalid(
                    py,
                    format!("{name} has {has} elements, and {} needs {expected}", collective.name()),
                ));
            }
            if operand.is_none() && expected != 0 {
                return Err(invalid(
                    py,
                    format!("{name} is None, and {} needs {expected} elements", collective.name()),
                ));
            }
        }
        let address = |operand: Option<&Operand>| operand.map_or(0, |operand| operand.address);
        let addresses = [address(input), address(output)];
        let stream = values::stream(stream)?;
        let call = || {
            // SAFETY: the operands hold memory of the communicator's device with as many elements as the collective
            // reads and writes, which has just been compared; Python's caller leaves it alone meanwhile.
            unsafe { any.collective(stream, collective, addresses, count, dtype) }
        };
        let done = waiting(py, || Wait::Call(Arc::clone(&any)), call)?;
        done.map_err(|error| raised(py, error))
    }

    /// A message, now or with the thread's group.
    fn message(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        direction: Direction,
        operand: Operand,
        peer: usize,
        tag: u32,
    ) -> PyResult<()> {
        let any = self.live(py)?;
        let stream = values::stream(stream)?;
        let world_size = self.world_size;
        if peer >= world_size {
            return Err(raised(py, Error::RankOutOfRange { rank: peer, world_size }));
        }
        let Operand { address, count, dtype, .. } = operand;
        let transfer = Transfer { direction, peer, address, count, dtype, tag };
        let Some(_held) = gathered(&any, stream, transfer, operand) else {
            return Ok(());
        };
        let call = || {
            // SAFETY: the operand holds the memory, which is of the communicator's device.
            unsafe { any.transfer(stream, &[transfer]) }
        };
        let done = waiting(py, || Wait::Call(Arc::clone(&any)), call)?;
        done.map_err(|error| raised(py, error))
    }

    /// An equal share of a buffer for each rank.
    fn share(&self, py: Python<'_>, name: &str, operand: &Operand) -> PyResult<usize> {
        let (count, world_size) = (operand.count, self.world_size);
        match count % world_size {
            0 => Ok(count / world_size),
            _ => Err(invalid(
                py,
                format!("{name} has {count} elements, which {world_size} ranks cannot share equally"),
            )),
        }
    }

    fn counts(&self, py: Python<'_>, name: &str, counts: &[usize]) -> PyResult<()> {
        match counts.len() == self.world_size {
            true => Ok(()),
            false => {
                Err(invalid(py, format!("{name} has {} numbers for {} ranks", counts.len(), self.world_size)))
            }
        }
    }

    fn part<T: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&Any) -> fast_allreduce::Result<T> + Send,
    ) -> PyResult<T> {
        let any = self.live(py)?;
        let made = waiting(py, || Wait::Call(Arc::clone(&any)), || make(&any))?;
        made.map_err(|error| raised(py, error))
    }
}

#[pymethods]
impl Communicator {
    #[staticmethod]
    #[pyo3(signature = (nranks, rank, unique_id, device = "cpu", *, timeout = None, max_bytes = None, algorithm = None,
        check = None, workers = 1, wait = "auto"))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords of Python's")]
    fn init(
        py: Python<'_>,
        nranks: usize,
        rank: usize,
        unique_id: &Bound<'_, UniqueId>,
        device: &str,
        timeout: Option<f64>,
        max_bytes: Option<usize>,
        algorithm: Option<&str>,
        check: Option<bool>,
        workers: usize,
        wait: &str,
    ) -> PyResult<Self> {
        let settings = Settings::of(py, device, timeout, max_bytes, algorithm, check, workers, wait)?;
        let (id, limit) = (unique_id.get().0.clone(), settings.meeting);
        let local = elsewhere(py, move || Local::connect(&id, rank, nranks, limit))?;
        let local = local.map_err(|error| raised(py, error))?;
        Self::built(py, settings, Arc::new(local))
    }

    #[staticmethod]
    #[pyo3(signature = (device = "cpu", *, timeout = None, max_bytes = None, algorithm = None, check = None,
        workers = 1, wait = "auto"))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords of Python's")]
    fn from_env(
        py: Python<'_>,
        device: &str,
        timeout: Option<f64>,
        max_bytes: Option<usize>,
        algorithm: Option<&str>,
        check: Option<bool>,
        workers: usize,
        wait: &str,
    ) -> PyResult<Option<Self>> {
        let settings = Settings::of(py, device, timeout, max_bytes, algorithm, check, workers, wait)?;
        match elsewhere(py, Local::from_env)?.map_err(|error| raised(py, error))? {
            Some(local) => Self::built(py, settings, Arc::new(local)).map(Some),
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
    fn is_valid(&self) -> bool {
        self.any.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, op = Op(ReduceOp::Sum), *, stream = None))]
    fn allreduce(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        op: Op,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let collective = Collective::AllReduce(op.0);
        match recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf)) {
            None => {
                let data = self.written("sendbuf", sendbuf)?;
                self.carry_out(py, stream, collective, (Some(&data), Some(&data)), data.count)
            }
            Some(recvbuf) => {
                let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
                self.carry_out(py, stream, collective, (Some(&input), Some(&output)), input.count)
            }
        }
    }

    #[pyo3(signature = (sendbuf, recvbuf, *, stream = None))]
    fn allgather(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        self.carry_out(py, stream, Collective::AllGather, (Some(&input), Some(&output)), input.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, counts, *, stream = None))]
    fn allgather_v(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        counts: Vec<usize>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.counts(py, "counts", &counts)?;
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        self.carry_out(py, stream, Collective::AllGatherV(&counts), (Some(&input), Some(&output)), 0)
    }

    #[pyo3(signature = (sendbuf, recvbuf, op = Op(ReduceOp::Sum), *, stream = None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        op: Op,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        self.carry_out(
            py,
            stream,
            Collective::ReduceScatter(op.0),
            (Some(&input), Some(&output)),
            output.count,
        )
    }

    #[pyo3(signature = (sendbuf, recvbuf, counts, op = Op(ReduceOp::Sum), *, stream = None))]
    fn reduce_scatter_v(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        counts: Vec<usize>,
        op: Op,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.counts(py, "counts", &counts)?;
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        self.carry_out(
            py,
            stream,
            Collective::ReduceScatterV(op.0, &counts),
            (Some(&input), Some(&output)),
            0,
        )
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, root = 0, *, stream = None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        root: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.root(py, root)?;
        let collective = Collective::Broadcast { root };
        let target = recvbuf.unwrap_or(sendbuf);
        let output = self.written(if recvbuf.is_some() { "recvbuf" } else { "sendbuf" }, target)?;
        if self.rank != root || target.is(sendbuf) {
            let input = (self.rank == root).then_some(&output);
            return self.carry_out(py, stream, collective, (input, Some(&output)), output.count);
        }
        let input = self.read("sendbuf", sendbuf)?;
        self.carry_out(py, stream, collective, (Some(&input), Some(&output)), output.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, op = Op(ReduceOp::Sum), root = 0, *, stream = None))]
    fn reduce(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        op: Op,
        root: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.root(py, root)?;
        let collective = Collective::Reduce { op: op.0, root };
        if self.rank != root {
            let input = self.read("sendbuf", sendbuf)?;
            return self.carry_out(py, stream, collective, (Some(&input), None), input.count);
        }
        match recvbuf.filter(|recvbuf| !recvbuf.is(sendbuf)) {
            None => {
                let data = self.written("sendbuf", sendbuf)?;
                self.carry_out(py, stream, collective, (Some(&data), Some(&data)), data.count)
            }
            Some(recvbuf) => {
                let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
                self.carry_out(py, stream, collective, (Some(&input), Some(&output)), input.count)
            }
        }
    }

    #[pyo3(signature = (sendbuf, recvbuf = None, root = 0, *, stream = None))]
    fn gather(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: Option<&Bound<'_, PyAny>>,
        root: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.root(py, root)?;
        let input = self.read("sendbuf", sendbuf)?;
        let recvbuf = recvbuf.filter(|_| self.rank == root);
        let output = recvbuf.map(|recvbuf| self.written("recvbuf", recvbuf)).transpose()?;
        self.carry_out(py, stream, Collective::Gather { root }, (Some(&input), output.as_ref()), input.count)
    }

    #[pyo3(signature = (sendbuf, recvbuf, root = 0, *, stream = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        sendbuf: Option<&Bound<'_, PyAny>>,
        recvbuf: &Bound<'_, PyAny>,
        root: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.root(py, root)?;
        let output = self.written("recvbuf", recvbuf)?;
        let sendbuf = sendbuf.filter(|_| self.rank == root);
        let input = sendbuf.map(|sendbuf| self.read("sendbuf", sendbuf)).transpose()?;
        self.carry_out(
            py,
            stream,
            Collective::Scatter { root },
            (input.as_ref(), Some(&output)),
            output.count,
        )
    }

    #[pyo3(signature = (sendbuf, recvbuf, *, stream = None))]
    fn alltoall(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        recvbuf: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        let share = self.share(py, "sendbuf", &input)?;
        self.carry_out(py, stream, Collective::AllToAll, (Some(&input), Some(&output)), share)
    }

    #[pyo3(signature = (sendbuf, sendcounts, recvbuf, recvcounts, *, stream = None))]
    fn alltoall_v(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        sendcounts: Vec<usize>,
        recvbuf: &Bound<'_, PyAny>,
        recvcounts: Vec<usize>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.counts(py, "sendcounts", &sendcounts)?;
        self.counts(py, "recvcounts", &recvcounts)?;
        let (input, output) = (self.read("sendbuf", sendbuf)?, self.written("recvbuf", recvbuf)?);
        let collective = Collective::AllToAllV { send: &sendcounts, receive: &recvcounts };
        self.carry_out(py, stream, collective, (Some(&input), Some(&output)), 0)
    }

    #[pyo3(signature = (sendbuf, peer, *, tag = 0, stream = None))]
    fn send(
        &self,
        py: Python<'_>,
        sendbuf: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.message(py, stream, Direction::Send, self.read("sendbuf", sendbuf)?, peer, tag)
    }

    #[pyo3(signature = (recvbuf, peer, *, tag = 0, stream = None))]
    fn recv(
        &self,
        py: Python<'_>,
        recvbuf: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.message(py, stream, Direction::Recv, self.written("recvbuf", recvbuf)?, peer, tag)
    }

    #[pyo3(signature = (*, stream = None))]
    fn barrier(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.carry_out(py, stream, Collective::Barrier, (None, None), 0)
    }

    /// Raises what has gone wrong so far, also in calls on streams that nobody has waited for.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let any = self.live(py)?;
        let checked = match &*any {
            // SAFETY: no messages: it only looks whether the communicator has failed.
            Any::Host(communicator) => unsafe { communicator.transfer_raw(&[]) },
            #[cfg(feature = "cuda")]
            Any::Cuda(communicator, _) => communicator.check(),
        };
        checked.map_err(|error| raised(py, error))
    }

    fn alloc(&self, py: Python<'_>, nbytes: usize) -> PyResult<RegisteredBuffer> {
        let buffer = self.part(py, |any| match any {
            Any::Host(communicator) => communicator.alloc::<u8>(nbytes).map(RegisteredBuffer::host),
            #[cfg(feature = "cuda")]
            Any::Cuda(communicator, _) => {
                let buffer = communicator.alloc::<u8>(nbytes)?;
                Ok(RegisteredBuffer::cuda(buffer, communicator.rank(), any.place()))
            }
        })?;
        Ok(buffer)
    }

    fn register_buffer<'py>(
        &self,
        py: Python<'py>,
        buffer: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if buffer.is_instance_of::<RegisteredBuffer>() {
            return Ok(buffer);
        }
        Err(raised(
            py,
            Error::Unavailable {
                what: "registering memory that is there already".into(),
                reason: "peers cannot map it: allocate it by Communicator.alloc, which registers it".into(),
            },
        ))
    }

    #[pyo3(signature = (color = None, key = 0))]
    fn split(&self, py: Python<'_>, color: Option<u32>, key: i64) -> PyResult<Option<Self>> {
        let made = self.part(py, |any| match any {
            Any::Host(communicator) => Ok(communicator.split(color, key)?.map(Any::Host)),
            #[cfg(feature = "cuda")]
            Any::Cuda(communicator, ordinal) => {
                Ok(communicator.split(color, key)?.map(|made| Any::Cuda(made, *ordinal)))
            }
        })?;
        Ok(made.map(Self::new))
    }

    #[getter]
    fn survivors(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        Ok(on_any!(&*self.live(py)?, communicator => communicator.survivors()))
    }

    #[pyo3(signature = (exclude_ranks = None))]
    fn shrink(&self, py: Python<'_>, exclude_ranks: Option<Vec<usize>>) -> PyResult<Self> {
        let any = self.live(py)?;
        let left = match exclude_ranks {
            Some(gone) => (0..self.world_size).filter(|rank| !gone.contains(rank)).collect(),
            None => on_any!(&*any, communicator => communicator.survivors()),
        };
        let made = self.part(py, |any| match any {
            Any::Host(communicator) => communicator.shrink(&left).map(Any::Host),
            #[cfg(feature = "cuda")]
            Any::Cuda(communicator, ordinal) => {
                communicator.shrink(&left).map(|made| Any::Cuda(made, *ordinal))
            }
        })?;
        Ok(Self::new(made))
    }

    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let any = self.live(py)?;
        py.detach(|| on_any!(&*any, communicator => communicator.abort()));
        Ok(())
    }

    /// Closes it, when calls of other threads have ended. A second time is nothing.
    fn destroy(&self, py: Python<'_>) {
        let any = self.any.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(any));
    }

    fn counters(&self, py: Python<'_>) -> PyResult<Counters> {
        let told = on_any!(&*self.live(py)?, communicator => communicator.counters());
        Ok(Counters { calls: told.calls, bytes: told.bytes, waits: told.waits, timeouts: told.timeouts })
    }

    /// What an allreduce of so many elements does, in words.
    fn plan(&self, py: Python<'_>, count: usize, dtype: &Bound<'_, PyAny>) -> PyResult<(String, usize)> {
        let dtype = values::dtype(py, dtype.str()?.to_str()?)?;
        let plan = on_any!(&*self.live(py)?, communicator => communicator.plan(count, dtype));
        Ok((plan.algorithm.to_string(), plan.piece_bytes))
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

impl Communicator {
    fn root(&self, py: Python<'_>, root: usize) -> PyResult<()> {
        let world_size = self.world_size;
        match root < world_size {
            true => Ok(()),
            false => Err(raised(py, Error::RankOutOfRange { rank: root, world_size })),
        }
    }
}
