//! Ranks that meet by a function of the caller's: MPI's, a torch store, anything that gathers equal numbers of bytes.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use fast_allreduce::bootstrap::Bootstrap;
use fast_allreduce::{Error, Result};

/// Gives `bytes` bytes at `input` to all ranks, and has those of all, in the order of the ranks, at `output`. Returns 0, or
/// anything else if that failed or took longer than `timeout_ms`. It is called by the threads that call the communicator,
/// one at a time, until fast_allreduce_free has returned.
pub type fast_allreduce_all_gather_function = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        input: *const c_void,
        output: *mut c_void,
        bytes: usize,
        timeout_ms: u64,
    ) -> c_int,
>;

/// A caller's function, as a bootstrap.
pub struct Caller {
    pub function: unsafe extern "C" fn(*mut c_void, *const c_void, *mut c_void, usize, u64) -> c_int,
    pub context: *mut c_void,
    pub rank: usize,
    pub world_size: usize,
}

// SAFETY: the context is only handed to the caller's function, which may be called by any thread: the header says so.
unsafe impl Send for Caller {}
// SAFETY: as above, and the library makes one call at a time: setting up is in order, and later steps hold a lock.
unsafe impl Sync for Caller {}

impl Caller {
    /// `bytes` of every rank, one after the other: as many on each.
    fn gather(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        let mut all = vec![0; bytes.len() * self.world_size];
        let limit = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: the input has so many bytes, the output as many for each rank; the function is one of this type.
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
            let reason = "the caller's all-gather function does not give this rank's bytes back".into();
            return Err(Error::Rendezvous { reason });
        }
        let longest = (0..self.world_size).map(length).max().unwrap_or(0);
        // A step of the library gives a few kilobytes.
        if longest > 1 << 20 {
            let reason = format!("the caller's all-gather function says that a rank gave {longest} bytes");
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
