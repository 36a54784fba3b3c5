//! Store buffers: other threads see relaxed stores late, as they may on a GPU. A store may overtake another
//! one to a different address.
//!
//! A store is held back until its thread orders it (by a fence, a release, a barrier, or its end) or
//! accesses the same bytes, or until it is released at random. Without store buffers all accesses take
//! effect at once and in order. Code that relies on that order would go unnoticed if all its accesses are
//! strong, as it has no data race.

use crate::runtime::what;
use crate::types::Order;

/// A store of one word that has been checked but not performed.
#[derive(Clone, Copy)]
struct Store {
    address: u64,
    bytes: u32,
    value: u64,
}

impl Store {
    fn meets(&self, address: u64, bytes: u32) -> bool {
        self.address < address + u64::from(bytes) && address < self.address + u64::from(self.bytes)
    }

    fn perform(self) {
        let Self { address, bytes, value } = self;
        // SAFETY: the address was checked when the instruction was executed, and its memory outlives the
        // launch.
        unsafe {
            match bytes {
                1 => (address as *mut u8).write_volatile(value as u8),
                2 => (address as *mut u16).write_volatile(value as u16),
                4 => (address as *mut u32).write_volatile(value as u32),
                _ => (address as *mut u64).write_volatile(value),
            }
        }
    }
}

/// Held-back stores of each thread that runs, the oldest first.
pub(crate) struct StoreBuffers(Vec<Vec<Store>>);

impl StoreBuffers {
    pub fn new(threads: u32) -> Self {
        Self(vec![Vec::new(); threads as usize])
    }

    /// Holds a store back. Earlier stores to the same bytes have been performed.
    pub fn hold(&mut self, thread: u32, address: u64, bytes: u32, value: u64) {
        self.0[thread as usize].push(Store { address, bytes, value });
    }

    /// Performs the held-back stores that must come before an access or a fence of a thread.
    pub fn before(&mut self, thread: u32, address: u64, bytes: u32, code: u32) {
        let (order, _) = what::decode(code);
        let orders = matches!(order, Order::Release | Order::AcqRel | Order::SeqCst);
        self.release(thread, |store| orders || store.meets(address, bytes));
    }

    /// Performs some of a thread's stores, chosen at random.
    pub fn let_some_go(&mut self, thread: u32, mut chance: impl FnMut() -> bool) {
        self.release(thread, |_| chance());
    }

    fn release(&mut self, thread: u32, mut which: impl FnMut(&Store) -> bool) {
        self.0[thread as usize].retain(|store| {
            let goes = which(store);
            if goes {
                store.perform();
            }
            !goes
        });
    }

    /// Performs all stores of a thread.
    pub fn flush(&mut self, thread: u32) {
        self.release(thread, |_| true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Scope;

    #[test]
    fn stores_wait_for_what_orders_them() {
        let mut words = [0u32; 3];
        let first = &raw mut words as u64;
        let addresses = [first, first + 4, first + 8];
        // SAFETY: the addresses are those of `words`, which nothing else refers to meanwhile.
        let read = |i: usize| unsafe { (addresses[i] as *const u32).read_volatile() };
        let relaxed = |kind| what::code(kind, Order::Relaxed, Scope::Sys);
        let mut buffers = StoreBuffers::new(2);
        for (i, &address) in addresses.iter().enumerate() {
            buffers.hold(1, address, 4, i as u64 + 7);
        }
        buffers.before(0, addresses[0], 4, what::fence(Order::SeqCst, Scope::Sys));
        assert_eq!([0, 1, 2].map(read), [0; 3], "another thread's fence");
        buffers.before(1, addresses[1], 4, relaxed(what::READ));
        assert_eq!([0, 1, 2].map(read), [0, 8, 0], "its own read");
        buffers.before(1, addresses[1], 4, relaxed(what::WRITE));
        assert_eq!([0, 1, 2].map(read), [0, 8, 0], "another address");
        buffers.before(1, addresses[1], 4, what::code(what::WRITE, Order::Release, Scope::Sys));
        assert_eq!([0, 1, 2].map(read), [7, 8, 9], "a release");
    }
}
