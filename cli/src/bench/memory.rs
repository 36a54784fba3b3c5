//! The buffers of a row: private or registered, aligned alike on every rank.

use std::ops::{Deref, DerefMut};

use fast_allreduce::{Buffer, Communicator, Host};

use super::reference::Number;
use crate::failure::Failure;

/// Elements that an allreduce reads or writes.
pub enum Memory<T: Number> {
    Private { storage: Vec<T>, offset: usize },
    Registered(Buffer<T>),
}

impl<T: Number> Memory<T> {
    /// This process' own memory, on a cache line's boundary.
    pub fn private(count: usize) -> Result<Self, Failure> {
        const ALIGNMENT: usize = 64;
        let length = count.saturating_add(ALIGNMENT / size_of::<T>());
        let mut storage = Vec::new();
        storage.try_reserve_exact(length).map_err(|_| {
            Failure::Usage(format!("no memory for a buffer of {count} elements of {}", T::DTYPE))
        })?;
        storage.resize(length, T::poison());
        let offset = storage.as_ptr().align_offset(ALIGNMENT);
        storage.truncate(offset + count);
        Ok(Self::Private { storage, offset })
    }

    /// Memory that the peers read where it is. Collective.
    pub fn registered(communicator: &Communicator<Host>, count: usize) -> Result<Self, Failure> {
        Ok(Self::Registered(communicator.alloc(count)?))
    }
}

impl<T: Number> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Private { storage, offset } => &storage[*offset..],
            Self::Registered(buffer) => buffer,
        }
    }
}

impl<T: Number> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Private { storage, offset } => &mut storage[*offset..],
            Self::Registered(buffer) => buffer,
        }
    }
}
