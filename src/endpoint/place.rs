//! The place of a rank that has left its world, and may come back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bootstrap::Lineage;
use crate::error::Error;

/// While a rank has no membership: the secrets by which the ranks meet again; `None` after an abort.
#[derive(Clone, Default)]
pub(crate) struct Place(Arc<Mutex<Option<Arc<Lineage>>>>);

impl Place {
    pub fn get(&self) -> Option<Arc<Lineage>> {
        self.locked().clone()
    }

    pub fn set(&self, lineage: Option<Arc<Lineage>>) {
        *self.locked() = lineage;
    }

    /// Returns the error of what needs a membership, when there is none.
    #[cold]
    pub fn suspended(&self) -> Error {
        if self.locked().is_none() {
            return Error::Aborted;
        }
        Error::Unavailable {
            what: "a call or step".into(),
            reason: "the communicator is suspended: resume it first".into(),
        }
    }

    fn locked(&self) -> MutexGuard<'_, Option<Arc<Lineage>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
