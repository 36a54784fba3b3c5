//! An adapter that implements numr's `Communicator` and `StreamSyncOps` on any communicator of fast-allreduce.

use fast_allreduce as far;
use fast_allreduce::{Collective, StreamCommunicator};
use numr::dtype::DType;
use numr::error::{Error, Result};
use numr::runtime::{Communicator, ReduceOp, StreamSyncOps};

/// A communicator of fast-allreduce with numr's traits.
pub struct FastAllreduce(pub StreamCommunicator);

fn error(error: far::Error) -> Error {
    Error::Backend(error.to_string())
}

/// Converts a type that can be reduced.
fn reducible(dtype: DType, op: &'static str) -> Result<far::DType> {
    match dtype {
        DType::F16 => Ok(far::DType::F16),
        DType::BF16 => Ok(far::DType::Bf16),
        DType::F32 => Ok(far::DType::F32),
        DType::F64 => Ok(far::DType::F64),
        DType::I8 => Ok(far::DType::I8),
        DType::U8 => Ok(far::DType::U8),
        DType::I32 => Ok(far::DType::I32),
        DType::U32 => Ok(far::DType::U32),
        DType::I64 => Ok(far::DType::I64),
        DType::U64 => Ok(far::DType::U64),
        dtype => Err(Error::UnsupportedDType { dtype, op }),
    }
}

/// Converts a type and a number of elements to ones that can be moved: bytes if fast-allreduce does not have the type.
fn movable(dtype: DType, count: usize) -> (far::DType, usize) {
    match reducible(dtype, "") {
        Ok(dtype) => (dtype, count),
        Err(_) => (far::DType::U8, count.saturating_mul(dtype.size_in_bytes())),
    }
}

fn operation(op: ReduceOp) -> far::ReduceOp {
    match op {
        ReduceOp::Sum => far::ReduceOp::Sum,
        ReduceOp::Prod => far::ReduceOp::Prod,
        ReduceOp::Min => far::ReduceOp::Min,
        ReduceOp::Max => far::ReduceOp::Max,
    }
}

// SAFETY of the blocks below: numr's contract for the caller includes that of StreamCommunicator: the pointers are
// valid, on the communicator's device, until sync() or barrier() returns.
impl Communicator for FastAllreduce {
    fn world_size(&self) -> usize {
        self.0.communicator().world_size()
    }

    fn rank(&self) -> usize {
        self.0.communicator().rank()
    }

    unsafe fn all_reduce(&self, ptr: u64, count: usize, dtype: DType, op: ReduceOp) -> Result<()> {
        let dtype = reducible(dtype, "all_reduce")?;
        // SAFETY: as above.
        unsafe { self.0.collective(Collective::AllReduce(operation(op)), [ptr; 2], count, dtype) }
            .map_err(error)
    }

    unsafe fn broadcast(&self, ptr: u64, count: usize, dtype: DType, root: usize) -> Result<()> {
        let (dtype, count) = movable(dtype, count);
        // SAFETY: as above.
        unsafe { self.0.collective(Collective::Broadcast { root }, [ptr; 2], count, dtype) }.map_err(error)
    }

    unsafe fn all_gather(&self, send_ptr: u64, recv_ptr: u64, count: usize, dtype: DType) -> Result<()> {
        let (dtype, count) = movable(dtype, count);
        // SAFETY: as above.
        unsafe { self.0.collective(Collective::AllGather, [send_ptr, recv_ptr], count, dtype) }.map_err(error)
    }

    unsafe fn reduce_scatter(
        &self,
        send_ptr: u64,
        recv_ptr: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let (dtype, collective) =
            (reducible(dtype, "reduce_scatter")?, Collective::ReduceScatter(operation(op)));
        // SAFETY: as above.
        unsafe { self.0.collective(collective, [send_ptr, recv_ptr], count, dtype) }.map_err(error)
    }

    unsafe fn send(&self, ptr: u64, count: usize, dtype: DType, dest: usize, tag: u32) -> Result<()> {
        let (dtype, count) = movable(dtype, count);
        // SAFETY: as above.
        unsafe { self.0.send(ptr, count, dtype, dest, tag) }.map_err(error)
    }

    unsafe fn recv(&self, ptr: u64, count: usize, dtype: DType, src: usize, tag: u32) -> Result<()> {
        let (dtype, count) = movable(dtype, count);
        // SAFETY: as above.
        unsafe { self.0.recv(ptr, count, dtype, src, tag) }.map_err(error)
    }

    fn sync(&self) -> Result<()> {
        self.0.sync().map_err(error)
    }

    fn barrier(&self) -> Result<()> {
        self.0.barrier().map_err(error)
    }

    fn split(&self, color: u32, key: u32) -> Result<Option<Box<dyn Communicator>>> {
        let part = self.0.split(Some(color), key.into()).map_err(error)?;
        Ok(part.map(|part| Box::new(Self(part)) as Box<dyn Communicator>))
    }

    fn as_stream_sync(&self) -> Option<&dyn StreamSyncOps> {
        Some(self)
    }
}

impl StreamSyncOps for FastAllreduce {
    fn create_event(&self) -> Result<u64> {
        self.0.communicator().create_event().map_err(error)
    }

    fn destroy_event(&self, event: u64) -> Result<()> {
        self.0.communicator().destroy_event(event).map_err(error)
    }

    fn record_on_comm_stream(&self, event: u64) -> Result<()> {
        self.0.record(event).map_err(error)
    }

    fn record_on_stream(&self, event: u64, stream_handle: u64) -> Result<()> {
        // SAFETY: numr passes live streams of its runtime's context, in which the communicator was built.
        unsafe { self.0.communicator().record_event(event, stream_handle) }.map_err(error)
    }

    fn comm_stream_wait_event(&self, event: u64) -> Result<()> {
        self.0.wait(event).map_err(error)
    }

    fn stream_wait_event(&self, stream_handle: u64, event: u64) -> Result<()> {
        // SAFETY: as in record_on_stream.
        unsafe { self.0.communicator().wait_event(stream_handle, event) }.map_err(error)
    }

    fn sync_comm_stream(&self) -> Result<()> {
        self.0.sync().map_err(error)
    }
}
