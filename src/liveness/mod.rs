//! Liveness: what each rank is doing (for error messages), whether it has left (so that nobody waits for it), and whether it has
//! closed its mappings of the others' memory (so that they may free it).
//!
//! A rank leaves when its communicator is closed or has failed, and when its process ends. Peers notice in about a millisecond and
//! mark it as gone in their status; a kernel gives up only if it waits for *that* rank, and has looked once more after it saw the
//! mark. A rank that is done with its last call and leaves therefore disturbs nobody. One that fails takes along those who wait
//! for it, with the cause: who waits for a rank that itself waited for a third names the third.

mod closing;
mod direct;
mod farewell;
mod life;
mod page;
mod status_page;
mod watch;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub(crate) use self::closing::{Closings, Mappings, Word};
pub use self::direct::DirectReads;
pub(crate) use self::farewell::Farewell;
use self::page::{own_status, page, status, Page, ReadProbe};
use self::status_page::{Activity, Cause, ExitRecord, StatusPage};
use self::watch::{Event, Watched, Watcher};
use crate::abi::{FaCall, MAX_RANKS};
use crate::bootstrap::{all_succeeded, exchange_several, process_identity, Bootstrap, Notices};
use crate::call::CallId;
use crate::deadline::Deadline;
use crate::device::host::SharedMemory;
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::thread;

/// How long a rank whose time is up waits to hear whether a rank in the same call gives up as well, and why.
const GRACE: Duration = Duration::from_millis(100);

/// What this rank shows the others of itself, and knows of them.
#[derive(Debug)]
pub(crate) struct Liveness {
    pages: Arc<SharedMemory>,
    rank: usize,
    world_size: usize,
    threads: u32,
    /// The end of the connection that is shut down when this rank leaves.
    here: Mutex<Option<OwnedFd>>,
    watcher: Option<Watcher>,
    /// Of the ranks, by what the kernel has noted of the sockets that they made.
    processes: [Option<u32>; MAX_RANKS],
    /// For peers to read.
    _probe: ReadProbe,
    /// Ranks whose processes have ended, a bit for each.
    ended: Arc<AtomicU32>,
    origin: Origin,
}

/// What is exchanged before the watcher can start, which wants the communicator's status.
pub(crate) struct Arrivals {
    pages: Arc<SharedMemory>,
    rank: usize,
    world_size: usize,
    threads: u32,
    here: OwnedFd,
    watched: Vec<Watched>,
    probe: ReadProbe,
}

