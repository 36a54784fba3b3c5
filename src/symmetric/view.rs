//! Atomic access to the elements of one rank's part of symmetric memory, on the host.

use std::fmt;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, AtomicU8, Ordering};

use super::SymmetricMemory;
use crate::element::Element;
use crate::error::{Error, Result};

/// One rank's part of [`SymmetricMemory`], in this process or another.
///
/// Each safe access is a relaxed atomic of one element, so a concurrent write by another rank is not undefined
/// behaviour. Accesses order nothing. After a [`barrier`](crate::Communicator::barrier), a rank reads what was written
/// before the barrier.
///
/// ```
#[doc = include_str!("../example_ranks.txt")]
/// # ranks(2, |communicator| {
/// let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
/// let memory = communicator.symmetric_memory::<f32>(3)?;
/// let theirs = memory.view(peer)?;
/// assert_eq!((theirs.rank(), theirs.len(), theirs.is_empty()), (peer, 3, false));
/// theirs.copy_from(&[rank as f32; 3])?;
/// theirs.store(1, 0.5)?;
/// communicator.barrier()?;
///
/// let mine = memory.view(rank)?;
/// let mut values = [0.0; 3];
/// mine.copy_to(&mut values)?;
/// assert_eq!((values, mine.load(1)?), ([peer as f32, 0.5, peer as f32], 0.5));
/// // SAFETY: no rank writes after the barrier.
/// assert_eq!(unsafe { mine.as_slice() }, values);
/// assert_eq!(unsafe { *mine.as_ptr() }, values[0]);
/// # communicator.barrier()?;
/// # Ok(()) });
/// ```
#[derive(Clone, Copy)]
pub struct SymmetricView<'a, T: Element> {
    memory: &'a SymmetricMemory<T>,
    rank: usize,
    /// The address of the mapping in this process.
    address: u64,
}

impl<T: Element> SymmetricMemory<T> {
    /// Returns a view of a rank's part, of this rank or a peer.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`] if there is no such rank; [`Error::Unavailable`] while the communicator is suspended.
    pub fn view(&self, rank: usize) -> Result<SymmetricView<'_, T>> {
        let world_size = self.endpoint.world_size;
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let address = self.peer_address(rank).ok_or_else(|| Error::Unavailable {
            what: format!("rank {rank}'s part of symmetric memory"),
            reason: "the communicator is suspended, or has joined again without this memory".into(),
        })?;
        Ok(SymmetricView { memory: self, rank, address })
    }
}

impl<'a, T: Element> SymmetricView<'a, T> {
    /// Returns the rank that has this memory.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// Returns a pointer to the first element, aligned, and valid as long as the memory.
    ///
    /// It is for unsafe code that orders its accesses with the other ranks.
    pub fn as_ptr(&self) -> *mut T {
        self.address as *mut T
    }

    /// Returns the elements as a slice.
    ///
    /// # Safety
    ///
    /// While the slice is in use, no rank writes to this part, and the communicator is not suspended or joined.
    pub unsafe fn as_slice(&self) -> &'a [T] {
        // SAFETY: the mapping has `len` elements and is borrowed for 'a. Any bits are a value of T. The caller ensures
        // that nobody writes.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// Reads an element by a relaxed atomic load.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for an index beyond the end.
    pub fn load(&self, index: usize) -> Result<T> {
        self.element(index).map(load)
    }

    /// Writes an element by a relaxed atomic store.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for an index beyond the end.
    pub fn store(&self, index: usize, value: T) -> Result<()> {
        self.element(index).map(|element| store(element, value))
    }

    /// Reads all elements into `values`, each as [`SymmetricView::load`] does.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] unless `values` has as many elements.
    pub fn copy_to(&self, values: &mut [T]) -> Result<()> {
        if values.len() != self.len() {
            return Err(Error::LengthMismatch { input: self.len(), output: values.len() });
        }
        values.iter_mut().zip(self.elements()).for_each(|(value, element)| *value = load(element));
        Ok(())
    }

    /// Writes all elements from `values`, each as [`SymmetricView::store`] does.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] unless `values` has as many elements.
    pub fn copy_from(&self, values: &[T]) -> Result<()> {
        if values.len() != self.len() {
            return Err(Error::LengthMismatch { input: values.len(), output: self.len() });
        }
        values.iter().zip(self.elements()).for_each(|(&value, element)| store(element, value));
        Ok(())
    }

    fn elements(&self) -> impl Iterator<Item = Shared<'a, T>> + '_ {
        (0..self.len()).map(|index| self.at(index))
    }

    fn element(&self, index: usize) -> Result<Shared<'a, T>> {
        if index >= self.len() {
            let value = format!("{index} of {} elements", self.len());
            return Err(Error::InvalidSetting {
                name: "index",
                value,
                expected: "an index below the length",
            });
        }
        Ok(self.at(index))
    }

    /// Returns the element at an index below the length.
    fn at(&self, index: usize) -> Shared<'a, T> {
        debug_assert!(index < self.len());
        Shared { address: self.as_ptr().wrapping_add(index), memory: std::marker::PhantomData }
    }
}

/// An element in a mapping that lives for 'a. Safe code accesses it atomically.
struct Shared<'a, T> {
    address: *mut T,
    memory: std::marker::PhantomData<&'a T>,
}

/// Does an atomic operation on the bits of an element, as an integer of the element's size.
macro_rules! on_bits {
    ($shared:expr, $T:ty, |$atomic:ident: $bits:ident| $operation:expr) => {{
        let address = $shared.address;
        match size_of::<$T>() {
            1 => on_bits!(@ AtomicU8, u8, address, $atomic, $bits, $operation),
            2 => on_bits!(@ AtomicU16, u16, address, $atomic, $bits, $operation),
            4 => on_bits!(@ AtomicU32, u32, address, $atomic, $bits, $operation),
            _ => on_bits!(@ AtomicU64, u64, address, $atomic, $bits, $operation),
        }
    }};
    (@ $Atomic:ty, $integer:ty, $address:ident, $atomic:ident, $bits:ident, $operation:expr) => {{
        type $bits = $integer;
        // SAFETY: the element is in a live mapping and is aligned to its size, which is that of the integer. All
        // accesses by safe code are atomic and of this size; unsafe code is responsible for its own accesses.
        let $atomic = unsafe { <$Atomic>::from_ptr($address.cast()) };
        $operation
    }};
}

fn load<T: Element>(element: Shared<'_, T>) -> T {
    on_bits!(element, T, |atomic: Bits| {
        let bits: Bits = atomic.load(Ordering::Relaxed);
        // SAFETY: the integer has the size of T, and any bits are a value of T.
        unsafe { std::mem::transmute_copy(&bits) }
    })
}

fn store<T: Element>(element: Shared<'_, T>, value: T) {
    on_bits!(element, T, |atomic: Bits| {
        // SAFETY: T has the size of the integer, is initialised throughout, and any bits are an integer.
        let bits: Bits = unsafe { std::mem::transmute_copy(&value) };
        atomic.store(bits, Ordering::Relaxed);
    });
}

impl<T: Element> fmt::Debug for SymmetricView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, count) = (self.rank, self.len());
        f.debug_struct("SymmetricView").field("rank", &rank).field("count", &count).finish_non_exhaustive()
    }
}
