//! How ranks enter a world: all of them for the first time, or some again, as the ranks that they were.
//!
//! The ranks tell each other what they have of an earlier world. What all of its ranks have stays: plans, the numbers
//! of allocations, rows of the table, memory. What others may write is always new memory, so that a rank that was
//! stopped and wakes up later reaches nothing of the new world.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::abi::MAX_RANKS;
use crate::bootstrap::{agree_on, all_succeeded, Bootstrap, Lineage};
use crate::catalogue::settings::Flight;
use crate::device::Device;
use crate::endpoint::{Connection, Membership, MemoryFacts, Region};
use crate::error::{Error, Result};
use crate::liveness::{DirectReads, Liveness, LivenessSetup};
use crate::plan::{Costs, Nvls, Table};
use crate::region::{Layout, FIRST_GRAPH_ROW};

/// What a rank needs to enter a world again, besides its device.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    /// What must be equal on all ranks.
    pub facts: Vec<(&'static str, String)>,
    pub layout: Layout,
    pub table: Table,
    pub direct_reads: Option<bool>,
    /// Sizes in bytes of shares of an all-gather that ranks read from each other's processes.
    pub shares_read: Range<u64>,
    pub flight: Flight,
    pub last_epoch: u32,
    pub timeout: Duration,
}

/// The fact that has the plan, as in the text of errors.
pub(super) const PLAN: &str = "the plan";

/// What a rank brings into a world.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Role {
    /// Collective calls that it has completed; `None` for a new rank.
    pub completed: Option<u64>,
    /// What it has of the world that is formed again; `None` for a new rank.
    pub member: Option<Member>,
}

/// What a rank has of an earlier world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Member {
    pub world: u64,
    /// Mask of the ranks that keep their places; 0 if the program did not say.
    pub survivors: u32,
    /// Number of rows in the table.
    pub rows: u64,
    pub allocations: u64,
    pub memories: Vec<MemoryFacts>,
    pub world_ranks: Vec<usize>,
}

/// [`Role`] as it is encoded, with the rank's plan.
type Encoded = (Option<u64>, Option<EncodedMember>, String);
type EncodedMember = (u64, u32, u64, u64, Vec<(u64, u64, Option<u64>)>, Vec<u32>);

impl Member {
    /// Returns whether its table has the rows of its memory. New ranks write to these rows.
    fn has_its_rows(&self) -> bool {
        let mut rows = self.memories.iter().filter_map(|memory| memory.row);
        self.rows <= FIRST_GRAPH_ROW as u64 && rows.all(|row| row < self.rows)
    }
}

impl Role {
    fn encode(&self, plan: &str) -> Vec<u8> {
        let member = self.member.as_ref().map(|member| {
            let memories = member.memories.iter();
            let memories = memories.map(|memory| (memory.number, memory.bytes, memory.row)).collect();
            let world_ranks = member.world_ranks.iter().map(|&rank| rank as u32).collect();
            (member.world, member.survivors, member.rows, member.allocations, memories, world_ranks)
        });
        let encoded: Encoded = (self.completed, member, plan.to_owned());
        // This cannot fail: the vector grows, and postcard can encode all of these types.
        postcard::to_allocvec(&encoded).unwrap_or_default()
    }

    fn decode(bytes: &[u8]) -> Option<(Self, String)> {
        let (completed, member, plan): Encoded = postcard::from_bytes(bytes).ok()?;
        let member = member.map(|(world, survivors, rows, allocations, memories, world_ranks)| {
            let memory = |(number, bytes, row)| MemoryFacts { number, bytes, row };
            let memories = memories.into_iter().map(memory).collect();
            let world_ranks = world_ranks.into_iter().map(|rank| rank as usize).collect();
            Member { world, survivors, rows, allocations, memories, world_ranks }
        });
        Some((Self { completed, member }, plan))
    }
}

/// What all ranks bring into a world, equal on all of them.
#[derive(Debug)]
pub(super) struct Roles {
    roles: Vec<Role>,
    /// The plans that the ranks propose: of a world that is formed again the first member's, for all.
    pub plans: Vec<Vec<u8>>,
}

