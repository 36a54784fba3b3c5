//! The driver functions that this crate calls directly, one row each, loaded at run time.
//!
//! Result codes are received as numbers. cudarc's functions of the same names return a Rust enum; with those, a code
//! that only a newer driver has would be undefined behaviour. Calls that cudarc makes itself, for its contexts,
//! streams, events and slices, are not affected by this module.
//!
//! Public for the command-line program of this repository; not part of the API.
#![allow(non_snake_case)]

use std::borrow::Cow;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void, CStr, CString};
use std::fmt;
use std::ptr::NonNull;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_P2PAttribute, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUgraph, CUgraphNode, CUhostFn, CUipcMemHandle, CUlaunchConfig, CUlimit,
    CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmodule, CUpointer_attribute, CUresult, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus, CUuserObject, CUuuid,
};
use cudarc::driver::DriverError;

/// Result code other than success; possibly one that the bindings lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

impl Code {
    /// An argument is invalid.
    pub const INVALID_VALUE: Self = Self(CUresult::CUDA_ERROR_INVALID_VALUE as u32);
    /// The context is not current, or has been destroyed.
    pub const INVALID_CONTEXT: Self = Self(CUresult::CUDA_ERROR_INVALID_CONTEXT as u32);
    /// The handle is invalid, or belongs to another context.
    pub const INVALID_HANDLE: Self = Self(CUresult::CUDA_ERROR_INVALID_HANDLE as u32);
    /// A symbol was not found; also used for a function that the driver lacks.
    pub const NOT_FOUND: Self = Self(CUresult::CUDA_ERROR_NOT_FOUND as u32);
    /// A module has no code for the device.
    pub const NO_BINARY_FOR_GPU: Self = Self(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as u32);
    /// A module's PTX is newer than the driver.
    pub const UNSUPPORTED_PTX_VERSION: Self = Self(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as u32);
    /// The state of the system forbids the call.
    pub const ILLEGAL_STATE: Self = Self(CUresult::CUDA_ERROR_ILLEGAL_STATE as u32);
    /// The system is not ready for the call yet.
    pub const SYSTEM_NOT_READY: Self = Self(CUresult::CUDA_ERROR_SYSTEM_NOT_READY as u32);
    /// The call is not permitted.
    pub const NOT_PERMITTED: Self = Self(CUresult::CUDA_ERROR_NOT_PERMITTED as u32);
    /// The call is not supported.
    pub const NOT_SUPPORTED: Self = Self(CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
    /// The work has not ended yet.
    pub const NOT_READY: Self = Self(CUresult::CUDA_ERROR_NOT_READY as u32);
    /// Peer access was already enabled.
    pub const PEER_ACCESS_ALREADY_ENABLED: Self =
        Self(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as u32);

    /// Returns whether the code says that a capture does not permit the call.
    pub fn is_capture_error(self) -> bool {
        (CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as u32
            ..=CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as u32)
            .contains(&self.0)
    }

    fn check(code: u32) -> Result<(), Self> {
        match code {
            0 => Ok(()),
            code => Err(Self(code)),
        }
    }

    /// Returns the driver's name or text of the code.
    fn text(
        self,
        query: unsafe fn(u32, *mut *const c_char) -> Result<(), Self>,
    ) -> Option<Cow<'static, str>> {
        let mut text = std::ptr::null();
        // SAFETY: the driver takes any number, and writes one address.
        unsafe { query(self.0, &mut text) }.ok()?;
        // SAFETY: a non-null address is that of a constant string of the driver, which is never unloaded.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
    }
}

impl From<DriverError> for Code {
    fn from(error: DriverError) -> Self {
        Self(error.0 as u32)
    }
}

/// Writes the driver's name and text of the code.
impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text(cuGetErrorName) {
            Some(name) => write!(f, "{name}: {}", self.text(cuGetErrorString).unwrap_or_default()),
            None => write!(f, "result code {}, for which the driver has no name", self.0),
        }
    }
}

/// Returns whether the driver library is installed.
pub(super) fn is_present() -> bool {
    library().is_some()
}

/// Returns a handle of the driver library. cudarc loads the same library, or is linked to it if another crate
/// requests that (candle does); only in the first case does cudarc have a handle itself.
fn library() -> Option<NonNull<c_void>> {
    /// The handle as an address; the library stays loaded.
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let open = || {
        let names = [c"libcuda.so.1", c"libcuda.so"].into_iter();
        // SAFETY: the names are zero-terminated, and the initialisers that run are the driver's own.
        let mut opened = names.map(|name| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) } as usize);
        opened.find(|handle| *handle != 0).unwrap_or(0)
    };
    NonNull::new(*LIBRARY.get_or_init(open) as *mut c_void)
}

