//! Finds the ranks in other processes whose memory this process can read, by reading a probe.
//!
//! The kernel allows `process_vm_readv(2)` under the same conditions as `ptrace`: users, namespaces, Yama's
//! `ptrace_scope`, filters of a sandbox. So each rank tries to read from every other rank once, and shares the results
//! with all. A sender relies on direct reads only with ranks whose attempt succeeded. Process ids are the credentials
//! that the kernel recorded for the sockets of each process, translated to this process's namespace.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use nix::errno::Errno;

use super::page::{page, Page};
use super::Liveness;
use crate::abi::{FaDirect, FA_LEAST_DIRECT_BYTES, FA_MAX_RANKS, MAX_RANKS};
use crate::bootstrap::Bootstrap;
use crate::error::{Error, Result};

/// Direct reads between this rank and the others: the receiver of a large message in private memory lets the kernel
/// copy it from the sender's process (`process_vm_readv`). `Display` writes a line for logs.
///
/// ```
/// use fast_allreduce::bootstrap::Threads;
/// use fast_allreduce::{Communicator, Host};
///
/// let communicator = Communicator::builder().build(Host::new(), Threads::world(1)?.remove(0))?;
/// let reads = communicator.direct_reads().unwrap();
/// assert_eq!(reads.readable().count() + reads.refused().len(), 0, "no ranks in other processes");
/// assert_eq!(reads.to_string(), "no direct reads");
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
pub struct DirectReads {
    table: Box<FaDirect>,
    /// Bit r: rank r can read from this rank.
    readers: u32,
    /// Ranks from which this rank cannot read, with the reason.
    refused: Vec<(usize, String)>,
    always: bool,
    /// Sizes in bytes of shares of an all-gather that ranks read from each other. All ranks have the same.
    shares: Range<u64>,
}

impl DirectReads {
    /// Returns the ranks whose memory this rank can read.
    pub fn readable(&self) -> impl Iterator<Item = usize> + '_ {
        (0..MAX_RANKS).filter(|&rank| self.table.process[rank] != 0)
    }

    /// Returns the ranks in other processes whose memory this rank does not read, with the reasons.
    pub fn refused(&self) -> &[(usize, String)] {
        &self.refused
    }

    /// Returns whether the shares of an all-gather, of which the largest has `bytes` bytes, are messages that ranks
    /// read from each other. The answer is the same on all ranks.
    #[inline]
    pub(crate) fn gathers(&self, bytes: u64) -> bool {
        self.shares.contains(&bytes)
    }

    /// Returns the size from which `peer` reads a message in private memory directly.
    pub(crate) fn least_bytes(&self, peer: usize) -> u64 {
        match self.readers >> peer & 1 {
            0 => u64::MAX,
            _ if self.always => 1,
            _ => FA_LEAST_DIRECT_BYTES.into(),
        }
    }

    /// Returns the address of the table for launches, which is valid while this exists.
    pub(crate) fn address(&self) -> u64 {
        std::ptr::from_ref(&*self.table) as u64
    }
}

/// Writes, for example, `direct reads from ranks 1, 2; not from rank 3: process_vm_readv: EPERM: ...`.
impl fmt::Display for DirectReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<_> = self.readable().map(|rank| rank.to_string()).collect();
        match ranks.len() {
            0 => f.write_str("no direct reads")?,
            1 => write!(f, "direct reads from rank {}", ranks[0])?,
            _ => write!(f, "direct reads from ranks {}", ranks.join(", "))?,
        }
        self.refused.iter().try_for_each(|(rank, reason)| write!(f, "; not from rank {rank}: {reason}"))
    }
}

impl fmt::Debug for DirectReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DirectReads({self})")
    }
}

