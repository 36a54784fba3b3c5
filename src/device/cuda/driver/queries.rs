//! Queries of devices, streams and memory.

use std::ffi::CString;

use cudarc::driver::sys::{self, CUdevice_attribute, CUpointer_attribute, CUstream};
use cudarc::driver::CudaContext;

use super::api::{self, Code};
use super::driver;
use crate::error::{Error, Result};
use crate::topology::PciAddress;

/// Checks that a stream belongs to a context, which must be current.
///
/// # Errors
///
/// [`Error::InvalidStream`], [`Error::Driver`].
///
/// # Safety
///
/// `stream` is a live stream of any context, or the handle of a default stream, which stands for the current context's.
pub(crate) unsafe fn check_context(expected: &CudaContext, stream: CUstream) -> Result<()> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the stream is live; the driver writes the context on success.
    unsafe { api::cuStreamGetCtx(stream, &mut context) }.map_err(driver("cuStreamGetCtx"))?;
    if context == expected.cu_ctx() {
        return Ok(());
    }
    let mut device = -1;
    // SAFETY: the context is live as its stream is; it is popped after it was pushed.
    unsafe {
        if api::cuCtxPushCurrent_v2(context).is_ok() {
            let _ = api::cuCtxGetDevice(&mut device);
            let _ = api::cuCtxPopCurrent_v2(&mut context);
        }
    }
    let stream = usize::try_from(device).unwrap_or(usize::MAX);
    Err(Error::InvalidStream { stream, device: expected.ordinal() })
}

/// Returns a device attribute; 0 if the driver does not know it.
pub(crate) fn attribute(context: &CudaContext, attribute: CUdevice_attribute) -> i32 {
    attribute_of_number(context, attribute as u32)
}

/// Returns a device attribute by its number, for attributes that the bindings may lack; 0 if the driver does not know
/// it.
pub(crate) fn attribute_of_number(context: &CudaContext, attribute: u32) -> i32 {
    let mut value = 0;
    // SAFETY: the driver validates the attribute and the device, and writes one int.
    let known = unsafe { api::cuDeviceGetAttribute(&mut value, attribute, context.cu_device()) };
    known.map_or(0, |()| value)
}

/// Returns the device at a PCI address; `None` if this process does not see it.
pub(crate) fn device_at(pci: PciAddress) -> Option<sys::CUdevice> {
    let PciAddress { domain, bus, device, function } = pci;
    let address = CString::new(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}")).ok()?;
    let mut found = 0;
    // SAFETY: the driver reads the string and writes one device.
    unsafe { api::cuDeviceGetByPCIBusId(&mut found, address.as_ptr()) }.ok()?;
    Some(found)
}

/// Returns whether `device` can access the memory of `peer`.
pub(crate) fn can_access_peer(device: sys::CUdevice, peer: sys::CUdevice) -> Result<bool> {
    let mut can = 0;
    // SAFETY: the driver validates the devices and writes one int.
    unsafe { api::cuDeviceCanAccessPeer(&mut can, device, peer) }.map_err(driver("cuDeviceCanAccessPeer"))?;
    Ok(can != 0)
}

/// Returns an attribute of the link from `device` to `peer`, a different device.
pub(crate) fn peer_attribute(
    device: sys::CUdevice,
    peer: sys::CUdevice,
    attribute: sys::CUdevice_P2PAttribute,
) -> Result<i32> {
    let mut value = 0;
    // SAFETY: the driver validates the attribute and the devices, and writes one int.
    unsafe { api::cuDeviceGetP2PAttribute(&mut value, attribute, device, peer) }
        .map_err(driver("cuDeviceGetP2PAttribute"))?;
    Ok(value)
}

/// Returns the base and the size in bytes of the allocation that contains an address.
pub(crate) fn allocation_of(address: u64) -> Result<(u64, usize)> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the driver looks the address up and writes both results.
    unsafe { api::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) }
        .map_err(driver("cuMemGetAddressRange of a registered buffer"))?;
    Ok((base, bytes))
}

/// Returns an attribute of the memory at an address; `None` if the driver knows no memory there.
///
/// # Safety
///
/// `T` is the type of the attribute.
unsafe fn pointer_attribute<T: Default>(attribute: CUpointer_attribute, address: u64) -> Result<Option<T>> {
    let mut value = T::default();
    // SAFETY: the driver writes one T, by the caller's contract.
    match unsafe { api::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) } {
        Err(Code::INVALID_VALUE) => Ok(None),
        found => found.map(|()| Some(value)).map_err(driver("cuPointerGetAttribute")),
    }
}

/// Returns the ordinal of the device whose memory is at an address; `None` if it is not device memory.
pub(crate) fn device_of(address: u64) -> Result<Option<usize>> {
    use CUpointer_attribute::{CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
    // SAFETY: a CUmemorytype is a u32.
    let kind = unsafe { pointer_attribute::<u32>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) }?;
    if kind != Some(sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32) {
        return Ok(None);
    }
    // SAFETY: an ordinal is an i32.
    let ordinal = unsafe { pointer_attribute::<i32>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) }?;
    Ok(ordinal.and_then(|ordinal| usize::try_from(ordinal).ok()))
}

/// Returns whether `cuIpcGetMemHandle` works for the memory at an address. Allowed during captures.
pub(crate) fn is_exportable(address: u64) -> bool {
    use sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    let mut capable = 0u32;
    // SAFETY: the driver writes one boolean, of at most 4 bytes.
    let found = unsafe {
        let attribute = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        api::cuPointerGetAttribute((&raw mut capable).cast(), attribute, address)
    };
    found.is_ok() && capable & 0xFF != 0
}

/// Returns whether memory was allocated in stream order, from a pool.
pub(crate) fn is_stream_ordered(address: u64) -> Result<bool> {
    // SAFETY: a pool's handle is an address.
    let pool = unsafe {
        pointer_attribute::<u64>(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address)
    }?;
    Ok(pool.is_some_and(|pool| pool != 0))
}

/// Returns the driver's ID of the allocation that contains an address, unique in this process; `None` if there is no
/// allocation. Allowed during captures.
pub(crate) fn allocation_number(address: u64) -> Result<Option<u64>> {
    // SAFETY: a number is a u64.
    unsafe { pointer_attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, address) }
}
