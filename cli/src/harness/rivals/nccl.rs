//! `ncclAllReduce` on memory of GPUs, by a blocking communicator.

use std::ffi::c_int;
use std::sync::mpsc;
use std::time::Duration;

use cudarc::driver::{DevicePtr, DevicePtrMut, DeviceSlice};
use fast_allreduce::hierarchical::nccl_library::{self as library, Handle, UniqueId, Version};
use fast_allreduce::{CallKind, DType, ReduceOp};

use crate::failure::Failure;
use crate::harness::contender::{Placement, Rival};
use crate::harness::device::cuda::{Gpu, Memory};
use crate::harness::device::MeasuredRank;
use crate::harness::session::Session;
use crate::harness::work::Work;

/// The variable that lets several ranks share a GPU, from [`SHARED_GPU_VERSION`] on.
pub const SHARED_GPU: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
const SHARED_GPU_VERSION: Version = Version(2, 30, 0);
/// Longest time of ncclCommInitRank.
const LIMIT: Duration = Duration::from_secs(60);

/// A communicator of NCCL between this crate's ranks.
///
/// It is not destroyed: that would wait for the other ranks, which may have failed. The process ends after the run.
pub struct Nccl {
    library: &'static library::Nccl,
    version: Version,
    comm: Handle,
}

impl Nccl {
    /// Makes the communicator. If a rank lacks NCCL, no other waits for it. Collective.
    pub fn new(gpu: &Gpu, session: &Session) -> Result<Self, String> {
        let ready = Self::ready(gpu, session.rank());
        let (is_ready, said) = match &ready {
            Ok((_, _, id)) => (1, id.0.to_vec()),
            Err(reason) => (0, reason.clone().into_bytes()),
        };
        let all = session.exchange(&[&[is_ready], &said[..]].concat()).map_err(|error| error.to_string())?;
        let (library, version, _) = ready?;
        if let Some(rank) = all.iter().position(|theirs| theirs.first() != Some(&1)) {
            return Err(format!("rank {rank} has no NCCL"));
        }
        let id = all[0][1..].try_into().map(UniqueId).map_err(|_| "rank 0 gave no id")?;
        let comm = connect(library, gpu, session, id)?;
        let nccl = Self { library, version, comm };
        nccl.first_call(gpu).map_err(|failure| failure.to_string())?;
        Ok(nccl)
    }

    /// Returns the library, its version, and on the first rank an id.
    fn ready(gpu: &Gpu, rank: usize) -> Result<(&'static library::Nccl, Version, UniqueId), String> {
        let told = |error: fast_allreduce::Error| error.to_string();
        let library = library::Nccl::get().map_err(told)?;
        let version = library.version().map_err(told)?;
        check_version(version, gpu.ranks_per_gpu())?;
        let id = if rank == 0 { library.unique_id().map_err(told)? } else { UniqueId([0; 128]) };
        Ok((library, version, id))
    }

    /// Makes a first call: its allocations are not possible during a capture.
    fn first_call(&self, gpu: &Gpu) -> Result<(), Failure> {
        let mut memory = gpu.allocate(DType::F32, 1, false)?;
        gpu.write(&mut memory, &mut |bytes| bytes.fill(0))?;
        let work = Work::new(CallKind::AllReduce, DType::F32, ReduceOp::Sum, 0, 1, 0, 1);
        self.start_in_place(gpu, &work, &mut memory)?;
        gpu.read(&memory, &mut |_| ())
    }

    /// # Safety
    ///
    /// `input` and `output` are memory of the GPU, as long as the message, and live until the stream has made the call.
    unsafe fn call(&self, gpu: &Gpu, work: &Work, input: u64, output: u64) -> Result<(), Failure> {
        let (Some(dtype), Some(op)) = (work.dtype.nccl(), work.op.nccl()) else {
            return Err(Failure::Usage(format!("NCCL has no {} of {}", work.op, work.dtype)));
        };
        let count = work.shares[0];
        let stream = gpu.stream().cu_stream().cast();
        // SAFETY: the caller guarantees the memory, `dtype` is its type, and the communicator was made.
        let status = unsafe {
            (self.library.all_reduce)(input as _, output as _, count, dtype, op, self.comm, stream)
        };
        Ok(self.library.check("ncclAllReduce", status)?)
    }
}

