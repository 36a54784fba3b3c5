//! Writes the calls of a rank into a file.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use serde::Serialize;

use super::arguments::Call;
use super::recording::{hash, unusable, Frame, Header, Options, MAGIC, WORDS};
use super::saved::{SavedCall, Span};
use crate::error::{Error, Result};

/// Room for the end of a call, besides its results.
pub(super) const MOST_END: u64 = 4 << 10;

/// Writes the recording of a rank.
#[derive(Debug)]
pub(crate) struct Recorder {
    file: File,
    pub(super) path: PathBuf,
    left: u64,
    has_data: bool,
    place: (usize, usize),
    frame: Vec<u8>,
}

impl Recorder {
    /// Creates the file of a rank.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the file cannot be created or written.
    pub fn create(options: &Options, mut header: Header) -> Result<Self> {
        let path = options.directory.join(format!("{:016x}-{}.record", header.world, header.rank));
        header.has_data = options.has_data;
        let fail = |error| unusable(&path, format!("it cannot be written: {error}"));
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(fail)?;
        file.write_all(MAGIC).map_err(fail)?;
        let (place, has_data) = ((header.rank, header.world_size), options.has_data);
        let mut recorder =
            Self { file, path: path.clone(), left: options.bytes, has_data, place, frame: Vec::new() };
        recorder.begin_frame(&header);
        recorder.write().map_err(|reason| unusable(&path, reason))?;
        Ok(recorder)
    }

    /// Records a call that begins. Returns whether the recording goes on.
    ///
    /// # Safety
    ///
    /// The memory of the call is valid for reads and nothing writes it meanwhile; [`Call::check`] has passed.
    pub unsafe fn begin(&mut self, call: &Call<'_>) -> bool {
        self.begin_frame(&Frame::Call(SavedCall::of(call).into()));
        // SAFETY: the caller's obligation.
        unsafe { self.add(call, |span| span.is_read) };
        let (rank, world_size) = self.place;
        let spans = call.spans(rank, world_size).unwrap_or_default();
        let written: u64 = spans.iter().filter(|span| span.is_written).map(|span| self.stored(span)).sum();
        // A call whose end does not fit is not begun.
        if self.frame.len() as u64 + written + MOST_END > self.left {
            self.left = 0;
        }
        self.goes_on()
    }

    /// Records that a call has ended. Returns whether the recording goes on.
    ///
    /// # Safety
    ///
    /// As [`Recorder::begin`].
    pub unsafe fn end(&mut self, call: &Call<'_>, failure: Option<&Error>) -> bool {
        self.begin_frame(&Frame::End(failure.map(Error::to_string)));
        if failure.is_none() {
            // SAFETY: the caller's obligation.
            unsafe { self.add(call, |span| span.is_written) };
        }
        self.goes_on() && failure.is_none()
    }

    fn begin_frame(&mut self, head: &impl Serialize) {
        // Writing to memory does not fail.
        let head = postcard::to_allocvec(head).unwrap_or_default();
        self.frame.clear();
        self.frame.resize(WORDS * 8, 0);
        self.frame[..8].copy_from_slice(&(head.len() as u64).to_le_bytes());
        self.frame.extend(head);
    }

    /// # Safety
    ///
    /// As [`Recorder::begin`].
    unsafe fn add(&mut self, call: &Call<'_>, is_meant: fn(&Span) -> bool) {
        let (rank, world_size) = self.place;
        // The call has been checked, so the memory is known.
        for span in call.spans(rank, world_size).unwrap_or_default().iter().filter(|&one| is_meant(one)) {
            // A frame that does not fit is not written.
            if self.stored(span) > self.left {
                self.left = 0;
                return;
            }
            // SAFETY: the caller vouches for the memory of the call.
            let bytes = unsafe { std::slice::from_raw_parts(span.address as *const u8, span.bytes as usize) };
            match self.has_data {
                true => self.frame.extend(bytes),
                false => self.frame.extend(hash(bytes).to_le_bytes()),
            }
        }
    }

    /// Returns the bytes that the file has of memory.
    fn stored(&self, span: &Span) -> u64 {
        if self.has_data {
            span.bytes
        } else {
            8
        }
    }

    fn goes_on(&mut self) -> bool {
        let written = self.write();
        if let Err(reason) = &written {
            tracing::warn!(file = %self.path.display(), reason, "the recording has ended");
        }
        written.is_ok()
    }

    fn write(&mut self) -> Result<(), String> {
        let head = u64::from_le_bytes(*self.frame.first_chunk().unwrap_or(&[0; 8]));
        let data = self.frame.len() as u64 - (WORDS * 8) as u64 - head;
        let checksum = hash(&self.frame[WORDS * 8..]);
        self.frame[8..16].copy_from_slice(&data.to_le_bytes());
        self.frame[16..24].copy_from_slice(&checksum.to_le_bytes());
        self.left =
            self.left.checked_sub(self.frame.len() as u64).ok_or("it has as many bytes as it may have")?;
        self.file.write_all(&self.frame).map_err(|error| format!("it cannot be written: {error}"))
    }
}
