//! Memory of one GPU that a rank of another GPU in this process is the last to drop: ranks of its own GPU free it.
//!
//! `cuMemFree` waits for all work of the memory's context (CUDA Driver API). A kernel there may wait for the rank that
//! frees: both would wait until the limit. So that rank hands the memory back to the context's devices. It frees the
//! memory itself only where no device of the crate uses the context, so that no kernel of the crate runs there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaContext;

use super::memory::Memory;

/// Contexts that have an [`Owner`], by their numbers. Whether there is one is decided, and memory is handed back, under
/// this lock: what is handed back has an owner that frees it.
static CONTEXTS: Mutex<BTreeMap<u64, Context>> = Mutex::new(BTreeMap::new());

#[derive(Default)]
struct Context {
    owners: usize,
    returned: Vec<Memory>,
}

fn contexts() -> MutexGuard<'static, BTreeMap<u64, Context>> {
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device as a user of its context: it frees what is handed back to the context when it allocates and when it is dropped.
pub(super) struct Owner {
    context_id: u64,
}

impl Owner {
    pub fn new(context_id: u64) -> Self {
        contexts().entry(context_id).or_default().owners += 1;
        Self { context_id }
    }

    /// Frees what was handed back, without the lock: freeing may wait.
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
            // The last one also frees what came since.
            let unowned = if context.owners == 0 { contexts.remove(&self.context_id) } else { None };
            drop(contexts);
            drop(unowned);
        }
    }
}

/// Drops a reference that a rank of `context` has. If it is the last one, the memory is freed or handed back.
pub(super) fn let_go(memory: Arc<Memory>, context: &CudaContext) {
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
