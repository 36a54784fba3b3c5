//! Liveness: what each rank is doing (for error messages), whether it has left (so that nobody waits for it), and
//! whether it has closed its mappings of the others' memory (so that they may free it).
//!
//! A rank leaves when its communicator is closed or fails, and when its process ends. Peers notice it within about a
//! millisecond and mark the rank as gone in their own status. A kernel gives up only if it waits for *that* rank, and
//! only after it has checked for the awaited signal once more after it saw the mark. So a rank that leaves after its
//! last call disturbs nobody. If a rank fails, the ranks that wait for it fail as well, with the original cause: if
//! rank 0 waits for rank 1, which was waiting for rank 2, the error of rank 0 names rank 2.

mod close_report;
mod deferred_exit;
mod direct;
mod exit_futex;
mod findings;
mod flight;
mod inspect;
mod metrics;
mod page;
mod record;
mod record_file;
mod recorder;
mod status_page;
mod totals;
mod watch;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub(crate) use self::close_report::{CloseReport, CloseReports, PeerMappings};
pub(crate) use self::deferred_exit::DeferredExit;
pub use self::direct::DirectReads;
pub(crate) use self::flight::Waits;
use self::flight::{Activity, FlightPage};
pub use self::inspect::{of_directory, of_process};
pub use self::metrics::metrics;
pub(crate) use self::metrics::write;
use self::page::{flight, own_page, own_status, page, status, ReadProbe};
pub use self::record::{CallTotals, FlightRecord, RankRecord, RankState, RecordedCall, UnreadRank};
use self::record_file::RecordFile;
use self::recorder::Recorder;
use self::status_page::{Cause, ExitRecord, StatusPage};
use self::watch::{Event, Watched, Watcher};
use crate::abi::{FaCall, MAX_RANKS};
use crate::bootstrap::{
    all_exchanged, all_succeeded, exchange_several, process_identity, Announcements, Bootstrap, OfNode,
};
use crate::call::CallId;
use crate::catalogue::settings::Flight;
use crate::deadline::Deadline;
use crate::descriptor::pidfd;
use crate::device::host::SharedMemory;
use crate::error::{Error, Result};
use crate::fork::ForkCheck;
use crate::thread;

/// How long a rank waits, after its timeout, for the exit record of another rank in the same call, which names the
/// cause.
const GRACE: Duration = Duration::from_millis(100);

/// This rank's published status, and its knowledge of the other ranks.
#[derive(Debug)]
pub(crate) struct Liveness {
    pages: Arc<SharedMemory>,
    rank: usize,
    world_size: usize,
    /// Mask of the ranks that are threads of this process, including this rank.
    threads: u32,
    /// The end of the connection that this rank shuts down when it leaves; `None` after that.
    own_end: Mutex<Option<OwnedFd>>,
    watcher: Mutex<Option<Watcher>>,
    recorder: Recorder,
    record_file: RecordFile,
    /// Process ids by rank, from the socket credentials that the kernel recorded.
    processes: [Option<u32>; MAX_RANKS],
    /// Stays allocated for peers that read it.
    _read_probe: ReadProbe,
    /// Mask of the ranks whose processes have ended.
    ended: Arc<AtomicU32>,
    fork_check: ForkCheck,
}

/// Liveness before its watcher runs. The watcher needs the communicator's status, which is created later.
pub(crate) struct LivenessSetup {
    pages: Arc<SharedMemory>,
    rank: usize,
    world_size: usize,
    threads: u32,
    own_end: OwnedFd,
    watched: Vec<Watched>,
    read_probe: ReadProbe,
    record_file: RecordFile,
}

