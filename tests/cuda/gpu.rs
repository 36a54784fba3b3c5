//! What there is to test on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::{sys, CudaContext};

use crate::processes::part;
use crate::runner::{Found, Missing};

/// A limit that nothing reaches unless something hangs.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The GPUs of this process. Tests that share a process take turns: an allocation or a capture of one would disturb another
/// whose ranks wait for each other.
pub struct Gpus {
    _turn: MutexGuard<'static, ()>,
    pub count: usize,
    pub stand_in: bool,
}

/// At least one.
pub fn gpu() -> Found<Gpus> {
    gpus(1)
}

/// At least two.
pub fn two_gpus() -> Found<Gpus> {
    gpus(2)
}

fn gpus(count: usize) -> Found<Gpus> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match found() {
        Err(reason) => Err(Missing::new("cuda", reason)),
        Ok((found, _)) if found < count => Err(Missing::new("two-gpus", format!("{found} GPU of {count}"))),
        Ok((count, stand_in)) => Ok(Gpus { _turn: turn, count, stand_in }),
    }
}

/// GPUs of the stand-in driver, which alone can be made to do what the test needs.
pub fn stand_in() -> Found<Gpus> {
    of_stand_in(gpu()?)
}

/// As [`stand_in`], and two of them.
pub fn stand_in_pair() -> Found<Gpus> {
    of_stand_in(two_gpus()?)
}

fn of_stand_in(gpus: Gpus) -> Found<Gpus> {
    match gpus.stand_in {
        true => Ok(gpus),
        false => Err(Missing::new("stand-in", "this needs the stand-in driver, and there is another")),
    }
}

/// As [`stand_in`], but nothing in a child of the test: there the driver is set to do something else.
pub fn stand_in_of_parent() -> Found<Option<Gpus>> {
    match part() {
        Some(_) => Ok(None),
        None => stand_in().map(Some),
    }
}

/// Whether the PTX machine looks at each access of kernels (lab/ptx_machine): it does so for launches of few threads.
pub fn is_observed() -> bool {
    ["PTX_MACHINE_RACE", "PTX_MACHINE_LATE"]
        .iter()
        .any(|name| std::env::var_os(name).is_some_and(|on| on == "1"))
}

pub fn has_driver() -> bool {
    // SAFETY: loads the driver's library, whose initialisers are its own.
    unsafe { sys::is_culib_present() }
}

/// How many GPUs there are, and whether the driver is the stand-in.
fn found() -> Result<(usize, bool), String> {
    if !has_driver() {
        return Err("no CUDA driver".into());
    }
    let count = CudaContext::device_count().map_err(|error| format!("no CUDA device: {error:?}"))?;
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 {
        return Err("no CUDA device".into());
    }
    let name = context(0).name().map_err(|error| error.to_string())?;
    if let Err(error) = fast_allreduce::Cuda::open(0) {
        return Err(error.to_string());
    }
    Ok((count, name.to_lowercase().contains("stand-in")))
}

/// The primary context of a device, as a handle of its own.
pub fn context(ordinal: usize) -> Arc<CudaContext> {
    CudaContext::new(ordinal).unwrap()
}
