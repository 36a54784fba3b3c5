//! A communicator of this crate's own, and messages on it that never block.
//!
//! A thin layer over MPI's calls: every handle is owned, every code checked, and a buffer lives for as long as MPI may
//! touch it.

use std::ffi::c_int;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ::mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};

use super::library::{check, never_finalize, turn, Turn};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// An intracommunicator that nothing else speaks on. Errors on it are returned.
///
/// MPI is used for messages between pairs alone: they never block, tell who is missing, and need no communicator of their ranks.
pub(super) struct Channel {
    communicator: MPI_Comm,
    /// The ranks of the communicator that are of this channel, in the channel's order.
    members: Vec<usize>,
    /// This rank's place among them.
    position: usize,
    /// Tags of a part are not those of the whole.
    is_part: bool,
    /// Peers may speak on it after this rank has left.
    is_abandoned: bool,
}

// SAFETY: a communicator's handle is a number or an address that MPI looks up, of no thread in particular; it is used only
// with a `Turn`, in a thread that may call MPI while no other does.
unsafe impl Send for Channel {}
// SAFETY: as above; a shared channel hands out nothing but its numbers.
unsafe impl Sync for Channel {}

impl Channel {
    /// A duplicate of the caller's communicator. Collective, and bounded.
    ///
    /// # Safety
    ///
    /// `original` is a communicator that lives.
    pub(super) unsafe fn duplicate(original: MPI_Comm, deadline: &Deadline<'_>) -> Result<Self> {
        // Boxed, so that the handle stays where MPI writes it if this function leaves earlier.
        // SAFETY: MPI's constants do not change.
        let communicator = Box::into_raw(Box::new(unsafe { ffi::RSMPI_COMM_NULL }));
        let mut request = {
            let _turn = turn()?;
            let mut is_inter: c_int = 0;
            // SAFETY: the communicator lives, says the caller.
            check("MPI_Comm_test_inter", unsafe { ffi::MPI_Comm_test_inter(original, &mut is_inter) })?;
            if is_inter != 0 {
                return Err(Error::InvalidSetting {
                    name: "communicator",
                    value: "an intercommunicator".into(),
                    expected: "an intracommunicator",
                });
            }
            // SAFETY: as above; the new handle has a place that is not freed before the request has ended.
            let request = unsafe { ffi::RSMPI_REQUEST_NULL };
            let mut request = Request(request);
            // SAFETY: as above.
            check("MPI_Comm_idup", unsafe { ffi::MPI_Comm_idup(original, communicator, &mut request.0) })?;
            request
        };
        let mut pause = Pause::short();
        loop {
            // Asked before looking, so that the last look comes after the limit.
            let is_late = deadline.has_passed();
            if request.has_ended(&turn()?)? {
                break;
            }
            if is_late {
                let _turn = turn()?;
                // SAFETY: the communicator lives, says the caller.
                let (rank, size) = unsafe { place(original) }?;
                return Err(Error::Timeout {
                    operation: "MPI_Comm_idup, which does not say who is missing among",
                    epoch: 0,
                    missing: (0..size).filter(|&other| other != rank).collect(),
                    waited: deadline.waited(),
                    last_seen: String::new(),
                });
            }
            pause.take();
        }
        // SAFETY: the request has ended, so MPI has written the handle, and the box is nobody else's.
        let communicator = unsafe { *Box::from_raw(communicator) };
        Self::own(communicator, &turn()?)
    }

    /// The part of these ranks, in their order, this one among them. Only they speak in it, in tags of their own: other parts
    /// may go on side by side, and what the whole had left to say is not heard.
    ///
    /// No communicator is made for it: MPI's calls that make one of a part block, for as long as a rank does not come.
    pub(super) fn part(mut self, members: Vec<usize>) -> Self {
        debug_assert!(members.contains(&self.rank()) && !self.is_part);
        self.position = members.iter().position(|&member| member == self.rank()).unwrap_or(0);
        (self.members, self.is_part) = (members, true);
        self
    }

    fn own(communicator: MPI_Comm, _: &Turn) -> Result<Self> {
        // SAFETY: the communicator has just been made.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(communicator, ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code)?;
        // SAFETY: as above.
        let (rank, size) = unsafe { place(communicator) }?;
        let members = (0..size).collect();
        Ok(Self { communicator, members, position: rank, is_part: false, is_abandoned: false })
    }