impl LivenessSetup {
    /// Exchanges status pages, connections and pidfds with all ranks. Collective.
    /// `world` is the world's identity, equal on all ranks.
    pub fn exchange(world: u64, bootstrap: &dyn Bootstrap, timeout: Duration) -> Result<Self> {
        let rank = bootstrap.rank();
        let identity = process_identity();
        let pages = identity.and_then(|identity| Ok((RecordFile::create(world, rank)?, identity)));
        let ((mut pages, record_file), identity) = all_succeeded(pages, bootstrap, timeout)?;
        let read_probe = ReadProbe::new(identity);
        own_page(&pages).header.set(world, rank, bootstrap.world_size());
        own_status(&pages).set_process(&identity, read_probe.address());
        // Memory and descriptors are shared within a node. Ranks on other nodes are not watched.
        let node = OfNode::new(bootstrap)?;
        let of_world = |error| node.in_world_ranks(error);
        all_exchanged(pages.map_peers(&node, timeout / 2).map_err(of_world), bootstrap, timeout)?;
        pages.set_members(node.members.clone());

        let (gone, own_end) = all_succeeded(watch::connection(), bootstrap, timeout)?;
        let process = pidfd(std::process::id());
        let own: Vec<_> =
            std::iter::once(&gone).chain(&process).map(|descriptor| descriptor.as_fd()).collect();
        let received = exchange_several(&node, &own, 1..=2, timeout / 2).map_err(of_world);
        let received = all_exchanged(received, bootstrap, timeout)?;
        let peers = node.members.iter().copied().zip(received).filter(|(peer, _)| *peer != rank);
        let in_this_process =
            |peer| peer == rank || status(&pages, peer).is_some_and(|status| status.process() == identity);
        let threads =
            (0..bootstrap.world_size()).fold(0, |mask, peer| mask | u32::from(in_this_process(peer)) << peer);
        let watched = peers.map(|(peer, descriptors)| {
            let in_this_process = in_this_process(peer);
            let mut descriptors = descriptors.into_iter();
            let connection = descriptors.next();
            // A rank in this process needs no pidfd: it ends with this process.
            let process = descriptors.next().filter(|_| !in_this_process).map(Arc::new);
            Watched { rank: peer, connection, is_polled: !in_this_process && process.is_none(), process }
        });
        let (watched, world_size) = (watched.collect(), bootstrap.world_size());
        Ok(Self {
            watched,
            threads,
            pages: Arc::new(pages),
            rank,
            world_size,
            own_end,
            read_probe,
            record_file,
        })
    }

    /// Returns the reports by which ranks announce that they have closed their mappings.
    pub fn close_reports(&self) -> CloseReports {
        let processes =
            self.watched.iter().filter_map(|peer| Some((peer.rank, Arc::clone(peer.process.as_ref()?))));
        let pages = Arc::clone(&self.pages);
        CloseReports::new(pages, self.rank, self.world_size, self.threads, processes.collect())
    }

    /// Starts the watcher. Its thread calls `on_gone` with each rank that leaves, after everything that the rank has
    /// sent, possibly twice, and publishes about once a second what `waits` returns.
    pub fn watch(
        self,
        level: Flight,
        on_gone: impl Fn(usize) + Send + 'static,
        waits: impl Fn() -> Waits + Send + 'static,
    ) -> Result<Liveness> {
        let Self { pages, rank, world_size, threads, own_end, watched, read_probe: _read_probe, record_file } =
            self;
        let ended = Arc::new(AtomicU32::new(0));
        let mut processes = [None; MAX_RANKS];
        for Watched { rank, connection, .. } in &watched {
            processes[*rank] = connection.as_ref().and_then(|connection| watch::creator(connection.as_fd()));
            own_page(&pages).header.set_peer(*rank, processes[*rank].unwrap_or(0));
        }
        let (seen, marks) = (Arc::clone(&pages), Arc::clone(&ended));
        let on_event = move |rank: usize, event| {
            // A connection that closes without an exit record was closed by the kernel.
            let has_no_record = status(&seen, rank).is_none_or(|status| status.exit_record().is_none());
            if has_no_record || event == Event::ProcessEnded {
                marks.fetch_or(1 << rank, Ordering::Relaxed);
            }
            on_gone(rank);
        };
        let looked = Arc::clone(&pages);
        let look = move || {
            let flight = &own_page(&looked).flight;
            flight.set_waits(&waits());
            flight.look(recorder::now());
        };
        let watcher = (!watched.is_empty())
            .then(|| Watcher::start(Arc::clone(&pages), watched, on_event, look))
            .transpose()?;
        let own_end = Mutex::new(Some(own_end));
        let fork_check = ForkCheck::new();
        Ok(Liveness {
            pages,
            rank,
            world_size,
            threads,
            own_end,
            watcher: Mutex::new(watcher),
            recorder: Recorder::new(level),
            record_file,
            processes,
            _read_probe,
            ended,
            fork_check,
        })
    }
}