impl Arrivals {
    /// Shows this rank to all others, and them to it. Collective.
    pub fn exchange(bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self> {
        let rank = bootstrap.rank();
        let identity = process_identity();
        let pages = identity.and_then(|identity| Ok((SharedMemory::allocate(size_of::<Page>())?, identity)));
        let (mut pages, identity) = all_succeeded(pages, bootstrap, timeout)?;
        let probe = ReadProbe::new(identity);
        own_status(&pages).set_process(&identity, probe.address());
        all_succeeded(pages.map_peers(bootstrap, timeout), bootstrap, timeout)?;

        let (gone, here) = all_succeeded(watch::connection(), bootstrap, timeout)?;
        let process = watch::own_process();
        let own: Vec<_> =
            std::iter::once(&gone).chain(&process).map(|descriptor| descriptor.as_fd()).collect();
        let received = all_succeeded(exchange_several(bootstrap, &own, 1..=2, timeout), bootstrap, timeout)?;
        let peers = received.into_iter().enumerate().filter(|(peer, _)| *peer != rank);
        let is_here =
            |peer| peer == rank || status(&pages, peer).is_some_and(|status| status.process() == identity);
        let threads =
            (0..bootstrap.world_size()).fold(0, |mask, peer| mask | u32::from(is_here(peer)) << peer);
        let watched = peers.map(|(peer, descriptors)| {
            let is_here = is_here(peer);
            let mut descriptors = descriptors.into_iter();
            let connection = descriptors.next();
            // A rank of this process ends with it.
            let process = descriptors.next().filter(|_| !is_here).map(Arc::new);
            Watched { rank: peer, connection, look: !is_here && process.is_none(), process }
        });
        let (watched, world_size) = (watched.collect(), bootstrap.world_size());
        Ok(Self { watched, threads, pages: Arc::new(pages), rank, world_size, here, probe })
    }

    /// By which the ranks tell each other that they have closed their mappings.
    pub fn closings(&self) -> Closings {
        let processes =
            self.watched.iter().filter_map(|peer| Some((peer.rank, Arc::clone(peer.process.as_ref()?))));
        let pages = Arc::clone(&self.pages);
        Closings::new(pages, self.rank, self.world_size, self.threads, processes.collect())
    }

    /// Calls `gone` from a thread with each rank that leaves, after all that it has sent; maybe twice.
    pub fn watch(self, gone: impl Fn(usize) + Send + 'static) -> Result<Liveness> {
        let Self { pages, rank, world_size, threads, here, watched, probe: _probe } = self;
        let ended = Arc::new(AtomicU32::new(0));
        let mut processes = [None; MAX_RANKS];
        for Watched { rank, connection, .. } in &watched {
            processes[*rank] = connection.as_ref().and_then(|connection| watch::maker(connection.as_fd()));
        }
        let (seen, marks) = (Arc::clone(&pages), Arc::clone(&ended));
        let tell = move |rank: usize, what| {
            // A connection that closes without an exit record has been closed by the kernel.
            let silent = status(&seen, rank).is_none_or(|status| status.exit_record().is_none());
            if silent || what == Event::ProcessEnded {
                marks.fetch_or(1 << rank, Ordering::Relaxed);
            }
            gone(rank);
        };
        let watcher =
            (!watched.is_empty()).then(|| Watcher::start(Arc::clone(&pages), watched, tell)).transpose()?;
        let here = Mutex::new(Some(here));
        let origin = Origin::here();
        Ok(Liveness { pages, rank, world_size, threads, here, watcher, processes, _probe, ended, origin })
    }
}

impl Liveness {
    /// Whether this process is a fork of the one that is the rank.
    pub fn is_elsewhere(&self) -> bool {
        self.origin.is_elsewhere()
    }

    /// Ranks that are threads of this process, a bit for each, this one too.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// Whether a rank's process runs, its device works and it has not closed its communicator, as far as this rank has noticed.
    pub fn is_left(&self, rank: usize) -> bool {
        let is_absent = status(&self.pages, rank).is_some_and(StatusPage::is_absent);
        !is_absent && self.ended.load(Ordering::Relaxed) >> rank & 1 == 0
    }

    /// Where a rank tells which meetings it serves.
    pub fn notices(&self, rank: usize) -> Option<&Notices> {
        page(&self.pages, rank).map(|page| &page.notices)
    }

    /// Shows that a call begins, and returns its number.
    pub fn begin(&self, call: FaCall) -> u64 {
        own_status(&self.pages).begin(call)
    }

    /// Shows that it is over.
    pub fn end(&self) {
        own_status(&self.pages).end();
    }

    /// The call that began last went into a graph.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the host has no graphs"))]
    pub fn capture(&self) {
        own_status(&self.pages).capture();
    }

    /// The call that this rank is in, in words.
    pub fn call(&self) -> String {
        CallId::describe(own_status(&self.pages).activity().call)
    }

    /// The call that another rank made last, in words.
    pub fn call_of(&self, rank: usize) -> String {
        status(&self.pages, rank)
            .map_or_else(|| "none".into(), |status| CallId::describe(status.activity().call))
    }

    /// Why a rank has left, as far as it has said.
    pub fn reason_of(&self, rank: usize) -> Option<String> {
        status(&self.pages, rank).and_then(StatusPage::exit_record).map(|record| record.text)
    }

