//! Device memory that other ranks can map: allocation, export and import.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use cudarc::driver::sys::{self, CUmemAllocationProp};
use cudarc::driver::CudaContext;

use super::copies::Copies;
use super::handle::{Handle, Payload, Sharing};
use crate::descriptor::moved;
use crate::device::cuda::driver::api::{self, Code};
use crate::device::cuda::driver::{self, driver};
use crate::device::host::SharedMemory;
use crate::device::sealed::Shared as _;
use crate::error::{Error, Result};

/// Allocation of this process, or mapping of another process's allocation. Released on drop.
#[derive(Debug)]
pub(crate) struct Memory {
    context: Arc<CudaContext>,
    address: u64,
    bytes: usize,
    backing: Backing,
    /// ID of the allocation in this process.
    export: u64,
    /// ID of the context. A reset of the context frees the memory and changes the ID. `None` if the driver did not
    /// say.
    context_id: Option<u64>,
    /// Mapping of the multicast group that this memory is bound to.
    group: OnceLock<Arc<Memory>>,
}

/// How the memory was obtained, and so how it is released.
#[derive(Debug)]
enum Backing {
    /// From `cuMemAlloc`.
    Allocated,
    /// Reserved addresses, where a VMM allocation that was created here or imported may be mapped.
    Reserved { physical: Mutex<Physical>, is_imported: bool },
    /// From `cuIpcOpenMemHandle`.
    Opened,
    /// Registered by `cuMemHostRegister`: host memory that the ranks share.
    Registered { host: u64, _memory: Arc<SharedMemory> },
    /// The caller's allocation, which is never released here; `address` is its base.
    Foreign,
}

/// What is at reserved addresses.
#[derive(Debug, Default)]
struct Physical {
    /// The allocation, until it is released.
    handle: Option<u64>,
    is_mapped: bool,
    /// Ordinals of the devices that have access.
    devices: Vec<usize>,
}

impl Physical {
    /// Unmaps the allocation and releases its handle, as far as that has not been done.
    fn give_back(&mut self, address: u64, bytes: usize) -> Result<()> {
        if self.is_mapped {
            // SAFETY: the range is mapped, and the caller has waited for this rank's kernels that use it. Other
            // mappings of the allocation stay as they are.
            unsafe { api::cuMemUnmap(address, bytes) }.map_err(driver("cuMemUnmap"))?;
            self.is_mapped = false;
        }
        if let Some(handle) = self.handle {
            // SAFETY: the handle is owned, and not used again.
            unsafe { api::cuMemRelease(handle) }.map_err(driver("cuMemRelease"))?;
            self.handle = None;
        }
        Ok(())
    }
}

/// Memory shared by IPC is a multiple of this size. The driver may place smaller allocations in a block with others,
/// and an IPC handle opens at the base of the block (CUDA C++ Programming Guide, Interprocess Communication).
const IPC_BYTES: usize = 2 << 20;

/// IPC handles that are open in this process: CUDA opens a handle once per process, so ranks and buffers share the
/// mapping.
static OPENED: Mutex<Vec<([u8; 64], Weak<Memory>)>> = Mutex::new(Vec::new());

/// Allocations that other ranks of this process may use, by `export`.
static EXPORTS: Mutex<Option<HashMap<u64, Weak<Memory>>>> = Mutex::new(None);

