//! Records a thread's actions between two stops, as reported by its code. Its stores outside of the block
//! are undone: other threads see them only when they have arrived.

use std::collections::VecDeque;

use crate::context::Context;
use crate::runtime::what;

/// An access or a fence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub at: u32,
    pub address: u64,
    pub bytes: u32,
    /// The stored value, if it is a store.
    pub value: [u64; 4],
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Note {
    /// A block begins with this instruction.
    Block(u32),
    /// A guarded instruction is executed.
    Taken(u32),
    Access(Access),
}

/// Notes of the running thread.
#[derive(Default)]
pub(crate) struct Recorder {
    pub notes: VecDeque<Note>,
    /// Number of the kernel's function; other functions are not recorded.
    pub function: u64,
    /// The block's shared memory and the thread's local memory: stores to them take effect at once.
    own: [(u64, u64); 2],
    /// Index in `notes` of each store, and the memory's previous content.
    stores: Vec<(usize, [u64; 4])>,
    /// Whether the last note has its stored value.
    is_read: bool,
}

fn read(address: u64, bytes: u32) -> [u64; 4] {
    let mut value = [0u64; 4];
    // SAFETY: compiled code has checked that this access of at most 32 bytes is within an allocation, and
    // no thread runs.
    unsafe {
        std::ptr::copy_nonoverlapping(address as *const u8, value.as_mut_ptr().cast(), bytes.min(32) as usize)
    };
    value
}

/// Writes a value to memory.
pub(crate) fn write(address: u64, bytes: u32, value: &[u64; 4]) {
    // SAFETY: as in `read`.
    unsafe {
        std::ptr::copy_nonoverlapping(value.as_ptr().cast(), address as *mut u8, bytes.min(32) as usize)
    };
}

impl Recorder {
    /// Begins to record a thread that is about to run.
    pub fn begin(
        &mut self,
        notes: VecDeque<Note>,
        function: u64,
        context: &Context,
        shared: u64,
        local: (u64, u64),
    ) {
        self.notes = notes;
        self.function = function;
        self.own = [(context.shared, shared), local];
        self.stores.clear();
        self.is_read = true;
    }

    /// Ends the record of a thread that has stopped, and returns its notes.
    pub fn end(&mut self) -> VecDeque<Note> {
        self.read_last();
        for &(at, before) in self.stores.iter().rev() {
            if let Note::Access(store) = &self.notes[at] {
                write(store.address, store.bytes, &before);
            }
        }
        std::mem::take(&mut self.notes)
    }

    fn read_last(&mut self) {
        if let (false, Some(&(at, _))) = (self.is_read, self.stores.last()) {
            if let Note::Access(store) = &mut self.notes[at] {
                store.value = read(store.address, store.bytes);
            }
        }
        self.is_read = true;
    }

    /// Notes an access, before the thread performs it.
    pub fn note(&mut self, address: u64, bytes: u32, code: u32, at: u64) {
        self.read_last();
        if at >> 32 != self.function {
            return;
        }
        let at = at as u32;
        self.notes.push_back(match code {
            what::REACHED => Note::Block(at),
            what::TAKEN => Note::Taken(at),
            _ => Note::Access(Access { at, address, bytes, value: [0; 4] }),
        });
        let outside = self.own.iter().all(|&(low, size)| address < low || address - low >= size);
        if code < what::REACHED && what::kind(code) == what::WRITE && outside {
            self.stores.push((self.notes.len() - 1, read(address, bytes)));
            self.is_read = false;
        }
    }
}
