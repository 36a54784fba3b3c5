//! Deferred frees: memory of one GPU whose last reference is dropped by a rank on another GPU of the same process is
//! freed by ranks of its own GPU.
//!
//! `cuMemFree` waits for all work of the memory's context, and may wait for that of its peers ([`Memory::allocate`]).
//! A kernel of that context may wait for the rank that frees, and then both would wait until the time limit. So that
//! rank returns the memory to the devices of the memory's context. It frees the memory itself only if no device of this
//! crate uses the context, because then no kernel of this crate runs there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaContext;

use super::allocation::Memory;

/// Contexts that have an [`Owner`], by ID. This lock is held while an owner is looked up and memory is returned to
/// it, so that returned memory always has an owner that frees it.
static CONTEXTS: Mutex<BTreeMap<u64, Context>> = Mutex::new(BTreeMap::new());

#[derive(Default)]
struct Context {
    owners: usize,
    returned: Vec<Memory>,
}

fn contexts() -> MutexGuard<'static, BTreeMap<u64, Context>> {
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a device as a user of its context. The device frees memory that was returned to the context when it
/// allocates and when it is dropped.
pub(crate) struct Owner {
    context_id: u64,
}

impl Owner {
    pub fn new(context_id: u64) -> Self {
        contexts().entry(context_id).or_default().owners += 1;
        Self { context_id }
    }

    /// Frees the returned memory. The lock is not held meanwhile, because freeing may wait.
    pub fn free_returned(&self) {
        let returned =
            contexts().get_mut(&self.context_id).map(|context| std::mem::take(&mut context.returned));
        drop(returned);
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.free_returned();
        let mut contexts = contexts();
        if let Some(context) = contexts.get_mut(&self.context_id) {
            context.owners -= 1;
            // The last owner also frees memory that was returned since.
            let unowned = if context.owners == 0 { contexts.remove(&self.context_id) } else { None };
            drop(contexts);
            drop(unowned);
        }
    }
}

/// Drops the reference of a rank whose context is `context`. If it was the last reference, the memory is freed or
/// returned.
pub(crate) fn release(memory: Arc<Memory>, context: &CudaContext) {
    let Some(memory) = Arc::into_inner(memory).filter(|memory| !memory.is_of(context)) else {
        return;
    };
    let mut contexts = contexts();
    match memory.context_id().and_then(|id| contexts.get_mut(&id)) {
        Some(owned) => owned.returned.push(memory),
        None => {
            drop(contexts);
            drop(memory);
        }
    }
}
