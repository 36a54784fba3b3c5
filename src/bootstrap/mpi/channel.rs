//! A duplicate of an MPI communicator, and nonblocking messages on it.
//!
//! A thin layer over MPI's calls: every handle is owned, every return code is checked, and a buffer lives as long as
//! MPI may access it.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ::mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};

use super::library::{check, lock, never_finalize, MpiLock};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// Most bytes of a segment. A message is sent as segments of this length and a shorter one.
///
/// Open MPI sends up to 64 KiB with its own header at once, over TCP. Of a longer message it first asks for the
/// receiver's memory, which takes two more delays, and about twice the time of the processors.
pub(super) const SEGMENT_BYTES: usize = 65_000;

/// An intracommunicator that only this crate uses. MPI returns errors on it instead of aborting.
///
/// Only point-to-point messages are used: they never block, they show which rank is missing, and a subset of ranks
/// needs no separate communicator for them.
pub(super) struct Channel {
    communicator: MPI_Comm,
    /// The ranks of the communicator that belong to this channel, in the channel's order.
    members: Vec<usize>,
    /// Index of this rank in `members`.
    rank: usize,
    /// Messages of a subset have other tags than those of all ranks.
    is_subset: bool,
    /// Peers may still send on the communicator after this rank has left.
    is_abandoned: bool,
}

// SAFETY: an MPI handle is a number or an address that MPI looks up, and belongs to no thread. It is used only with an
// `MpiLock`, in a thread that may call MPI while no other thread does.
unsafe impl Send for Channel {}
// SAFETY: as for `Send`; besides, a shared channel only returns numbers.
unsafe impl Sync for Channel {}

impl Channel {
    /// Duplicates the caller's communicator. Collective, with a time limit.
    ///
    /// # Safety
    ///
    /// `original` is a valid communicator.
    pub(super) unsafe fn duplicate(original: MPI_Comm, deadline: &Deadline<'_>) -> Result<Self> {
        // On the heap, and leaked if this function returns early: MPI may write the handle later.
        // SAFETY: reads a constant of MPI.
        let communicator = Box::into_raw(Box::new(unsafe { ffi::RSMPI_COMM_NULL }));
        let mut request = {
            let _lock = lock()?;
            let mut is_inter: c_int = 0;
            // SAFETY: the caller guarantees that the communicator is valid; the flag outlives the call.
            check("MPI_Comm_test_inter", unsafe { ffi::MPI_Comm_test_inter(original, &mut is_inter) })?;
            if is_inter != 0 {
                return Err(Error::InvalidSetting {
                    name: "communicator",
                    value: "an intercommunicator".into(),
                    expected: "an intracommunicator",
                });
            }
            // SAFETY: reads a constant of MPI.
            let request = unsafe { ffi::RSMPI_REQUEST_NULL };
            let mut request = Request(request);
            // SAFETY: the communicator is valid; the memory for the new handle is not freed before the request has
            // completed.
            check("MPI_Comm_idup", unsafe { ffi::MPI_Comm_idup(original, communicator, &mut request.0) })?;
            request
        };
        let mut pause = Pause::short();
        loop {
            // The deadline is checked first, so that the last test comes after the limit.
            let is_late = deadline.has_passed();
            if request.has_completed(&lock()?)? {
                break;
            }
            if is_late {
                let _lock = lock()?;
                // SAFETY: the caller guarantees that the communicator is valid.
                let (rank, size) = unsafe { rank_and_size(original) }?;
                return Err(Error::Timeout {
                    operation: "MPI_Comm_idup",
                    epoch: 0,
                    missing: (0..size).filter(|&other| other != rank).collect(),
                    waited: deadline.waited(),
                    last_seen: "MPI does not report which of them are missing".into(),
                });
            }
            pause.take();
        }
        // SAFETY: the request has completed, so that MPI has written the handle and no longer accesses the box.
        let communicator = unsafe { *Box::from_raw(communicator) };
        Self::own(communicator, &lock()?)
    }

    /// Restricts the channel to these ranks, in this order; this rank is one of them. Other disjoint subsets may work
    /// at the same time. Messages of a subset have their own tags, so that it does not receive leftover messages of
    /// all ranks.
    ///
    /// It creates no communicator: MPI's calls that create one for a subset of ranks block while a rank is missing.
    pub(super) fn subset(mut self, members: Vec<usize>) -> Self {
        debug_assert!(members.contains(&self.rank()) && !self.is_subset);
        self.rank = members.iter().position(|&member| member == self.rank()).unwrap_or(0);
        (self.members, self.is_subset) = (members, true);
        self
    }