impl Roles {
    /// Exchanges what the ranks bring. Collective.
    ///
    /// # Errors
    ///
    /// On all ranks alike, if they do not fit together.
    pub fn exchange(role: &Role, plan: &str, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self> {
        let gathered = bootstrap.all_gather(&role.encode(plan), timeout)?;
        let (mut roles, mut plans) = (Vec::new(), Vec::new());
        for (rank, bytes) in gathered.iter().enumerate() {
            let (role, plan) = Role::decode(bytes).ok_or_else(|| Error::Malformed {
                rank,
                reason: "what it brings into the world does not decode".into(),
            })?;
            if role.member.as_ref().is_some_and(|member| !member.has_its_rows()) {
                let reason = "it has memory in a row that is not in its table".into();
                return Err(Error::Malformed { rank, reason });
            }
            roles.push(role);
            plans.push(plan.into_bytes());
        }
        if let Some(first) = roles.iter().position(|role| role.member.is_some()) {
            check(&roles, first)?;
            let plan = plans[first].clone();
            plans.fill(plan);
        }
        Ok(Self { roles, plans })
    }

    /// Returns the first rank that enters again; `None` in a new world.
    pub fn first(&self) -> Option<&Member> {
        self.members().next().map(|(_, member)| member)
    }

    fn members(&self) -> impl Iterator<Item = (usize, &Member)> {
        self.roles.iter().enumerate().filter_map(|(rank, role)| Some((rank, role.member.as_ref()?)))
    }

    /// Returns the number of rows and of allocations of the member that has most: a step may have failed on some of
    /// them alone.
    pub fn most(&self) -> (usize, u64) {
        let most = |of: fn(&Member) -> u64| self.members().map(|(_, member)| of(member)).max().unwrap_or(0);
        // At most `FIRST_GRAPH_ROW`.
        (most(|member| member.rows) as usize, most(|member| member.allocations))
    }

    /// Returns the mask of the ranks that are new in a world that is formed again.
    pub fn new_ranks(&self) -> u32 {
        let is_new = |role: &Role| u32::from(role.member.is_none());
        self.roles.iter().enumerate().fold(0, |mask, (rank, role)| mask | is_new(role) << rank)
    }

    /// Returns the memory that all members have, in the order of allocation. It stays.
    pub fn kept(&self) -> Vec<MemoryFacts> {
        let Some(first) = self.first() else { return Vec::new() };
        let is_everywhere =
            |memory: &&MemoryFacts| self.members().all(|(_, member)| member.memories.contains(memory));
        let mut kept: Vec<_> = first.memories.iter().filter(is_everywhere).copied().collect();
        kept.sort_unstable_by_key(|memory| memory.number);
        kept.dedup_by_key(|memory| memory.number);
        kept
    }

    pub fn progress(&self) -> Progress {
        let of_rank: Vec<_> = self.roles.iter().map(|role| role.completed).collect();
        Progress { completed: of_rank.iter().flatten().copied().min().unwrap_or(0), of_rank }
    }
}

/// Checks that the ranks of a world that is formed again fit together.
fn check(roles: &[Role], first: usize) -> Result<()> {
    let members: Vec<_> = roles.iter().map(|role| role.member.as_ref()).collect();
    let Some(of_first) = members[first] else { return Ok(()) };
    let survivors = members.iter().flatten().map(|member| member.survivors).find(|&mask| mask != 0);
    for (rank, member) in members.iter().enumerate() {
        let is_listed = survivors.map(|mask| mask >> rank & 1 == 1);
        let disagreement =
            |what, theirs, ours| Err(Error::Disagreement { what, rank, theirs, own_rank: first, ours });
        match member {
            Some(member) if member.world != of_first.world => {
                let name = |member: &Member| format!("{:x}", member.world);
                return disagreement("the world that it was in", name(member), name(of_first));
            }
            Some(member) if member.survivors != 0 && Some(member.survivors) != survivors => {
                let ours = listed(survivors.unwrap_or_default());
                return disagreement("the survivors", listed(member.survivors), ours);
            }
            Some(_) if is_listed == Some(false) => {
                return Err(Error::Refused {
                    reason: format!("rank {rank} is of the world, but the survivors go on without it"),
                });
            }
            None if is_listed == Some(true) => {
                return Err(Error::Refused {
                    reason: format!("a new process has joined as rank {rank}, which is a survivor"),
                });
            }
            _ => {}
        }
    }
    Ok(())
}

fn listed(mask: u32) -> String {
    format!("{:?}", (0..MAX_RANKS).filter(|rank| mask >> rank & 1 == 1).collect::<Vec<_>>())
}

/// How far the ranks of a communicator had come when it was formed: see
/// [`Communicator::join`](super::Communicator::join).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Number of collective calls that every rank of the earlier world had completed. The program repeats from the
    /// next one, and all ranks count on from here. On GPUs it is 0, as their calls are enqueued and not counted.
    pub completed: u64,
    /// The number of each rank; `None` for one that is new.
    pub of_rank: Vec<Option<u64>>,
}

