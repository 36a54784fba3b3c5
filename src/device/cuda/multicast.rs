//! Windows: memory of each rank's GPU in one multicast group. One address reaches the windows of all ranks at once,
//! and the switch reduces loads from it (NVLS).

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::driver::{
    api::{self, MulticastProperties},
    attribute_of_number, bind, driver, refused_by_fabric,
};
use super::memory::{allocation, Memory, Sharing};
use super::Cuda;
use crate::bootstrap::{all_exchanged, all_succeeded, exchange_descriptors, Bootstrap};
use crate::device::sealed;
use crate::error::{Error, Result};
use crate::thread;

/// Time for attempts while the system is not ready.
const LIMIT_OF_ATTEMPTS: Duration = Duration::from_secs(30);

/// This rank's window, and the multicast mapping of all windows.
pub struct CudaWindows {
    all: Arc<Memory>,
    own: Arc<Memory>,
}

impl sealed::Windows for CudaWindows {
    fn own(&self) -> u64 {
        self.own.address()
    }

    fn multicast(&self) -> u64 {
        self.all.address()
    }
}

/// Handle of a multicast group until it is mapped.
struct Group(u64);

impl Group {
    /// Creates a group without devices. A context must be current.
    fn new(properties: &MulticastProperties) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: the driver reads the properties and writes one handle.
        unsafe { api::cuMulticastCreate(&mut handle, properties) }
            .map_err(refused_by_fabric("cuMulticastCreate"))?;
        Ok(Self(handle))
    }

    /// Returns the handle for a mapping, which releases it.
    fn into_handle(self) -> u64 {
        let handle = self.0;
        std::mem::forget(self);
        handle
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: self owns the handle. An error means that the context has been destroyed.
        let _ = unsafe { api::cuMemRelease(self.0) };
    }
}

impl Cuda {
    /// Checks that this rank's GPU can be in a multicast group with the others.
    fn check_multicast(&self) -> Result<()> {
        let refuse = |reason: &str| {
            Err(Error::Unavailable { what: "NVLS (in-switch reduction)".into(), reason: reason.into() })
        };
        if self.world.several_nodes {
            return refuse("the ranks are on several machines, and the group is shared by file descriptors");
        }
        if self.world.ranks_per_device > 1 {
            return refuse("ranks share a GPU, and a multicast group can contain a GPU only once");
        }
        if self.world.world_size < 2 {
            return refuse("a multicast group needs at least two GPUs");
        }
        if attribute_of_number(&self.context, api::MULTICAST_SUPPORTED) == 0 {
            return refuse(
                "the GPU or its driver has no multicast memory, which needs NVSwitch, Hopper or newer, and \
                 driver 530 or newer",
            );
        }
        if !self.kernels.has_nvls() {
            return refuse("this build has no NVLS kernels for this GPU: they need sm_90 or newer");
        }
        Ok(())
    }