    pub(super) fn rank(&self) -> usize {
        self.position
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    fn tag(&self, tag: Tag) -> c_int {
        2 * c_int::from(self.is_part) + tag as c_int
    }

    /// Does not free the communicator, since peers may still speak on it.
    pub(super) fn abandon(&mut self) {
        self.is_abandoned = true;
    }

    /// Starts to send.
    pub(super) fn send(&self, peer: usize, tag: Tag, bytes: &Arc<Vec<u8>>, _: &Turn) -> Result<Sending> {
        // SAFETY: MPI's constants do not change.
        let mut request = Request(unsafe { ffi::RSMPI_REQUEST_NULL });
        // SAFETY: the bytes live, and nobody writes them, until the request has ended: see `Sending`.
        check("MPI_Isend", unsafe {
            ffi::MPI_Isend(
                bytes.as_ptr().cast(),
                length(bytes)?,
                ffi::RSMPI_UINT8_T,
                self.members[peer] as c_int,
                self.tag(tag),
                self.communicator,
                &mut request.0,
            )
        })?;
        Ok(Sending { request, _bytes: Arc::clone(bytes) })
    }

    /// A message that has arrived, in whole or in part, and that nobody receives yet: its sender and its length.
    pub(super) fn arrived(&self, peer: Option<usize>, tag: Tag, _: &Turn) -> Result<Option<(usize, usize)>> {
        // SAFETY: MPI's constants do not change; a status is plain numbers, for which zeros will do.
        let (any, mut status) = unsafe { (ffi::RSMPI_ANY_SOURCE, std::mem::zeroed::<MPI_Status>()) };
        let source = peer.map_or(any, |peer| self.members[peer] as c_int);
        let (mut flag, mut count): (c_int, c_int) = (0, 0);
        // SAFETY: the communicator is this channel's; flag and status are written during the call.
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
        // Nobody else has the channel's tags.
        let sender = self.members.iter().position(|&member| member == sender);
        Ok(sender.map(|sender| (sender, number(count))))
    }

    /// Starts to receive a message that has arrived, of `length` bytes.
    pub(super) fn receive(&self, peer: usize, tag: Tag, length: usize, _: &Turn) -> Result<Receiving> {
        let mut bytes = vec![0; length];
        // SAFETY: MPI's constants do not change.
        let mut request = Request(unsafe { ffi::RSMPI_REQUEST_NULL });
        // SAFETY: the buffer has that length, and stays where it is until the request has ended: see `Receiving`.
        check("MPI_Irecv", unsafe {
            ffi::MPI_Irecv(
                bytes.as_mut_ptr().cast(),
                self::length(&bytes)?,
                ffi::RSMPI_UINT8_T,
                self.members[peer] as c_int,
                self.tag(tag),
                self.communicator,
                &mut request.0,
            )
        })?;
        Ok(Receiving { request, bytes })
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // In a thread that may not call MPI the communicator stays until MPI ends.
        if let (false, Ok(_turn)) = (self.is_abandoned, turn()) {
            // SAFETY: the communicator is this channel's, and not used again.
            unsafe { ffi::MPI_Comm_free(&mut self.communicator) };
        }
    }
}

/// What a message is for. Those of one purpose from one rank arrive in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    /// A rank's part of a gather.
    Part,
    /// That a rank has given up, and why.
    Notice,
}

/// An operation of MPI that has been started.
struct Request(MPI_Request);

impl Request {
    /// Lets MPI make progress; once true, MPI no longer touches what the request was made with.
    fn has_ended(&mut self, _: &Turn) -> Result<bool> {
        let mut flag: c_int = 0;
        // SAFETY: the request is this one's own, or null after it has ended, which ends at once; MPI_STATUS_IGNORE may
        // stand for a status.
        check("MPI_Test", unsafe { ffi::MPI_Test(&mut self.0, &mut flag, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(flag != 0)
    }

    fn is_under_way(&self) -> bool {
        // SAFETY: MPI's constants do not change.
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

/// A message that is being sent. If it is dropped before its end, its bytes stay for as long as the process.
pub(super) struct Sending {
    request: Request,
    _bytes: Arc<Vec<u8>>,
}

impl Sending {
    pub(super) fn has_ended(&mut self, turn: &Turn) -> Result<bool> {
        self.request.has_ended(turn)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if self.request.is_under_way() {
            std::mem::forget(Arc::clone(&self._bytes));
        }
    }
}

/// A message that is being received. If it is dropped before its end, its buffer stays for as long as the process.
pub(super) struct Receiving {
    request: Request,
    bytes: Vec<u8>,
}

impl Receiving {
    /// The message, once, when it is there.
    pub(super) fn take(&mut self, turn: &Turn) -> Result<Option<Vec<u8>>> {
        Ok(self.request.has_ended(turn)?.then(|| std::mem::take(&mut self.bytes)))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if self.request.is_under_way() {
            std::mem::forget(std::mem::take(&mut self.bytes));
        }
    }
}

/// Between two looks at MPI: short at first, then longer, so that the others get the core.
pub(super) struct Pause {
    started: Instant,
    busy: Duration,
}

impl Pause {
    /// Where ranks need not come at once.
    pub(super) fn short() -> Self {
        Self::after(Duration::from_micros(100))
    }

    /// MPI makes progress while it is called: without a break, for so long.
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

/// Rank and size.
///
/// # Safety
///
/// The communicator lives.
unsafe fn place(communicator: MPI_Comm) -> Result<(usize, usize)> {
    let (mut rank, mut size): (c_int, c_int) = (0, 0);
    // SAFETY: the caller's; the numbers are written during the calls.
    check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(communicator, &mut rank) })?;
    // SAFETY: as above.
    check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(communicator, &mut size) })?;
    let number = |number: c_int| usize::try_from(number).unwrap_or(0);
    Ok((number(rank), number(size)))
}

fn length(bytes: &[u8]) -> Result<c_int> {
    c_int::try_from(bytes.len()).map_err(|_| Error::InvalidSetting {
        name: "bytes of a message",
        value: bytes.len().to_string(),
        expected: "less than 2 GiB",
    })
}