impl Liveness {
    /// Tries to read from every rank in another process, and gathers which of them can read from this one. Collective.
    ///
    /// `wanted`: true uses direct reads wherever possible, false never, `None` where they are faster. `shares`:
    /// sizes of shares of an all-gather that this rank wants to be read from their ranks.
    pub fn direct_reads(
        &self,
        wanted: Option<bool>,
        shares: Range<u64>,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<DirectReads> {
        let always = wanted == Some(true);
        let (exit_futex, process) = ([0; FA_MAX_RANKS as usize], [0; FA_MAX_RANKS as usize]);
        let mut table = Box::new(FaDirect { exit_futex, process, always: always.into(), reserved: 0 });
        let (mut refused, mut readable) = (Vec::new(), 0_u32);
        for rank in (0..self.world_size).filter(|&rank| self.threads >> rank & 1 == 0) {
            let tried = match wanted {
                Some(false) => Err("direct reads are switched off".to_owned()),
                _ => self.try_to_read(rank),
            };
            match tried {
                Ok((process, exit_futex)) => {
                    (table.process[rank], table.exit_futex[rank]) = (process, exit_futex);
                    readable |= 1 << rank;
                }
                Err(reason) => refused.push((rank, reason)),
            }
        }
        let own = [readable.into(), shares.start, shares.end].map(u64::to_le_bytes).concat();
        let all = bootstrap.all_gather(&own, timeout)?;
        let (mut readers, mut shares) = (0, 0..u64::MAX);
        for (rank, theirs) in all.iter().enumerate() {
            let words: Vec<_> =
                theirs.chunks(8).map(|word| word.try_into().map(u64::from_le_bytes)).collect();
            let &[Ok(reads), Ok(start), Ok(end)] = &words[..] else {
                let reason = "its message on direct reads does not decode".to_owned();
                return Err(Error::Malformed { rank, reason });
            };
            readers |= ((reads >> self.rank & 1) as u32) << rank;
            let end = if reads.count_ones() as usize + 1 == self.world_size { end } else { 0 };
            shares = shares.start.max(start)..shares.end.min(end);
        }
        // Without direct reads, this rank neither reads nor is read.
        let readers = if wanted == Some(false) { 0 } else { readers };
        Ok(DirectReads { table, readers, refused, always, shares })
    }

    /// Reads a rank's probe. Returns its process id and the address of its exit futex if the contents are as expected.
    fn try_to_read(&self, rank: usize) -> Result<(u32, u64), String> {
        let Page { status, exit_futex, .. } = page(&self.pages, rank).ok_or("it has no page")?;
        let process = self.processes[rank].ok_or("its process is not visible in this namespace")?;
        let read =
            read_probe(process, status.read_probe()).map_err(|errno| format!("process_vm_readv: {errno}"))?;
        if read != status.process() {
            return Err(format!("the memory of process {process} does not match"));
        }
        if !exit_futex.is_held() {
            return Err("the end of its process could not be noticed".to_owned());
        }
        Ok((process, exit_futex.address()))
    }
}

/// Reads 16 bytes at an address of another process.
fn read_probe(process: u32, address: u64) -> Result<[u8; 16], Errno> {
    let mut read_probe = [0_u8; 16];
    let here = libc::iovec { iov_base: read_probe.as_mut_ptr().cast(), iov_len: read_probe.len() };
    let there = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: read_probe.len() };
    let process = libc::pid_t::try_from(process).map_err(|_| Errno::ESRCH)?;
    // SAFETY: writes only to the local buffer, within its length. The other address is one of the other process; the
    // kernel returns an error if it is not mapped there.
    let read = unsafe { libc::process_vm_readv(process, &here, 1, &there, 1, 0) };
    match usize::try_from(read) {
        Ok(read) if read == read_probe.len() => Ok(read_probe),
        Ok(_) => Err(Errno::EFAULT),
        Err(_) => Err(Errno::last()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::liveness::page::ReadProbe;

    #[test]
    fn a_process_reads_its_own_probe_and_no_other_memory() {
        let probe = ReadProbe::new(*b"what a rank says");
        let own = std::process::id();
        assert_eq!(read_probe(own, probe.address()), Ok(*b"what a rank says"));
        assert_eq!(read_probe(own, 8), Err(Errno::EFAULT));
        assert_eq!(read_probe(0x7fff_fff0, probe.address()), Err(Errno::ESRCH));
    }
}
