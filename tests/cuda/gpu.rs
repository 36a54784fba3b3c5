//! What there is to test on, and the skipping where it is too little.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::{sys, CudaContext};

/// A limit that nothing reaches unless something hangs.
pub const LIMIT: Duration = Duration::from_secs(30);

const REQUIRE: &str = "FAST_ALLREDUCE_REQUIRE";

/// The GPUs of this process. Tests that share a process take turns: an allocation or a capture of one would disturb another
/// whose ranks wait for each other.
pub struct Gpus {
    _turn: MutexGuard<'static, ()>,
    pub count: usize,
    pub stand_in: bool,
}

/// At least `count` GPUs, or `None` after saying why not.
///
/// # Panics
///
/// Where the environment requires what there is not.
pub fn gpus(count: usize) -> Option<Gpus> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match found() {
        Err(reason) => skipped("cuda", &reason),
        Ok((found, _)) if found < count => skipped("two-gpus", &format!("{found} GPU of {count}")),
        Ok((count, stand_in)) => Some(Gpus { _turn: turn, count, stand_in }),
    }
}

/// As [`gpus`], where only the stand-in driver can be made to do what the test needs.
pub fn stand_in() -> Option<Gpus> {
    match gpus(1)? {
        gpus if gpus.stand_in => Some(gpus),
        _ => skipped("stand-in", "this needs the stand-in driver, and there is another"),
    }
}

/// Says that a test is skipped.
///
/// # Panics
///
/// Where the environment requires `what`.
pub fn skipped<T>(what: &str, reason: &str) -> Option<T> {
    let required = std::env::var(REQUIRE).unwrap_or_default();
    assert!(!required.split(',').any(|required| required == what), "{REQUIRE}={required}: {reason}");
    println!("skipped: {reason}");
    None
}

/// How many GPUs there are, and whether the driver is the stand-in.
fn found() -> Result<(usize, bool), String> {
    // SAFETY: loads the driver's library, whose initialisers are its own.
    if !unsafe { sys::is_culib_present() } {
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
