//! Bootstrap by the caller's all-gather function: over MPI, a torch store, or any other way to gather equal numbers of
//! bytes.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use fast_allreduce::bootstrap::Bootstrap;
use fast_allreduce::{Error, Result};

/// All-gather function of the program. It sends `bytes` bytes at `input` to all ranks, and writes the bytes of all
/// ranks, in rank order, to `output`. It returns 0, or another value if it fails or takes longer than `timeout_ms`. The
/// library calls it in the threads that call the communicator, one call at a time, until fast_allreduce_free has
/// returned.
pub type fast_allreduce_all_gather_function = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        input: *const c_void,
        output: *mut c_void,
        bytes: usize,
        timeout_ms: u64,
    ) -> c_int,
>;

/// A bootstrap that calls the caller's function.
pub struct Caller {
    pub function: unsafe extern "C" fn(*mut c_void, *const c_void, *mut c_void, usize, u64) -> c_int,
    pub context: *mut c_void,
    pub rank: usize,
    pub world_size: usize,
}

// SAFETY: the context is only passed to the caller's function, which any thread may call, according to the header.
unsafe impl Send for Caller {}
// SAFETY: as for `Send`; besides, the library makes one call at a time: the set-up is sequential, and later steps hold
// a lock.
unsafe impl Sync for Caller {}

impl Caller {
    /// Gathers `bytes` of every rank, concatenated in rank order. All ranks pass the same number of bytes.
    fn gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        let mut all = vec![0; bytes.len() * self.world_size];
        let limit = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: the input has `bytes.len()` bytes, and the output this number for each rank; the caller guarantees
        // that the function is of this type.
        let code = unsafe {
            (self.function)(self.context, bytes.as_ptr().cast(), all.as_mut_ptr().cast(), bytes.len(), limit)
        };
        match code {
            0 => Ok(all),
            code => {
                Err(Error::Rendezvous { reason: format!("the caller's all-gather function returned {code}") })
            }
        }
    }
}

impl Bootstrap for Caller {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        const WORD: usize = size_of::<u64>();
        let lengths = self.gather(&(bytes.len() as u64).to_le_bytes(), timeout)?;
        let length = |rank: usize| {
            let mut word = [0; WORD];
            word.copy_from_slice(&lengths[rank * WORD..][..WORD]);
            u64::from_le_bytes(word) as usize
        };
        if length(self.rank) != bytes.len() {
            let reason = "the caller's all-gather function does not return this rank's own bytes".into();
            return Err(Error::Rendezvous { reason });
        }
        let longest = (0..self.world_size).map(length).max().unwrap_or(0);
        // The library's messages have a few kilobytes.
        if longest > 1 << 20 {
            let reason =
                format!("the caller's all-gather function returned a message length of {longest} bytes");
            return Err(Error::Rendezvous { reason });
        }
        if longest == 0 {
            return Ok(vec![Vec::new(); self.world_size]);
        }
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let all = self.gather(&padded, timeout)?;
        Ok((0..self.world_size).map(|rank| all[rank * longest..][..length(rank)].to_vec()).collect())
    }
}