fn exports() -> MutexGuard<'static, Option<HashMap<u64, Weak<Memory>>>> {
    EXPORTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// Allocates zeroed memory that can be shared by this mechanism.
    ///
    /// Between threads, the memory is VMM memory where the device has it. `cuMemFree` of other memory may wait for
    /// all work of the device and of its peers (PyTorch issue 50925), among it a peer's kernel that waits for this
    /// rank. Unmapping does not (c10/cuda/CUDACachingAllocator.cpp of PyTorch synchronises itself for that reason).
    pub fn allocate(
        context: &Arc<CudaContext>,
        copies: &Copies,
        bytes: usize,
        sharing: Sharing,
    ) -> Result<Arc<Self>> {
        driver::bind(context)?;
        let failed = |error: Error| match error {
            Error::Unavailable { .. } => error,
            error => Error::Allocation { bytes, reason: error.to_string() },
        };
        let memory = match sharing {
            Sharing::Pointers if has_vmm(context) => Self::create(context, bytes, sharing).map_err(failed)?,
            Sharing::Pointers | Sharing::Ipc => {
                let bytes = match sharing {
                    Sharing::Ipc => bytes.next_multiple_of(IPC_BYTES),
                    _ => bytes,
                };
                let mut address = 0;
                // SAFETY: the context is current; the driver writes one address.
                unsafe { api::cuMemAlloc_v2(&mut address, bytes) }
                    .map_err(driver("cuMemAlloc"))
                    .map_err(failed)?;
                Self::new(context, address, bytes, Backing::Allocated)
            }
            Sharing::Descriptor => Self::create(context, bytes, sharing).map_err(failed)?,
            Sharing::Fabric => Self::create(context, bytes, sharing).map_err(no_fabric).map_err(failed)?,
            Sharing::Host => return Err(not_of_gpu()),
        };
        // SAFETY: `memory` is mapped, of that size, and not shared yet.
        unsafe { copies.zero(memory.address, memory.bytes) }?;
        let memory = Arc::new(memory);
        exports().get_or_insert_with(HashMap::new).insert(memory.export, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// Registers `rank`'s part of host memory that the ranks share, for the kernels of all contexts.
    pub fn register(
        context: &Arc<CudaContext>,
        memory: &Arc<SharedMemory>,
        rank: usize,
        bytes: usize,
    ) -> Result<Arc<Self>> {
        driver::bind(context)?;
        let host = memory.address(rank);
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: `bytes` bytes at `host` are mapped until the registration ends, as `_memory` keeps them.
        unsafe { api::cuMemHostRegister_v2(host as *mut _, bytes, flags) }
            .map_err(driver("cuMemHostRegister"))?;
        let backing = Backing::Registered { host, _memory: Arc::clone(memory) };
        let mut registered = Self::new(context, 0, bytes, backing);
        // SAFETY: registered above; the driver writes the device address of the same memory.
        unsafe { api::cuMemHostGetDevicePointer_v2(&mut registered.address, host as *mut _, 0) }
            .map_err(driver("cuMemHostGetDevicePointer"))?;
        Ok(Arc::new(registered))
    }

    /// Returns the allocation that contains a caller's buffer.
    pub fn foreign(context: &Arc<CudaContext>, address: u64) -> Result<Arc<Self>> {
        driver::bind(context)?;
        let (base, bytes) = driver::allocation_of(address)?;
        let memory = Arc::new(Self::new(context, base, bytes, Backing::Foreign));
        exports().get_or_insert_with(HashMap::new).insert(memory.export, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// Wraps memory of the context, which must be current.
    fn new(context: &Arc<CudaContext>, address: u64, bytes: usize, backing: Backing) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let export = NEXT.fetch_add(1, Ordering::Relaxed);
        let context_id = driver::context_id().ok();
        let group = OnceLock::new();
        Self { context: Arc::clone(context), address, bytes, backing, export, context_id, group }
    }

    /// Creates a VMM allocation and maps it for this device.
    fn create(context: &Arc<CudaContext>, bytes: usize, sharing: Sharing) -> Result<Self> {
        let properties = properties(context, sharing);
        let mut granularity = 0;
        // SAFETY: the driver reads the properties and writes one size.
        unsafe {
            api::cuMemGetAllocationGranularity(
                &mut granularity,
                &properties,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        }
        .map_err(driver("cuMemGetAllocationGranularity"))?;
        let bytes = bytes.next_multiple_of(granularity.max(1));
        let mut handle = 0;
        // SAFETY: the driver reads the properties and writes one handle.
        unsafe { api::cuMemCreate(&mut handle, bytes, &properties, 0) }.map_err(driver("cuMemCreate"))?;
        Self::map(context, handle, bytes, false)
    }

    /// Maps a VMM handle and takes ownership of it, also on errors.
    fn map(context: &Arc<CudaContext>, handle: u64, bytes: usize, is_imported: bool) -> Result<Self> {
        Self::map_unless_failed(context, handle, bytes, is_imported).inspect_err(|_| {
            // SAFETY: the handle is owned and not mapped.
            let _ = unsafe { api::cuMemRelease(handle) };
        })
    }

    /// Maps a VMM handle and takes ownership of it, except on errors.
    fn map_unless_failed(
        context: &Arc<CudaContext>,
        handle: u64,
        bytes: usize,
        is_imported: bool,
    ) -> Result<Self> {
        let mut address = 0;
        // SAFETY: reserves a range that the driver chooses.
        unsafe { api::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }
            .map_err(driver("cuMemAddressReserve"))?;
        let mut memory = Self::new(context, address, bytes, Backing::Foreign);
        // SAFETY: the range was reserved, and the handle has `bytes` bytes.
        let mapped = unsafe { api::cuMemMap(address, bytes, 0, handle, 0) }.map_err(driver("cuMemMap"));
        let allowed = mapped.and_then(|()| {
            memory.set_access(&[context.ordinal()]).inspect_err(|_| {
                // SAFETY: mapped above, and not used yet.
                let _ = unsafe { api::cuMemUnmap(address, bytes) };
            })
        });
        if let Err(error) = allowed {
            // SAFETY: the range was reserved above and is not mapped.
            let _ = unsafe { api::cuMemAddressFree(address, bytes) };
            return Err(error);
        }
        let physical = Physical { handle: Some(handle), is_mapped: true, devices: vec![context.ordinal()] };
        memory.backing = Backing::Reserved { physical: Mutex::new(physical), is_imported };
        Ok(memory)
    }

    /// Maps the allocation of `fresh` at the addresses of this memory, in place of the one that is mapped here, and
    /// takes ownership of its handle; `fresh` keeps its own addresses alone. Nobody uses either memory meanwhile, in
    /// this process. After an error nothing is mapped here, or one of the two allocations.
    ///
    /// What was written at the other addresses is seen here by the kernels of later launches, as with any two mappings
    /// of one allocation.
    pub fn replace(&self, fresh: &Self) -> Result<()> {
        let (Some(mut own), Some(mut new)) = (self.physical(), fresh.physical()) else {
            return Err(not_virtual());
        };
        let _relaxed = driver::Relaxed::enter();
        driver::bind(&self.context)?;
        own.give_back(self.address, self.bytes)?;
        let handle = new.handle.ok_or_else(not_virtual)?;
        // SAFETY: the range is reserved and nothing is mapped there; the handle has as many bytes, as the callers have
        // compared.
        unsafe { api::cuMemMap(self.address, self.bytes, 0, handle, 0) }.map_err(driver("cuMemMap"))?;
        *own = Physical { handle: new.handle.take(), is_mapped: true, devices: new.devices.clone() };
        self.set_access(&own.devices)?;
        new.give_back(fresh.address, fresh.bytes)
    }

    /// Unmaps the memory and releases it; its addresses stay reserved. Does nothing if that has been done.
    pub fn give_back(&self) -> Result<()> {
        let Some(mut physical) = self.physical() else { return Err(not_virtual()) };
        let _relaxed = driver::Relaxed::enter();
        driver::bind(&self.context)?;
        physical.give_back(self.address, self.bytes)
    }

    fn physical(&self) -> Option<MutexGuard<'_, Physical>> {
        match &self.backing {
            Backing::Reserved { physical, .. } => {
                Some(physical.lock().unwrap_or_else(PoisonError::into_inner))
            }
            _ => None,
        }
    }

    /// Returns whether this is virtual memory, whose addresses can outlive what is mapped there.
    pub fn is_virtual(&self) -> bool {
        matches!(self.backing, Backing::Reserved { .. })
    }

    /// Returns whether this is a mapping of virtual memory of another process.
    pub fn is_imported(&self) -> bool {
        matches!(self.backing, Backing::Reserved { is_imported: true, .. })
    }

    /// Returns the ID of the allocation in its process.
    pub fn export(&self) -> u64 {
        self.export
    }

    /// Binds this VMM memory to a multicast group that contains all its GPUs, and maps the group. The memory is unbound
    /// before it is released. Takes ownership of the group's handle, also on errors.
    pub fn bind_to_group(&self, group: u64) -> Result<Arc<Self>> {
        let own = self.allocation().inspect_err(|_| {
            // SAFETY: the handle is owned and not mapped.
            let _ = unsafe { api::cuMemRelease(group) };
        })?;
        // SAFETY: both handles are live, and the memory has `bytes` bytes. It is unbound before it is unmapped.
        let bound = unsafe { api::cuMulticastBindMem(group, 0, own, 0, self.bytes, 0) }
            .map_err(driver::refused_by_fabric("cuMulticastBindMem"));
        let mapped = bound.and_then(|()| {
            Self::map_unless_failed(&self.context, group, self.bytes, false).inspect_err(|_| {
                let _ = self.unbind(group);
            })
        });
        let mapped = Arc::new(mapped.inspect_err(|_| {
            // SAFETY: the handle is owned and not mapped.
            let _ = unsafe { api::cuMemRelease(group) };
        })?);
        Ok(Arc::clone(self.group.get_or_init(|| mapped)))
    }

    /// Unbinds the memory from a multicast group. No kernel of any rank uses the group any more.
    fn unbind(&self, group: u64) -> Result<()> {
        // SAFETY: the group's handle is live, and this device has bound these bytes to it.
        unsafe { api::cuMulticastUnbind(group, self.context.cu_device(), 0, self.bytes) }
            .map_err(driver("cuMulticastUnbind"))
    }

    /// Grants the device of a context access to the mapping, in addition to devices that have it.
    fn allow(&self, context: &CudaContext) -> Result<()> {
        let Some(mut physical) = self.physical() else { return Err(not_virtual()) };
        let ordinal = context.ordinal();
        if !physical.devices.contains(&ordinal) {
            self.set_access(&[ordinal])?;
            physical.devices.push(ordinal);
        }
        Ok(())
    }

    /// Grants devices access to the mapping.
    fn set_access(&self, devices: &[usize]) -> Result<()> {
        let access = |&ordinal: &usize| {
            // SAFETY: all zeros is a valid value of the struct; location and flags are set below.
            let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            set_location(&raw mut access.location, ordinal);
            access
        };
        let access: Vec<_> = devices.iter().map(access).collect();
        // SAFETY: the range is mapped; the driver reads as many descriptors.
        unsafe { api::cuMemSetAccess(self.address, self.bytes, access.as_ptr(), access.len()) }
            .map_err(driver("cuMemSetAccess"))
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size of the allocation, which may be larger than what was asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_of(&self, context: &CudaContext) -> bool {
        *self.context == *context
    }

    pub fn context_id(&self) -> Option<u64> {
        self.context_id
    }

    /// Returns the handle by which a peer maps the memory; the shared bytes begin at `offset`.
    pub fn handle(&self, process: [u8; 16], offset: u64, sharing: Sharing) -> Result<Handle> {
        let payload = match sharing {
            Sharing::Pointers => Payload::Pointers,
            Sharing::Descriptor => Payload::Descriptor,
            Sharing::Host => return Err(not_of_gpu()),
            Sharing::Fabric => {
                let mut handle = [0; 64];
                // SAFETY: the driver validates the handle, and writes 64 bytes for this handle type.
                unsafe {
                    let to = handle.as_mut_ptr().cast();
                    api::cuMemExportToShareableHandle(to, self.allocation()?, FABRIC, 0)
                }
                .map_err(driver("cuMemExportToShareableHandle of a fabric handle"))
                .map_err(no_fabric)?;
                Payload::Fabric(handle)
            }
            Sharing::Ipc => {
                let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
                // SAFETY: `address` is the base of an allocation of this process; the driver writes one handle.
                unsafe { api::cuIpcGetMemHandle(&mut handle, self.address) }
                    .map_err(driver("cuIpcGetMemHandle (stream-ordered and VMM memory has none)"))?;
                Payload::Ipc(handle.reserved.map(|byte| byte as u8))
            }
        };
        Ok(Handle { process, export: self.export, bytes: self.bytes as u64, offset, payload })
    }

    /// Returns the VMM handle, which this value continues to own.
    pub fn allocation(&self) -> Result<u64> {
        self.physical().and_then(|physical| physical.handle).ok_or_else(not_virtual)
    }

    /// Exports a VMM allocation as a file descriptor, for another process to import.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        export(self.allocation()?)
    }

    /// Maps a peer's allocation for this context.
    pub fn import(
        context: &Arc<CudaContext>,
        rank: usize,
        handle: &Handle,
        own_process: [u8; 16],
        descriptor: Option<&OwnedFd>,
    ) -> Result<Arc<Self>> {
        if handle.process == own_process {
            // IPC handles cannot be opened in the process that created them, and need not be.
            let found = exports().as_ref().and_then(|exports| exports.get(&handle.export)?.upgrade());
            let memory = found.ok_or_else(|| Error::PeerLost {
                rank,
                reason: "the memory that it shares within this process is gone".into(),
            })?;
            match memory.backing {
                Backing::Reserved { .. } => memory.allow(context)?,
                _ => driver::enable_peer_access(context, &memory.context)?,
            }
            return Ok(memory);
        }
        driver::bind(context)?;
        let bytes = usize::try_from(handle.bytes)
            .map_err(|_| Error::Malformed { rank, reason: "a memory handle of too many bytes".into() })?;
        match (&handle.payload, descriptor) {
            (Payload::Ipc(reserved), _) => {
                let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
                opened.retain(|(_, memory)| memory.strong_count() > 0);
                let open = opened.iter().find(|(handle, memory)| {
                    handle == reserved && memory.upgrade().is_some_and(|memory| memory.context == *context)
                });
                if let Some(memory) = open.and_then(|(_, memory)| memory.upgrade()) {
                    return Ok(memory);
                }
                let ipc = sys::CUipcMemHandle { reserved: reserved.map(|byte| byte as _) };
                let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
                let mut address = 0;
                // SAFETY: the driver validates the handle and writes one address.
                unsafe { api::cuIpcOpenMemHandle_v2(&mut address, ipc, flags) }
                    .map_err(driver("cuIpcOpenMemHandle"))?;
                let memory = Arc::new(Self::new(context, address, bytes, Backing::Opened));
                opened.push((*reserved, Arc::downgrade(&memory)));
                Ok(memory)
            }
            (Payload::Descriptor, Some(descriptor)) => {
                Self::map(context, import(descriptor)?, bytes, true).map(Arc::new)
            }
            (Payload::Fabric(fabric), _) => {
                let (mut fabric, mut imported) = (*fabric, 0);
                // SAFETY: the driver reads 64 bytes for this handle type, and writes one handle.
                unsafe {
                    let from = fabric.as_mut_ptr().cast();
                    api::cuMemImportFromShareableHandle(&mut imported, from, FABRIC)
                }
                .map_err(driver("cuMemImportFromShareableHandle of a fabric handle"))
                .map_err(no_fabric)?;
                Self::map(context, imported, bytes, true).map(Arc::new)
            }
            (Payload::Descriptor | Payload::Pointers, _) => Err(Error::Malformed {
                rank,
                reason: "its memory handle is of another process, but comes without a way to open it".into(),
            }),
        }
    }
}

impl Memory {
    /// Releases the memory and returns whether that succeeded, which drop cannot.
    pub fn release(mut self) -> Result<()> {
        self.undo()
    }

    /// Releases the memory on the first call.
    fn undo(&mut self) -> Result<()> {
        if let Some(exports) = exports().as_mut() {
            exports.remove(&self.export);
        }
        if matches!(self.backing, Backing::Foreign) {
            return Ok(());
        }
        let _relaxed = driver::Relaxed::enter();
        driver::bind_to_free(&self.context)?;
        // After a reset of the context, the address may belong to another allocation.
        if let (Some(id), Ok(now)) = (self.context_id, driver::context_id()) {
            if now != id {
                return Ok(());
            }
        }
        // Before either is unmapped: the switch must not reach memory that the driver may use again (NCCL, nvls.cc).
        let unbound = self.group.take().map_or(Ok(()), |group| self.unbind(group.allocation()?));
        let backing = std::mem::replace(&mut self.backing, Backing::Foreign);
        // SAFETY: each arm releases the memory as it was obtained, once. This rank's kernels that use it have ended:
        // the device and the registration waited for them first. A peer that still reads it holds a reference or, in
        // another process, a mapping of its own.
        unsafe {
            match backing {
                Backing::Allocated => api::cuMemFree_v2(self.address).map_err(driver("cuMemFree")),
                Backing::Opened => {
                    api::cuIpcCloseMemHandle(self.address).map_err(driver("cuIpcCloseMemHandle"))
                }
                Backing::Registered { host, _memory } => {
                    api::cuMemHostUnregister(host as *mut _).map_err(driver("cuMemHostUnregister"))
                }
                Backing::Reserved { physical, .. } => {
                    let physical = physical.into_inner().unwrap_or_else(PoisonError::into_inner);
                    let unmapped = match physical.is_mapped {
                        true => api::cuMemUnmap(self.address, self.bytes),
                        false => Ok(()),
                    };
                    let released = physical.handle.map_or(Ok(()), |handle| api::cuMemRelease(handle));
                    let freed = api::cuMemAddressFree(self.address, self.bytes);
                    unbound?;
                    unmapped.map_err(driver("cuMemUnmap"))?;
                    released.map_err(driver("cuMemRelease"))?;
                    freed.map_err(driver("cuMemAddressFree"))
                }
                Backing::Foreign => Ok(()),
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // An error means that the context has been destroyed, and its memory with it.
        let _ = self.undo();
    }
}

/// Exports a VMM handle, of memory or of a multicast group, as a file descriptor.
pub(crate) fn export(handle: u64) -> Result<OwnedFd> {
    let mut descriptor: RawFd = -1;
    // SAFETY: the driver validates the handle, and writes one int for this handle type.
    unsafe {
        api::cuMemExportToShareableHandle(
            (&raw mut descriptor).cast(),
            handle,
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            0,
        )
    }
    .map_err(driver("cuMemExportToShareableHandle"))?;
    // SAFETY: the driver created the descriptor for this call.
    let exported = unsafe { OwnedFd::from_raw_fd(descriptor) };
    moved(exported).map_err(Error::system("fcntl(F_DUPFD_CLOEXEC)"))
}

/// Imports a file descriptor as a VMM handle, which the caller releases. A context must be current.
pub(crate) fn import(descriptor: &OwnedFd) -> Result<u64> {
    let mut imported = 0;
    // SAFETY: for this handle type the driver takes the descriptor's number as a pointer-sized value, and does not
    // keep the descriptor.
    unsafe {
        api::cuMemImportFromShareableHandle(
            &mut imported,
            descriptor.as_raw_fd() as usize as *mut _,
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        )
    }
    .map_err(driver("cuMemImportFromShareableHandle"))?;
    Ok(imported)
}

/// `CU_MEM_HANDLE_TYPE_FABRIC`, which the bindings of CUDA 12.0 lack.
const FABRIC: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType(8);

/// The error of a request for GPU memory where the ranks share host memory.
pub(crate) fn not_of_gpu() -> Error {
    Error::Unavailable {
        what: "GPU memory that other ranks reach".into(),
        reason: "the ranks share host memory (sharing=host), since their GPUs cannot access each other's: make calls \
                 without registering, on any memory"
            .into(),
    }
}

/// The error of memory that has no VMM handle.
fn not_virtual() -> Error {
    Error::Unavailable {
        what: "a handle of device memory".into(),
        reason: "it was not allocated through virtual memory management, or has been given back".into(),
    }
}

/// Adds to an error of a fabric handle what such handles need, if their lack may be its cause.
fn no_fabric(error: Error) -> Error {
    const LACKING: [Code; 3] = [Code::NOT_SUPPORTED, Code::NOT_PERMITTED, Code::INVALID_VALUE];
    if !matches!(error, Error::Driver { code, .. } if LACKING.contains(&Code(code))) {
        return error;
    }
    Error::Unavailable {
        what: "GPU memory that other machines can open".into(),
        reason: format!(
            "{error}; fabric handles need GPUs of one NVLink domain over several machines, such as GB200 NVL72, a \
             driver for CUDA 12.4 or newer, the service nvidia-imex on each machine, and a channel that this process \
             may open, /dev/nvidia-caps-imex-channels/channel0; without them, build a communicator for each machine \
             and join them by Hierarchical"
        ),
    }
}

/// Returns whether the device has virtual memory management.
fn has_vmm(context: &CudaContext) -> bool {
    use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
    driver::attribute(context, CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED) != 0
}

/// Returns the properties of device memory that can be exported for this mechanism.
fn properties(context: &CudaContext, sharing: Sharing) -> CUmemAllocationProp {
    // SAFETY: all zeros is a valid value of the struct: no flags.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = match sharing {
        Sharing::Descriptor => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        Sharing::Fabric => FABRIC,
        Sharing::Pointers | Sharing::Ipc | Sharing::Host => {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        }
    };
    set_location(&raw mut properties.location, context.ordinal());
    properties
}

/// Sets a location to a device.
fn set_location(location: *mut sys::CUmemLocation, ordinal: usize) {
    let kind = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32;
    // SAFETY: in every version of the driver's API the struct begins with the type and the device's ordinal, 4 bytes
    // each; from CUDA 13.2 on, cudarc declares the second as a union.
    unsafe { location.cast::<[i32; 2]>().write([kind, ordinal as i32]) };
}