    /// What a rank has failed with; `None` if it has only closed its communicator, or said nothing.
    pub fn failure_of(&self, rank: usize) -> Option<Error> {
        let record = status(&self.pages, rank).and_then(StatusPage::exit_record)?;
        match record.cause {
            Cause::Closed => None,
            Cause::TimedOut => Some(Error::PeerFailed { rank, reason: record.text }),
            Cause::Lost | Cause::Failed => Some(self.lost(rank, "a step", 0, Duration::ZERO)),
        }
    }

    /// The name of this rank's call.
    pub fn operation(&self) -> &'static str {
        let call = CallId::decode(own_status(&self.pages).activity().call);
        call.map_or("a call", |call| call.kind.name())
    }

    /// Calls that this rank has begun.
    pub fn calls(&self) -> u64 {
        own_status(&self.pages).activity().begun
    }

    /// This rank takes part in no later world.
    pub fn set_absent(&self) {
        own_status(&self.pages).set_absent();
    }

    /// Ranks that have begun fewer calls than this one.
    pub fn behind(&self) -> Vec<usize> {
        let own = self.calls();
        let is_behind =
            |rank: &usize| status(&self.pages, *rank).is_some_and(|status| status.activity().begun < own);
        (0..self.world_size).filter(|rank| *rank != self.rank).filter(is_behind).collect()
    }

    /// Tells all others that this rank has failed and will send nothing more. Later exit records are not heard.
    pub fn fail(&self, error: &Error) {
        let mask = |ranks: &[usize]| ranks.iter().fold(0, |mask, rank| mask | 1 << rank);
        let (cause, ranks) = match error {
            Error::PeerLost { rank, .. } => (Cause::Lost, mask(&[*rank])),
            Error::Timeout { missing, .. } => (Cause::TimedOut, mask(missing)),
            // In the words of the rank that failed, which whoever hears of it from this one is told as well.
            Error::PeerFailed { rank, reason } => {
                return self.leave(&ExitRecord {
                    cause: Cause::Failed,
                    ranks: mask(&[*rank]),
                    text: reason.clone(),
                });
            }
            _ => (Cause::Failed, 0),
        };
        self.leave(&ExitRecord { cause, ranks, text: error.to_string() });
    }

    /// Before it is dropped while calls of this rank may still run: kernels of the others do not hear of its end yet. `None`: they
    /// have heard of another.
    pub fn postpone(&self) -> Option<Farewell> {
        self.set_absent();
        let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
        here.take().map(|here| Farewell::new(Arc::clone(&self.pages), here))
    }

    fn leave(&self, exit_record: &ExitRecord) {
        let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = here.take() {
            farewell::leave(&self.pages, &connection, exit_record);
        }
    }

    /// The error for a kernel that gave up because `rank` has gone.
    pub fn lost(&self, rank: usize, operation: &'static str, epoch: u32, waited: Duration) -> Error {
        let Some(status) = status(&self.pages, rank) else {
            return Error::PeerLost { rank, reason: "it was never here".into() };
        };
        let activity = tell(status.activity());
        let Some(ExitRecord { cause, ranks, text }) = status.exit_record() else {
            let how = if status.is_absent() { CLOSED_EARLY } else { "its process ended" };
            return Error::PeerLost { rank, reason: format!("{how}; it {activity}") };
        };
        let ranks = self.ranks(ranks);
        match (cause, ranks.first()) {
            (Cause::Closed, _) => {
                Error::PeerLost { rank, reason: format!("it closed its communicator; it {activity}") }
            }
            // What that rank lost, this one has lost as well.
            (Cause::Lost, Some(&lost)) if lost != self.rank => {
                Error::PeerLost { rank: lost, reason: format!("rank {rank} found: {text}") }
            }
            (Cause::Failed, Some(&failed)) if failed != self.rank => {
                Error::PeerFailed { rank: failed, reason: text }
            }
            (Cause::TimedOut, Some(_)) if !ranks.contains(&self.rank) => {
                let last_seen = self.last_seen(&ranks);
                Error::Timeout { operation, epoch, missing: ranks, waited, last_seen }
            }
            _ => Error::PeerFailed { rank, reason: text },
        }
    }

