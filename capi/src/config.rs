//! Settings of a communicator, as C gives them.

use std::ffi::{c_char, CStr, OsStr};
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use fast_allreduce::device::host::Bind;
use fast_allreduce::plan::Tuning;
#[cfg(feature = "cuda")]
use fast_allreduce::Cuda;
use fast_allreduce::{Builder, Communicator, Host, Wait};

use crate::codes;
use crate::status::{argument, Failure};

/// Settings of a communicator. All zeros but for `size` are the defaults; all ranks must have the same.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fast_allreduce_config {
    /// sizeof(fast_allreduce_config): tells the library which fields the program knows.
    pub size: usize,
    /// A fast_allreduce_device.
    pub device: u32,
    /// Of the GPU, where the device is one. May differ among ranks.
    pub ordinal: u32,
    /// Longest wait for another rank, in milliseconds. 0: the default, which is 30 s or FAST_ALLREDUCE_TIMEOUT; below 0:
    /// calls wait for ever.
    pub timeout_ms: i64,
    /// Bytes that one launch takes through shared memory; larger messages go in pieces. 0: the default.
    pub max_bytes: usize,
    /// A fast_allreduce_algorithm for all allreduces.
    pub algorithm: u32,
    /// Threads of each rank for large messages on the host, the caller's included. 0: 1.
    pub workers: u32,
    /// A fast_allreduce_wait.
    pub wait: u32,
    /// A fast_allreduce_check_mode.
    pub check: u32,
    /// A fast_allreduce_bind.
    pub bind: u32,
    /// A fast_allreduce_calibrate.
    pub calibrate: u32,
    /// Path of a tuning file, ending with a zero byte. NULL: that of the environment or of this machine, where there is one.
    pub tuning: *const c_char,
    /// A fast_allreduce_order.
    pub order: u32,
    /// A fast_allreduce_direct_reads. May differ among ranks.
    pub direct_reads: u32,
    /// The most blocks of a launch on a GPU. 0: half of the multiprocessors that the process's communicators have left on it.
    pub max_blocks: u32,
    /// A fast_allreduce_residency, of GPUs.
    pub residency: u32,
    /// A fast_allreduce_programmatic_launch, of GPUs. May differ among ranks.
    pub programmatic_launch: u32,
    /// 0.
    pub reserved: u32,
}

type Config = fast_allreduce_config;

/// How long ranks wait for each other to come at all, where the caller sets no limit.
const MEETING: Duration = Duration::from_secs(30);

impl Config {
    /// What a caller gave: null is the defaults.
    ///
    /// # Safety
    ///
    /// `given` is null, or valid for reads of as many bytes as its first field says; a path in it is a string until the config
    /// has been used.
    pub unsafe fn read(given: *const Self) -> Result<Self, Failure> {
        let mut config = Self {
            size: size_of::<Self>(),
            device: 0,
            ordinal: 0,
            timeout_ms: 0,
            max_bytes: 0,
            algorithm: 0,
            workers: 0,
            wait: 0,
            check: 0,
            bind: 0,
            calibrate: 0,
            tuning: std::ptr::null(),
            order: 0,
            direct_reads: 0,
            max_blocks: 0,
            residency: 0,
            programmatic_launch: 0,
            reserved: 0,
        };
        if given.is_null() {
            return Ok(config);
        }
        // SAFETY: the caller's: the first field at least is there.
        let size = unsafe { given.cast::<usize>().read() };
        let (first, known) = (offset_of!(Self, bind), size_of::<Self>());
        if !(first..=known).contains(&size) {
            return Err(argument(format!(
                "config.size is {size}: this library knows configs of {first} to {known} bytes"
            )));
        }
        // SAFETY: the caller's: it is as long as it says. That fits into ours, whose other fields stay the defaults, and any
        // bits are values of its fields.
        unsafe { given.cast::<u8>().copy_to_nonoverlapping((&raw mut config).cast(), size) };
        Ok(config)
    }

    pub fn meeting_timeout(&self) -> Duration {
        match self.timeout_ms {
            1.. => Duration::from_millis(self.timeout_ms.unsigned_abs()),
            _ => MEETING,
        }
    }

    /// Checks the settings, before a rank joins with them.
    pub fn builder(&self) -> Result<Builder, Failure> {
        self.check_device()?;
        if self.reserved != 0 {
            return Err(argument("config.reserved is to be 0"));
        }
        let mut builder = Communicator::builder()
            .algorithm(codes::algorithm(self.algorithm)?)
            .check(codes::check(self.check)?)
            .calibrate(codes::calibrate(self.calibrate)?)
            .order(codes::order(self.order)?)
            .direct_reads(codes::direct_reads(self.direct_reads)?);
        builder = match self.timeout_ms {
            0 => builder,
            1.. => builder.timeout(Duration::from_millis(self.timeout_ms.unsigned_abs())),
            _ => builder.timeout(None),
        };
        if self.max_bytes != 0 {
            builder = builder.max_bytes(self.max_bytes);
        }
        if !self.tuning.is_null() {
            // SAFETY: `read`'s caller says that a path is a string.
            let path = unsafe { CStr::from_ptr(self.tuning) };
            builder = builder.tuning(Tuning::load(OsStr::from_bytes(path.to_bytes()))?);
        }
        Ok(builder)
    }

    /// Refuses codes that are none, and settings of the other device.
    fn check_device(&self) -> Result<(), Failure> {
        let (is_one_at_a_time, is_programmatic) =
            (codes::is_one_at_a_time(self.residency)?, codes::is_programmatic(self.programmatic_launch)?);
        let (wait, bind) = (codes::wait(self.wait)?, codes::bind(self.bind)?);
        if codes::is_cuda(self.device)? {
            return match self.workers > 1 || wait != Wait::Auto || bind != Bind::None {
                true => {
                    Err(argument("workers, wait and bind are settings of the host, and the device is CUDA"))
                }
                false => Ok(()),
            };
        }
        match self.max_blocks != 0 || is_one_at_a_time || is_programmatic {
            true => Err(argument(
                "max_blocks, residency and programmatic_launch are settings of GPUs, and the device is the host",
            )),
            false => Ok(()),
        }
    }

    pub fn host(&self) -> Result<Host, Failure> {
        let host = Host::new().workers(self.workers.max(1) as usize)?;
        Ok(host.wait(codes::wait(self.wait)?).bind(codes::bind(self.bind)?))
    }

    #[cfg(feature = "cuda")]
    pub fn cuda(&self) -> Result<Cuda, Failure> {
        let is_programmatic = codes::is_programmatic(self.programmatic_launch)?;
        let mut device = Cuda::open(self.ordinal as usize)?.programmatic_launch(is_programmatic);
        if self.max_blocks != 0 {
            device = device.max_blocks(self.max_blocks as usize);
        }
        Ok(if codes::is_one_at_a_time(self.residency)? { device.one_at_a_time() } else { device })
    }
}