impl Liveness {
    /// Returns whether this process is a fork of the rank's process.
    pub fn in_fork(&self) -> bool {
        self.fork_check.in_fork()
    }

    /// Returns the mask of the ranks that are threads of this process, including this rank.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// Returns whether, as far as this rank knows, a rank's process runs, its device works, and its communicator is
    /// open or suspended.
    pub fn is_present(&self, rank: usize) -> bool {
        let is_absent = status(&self.pages, rank).is_some_and(StatusPage::is_absent);
        !is_absent && self.ended.load(Ordering::Relaxed) >> rank & 1 == 0
    }

    /// Returns whether a rank is present and has not suspended its communicator.
    pub fn is_in_world(&self, rank: usize) -> bool {
        self.is_present(rank) && !status(&self.pages, rank).is_some_and(StatusPage::is_away)
    }

    /// Returns the rendezvous that a rank announces.
    pub fn announcements(&self, rank: usize) -> Option<&Announcements> {
        page(&self.pages, rank).map(|page| &page.announcements)
    }

    /// Publishes that a call begins, and returns its number.
    pub fn begin(&self, call: FaCall) -> u64 {
        self.recorder.begin(&own_page(&self.pages).flight, call)
    }

    /// Publishes the waits so far.
    pub fn set_waits(&self, waits: &Waits) {
        own_page(&self.pages).flight.set_waits(waits);
    }

    /// Counts a call that has been carried out.
    pub fn count(&self, what: u64, bytes: u64) {
        self.recorder.count(&own_page(&self.pages).flight, what, bytes);
    }

    /// Publishes that the call has ended. `slow` is `FaStatus.slow`; `waits` returns the waits so far.
    pub fn end(&self, slow: u32, waits: impl FnOnce() -> Waits) {
        self.recorder.end(&own_page(&self.pages).flight, slow, waits);
    }

    /// Publishes that the latest call was captured into a graph.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the host has no graphs"))]
    pub fn capture(&self) {
        own_page(&self.pages).flight.capture();
    }

    /// Returns what this rank is doing.
    fn activity(&self) -> Activity {
        own_page(&self.pages).flight.activity()
    }

    /// Returns what a rank is doing.
    fn activity_of(&self, rank: usize) -> Option<Activity> {
        flight(&self.pages, rank).map(FlightPage::activity)
    }

    /// Describes this rank's latest call.
    pub fn call(&self) -> String {
        CallId::describe(self.activity().call)
    }

    /// Describes the latest call of a rank.
    pub fn call_of(&self, rank: usize) -> String {
        self.activity_of(rank).map_or_else(|| "none".into(), |activity| CallId::describe(activity.call))
    }

    /// Returns the text of a rank's exit record, if it has one.
    pub fn reason_of(&self, rank: usize) -> Option<String> {
        status(&self.pages, rank).and_then(StatusPage::exit_record).map(|record| record.text)
    }

    /// Returns the failure in a rank's exit record; `None` if the rank only closed its communicator, or has no record.
    pub fn failure_of(&self, rank: usize) -> Option<Error> {
        let record = status(&self.pages, rank).and_then(StatusPage::exit_record)?;
        match record.cause {
            Cause::Closed => None,
            Cause::TimedOut => Some(Error::PeerFailed { rank, reason: record.text }),
            Cause::Lost | Cause::Failed => Some(self.lost(rank, "a step", 0, Duration::ZERO)),
        }
    }

