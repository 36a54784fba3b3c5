//! Memory that is shared again, with other peers, at the addresses that it has.

use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nix::fcntl::{fcntl, FcntlArg};

use super::{file, map_peer, Mapping, Populate, SharedMemory};
use crate::bootstrap::{exchange_several, Bootstrap};
use crate::descriptor::above_streams;
use crate::error::{Error, Result};

impl SharedMemory {
    /// Passes the descriptors of memories to all ranks, which pass those of theirs in the same order. Returns a
    /// function that moves the peers' parts to the addresses where they were before. Collective.
    pub(crate) fn share_again<'a>(
        memories: &'a [Arc<Self>],
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<impl FnOnce() -> Result<()> + use<'a>> {
        /// Descriptors that are received at a time: fewer than one message can carry, and than programs may have.
        const MOST: usize = 128;
        let (mut mapped, mut failure) = (Vec::new(), None);
        for memories in memories.chunks((MOST / bootstrap.world_size()).max(1)) {
            let kept: Vec<_> = memories.iter().map(|memory| memory.kept()).collect();
            let descriptors: Vec<_> = kept.iter().filter_map(|kept| Some(kept.as_ref()?.0.as_fd())).collect();
            let count = memories.len();
            let by_rank = exchange_several(bootstrap, &descriptors, count..=count, timeout)?;
            for (rank, descriptors) in by_rank.into_iter().enumerate() {
                for (memory, descriptor) in memories.iter().zip(descriptors) {
                    let Some(Some(place)) = memory.peers.get(rank) else { continue };
                    match map_peer(rank, &descriptor, memory.own.length, file::check, Populate::Now) {
                        Ok(mapping) => mapped.push((place, mapping)),
                        // The other descriptors are exchanged all the same, as the other ranks expect.
                        Err(error) => _ = failure.get_or_insert(error),
                    }
                }
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        Ok(move || {
            for (place, mapping) in mapped {
                mapping.replace(place).map_err(Error::system("mremap of a peer's memory"))?;
            }
            memories.iter().try_for_each(|memory| memory.set_shared())
        })
    }

    /// Notes that the peers have mapped what this rank's part is now.
    fn set_shared(&self) -> Result<()> {
        if let Some(kept) = &*self.kept() {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            if spare.is_none() {
                *spare = Some(Mapping::inaccessible(&kept.0, self.own.length)?);
            }
            self.private.store(false, Ordering::Relaxed);
            self.closed.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Replaces this rank's part by a copy in new memory that no peer has, and that can be shared again.
    pub(super) fn renew(&self) -> std::result::Result<(), String> {
        /// Larger parts become private copy-on-write memory: that takes no time, but cannot be shared again.
        const MOST_BYTES: usize = 16 << 20;
        let length = self.own.length;
        let mut kept = self.kept();
        if kept.take().is_none() || length.get() > MOST_BYTES {
            return Err("it is not copied".into());
        }
        let descriptor = file::create(length.get(), c"fast-allreduce")?;
        let copy = Mapping::of(&descriptor, length, Populate::Now).map_err(|error| error.to_string())?;
        let (from, to) = (self.own.address.as_ptr(), copy.address.as_ptr());
        // SAFETY: both are mappings of that length, which do not overlap. Nobody writes this rank's part meanwhile, as
        // `make_private` requires.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(from.cast(), length.get()) };
        copy.replace(&self.own).map_err(|errno| errno.to_string())?;
        *kept = KeptDescriptor::of(&descriptor);
        Ok(())
    }
}

/// Descriptor of memory that can be shared again. Only a limited number is kept, since programs have limits.
#[derive(Debug)]
pub(super) struct KeptDescriptor(OwnedFd);

static KEPT: AtomicUsize = AtomicUsize::new(0);

impl KeptDescriptor {
    /// Keeps a duplicate, if there are not too many.
    pub fn of(descriptor: &OwnedFd) -> Option<Self> {
        /// For a process; a program usually may have 1024 descriptors.
        const MOST: usize = 256;
        // Relaxed: only the number counts.
        if KEPT.fetch_add(1, Ordering::Relaxed) >= MOST {
            KEPT.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let kept = above_streams(|| fcntl(descriptor, FcntlArg::F_DUPFD_CLOEXEC(0)).map(owned));
        if kept.is_err() {
            KEPT.fetch_sub(1, Ordering::Relaxed);
        }
        kept.ok().map(Self)
    }
}

impl Drop for KeptDescriptor {
    fn drop(&mut self) {
        KEPT.fetch_sub(1, Ordering::Relaxed);
    }
}

fn owned(descriptor: RawFd) -> OwnedFd {
    // SAFETY: `fcntl` has just opened it, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}
