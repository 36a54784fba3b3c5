//! Facts about the ranks of a communicator, which they exchange when they join: which of them share a process or a
//! GPU, which links connect the GPUs, and how many blocks a launch may have.

mod identity;
mod links;
mod machine;
mod residency;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::identity::Identity;
pub(crate) use self::links::topology;
use self::links::{first_unreachable_pair, link_class};
pub(crate) use self::machine::machine_of_context;
use self::residency::{Reservation, Room, Sharers};
use crate::bootstrap::{all_succeeded, Bootstrap, OfNode};
use crate::device::sealed::cannot_return;
use crate::error::{Error, Result};
use crate::topology::LinkClass;

/// The ranks of a communicator, as this rank sees them.
#[derive(Debug)]
pub(super) struct World {
    pub same_process: bool,
    pub world_size: usize,
    /// UUID of each rank's GPU.
    gpus: Vec<[u8; 16]>,
    /// Number of ranks on the GPU with the most ranks.
    pub ranks_per_device: usize,
    /// Maximum number of blocks of a launch, for which every rank has room.
    pub blocks: usize,
    pub link: LinkClass,
    /// Whether the ranks are on more than one machine.
    pub several_nodes: bool,
    /// Two ranks and the PCI addresses of their GPUs, if one GPU cannot access the memory of the other and this
    /// process sees both.
    unreachable: Option<[(usize, String); 2]>,
    /// Reservation of these blocks on this rank's GPU.
    pub reservation: Option<Arc<Reservation>>,
}

impl Default for World {
    fn default() -> Self {
        let link = LinkClass::SameDevice;
        let (unreachable, reservation) = (None, None);
        Self {
            same_process: true,
            world_size: 1,
            gpus: Vec::new(),
            ranks_per_device: 1,
            blocks: 1,
            link,
            several_nodes: false,
            unreachable,
            reservation,
        }
    }
}