    fn own(communicator: MPI_Comm, _: &MpiLock) -> Result<Self> {
        // SAFETY: the communicator has just been created.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(communicator, ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code)?;
        // SAFETY: the communicator has just been created.
        let (rank, size) = unsafe { rank_and_size(communicator) }?;
        let members = (0..size).collect();
        Ok(Self { communicator, members, rank, is_subset: false, is_abandoned: false })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    fn tag(&self, tag: Tag) -> c_int {
        2 * c_int::from(self.is_subset) + tag as c_int
    }

    /// Leaves the communicator allocated when the channel is dropped, since peers may still send on it.
    pub(super) fn abandon(&mut self) {
        self.is_abandoned = true;
    }

    /// Starts to send a message of at least one byte, in segments.
    pub(super) fn send(&self, peer: usize, tag: Tag, bytes: &Arc<Vec<u8>>, _: &MpiLock) -> Result<Sending> {
        let mut sending = Sending { requests: Vec::new(), _bytes: Arc::clone(bytes) };
        for segment in bytes.chunks(SEGMENT_BYTES) {
            // SAFETY: reads a constant of MPI.
            let mut request = Request(unsafe { ffi::RSMPI_REQUEST_NULL });
            // SAFETY: the bytes stay allocated and unchanged until the request has completed: see `Sending`.
            check("MPI_Isend", unsafe {
                ffi::MPI_Isend(
                    segment.as_ptr().cast(),
                    segment.len() as c_int,
                    ffi::RSMPI_UINT8_T,
                    self.members[peer] as c_int,
                    self.tag(tag),
                    self.communicator,
                    &mut request.0,
                )
            })?;
            sending.requests.push(request);
        }
        Ok(sending)
    }

    /// Returns the sender and the length of a segment that has arrived, at least partly, and is not being received.
    pub(super) fn arrived(
        &self,
        peer: Option<usize>,
        tag: Tag,
        _: &MpiLock,
    ) -> Result<Option<(usize, usize)>> {
        // SAFETY: reads a constant of MPI; a status consists of numbers, for which zeros are valid.
        let (any, mut status) = unsafe { (ffi::RSMPI_ANY_SOURCE, std::mem::zeroed::<MPI_Status>()) };
        let source = peer.map_or(any, |peer| self.members[peer] as c_int);
        let (mut flag, mut count): (c_int, c_int) = (0, 0);
        // SAFETY: the communicator belongs to this channel; flag and status outlive the call.
        let code =
            unsafe { ffi::MPI_Iprobe(source, self.tag(tag), self.communicator, &mut flag, &mut status) };
        check("MPI_Iprobe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        // SAFETY: the probe has filled the status.
        check("MPI_Get_count", unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) })?;
        let number = |number: c_int| usize::try_from(number).unwrap_or(usize::MAX);
        let sender = number(status.MPI_SOURCE);
        // Only members use the channel's tags.
        let sender = self.members.iter().position(|&member| member == sender);
        Ok(sender.map(|sender| (sender, number(count))))
    }

    /// Starts to receive the segments of a message that become the bytes of this range of `bytes`, which is made longer
    /// if necessary.
    pub(super) fn receive(
        &self,
        peer: usize,
        tag: Tag,
        mut bytes: Vec<u8>,
        range: Range<usize>,
        _: &MpiLock,
    ) -> Result<Receiving> {
        bytes.resize(bytes.len().max(range.end), 0);
        let mut receiving = Receiving { requests: Vec::new(), bytes };
        for segment in receiving.bytes[range].chunks_mut(SEGMENT_BYTES) {
            // SAFETY: reads a constant of MPI.
            let mut request = Request(unsafe { ffi::RSMPI_REQUEST_NULL });
            // SAFETY: the segment is neither moved nor freed until the request has completed: see `Receiving`.
            check("MPI_Irecv", unsafe {
                ffi::MPI_Irecv(
                    segment.as_mut_ptr().cast(),
                    segment.len() as c_int,
                    ffi::RSMPI_UINT8_T,
                    self.members[peer] as c_int,
                    self.tag(tag),
                    self.communicator,
                    &mut request.0,
                )
            })?;
            receiving.requests.push(request);
        }
        Ok(receiving)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // In a thread that must not call MPI, the communicator stays allocated until MPI ends.
        if let (false, Ok(_lock)) = (self.is_abandoned, lock()) {
            // SAFETY: the communicator belongs to this channel, and is not used again.
            unsafe { ffi::MPI_Comm_free(&mut self.communicator) };
        }
    }
}