/// Looks up a function of the driver library.
///
/// # Safety
///
/// `F` is a function pointer type, and the type of this function.
unsafe fn load<F: Copy>(symbol: &str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let (library, symbol) = (library()?, CString::new(symbol).ok()?);
    // SAFETY: the library stays open.
    let function = NonNull::new(unsafe { libc::dlsym(library.as_ptr(), symbol.as_ptr()) })?;
    // SAFETY: `F` is as large as a pointer, as asserted above, and the right type by the caller's contract.
    Some(unsafe { std::mem::transmute_copy(&function) })
}

/// Expands to cudarc's type of a parameter.
macro_rules! bound {
    ($type:ty) => {
        $type
    };
    ($type:ty as $bound:ty) => {
        $bound
    };
}

/// Defines the functions. A row is a symbol and its parameters; `as` names cudarc's type where that is an enum but
/// any number may be passed. The signature is compared with cudarc's bindings at compile time. Some versions of the
/// bindings lack some functions: `bound` lists features of this crate whose bindings have the function, and only
/// those compare. (With the feature `cuda` alone, another crate chooses the version.) Drivers never remove a
/// function.
macro_rules! functions {
    ($(
        $(#[bound($($feature:literal),+)])?
        fn $symbol:ident($($parameter:ident: $type:ty $(as $bound:ty)?),* $(,)?);
    )*) => {$(
        /// Calls the driver function of this name.
        ///
        /// # Errors
        ///
        /// The driver's result code; [`Code::NOT_FOUND`] if the driver lacks the function.
        ///
        /// # Safety
        ///
        /// As the driver documents it.
        #[allow(clippy::too_many_arguments)]
        pub unsafe fn $symbol($($parameter: $type),*) -> Result<(), Code> {
            type Function = unsafe extern "C" fn($($type),*) -> u32;
            $(#[cfg(any($(feature = $feature),+))])?
            const _: unsafe fn($(bound!($type $(as $bound)?)),*) -> CUresult = sys::$symbol;
            static FUNCTION: OnceLock<Option<Function>> = OnceLock::new();
            // SAFETY: the constant above compares the type with the bindings', whose enums are 32-bit numbers.
            let function = FUNCTION.get_or_init(|| unsafe { load(stringify!($symbol)) });
            let function = function.ok_or(Code::NOT_FOUND)?;
            // SAFETY: by the caller's contract, which is the driver's for this function.
            Code::check(unsafe { function($($parameter),*) })
        }
    )*};
}

functions! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGetErrorName(code: u32 as CUresult, name: *mut *const c_char);
    fn cuGetErrorString(code: u32 as CUresult, text: *mut *const c_char);

    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice);
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    fn cuDeviceGetPCIBusId(address: *mut c_char, length: c_int, device: CUdevice);
    fn cuDeviceGetByPCIBusId(device: *mut CUdevice, address: *const c_char);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: u32 as CUdevice_attribute, device: CUdevice);
    fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: CUdevice_P2PAttribute, from: CUdevice, to: CUdevice);
    #[bound("cuda-13000")]
    fn cuDeviceGetHostAtomicCapabilities(
        capabilities: *mut c_uint, operations: *const u32 as *const sys::CUatomicOperation, count: c_uint,
        device: CUdevice,
    );
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);

    fn cuCtxGetCurrent(context: *mut CUcontext);
    fn cuCtxSetCurrent(context: CUcontext);
    fn cuCtxGetDevice(device: *mut CUdevice);
    fn cuCtxPushCurrent_v2(context: CUcontext);
    fn cuCtxPopCurrent_v2(context: *mut CUcontext);
    fn cuCtxGetId(context: CUcontext, id: *mut c_ulonglong);
    fn cuCtxSetLimit(limit: u32 as CUlimit, value: usize);
    fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);

    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuModuleUnload(module: CUmodule);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    #[bound("cuda-12090", "cuda-13000")]
    fn cuFuncIsLoaded(state: *mut u32 as *mut sys::CUfunctionLoadingState, function: CUfunction);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    );
    fn cuLaunchCooperativeKernel(
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void,
    );
    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig, function: CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    );

    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamQuery(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    fn cuStreamIsCapturing(stream: CUstream, status: *mut u32 as *mut CUstreamCaptureStatus);
    #[bound("cuda-12000", "cuda-12090")]
    fn cuStreamGetCaptureInfo_v2(
        stream: CUstream, status: *mut u32 as *mut CUstreamCaptureStatus, id: *mut u64, graph: *mut CUgraph,
        dependencies: *mut *const CUgraphNode, dependency_count: *mut usize,
    );
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32 as *mut CUstreamCaptureMode);

    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventQuery(event: CUevent);
    fn cuEventSynchronize(event: CUevent);

    fn cuUserObjectCreate(
        object: *mut CUuserObject, value: *mut c_void, destroy: CUhostFn, references: c_uint, flags: c_uint,
    );
    fn cuUserObjectRelease(object: CUuserObject, count: c_uint);
    fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint);

    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    fn cuMemFree_v2(address: CUdeviceptr);
    fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(host: *mut c_void);
    fn cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(host: *mut c_void);
    fn cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, host: *mut c_void, flags: c_uint);
    fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr);
    fn cuPointerGetAttribute(value: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr);

    fn cuMemsetD8Async(address: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);

    fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr);
    fn cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
    fn cuIpcCloseMemHandle(address: CUdeviceptr);

    fn cuMemGetAllocationGranularity(
        bytes: *mut usize, properties: *const CUmemAllocationProp, which: CUmemAllocationGranularity_flags,
    );
    fn cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp,
        flags: c_ulonglong,
    );
    fn cuMemRelease(handle: CUmemGenericAllocationHandle);
    fn cuMemAddressReserve(
        address: *mut CUdeviceptr, bytes: usize, alignment: usize, wanted: CUdeviceptr, flags: c_ulonglong,
    );
    fn cuMemAddressFree(address: CUdeviceptr, bytes: usize);
    fn cuMemMap(
        address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong,
    );
    fn cuMemUnmap(address: CUdeviceptr, bytes: usize);
    fn cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
    fn cuMemExportToShareableHandle(
        shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType,
        flags: c_ulonglong,
    );
    fn cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void, kind: CUmemAllocationHandleType,
    );

    #[bound("cuda-12090", "cuda-13000")]
    fn cuMulticastGetGranularity(
        bytes: *mut usize, properties: *const MulticastProperties as *const sys::CUmulticastObjectProp,
        which: u32 as sys::CUmulticastGranularity_flags,
    );
    #[bound("cuda-12090", "cuda-13000")]
    fn cuMulticastCreate(
        handle: *mut CUmemGenericAllocationHandle,
        properties: *const MulticastProperties as *const sys::CUmulticastObjectProp,
    );
    #[bound("cuda-12090", "cuda-13000")]
    fn cuMulticastAddDevice(handle: CUmemGenericAllocationHandle, device: CUdevice);
    #[bound("cuda-12090", "cuda-13000")]
    fn cuMulticastBindMem(
        handle: CUmemGenericAllocationHandle, offset: usize, memory: CUmemGenericAllocationHandle, memory_offset: usize,
        bytes: usize, flags: c_ulonglong,
    );
    #[bound("cuda-12090", "cuda-13000")]
    fn cuMulticastUnbind(handle: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, bytes: usize);
}