fn check_version(version: Version, ranks_per_gpu: usize) -> Result<(), String> {
    if ranks_per_gpu > 1 && version < SHARED_GPU_VERSION {
        return Err(format!(
            "NCCL {version} refuses several ranks on one GPU: install {SHARED_GPU_VERSION} or newer, or give each \
             rank a GPU"
        ));
    }
    Ok(())
}

/// Makes the communicator in a separate thread, because NCCL waits for all ranks without a time limit.
fn connect(
    library: &'static library::Nccl,
    gpu: &Gpu,
    session: &Session,
    id: UniqueId,
) -> Result<Handle, String> {
    /// The communicator may be used from any thread.
    struct Up(Handle);
    // SAFETY: it is moved once, from the thread that makes it to the one that uses it.
    unsafe impl Send for Up {}

    let (rank, world_size) = (session.rank() as c_int, session.world_size() as c_int);
    let context = gpu.stream().context().clone();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let bound = context.bind_to_thread().map_err(|error| error.to_string());
        let outcome = bound.and_then(|()| {
            let mut comm = std::ptr::null_mut();
            // SAFETY: the id is the first rank's, the ranks differ, and the GPU is this thread's.
            let status = unsafe { (library.comm_init_rank)(&mut comm, world_size, id, rank) };
            library.check("ncclCommInitRank", status).map(|()| Up(comm)).map_err(|error| error.to_string())
        });
        // After the limit there is no receiver.
        let _ = sender.send(outcome);
    });
    let outcome = receiver.recv_timeout(LIMIT);
    outcome
        .map_err(|_| format!("ncclCommInitRank has not returned within {} s", LIMIT.as_secs()))?
        .map(|up| up.0)
}

impl Rival<Gpu> for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn library(&self) -> String {
        format!("NCCL {}", self.version)
    }

    fn refusal(&self, kind: CallKind, dtype: DType, op: ReduceOp) -> Option<&'static str> {
        match (dtype.nccl(), op.nccl()) {
            _ if kind != CallKind::AllReduce => Some("only its allreduce is called here"),
            (None, _) => Some("NCCL has no such type"),
            (_, None) => Some("NCCL has no such operation"),
            _ if op == ReduceOp::Avg && !dtype.is_float() => {
                Some("NCCL's averages of integers divide a sum that wraps")
            }
            _ => None,
        }
    }

    fn has(&self, kind: CallKind, _: Placement) -> bool {
        kind == CallKind::AllReduce
    }

    fn start(&self, gpu: &Gpu, work: &Work, input: &Memory, output: &mut Memory) -> Result<(), Failure> {
        let bytes = work.bytes(work.elements());
        assert!(bytes <= input.len() && bytes <= output.len());
        let (input, _input_guard) = input.device_ptr(gpu.stream());
        let (output, _output_guard) = output.device_ptr_mut(gpu.stream());
        // SAFETY: two buffers of the message's length, which are freed in the order of the stream.
        unsafe { self.call(gpu, work, input, output) }
    }

    fn start_in_place(&self, gpu: &Gpu, work: &Work, data: &mut Memory) -> Result<(), Failure> {
        assert!(work.bytes(work.elements()) <= data.len());
        let (data, _guard) = data.device_ptr_mut(gpu.stream());
        // SAFETY: a buffer that is freed in the order of the stream; NCCL allows input and output to be the same.
        unsafe { self.call(gpu, work, data, data) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_refuse_shared_gpus() {
        assert!(check_version(Version(2, 29, 7), 2).unwrap_err().contains("2.30.0"));
        assert_eq!(check_version(Version(2, 29, 7), 1), Ok(()));
        assert_eq!(check_version(Version(2, 30, 0), 2), Ok(()));
    }
}
