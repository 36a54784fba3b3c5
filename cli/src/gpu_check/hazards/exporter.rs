//! A process that shares memory by CUDA IPC, which only another process can open.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;

use cudarc::driver::{sys, CudaContext};
use fast_allreduce::device::cuda::api;
use nix::poll::{poll, PollFd, PollFlags};

use crate::failure::{driver, Failure};
use crate::gpu_check::probe::context;

/// The hidden option of the process.
pub const OPTION: &str = "--export";

/// Longest time until the process has written its line, and most bytes of it.
const START_LIMIT_MS: u16 = 10_000;
const MOST_BYTES: u64 = 1024;

/// A running exporter. It ends when self is dropped.
pub struct Exporter {
    process: Child,
    /// Closing it ends the process.
    stdin: Option<ChildStdin>,
    handle: sys::CUipcMemHandle,
}

impl Exporter {
    /// Starts the process, and reads the handle of its memory.
    pub fn start(gpu: usize) -> Result<Self, Failure> {
        let mut process = Command::new("/proc/self/exe")
            .args(["gpu-check", OPTION, "--gpu", &gpu.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| Failure::System("starting a process that shares memory", error))?;
        let (stdin, stdout) = (process.stdin.take(), process.stdout.take());
        let mut exporter = Self { process, stdin, handle: sys::CUipcMemHandle { reserved: [0; 64] } };
        let mut line = String::new();
        if let Some(stdout) = stdout {
            // A process that fails closes the pipe.
            let mut ready = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
            let count =
                poll(&mut ready, START_LIMIT_MS).map_err(|errno| Failure::System("poll", errno.into()))?;
            if count == 0 {
                // An error means that it has already ended.
                let _ = exporter.process.kill();
                return Err(Failure::Ranks(format!(
                    "another process has not shared memory within {START_LIMIT_MS} ms"
                )));
            }
            let read = BufReader::new(stdout.take(MOST_BYTES)).read_line(&mut line);
            read.map_err(|error| Failure::System("read", error))?;
        }
        let bytes: Vec<u8> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let bytes: [u8; 64] = bytes.try_into().map_err(|_| {
            Failure::Ranks("another process cannot share memory by CUDA IPC: see the step ipc-handles".into())
        })?;
        exporter.handle.reserved = bytes.map(|byte| byte as _);
        Ok(exporter)
    }

    /// Opens the memory.
    pub fn open(&self, context: &Arc<CudaContext>) -> Result<Opened, Failure> {
        context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the driver validates the handle and writes one address.
        unsafe { api::cuIpcOpenMemHandle_v2(&mut address, self.handle, flags) }
            .map_err(driver("cuIpcOpenMemHandle"))?;
        Ok(Opened { context: Arc::clone(context), address })
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        drop(self.stdin.take());
        // It ends by itself. An error means that it has already ended.
        let _ = self.process.wait();
    }
}

/// Opened memory.
pub struct Opened {
    context: Arc<CudaContext>,
    address: u64,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: opened by `Exporter::open`; no kernel uses it.
        let _ = unsafe { api::cuIpcCloseMemHandle(self.address) };
    }
}

/// Runs as the process: shares memory until standard input is closed.
pub fn run(gpu: usize) -> Result<(), Failure> {
    let context = context(gpu)?;
    context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
    let (mut address, mut handle) = (0, sys::CUipcMemHandle { reserved: [0; 64] });
    // SAFETY: a context is current; the driver writes one address, and one handle of that memory.
    unsafe {
        api::cuMemAlloc_v2(&mut address, 2 << 20).map_err(driver("cuMemAlloc"))?;
        api::cuIpcGetMemHandle(&mut handle, address).map_err(driver("cuIpcGetMemHandle"))?;
    }
    let words: Vec<String> = handle.reserved.iter().map(|&byte| (byte as u8).to_string()).collect();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", words.join(" "))?;
    out.flush()?;
    let mut nothing = Vec::new();
    let read = std::io::stdin().lock().read_to_end(&mut nothing);
    read.map(drop).map_err(|error| Failure::System("read", error))
}