/// `CUmulticastObjectProp`, which the bindings of CUDA 12.0 lack.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MulticastProperties {
    /// Number of devices in the group.
    pub devices: c_uint,
    /// Bytes that each device binds.
    pub bytes: usize,
    /// Handle types that the group can be exported as.
    pub handle_types: c_ulonglong,
    /// Must be 0.
    pub flags: c_ulonglong,
}

#[cfg(not(feature = "cuda-12000"))]
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<MulticastProperties>() == size_of::<sys::CUmulticastObjectProp>());
    assert!(offset_of!(MulticastProperties, bytes) == offset_of!(sys::CUmulticastObjectProp, size));
    assert!(
        offset_of!(MulticastProperties, handle_types) == offset_of!(sys::CUmulticastObjectProp, handleTypes)
    );
};

/// `CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED`, which the bindings of CUDA 12.0 lack.
pub(crate) const MULTICAST_SUPPORTED: u32 = 132;
/// `CU_MULTICAST_GRANULARITY_MINIMUM`, which the bindings of CUDA 12.0 lack.
pub(crate) const MULTICAST_GRANULARITY_MINIMUM: u32 = 0;

#[cfg(not(feature = "cuda-12000"))]
const _: () = assert!(
    MULTICAST_SUPPORTED == CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED as u32
        && MULTICAST_GRANULARITY_MINIMUM
            == sys::CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_MINIMUM as u32
);