impl World {
    /// Exchanges identities and reserves blocks. Collective. `own` is this rank's identity; `most` limits the blocks
    /// of a launch.
    pub fn meet(
        own: Result<Identity>,
        most: Option<usize>,
        one_at_a_time: bool,
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<Self> {
        let own = all_succeeded(own, bootstrap, timeout)?;
        let all = bootstrap.all_gather(&own.encode(), timeout)?.into_iter().enumerate();
        let all = all.map(|(rank, bytes)| Identity::decode(rank, &bytes)).collect::<Result<Vec<_>>>()?;
        let several_nodes = !OfNode::new(bootstrap)?.is_whole_world();
        // Only a domain of NVLink switches connects GPUs of several machines, whose PCI addresses may be equal.
        let link = if several_nodes { LinkClass::NvSwitch } else { link_class(&all) };
        let on = |uuid: &[u8; 16]| all.iter().filter(|other| other.uuid == *uuid).count();
        let sharers = Sharers {
            gpu: own.uuid,
            multiprocessors: own.multiprocessors as usize,
            communicator: (all[0].process, all[0].communicator),
            ranks: on(&own.uuid),
        };
        let most = most.unwrap_or(usize::MAX);
        let (reservation, room) = match one_at_a_time {
            true => (
                None,
                Room { blocks: (sharers.multiprocessors / sharers.ranks).clamp(1, most), communicators: 0 },
            ),
            false => {
                let (reservation, room) = Reservation::take(sharers, most);
                (Some(reservation), room)
            }
        };
        // Ranks may see different parts of the machine and have different room: the worst result of any rank applies
        // to all.
        let found = Found { link: link as u8, multiprocessors: own.multiprocessors, room };
        let found = bootstrap.all_gather(&found.encode(), timeout)?.into_iter().enumerate();
        let found = found.map(|(rank, bytes)| Found::decode(rank, &bytes)).collect::<Result<Vec<_>>>()?;
        if let Some((rank, found)) = found.iter().enumerate().find(|(_, found)| found.room.blocks == 0) {
            return Err(found.refusal(rank, on(&all[rank].uuid)));
        }
        let worst = found.iter().map(|found| found.link).max().unwrap_or(link as u8);
        let link =
            LinkClass::ALL.into_iter().find(|&class| class as u8 == worst).unwrap_or(LinkClass::Unreachable);
        let blocks = found.iter().map(|found| found.room.blocks).min().unwrap_or(1);
        if let Some(reservation) = &reservation {
            reservation.keep(blocks);
        }
        Ok(Self {
            same_process: all.iter().all(|other| other.process == own.process),
            world_size: all.len(),
            gpus: all.iter().map(|other| other.uuid).collect(),
            ranks_per_device: all.iter().map(|other| on(&other.uuid)).max().unwrap_or(1),
            blocks,
            link,
            several_nodes,
            unreachable: if link == LinkClass::Unreachable { first_unreachable_pair(&all) } else { None },
            reservation,
        })
    }

    /// Exchanges identities with the ranks of a world that is formed again. Collective; in step with [`World::meet`] of
    /// new ranks. `near` are the IDs of the regions of ranks in this process. Returns whether calls that were planned
    /// and captured before are as right as they were.
    pub fn meet_again(
        &self,
        own: Result<Identity>,
        near: &[Option<u64>],
        bootstrap: &dyn Bootstrap,
        timeout: Duration,
    ) -> Result<Result<()>> {
        let own = all_succeeded(own, bootstrap, timeout)?;
        let all = bootstrap.all_gather(&own.encode(), timeout)?.into_iter().enumerate();
        let all = all.map(|(rank, bytes)| Identity::decode(rank, &bytes)).collect::<Result<Vec<_>>>()?;
        let several_nodes = !OfNode::new(bootstrap)?.is_whole_world();
        // New ranks take what this rank has, unless they have less.
        let room = Room { blocks: self.blocks, communicators: 0 };
        let found = Found { link: self.link as u8, multiprocessors: own.multiprocessors, room };
        let found = bootstrap.all_gather(&found.encode(), timeout)?.into_iter().enumerate();
        let found = found.map(|(rank, bytes)| Found::decode(rank, &bytes)).collect::<Result<Vec<_>>>()?;
        // Such a rank takes no further step.
        if let Some((rank, found)) = found.iter().enumerate().find(|(_, found)| found.room.blocks == 0) {
            return Err(found.refusal(rank, all.iter().filter(|other| other.uuid == all[rank].uuid).count()));
        }
        let is_near = |rank: usize| all[rank].process == own.process;
        let reason = (0..all.len()).find_map(|rank| match near.get(rank)? {
            Some(region) if !is_near(rank) || *region != all[rank].region => Some(format!(
                "rank {rank}, which was in this rank's process, has gone: only a rank in a process of its own can be \
                 replaced"
            )),
            None if is_near(rank) => Some(format!("rank {rank} is in this rank's process now")),
            _ => None,
        });
        let reason = reason.or_else(|| {
            found.iter().enumerate().find_map(|(rank, found)| match found {
                Found { room, .. } if room.blocks < self.blocks => {
                    let (blocks, before) = (room.blocks, self.blocks);
                    Some(format!(
                        "rank {rank}'s GPU runs {blocks} blocks at once, and calls were planned for {before}"
                    ))
                }
                Found { link, .. } if *link > self.link as u8 => Some(format!(
                    "rank {rank}'s GPU has slower links to the others than calls were planned for"
                )),
                _ => None,
            })
        });
        let shares = |gpus: &[[u8; 16]]| {
            let first = |gpu| gpus.iter().position(|other| other == gpu);
            gpus.iter().map(first).collect::<Vec<_>>()
        };
        let now: Vec<_> = all.iter().map(|other| other.uuid).collect();
        let reason = reason.or_else(|| match () {
            () if several_nodes != self.several_nodes => {
                Some("the ranks are on other machines than before".into())
            }
            () if shares(&now) != shares(&self.gpus) => {
                Some("other ranks share a GPU than before, and calls were planned for those".into())
            }
            () => None,
        });
        Ok(reason.map_or(Ok(()), |reason| Err(cannot_return(reason))))
    }

    /// Returns whether some GPU cannot access the memory of another one.
    pub fn is_unreachable(&self) -> bool {
        self.link == LinkClass::Unreachable
    }

    /// Describes why memory is unreachable, and what to do.
    pub fn why_unreachable(&self) -> String {
        let which = match &self.unreachable {
            Some([(a, of_a), (b, of_b)]) => {
                format!("rank {a}'s GPU ({of_a}) cannot access the memory of rank {b}'s ({of_b})")
            }
            None => "some rank's GPU cannot access the memory of another's".into(),
        };
        format!(
            "{which}, which calls need: there is no NVLink between them, and peer access over PCIe is not supported, \
             or disabled by the virtual machine, the IOMMU or access control services (ACS). `nvidia-smi topo -p2p r` \
             shows which pairs have it: give ranks such GPUs, or go through host memory (sharing=host, or NCCL)"
        )
    }

    /// Returns whether two ranks are on the same GPU.
    pub fn share_gpu(&self, a: usize, b: usize) -> bool {
        self.gpus.get(a) == self.gpus.get(b)
    }

    /// Returns whether every rank can use every pointer of another rank without mapping it.
    pub fn same_device_and_process(&self) -> bool {
        self.same_process && self.ranks_per_device == self.world_size
    }
}

/// Facts that a rank determines after the exchange of identities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// Code of a [`LinkClass`].
    link: u8,
    /// Number of multiprocessors of its GPU.
    multiprocessors: u32,
    room: Room,
}