    /// Returns the name of this rank's latest call.
    pub fn operation(&self) -> &'static str {
        let call = CallId::decode(self.activity().call);
        call.map_or("a call", |call| call.kind.name())
    }

    /// Returns the number of calls that this rank has begun.
    pub fn calls(&self) -> u64 {
        own_page(&self.pages).flight.begun()
    }

    /// Publishes that this rank takes part in no later world.
    pub fn set_absent(&self) {
        own_status(&self.pages).set_absent();
    }

    /// Returns the ranks that have begun fewer calls than this rank.
    pub fn behind(&self) -> Vec<usize> {
        let own = self.calls();
        let is_behind = |rank: &usize| flight(&self.pages, *rank).is_some_and(|flight| flight.begun() < own);
        (0..self.world_size).filter(|rank| *rank != self.rank).filter(is_behind).collect()
    }

    /// Publishes that this rank has failed and sends nothing more. Only the first exit record of a rank counts.
    pub fn fail(&self, error: &Error) {
        let mask = |ranks: &[usize]| ranks.iter().fold(0, |mask, rank| mask | 1 << rank);
        let (cause, ranks) = match error {
            Error::PeerLost { rank, .. } => (Cause::Lost, mask(&[*rank])),
            Error::Timeout { missing, .. } => (Cause::TimedOut, mask(missing)),
            // Pass on the text of the rank that failed first.
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

    /// Holds the exit of this rank back until its calls have ended; the kernels of other ranks do not see it earlier.
    /// Must be called before this is dropped. Returns `None` if the rank has already left.
    pub fn defer_exit(&self) -> Option<DeferredExit> {
        self.set_absent();
        let mut own_end = self.own_end.lock().unwrap_or_else(PoisonError::into_inner);
        own_end.take().map(|own_end| DeferredExit::new(Arc::clone(&self.pages), own_end))
    }

    /// Publishes that this rank has left for now, which is a failure for ranks that wait for it. Its record file goes,
    /// as after a close.
    pub fn leave_for_now(&self, reason: &str) {
        own_status(&self.pages).set_away();
        self.leave(&ExitRecord { cause: Cause::Failed, ranks: 0, text: reason.to_owned() });
        self.record_file.leave(true);
    }

    fn leave(&self, exit_record: &ExitRecord) {
        let mut own_end = self.own_end.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = own_end.take() {
            self.record_file.leave(exit_record.cause == Cause::Closed);
            deferred_exit::leave(&self.pages, &connection, exit_record);
        }
    }

    /// Returns the error for a kernel that gave up because `rank` has gone.
    pub fn lost(&self, rank: usize, operation: &'static str, epoch: u32, waited: Duration) -> Error {
        let Some(status) = status(&self.pages, rank) else {
            return Error::PeerLost { rank, reason: "it is on another node, which is not watched".into() };
        };
        let activity = self.describe(rank);
        let Some(ExitRecord { cause, ranks, text }) = status.exit_record() else {
            let how = if status.is_absent() { CLOSED_EARLY } else { "its process ended" };
            return Error::PeerLost { rank, reason: format!("{how}; it {activity}") };
        };
        let ranks = self.ranks(ranks);
        match (cause, ranks.first()) {
            (Cause::Closed, _) => {
                Error::PeerLost { rank, reason: format!("it closed its communicator; it {activity}") }
            }
            // A rank that the peer has lost is lost for this rank as well.
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

    /// Returns the error for a kernel that timed out while it waited for `missing`.
    ///
    /// A missing rank that has gone is the cause, even if another one was waited for. One that is in a call is itself
    /// waiting for another rank: so this waits for its exit record, which names that rank.
    pub fn timed_out(
        &self,
        missing: Vec<usize>,
        operation: &'static str,
        epoch: u32,
        waited: Duration,
    ) -> Error {
        // On a GPU, blocks that share a row wait for each other.
        if missing.is_empty() {
            let last_seen = "a block waited for other blocks of this rank, which may have had no room".into();
            return Error::Timeout { operation, epoch, missing: vec![self.rank], waited, last_seen };
        }
        if let Some(&gone) = missing.iter().find(|&&rank| !self.is_in_world(rank)) {
            return self.lost(gone, operation, epoch, waited);
        }
        let own = self.activity();
        let waits_itself = |rank: &usize| {
            let Some(theirs) = self.activity_of(*rank) else { return false };
            // A rank that has returned from this call has failed in it, and writes its exit record next: otherwise it
            // would have sent its signal. A rank in another call may be waiting as well: messages are calls of some
            // ranks only, and ranks do not end a call at the same time.
            !theirs.captured && (theirs.begun == own.begun || theirs.ended < theirs.begun)
        };
        let waiting = missing.iter().copied().filter(waits_itself).collect::<Vec<_>>();
        let is_absent = |rank: &usize| !waiting.contains(rank);
        let mut absent: Vec<usize> = missing.iter().copied().filter(is_absent).collect();
        // A rank that has returned from the call may itself wait for another's record, for the same time.
        let deadline = Deadline::after(2 * GRACE);
        let has_returned = |rank: usize| {
            let activity = self.activity_of(rank);
            activity.is_some_and(|activity| activity.begun == own.begun && activity.ended == activity.begun)
        };
        for rank in waiting {
            loop {
                // The time is read first, so that the last check comes after the limit.
                let waited_here = deadline.waited();
                match status(&self.pages, rank).and_then(StatusPage::exit_record) {
                    Some(ExitRecord { cause: Cause::TimedOut, ranks, .. }) => {
                        absent.extend(self.ranks(ranks).into_iter().filter(|&rank| rank != self.rank));
                        break;
                    }
                    // Its error names the cause more precisely.
                    Some(ExitRecord { cause: Cause::Lost, .. }) => {
                        return self.lost(rank, operation, epoch, waited);
                    }
                    Some(_) => break,
                    None if waited_here >= if has_returned(rank) { 2 * GRACE } else { GRACE } => break,
                    None => thread::pause(Duration::from_millis(1)),
                }
            }
        }
        absent.sort_unstable();
        absent.dedup();
        let missing = if absent.is_empty() { missing } else { absent };
        let mut last_seen = self.last_seen(&missing);
        // The kernel did not wait for them, but the call may need them.
        for gone in (0..self.world_size).filter(|&rank| rank != self.rank && !self.is_in_world(rank)) {
            last_seen += if last_seen.is_empty() { "" } else { "; " };
            last_seen += &format!("rank {gone} has gone");
        }
        Error::Timeout { operation, epoch, missing, waited, last_seen }
    }

    /// Returns the ranks in a mask that a peer wrote.
    fn ranks(&self, mask: u32) -> Vec<usize> {
        (0..self.world_size).filter(|rank| mask >> rank & 1 == 1).collect()
    }

    /// Describes what the ranks were doing last.
    fn last_seen(&self, ranks: &[usize]) -> String {
        let describe = |rank: &usize| {
            let status = status(&self.pages, *rank)?;
            let activity = self.describe(*rank);
            Some(match status.is_absent() && status.exit_record().is_none() {
                true => format!("rank {rank} {activity}, and {CLOSED_EARLY}"),
                false => format!("rank {rank} {activity}"),
            })
        };
        ranks.iter().filter_map(describe).collect::<Vec<_>>().join(", ")
    }

    /// Describes what a rank is doing, for example "is 3 calls behind, in call 7, all_reduce of ...".
    fn describe(&self, rank: usize) -> String {
        let Some(Activity { begun, ended, captured, call, waiting }) = self.activity_of(rank) else {
            return "has no flight record".into();
        };
        let waiting: Vec<_> =
            self.ranks(waiting).iter().map(|rank| format!(", waiting for rank {rank}")).collect();
        let call = CallId::describe(call);
        let (captures, is_in, returned) = (
            format!("captured call {begun}, {call}, into a graph"),
            format!("in call {begun}, {call}{}", waiting.concat()),
            format!("returned from call {begun}, {call}"),
        );
        let behind = match self.calls().saturating_sub(begun) {
            0 => None,
            1 => Some("is 1 call behind".to_owned()),
            calls => Some(format!("is {calls} calls behind")),
        };
        match (begun, behind) {
            (0, _) => "has made no call".into(),
            (_, None) if captured => captures,
            (_, None) if ended < begun => format!("is {is_in}"),
            (_, None) => returned,
            (_, Some(behind)) if captured => format!("{behind}: it {captures}"),
            (_, Some(behind)) if ended < begun => format!("{behind}, {is_in}"),
            (_, Some(behind)) => format!("{behind}: it {returned}"),
        }
    }
}

/// Text for a rank that is absent without an exit record.
const CLOSED_EARLY: &str =
    "it closed its communicator during a capture, while its calls may still have been running";

impl Liveness {
    /// Publishes that this rank has closed its communicator, and stops the watcher. Does nothing the second time.
    pub fn close(&self) {
        if self.in_fork() {
            // The rank and its watcher still run in the parent, where another thread may have held the lock.
            if let Some(mut watcher) = self.watcher.try_lock().ok().and_then(|mut watcher| watcher.take()) {
                watcher.forget();
            }
            return;
        }
        // Even if the rank has already left because of a failure, but not after `leave_for_now`.
        if !own_status(&self.pages).is_away() {
            self.set_absent();
        }
        self.leave(&ExitRecord::closed());
        let watcher = self.watcher.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Its thread needs no lock of this one.
        drop(watcher);
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        self.close();
    }
}