/// What a rank has of a world that has formed.
pub(super) struct Formed<D: Device> {
    pub lineage: Arc<Lineage>,
    pub liveness: Liveness,
    pub region: Arc<Region<D>>,
    pub direct_reads: Option<Arc<DirectReads>>,
    /// Measured, if that was asked for and possible.
    pub costs: Option<Costs>,
    pub nvls: Nvls,
    pub nvls_refused: Option<Error>,
}

impl<D: Device> Formed<D> {
    pub fn membership(self, connection: Connection<D>) -> Membership<D> {
        let Self { lineage, liveness, region, direct_reads, .. } = self;
        Membership { liveness, direct_reads, failed: OnceLock::new(), lineage, region, connection }
    }
}

/// Compares the facts, and exchanges what the ranks bring. Collective.
pub(super) fn compare(
    facts: &[(&'static str, String)],
    role: &Role,
    plan: Result<String>,
    bootstrap: &dyn Bootstrap,
    timeout: Duration,
) -> Result<Roles> {
    let mut facts = facts.to_vec();
    facts.push((PLAN, plan.as_ref().map_or_else(|error| format!("none ({error})"), |_| "one".into())));
    let agreed = agree_on(bootstrap, &facts, timeout);
    // A rank without a plan fails after the comparison, so that the others learn its reason.
    let plan = plan?;
    agreed?;
    Roles::exchange(role, &plan, bootstrap, timeout)
}

/// Whether a world is formed for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Forming {
    New {
        may_calibrate: bool,
    },
    /// The ranks wait for each other to go on: each page of a region is zeroed when it is first touched.
    Again,
}

/// Forms a world: its secrets, its liveness and its regions. Collective.
pub(super) fn form<D: Device>(
    device: &D,
    connection: &Connection<D>,
    terms: &Terms,
    forming: Forming,
    nvls: Nvls,
) -> Result<Formed<D>> {
    let (bootstrap, timeout, layout) = (&*connection.bootstrap, terms.timeout, terms.layout);
    let lineage = Lineage::establish(bootstrap, timeout)?;
    let liveness_setup = LivenessSetup::exchange(lineage.id(), bootstrap, timeout)?;
    connection.set_close_reports(liveness_setup.close_reports());
    let memory = match forming {
        Forming::New { .. } => device.share(layout.total_bytes, bootstrap, timeout)?,
        Forming::Again => device.share_for_return(layout.total_bytes, bootstrap, timeout)?,
    };
    let costs = match forming {
        Forming::New { may_calibrate: true } => {
            device.costs(&memory, layout.staging_offset, layout.staging_bytes, bootstrap, timeout)?
        }
        _ => None,
    };
    let windows = windows(device, nvls, 2 * layout.staging_bytes, bootstrap, timeout)?;
    let nvls = if windows.is_ok() { nvls } else { Nvls::Never };
    let (windows, nvls_refused) = match windows {
        Ok(windows) => (Some(windows), None),
        Err(reason) => (None, Some(reason)),
    };
    let region = Region::new(device, layout, terms.last_epoch, memory, windows, bootstrap.rank());
    let made = region.and_then(|region| {
        let region = Arc::new(region);
        if let Forming::New { .. } = forming {
            region.begin()?;
        }
        let [watched, looked] = [&region; 2].map(Arc::clone);
        let (on_gone, waits) = (move |rank| watched.set_gone(rank), move || looked.waits());
        let liveness = liveness_setup.watch(terms.flight, on_gone, waits)?;
        Ok((liveness, region))
    });
    // No rank launches before all have set their epochs. If one could not, no rank gets a membership.
    let (liveness, region) = all_succeeded(made, bootstrap, timeout)?;
    let direct_reads = match D::READS_DIRECTLY {
        true => Some(Arc::new(liveness.direct_reads(
            terms.direct_reads,
            terms.shares_read.clone(),
            bootstrap,
            timeout,
        )?)),
        false => None,
    };
    Ok(Formed { lineage: Arc::new(lineage), liveness, region, direct_reads, costs, nvls, nvls_refused })
}

/// Returns windows of `bytes` bytes, or the reason why there are none. Fails if they are required. Collective.
fn windows<D: Device>(
    device: &D,
    nvls: Nvls,
    bytes: usize,
    bootstrap: &dyn Bootstrap,
    timeout: Duration,
) -> Result<Result<D::Windows>> {
    if matches!(nvls, Nvls::Never) {
        return Ok(Err(Error::Unavailable {
            what: "NVLS (in-switch reduction)".into(),
            reason: "it is not requested, or not expected to be faster: see Order::Any".into(),
        }));
    }
    match device.share_windows(bytes, bootstrap, timeout) {
        // The bootstrap has failed.
        Err(error @ (Error::Timeout { .. } | Error::PeerLost { .. } | Error::Rendezvous { .. })) => {
            Err(error)
        }
        // Any other error is known to all ranks.
        Err(error) if matches!(nvls, Nvls::Always(_)) => Err(error),
        windows => Ok(windows),
    }
}

/// Shares memory of an earlier world with the ranks of the new one, in the same order on all of them, and begins the
/// use of the region in place of that of `before`. An error says whether it can still be undone. Collective.
pub(super) fn share_kept<D: Device>(
    device: &D,
    connection: &Connection<D>,
    region: &Region<D>,
    before: Option<&Region<D>>,
    kept: &[(MemoryFacts, Arc<D::Shared>)],
) -> std::result::Result<(), (Error, HasBegun)> {
    let (bootstrap, timeout) = (&*connection.bootstrap, connection.timeout);
    let memories: Vec<_> = kept.iter().map(|(_, memory)| Arc::clone(memory)).collect();
    let prepared = device.share_again(&memories, bootstrap, timeout);
    // From here on no kernel of the earlier world runs on any rank, and every rank has what it needs.
    let prepared = prepared.and_then(|map| device.wait_for_calls().map(|()| map));
    let map = connection.all_succeeded(prepared).map_err(|error| (error, HasBegun(false)))?;
    let begin = || {
        before.into_iter().for_each(Region::end);
        region.begin()
    };
    let mapped = begin().and_then(|()| map()).and_then(|()| {
        use crate::device::sealed::Shared as _;
        kept.iter().filter_map(|(facts, memory)| Some((facts.row?, memory))).try_for_each(
            |(row, memory)| {
                let bases = std::array::from_fn(|rank| memory.address(rank));
                // A row of an earlier table: `Roles::exchange` has checked it.
                region.write_row(device, row as usize, &bases)
            },
        )?;
        device.own_rows().iter().try_for_each(|(row, bases)| region.write_row(device, *row, bases))
    });
    connection.all_succeeded(mapped).map_err(|error| (error, HasBegun(true)))
}

/// Whether mappings of the earlier world may have been replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HasBegun(pub bool);

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_role, |bytes| {
    if let Some((role, plan)) = Role::decode(bytes) {
        let again = Role::decode(&role.encode(&plan));
        assert_eq!(again, Some((role, plan)), "it is not encoded as it was decoded");
    }
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::Threads;

    fn role(rows: u64, allocations: u64, row: u64) -> Role {
        let memories = vec![MemoryFacts { number: 0, bytes: 4, row: Some(row) }];
        let (world, survivors, world_ranks) = (1, 0b11, Vec::new());
        let member = Member { world, survivors, rows, allocations, memories, world_ranks };
        Role { completed: Some(allocations), member: Some(member) }
    }

    #[test]
    fn memory_in_a_row_that_does_not_exist_is_refused() {
        let exchanged = |role: &Role| {
            let alone = Threads::world(1).unwrap().remove(0);
            Roles::exchange(role, "", &alone, Duration::from_secs(20)).map(drop)
        };
        assert_eq!(exchanged(&role(2, 5, 1)), Ok(()));
        for refused in [role(2, 5, 2), role(2, 5, u64::MAX), role(u64::MAX, 5, 1 << 40)] {
            let error = exchanged(&refused).unwrap_err();
            assert!(matches!(error, Error::Malformed { rank: 0, .. }), "{error}");
        }
    }

    /// A step that failed on some ranks alone has left them with different tables.
    #[test]
    fn the_longest_table_counts() {
        let roles = Roles { roles: vec![role(2, 7, 1), role(3, 6, 1), Role::default()], plans: Vec::new() };
        assert_eq!(check(&roles.roles, 0), Ok(()));
        assert_eq!((roles.most(), roles.kept().len(), roles.new_ranks()), ((3, 7), 1, 0b100));
    }
}