impl Found {
    const BYTES: usize = 1 + 3 * 4;

    fn encode(self) -> Vec<u8> {
        let mut bytes = vec![self.link];
        // Both numbers are at most the GPU's number of multiprocessors, so they fit 32 bits.
        for word in [self.multiprocessors, self.room.blocks as u32, self.room.communicators as u32] {
            bytes.extend(word.to_le_bytes());
        }
        bytes
    }

    /// Decodes the facts that `rank` sent.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] naming `rank` if the length is wrong.
    fn decode(rank: usize, bytes: &[u8]) -> Result<Self> {
        let malformed = || Error::Malformed { rank, reason: "its facts about its GPU do not decode".into() };
        let bytes: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| malformed())?;
        let word = |index: usize| {
            let at = 1 + 4 * index;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let room = Room { blocks: word(1) as usize, communicators: word(2) as usize };
        Ok(Self { link: bytes[0], multiprocessors: word(0), room })
    }

    /// Returns the error that explains why there is no room for a communicator.
    fn refusal(self, rank: usize, ranks: usize) -> Error {
        let Self { multiprocessors, room: Room { communicators, .. }, .. } = self;
        Error::Unavailable {
            what: "a communicator whose blocks all run at the same time".into(),
            reason: format!(
                "rank {rank}'s GPU runs {multiprocessors} blocks at once, of which {communicators} communicators of \
                 its process leave fewer than the {ranks} needed; drop one of them, give each fewer blocks \
                 (Cuda::max_blocks), or promise that no two are in use at the same time (Cuda::one_at_a_time)"
            ),
        }
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_gpu_facts, |bytes| Found::decode(1, bytes));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_facts_round_trip() {
        let found = Found { link: 3, multiprocessors: 132, room: Room { blocks: 64, communicators: 9 } };
        assert_eq!(Found::decode(1, &found.encode()), Ok(found));
        for bytes in [0, Found::BYTES - 1, Found::BYTES + 1] {
            assert!(matches!(Found::decode(1, &vec![0; bytes]), Err(Error::Malformed { rank: 1, .. })));
        }
    }
}