/// Purpose of a message. Messages with the same tag from one rank arrive in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    /// A rank's message in an exchange.
    Part,
    /// The reason why a rank has given up.
    Notice,
}

/// A request: an MPI operation that has been started.
struct Request(MPI_Request);

impl Request {
    /// Lets MPI make progress, and returns whether the operation has completed. If so, MPI no longer accesses its
    /// buffers.
    fn has_completed(&mut self, _: &MpiLock) -> Result<bool> {
        let mut flag: c_int = 0;
        // SAFETY: this owns the request; after completion it is null, for which the test succeeds. MPI_STATUS_IGNORE is
        // allowed in place of a status.
        check("MPI_Test", unsafe { ffi::MPI_Test(&mut self.0, &mut flag, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(flag != 0)
    }

    fn is_under_way(&self) -> bool {
        // SAFETY: reads a constant of MPI.
        self.0 != unsafe { ffi::RSMPI_REQUEST_NULL }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.is_under_way() {
            never_finalize();
        }
    }
}

/// Tests requests from the last to the first, and removes those that have completed. Returns whether all have.
fn have_completed(requests: &mut Vec<Request>, lock: &MpiLock) -> Result<bool> {
    while let Some(request) = requests.last_mut() {
        if !request.has_completed(lock)? {
            return Ok(false);
        }
        requests.pop();
    }
    Ok(true)
}

/// A message that is being sent. If this is dropped before completion, the bytes stay allocated until the process ends.
pub(super) struct Sending {
    requests: Vec<Request>,
    _bytes: Arc<Vec<u8>>,
}

impl Sending {
    pub(super) fn has_completed(&mut self, lock: &MpiLock) -> Result<bool> {
        have_completed(&mut self.requests, lock)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if self.requests.iter().any(Request::is_under_way) {
            std::mem::forget(Arc::clone(&self._bytes));
        }
    }
}

/// A message that is being received. If this is dropped before completion, the buffer stays allocated until the process
/// ends.
pub(super) struct Receiving {
    requests: Vec<Request>,
    bytes: Vec<u8>,
}

impl Receiving {
    /// Returns the bytes once all segments have arrived completely.
    pub(super) fn take(&mut self, lock: &MpiLock) -> Result<Option<Vec<u8>>> {
        Ok(have_completed(&mut self.requests, lock)?.then(|| std::mem::take(&mut self.bytes)))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if self.requests.iter().any(Request::is_under_way) {
            std::mem::forget(std::mem::take(&mut self.bytes));
        }
    }
}

/// Pauses between two calls of MPI: at first yields, later sleeps, so that other processes get the core.
pub(super) struct Pause {
    started: Instant,
    busy: Duration,
}

impl Pause {
    /// Sleeps soon: for waits in which latency does not matter.
    pub(super) fn short() -> Self {
        Self::after(Duration::from_micros(100))
    }

    /// Only yields during the first `busy`: MPI makes progress only while it is called.
    pub(super) fn after(busy: Duration) -> Self {
        Self { started: Instant::now(), busy }
    }

    pub(super) fn take(&mut self) {
        if self.started.elapsed() < self.busy {
            thread::yield_now();
        } else {
            crate::thread::pause(Duration::from_micros(200));
        }
    }
}

/// Returns the rank and the size.
///
/// # Safety
///
/// The communicator is valid.
unsafe fn rank_and_size(communicator: MPI_Comm) -> Result<(usize, usize)> {
    let (mut rank, mut size): (c_int, c_int) = (0, 0);
    // SAFETY: the caller guarantees that the communicator is valid; the number outlives the call.
    check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(communicator, &mut rank) })?;
    // SAFETY: as for the rank.
    check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(communicator, &mut size) })?;
    let number = |number: c_int| usize::try_from(number).unwrap_or(0);
    Ok((number(rank), number(size)))
}
