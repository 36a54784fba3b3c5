//! Which ranks in other processes have memory that this process may read: found by reading some.
//!
//! The kernel decides by what `ptrace` would be allowed (`process_vm_readv(2)`): users, namespaces, Yama's `ptrace_scope`, a sandbox's
//! filter. So each rank tries once for each other, and tells all what came of it; a rank is not asked for what it did not read then.
//! The ids of processes are those that the kernel has noted of the sockets which they made, as this process's namespace has them.

use std::fmt;
use std::time::Duration;

use nix::errno::Errno;

use super::page::{page, Page};
use super::Liveness;
use crate::abi::{FaDirect, FA_LEAST_DIRECT_BYTES, FA_MAX_RANKS, MAX_RANKS};
use crate::bootstrap::Bootstrap;
use crate::error::{Error, Result};

/// Direct reads between a rank and the others: large messages in private memory that the receiver has the kernel copy from the
/// sender's process. Displays as a line for logs.
pub struct DirectReads {
    table: Box<FaDirect>,
    /// Bit r: rank r reads what this one sends.
    readers: u32,
    /// Why this rank does not read another's.
    refused: Vec<(usize, String)>,
    always: bool,
}

impl DirectReads {
    /// Ranks whose memory this rank can read.
    pub fn readable(&self) -> impl Iterator<Item = usize> + '_ {
        (0..MAX_RANKS).filter(|&rank| self.table.process[rank] != 0)
    }

    /// Ranks in other processes whose memory this rank does not read, with the reason.
    pub fn refused(&self) -> &[(usize, String)] {
        &self.refused
    }

    /// Bytes of the least message in private memory that `peer` can read directly.
    pub(crate) fn least_bytes(&self, peer: usize) -> u64 {
        match self.readers >> peer & 1 {
            0 => u64::MAX,
            _ if self.always => 1,
            _ => FA_LEAST_DIRECT_BYTES.into(),
        }
    }

    /// For launches; valid for the life of self.
    pub(crate) fn address(&self) -> u64 {
        std::ptr::from_ref(&*self.table) as u64
    }
}

/// `"direct reads from ranks 1, 2; not from rank 3: process_vm_readv: EPERM: Operation not permitted"`.
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
    /// Tries to read every rank in another process, and hears who can read this one. `wanted`: whether messages are read so
    /// wherever that works, or never; else where it is faster. Collective.
    pub fn direct_reads(
        &self,
        wanted: Option<bool>,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<DirectReads> {
        let always = wanted == Some(true);
        let (life, process) = ([0; FA_MAX_RANKS as usize], [0; FA_MAX_RANKS as usize]);
        let mut table = Box::new(FaDirect { exit_futex: life, process, always: always.into(), reserved: 0 });
        let (mut refused, mut readable) = (Vec::new(), 0_u32);
        for rank in (0..self.world_size).filter(|&rank| self.threads >> rank & 1 == 0) {
            let tried = match wanted {
                Some(false) => Err("it is switched off".to_owned()),
                _ => self.try_to_read(rank),
            };
            match tried {
                Ok((process, life)) => {
                    (table.process[rank], table.exit_futex[rank]) = (process, life);
                    readable |= 1 << rank;
                }
                Err(reason) => refused.push((rank, reason)),
            }
        }
        let all = bootstrap.all_gather(&readable.to_le_bytes(), timeout)?;
        let mut readers = 0;
        for (rank, theirs) in all.iter().enumerate() {
            let theirs = theirs.as_slice().try_into().map(u32::from_le_bytes).map_err(|_| {
                let reason = "what it says of direct reads does not decode".to_owned();
                Error::Malformed { rank, reason }
            })?;
            readers |= (theirs >> self.rank & 1) << rank;
        }
        // It would be refused here; a rank that does not read is not read either.
        let readers = if wanted == Some(false) { 0 } else { readers };
        Ok(DirectReads { table, readers, refused, always })
    }

    /// The process of a rank and the address of its life, if what is read in the one is what the rank says is there.
    fn try_to_read(&self, rank: usize) -> Result<(u32, u64), String> {
        let Page { status, life, .. } = page(&self.pages, rank).ok_or("it has no page")?;
        let process = self.processes[rank].ok_or("its process is in no namespace that this one sees")?;
        let read =
            read_probe(process, status.probe()).map_err(|errno| format!("process_vm_readv: {errno}"))?;
        if read != status.process() {
            return Err(format!("process {process} has other memory"));
        }
        if !life.is_held() {
            return Err("nothing would tell that its process has ended".to_owned());
        }
        Ok((process, life.address()))
    }
}

/// Reads the [`ReadProbe`](crate::liveness::page::ReadProbe) of another process at `address`.
fn read_probe(process: u32, address: u64) -> Result<[u8; 16], Errno> {
    let mut probe = [0_u8; 16];
    let here = libc::iovec { iov_base: probe.as_mut_ptr().cast(), iov_len: probe.len() };
    let there = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: probe.len() };
    let process = libc::pid_t::try_from(process).map_err(|_| Errno::ESRCH)?;
    // SAFETY: writes to `probe` alone, which is as long as it says; the other address is the other process's, and the kernel
    // refuses one that is not mapped there.
    let read = unsafe { libc::process_vm_readv(process, &here, 1, &there, 1, 0) };
    match usize::try_from(read) {
        Ok(read) if read == probe.len() => Ok(probe),
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