    /// Creates a group of all ranks' GPUs and binds zeroed memory of each to it. Collective.
    ///
    /// While Fabric Manager stalls, which was seen for 7 s, binding fails with `CUDA_ERROR_SYSTEM_NOT_READY`
    /// (torchcomms pull request 3130). All ranks then try again together: a rank that tried alone would wait for the
    /// others in the driver.
    pub(super) fn share_by_multicast(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaWindows> {
        const SHORTEST: Duration = Duration::from_millis(100);
        const LONGEST: Duration = Duration::from_secs(2);
        const NOT_READY: u32 = api::Code::SYSTEM_NOT_READY.0;
        all_succeeded(self.check_multicast(), bootstrap, timeout)?;
        let last = Instant::now() + timeout.min(LIMIT_OF_ATTEMPTS);
        let mut pause = SHORTEST;
        loop {
            let error = match self.try_multicast(bytes, bootstrap, timeout) {
                Ok(windows) => return Ok(windows),
                Err(error) => error,
            };
            // Whether the failure is this rank's and may pass, and whether this rank has time for another attempt.
            let may_pass = matches!(error, Error::Driver { code: NOT_READY, .. });
            let vote = [u8::from(may_pass), u8::from(Instant::now() + pause < last)];
            // If the vote fails, the ranks can no longer communicate, which the error says already.
            let Ok(votes) = bootstrap.all_gather(&vote, timeout) else { return Err(error) };
            let votes = || votes.iter().map(|vote| <[u8; 2]>::try_from(&vote[..]).unwrap_or_default());
            if votes().all(|[may_pass, _]| may_pass == 0) || votes().any(|[_, has_time]| has_time == 0) {
                return Err(error);
            }
            thread::pause(pause);
            pause = LONGEST.min(2 * pause);
        }
    }

    /// Makes one attempt. Collective: it succeeds on every rank or on none.
    ///
    /// Binding and mapping wait in the driver without a time limit until all GPUs are in the group (CUDA Driver API,
    /// `cuMulticastAddDevice`). So the ranks first make sure that all have been added.
    fn try_multicast(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<CudaWindows> {
        let prepared = self.calls.wait_for_last_call().and_then(|()| self.prepare_window(bytes, bootstrap));
        let (own, group) = all_succeeded(prepared, bootstrap, timeout)?;
        // Every rank exchanges a descriptor. Ranks without the group pass the descriptor of their window, which
        // nobody opens.
        let descriptor = match &group {
            Some(group) => allocation::export(group.0),
            None => own.descriptor(),
        };
        let descriptor = all_succeeded(descriptor, bootstrap, timeout)?;
        let descriptors = exchange_descriptors(bootstrap, descriptor.as_fd(), timeout / 2);
        let mut descriptors = all_exchanged(descriptors, bootstrap, timeout)?;
        let join = || {
            let group = match (group, descriptors[0].take()) {
                (Some(group), _) => group,
                (None, Some(descriptor)) => Group(allocation::import(&descriptor)?),
                (None, None) => {
                    let reason = "it passed no descriptor of the multicast group".into();
                    return Err(Error::Malformed { rank: 0, reason });
                }
            };
            // SAFETY: the driver validates the handle and the device.
            unsafe { api::cuMulticastAddDevice(group.0, self.context.cu_device()) }
                .map_err(refused_by_fabric("cuMulticastAddDevice"))?;
            Ok(group)
        };
        let group = all_succeeded(join(), bootstrap, timeout)?;
        let all = all_succeeded(own.bind_to_group(group.into_handle()), bootstrap, timeout)?;
        // A peer's kernel may load from this rank's window after this rank's kernel has ended.
        self.exports.keep(Arc::clone(&own));
        self.exports.set_exchanged();
        Ok(CudaWindows { all, own })
    }

    /// Allocates this rank's window and, on rank 0, creates the group.
    fn prepare_window(
        &self,
        bytes: usize,
        bootstrap: &dyn Bootstrap,
    ) -> Result<(Arc<Memory>, Option<Group>)> {
        bind(&self.context)?;
        let mut properties = MulticastProperties {
            devices: bootstrap.world_size() as u32,
            bytes,
            handle_types: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0.into(),
            flags: 0,
        };
        let mut granularity = 0;
        // SAFETY: the driver reads the properties and writes one size.
        unsafe {
            api::cuMulticastGetGranularity(&mut granularity, &properties, api::MULTICAST_GRANULARITY_MINIMUM)
        }
        .map_err(driver("cuMulticastGetGranularity"))?;
        let bytes = bytes.next_multiple_of(granularity.max(1));
        let own = Memory::allocate(&self.context, &self.copies, bytes, Sharing::Descriptor)?;
        // The whole window is bound, which may be larger. Granularities are powers of two.
        properties.bytes = own.bytes();
        let group = (bootstrap.rank() == 0).then(|| Group::new(&properties)).transpose()?;
        Ok((own, group))
    }
}