    /// The error for a kernel whose time was up, waiting for `missing`. A rank that is in a call itself waits for
    /// another: it is heard out.
    pub fn timed_out(
        &self,
        missing: Vec<usize>,
        operation: &'static str,
        epoch: u32,
        waited: Duration,
    ) -> Error {
        let own = own_status(&self.pages).activity();
        let waits_itself = |rank: &usize| {
            let Some(theirs) = status(&self.pages, *rank).map(StatusPage::activity) else { return false };
            // One that came back from this call failed, and says so next: else it would have sent what this rank waits for. One in
            // another call waits as well: messages are calls of some ranks only, and not all ranks end a call at once.
            !theirs.captured && (theirs.begun == own.begun || theirs.ended < theirs.begun)
        };
        let heard_out = missing.iter().copied().filter(waits_itself).collect::<Vec<_>>();
        let is_absent = |rank: &usize| !heard_out.contains(rank);
        let mut absent: Vec<usize> = missing.iter().copied().filter(is_absent).collect();
        // One that has come back hears out another itself, for as long.
        let deadline = Deadline::after(2 * GRACE);
        let has_come_back = |rank: usize| {
            let activity = status(&self.pages, rank).map(StatusPage::activity);
            activity.is_some_and(|activity| activity.begun == own.begun && activity.ended == activity.begun)
        };
        for rank in heard_out {
            loop {
                // Asked before looking, so that the last look comes after the limit.
                let heard = deadline.waited();
                match status(&self.pages, rank).and_then(StatusPage::exit_record) {
                    Some(ExitRecord { cause: Cause::TimedOut, ranks, .. }) => {
                        absent.extend(self.ranks(ranks).into_iter().filter(|&rank| rank != self.rank));
                        break;
                    }
                    // Its own reason is the better one.
                    Some(ExitRecord { cause: Cause::Lost, .. }) => {
                        return self.lost(rank, operation, epoch, waited);
                    }
                    Some(_) => break,
                    None if heard >= if has_come_back(rank) { 2 * GRACE } else { GRACE } => break,
                    None => thread::pause(Duration::from_millis(1)),
                }
            }
        }
        absent.sort_unstable();
        absent.dedup();
        let missing = if absent.is_empty() { missing } else { absent };
        let last_seen = self.last_seen(&missing);
        Error::Timeout { operation, epoch, missing, waited, last_seen }
    }

    /// The ranks in a mask that a peer wrote.
    fn ranks(&self, mask: u32) -> Vec<usize> {
        (0..self.world_size).filter(|rank| mask >> rank & 1 == 1).collect()
    }

    /// What ranks were last seen doing, in words.
    fn last_seen(&self, ranks: &[usize]) -> String {
        let tell = |rank: &usize| {
            let status = status(&self.pages, *rank)?;
            let activity = tell(status.activity());
            Some(match status.is_absent() && status.exit_record().is_none() {
                true => format!("rank {rank} {activity}, and {CLOSED_EARLY}"),
                false => format!("rank {rank} {activity}"),
            })
        };
        ranks.iter().filter_map(tell).collect::<Vec<_>>().join(", ")
    }
}

/// What a rank did that is absent and has left no exit record.
const CLOSED_EARLY: &str = "it closed its communicator during a capture, when its calls may still have run";

/// "is in call 7, all_reduce of ...".
fn tell(Activity { begun, ended, captured, call }: Activity) -> String {
    match begun {
        0 => "has made no call".into(),
        _ if captured => format!("captured call {begun}, {}, into a graph", CallId::describe(call)),
        _ if ended < begun => format!("is in call {begun}, {}", CallId::describe(call)),
        _ => format!("came back from call {begun}, {}", CallId::describe(call)),
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        if self.is_elsewhere() {
            // The rank lives on in the parent, and the thread with it.
            if let Some(watcher) = &mut self.watcher {
                watcher.forget();
            }
            return;
        }
        // Also where it has left before, by a failure.
        self.set_absent();
        self.leave(&ExitRecord::closed());
    }
}
