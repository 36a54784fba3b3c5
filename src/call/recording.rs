//! Recordings: files with the calls of a rank, what they read, and their results.
//!
//! A file is [`MAGIC`] and frames: the length of a head, the length of data and a checksum of both, each 8 bytes, then
//! head and data. The first head is a [`Header`]. Each call has two frames: [`Frame::Call`], whose data is what it
//! reads, before it begins, and [`Frame::End`] with what it has written.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::{de::DeserializeOwned, Deserialize, Serialize};

use super::saved::{SavedCall, Span, UsedMemory};
use crate::abi::MAX_RANKS;
use crate::error::{Error, Result};

/// The beginning of a file, with the version of its format.
pub(super) const MAGIC: &[u8; 16] = b"fast-allreduce 1";
/// What comes before a head: three words.
pub(super) const WORDS: usize = 3;
/// Largest head, of a call with its counts or of a header with a table of plans.
const MOST_HEAD: u64 = 1 << 20;

/// What is recorded of calls, and where: [`Communicator::record`](crate::Communicator::record).
#[derive(Debug, Clone)]
pub struct Options {
    pub(super) directory: PathBuf,
    pub(super) bytes: u64,
    pub(super) has_data: bool,
}

impl Options {
    /// Records inputs and results, of at most 1 GiB on each rank, into a file for each rank in `directory`.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), bytes: 1 << 30, has_data: true }
    }

    /// Sets how many bytes a file has at most. The first call that does not fit ends the recording.
    #[must_use]
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    /// Records hashes of inputs and results alone. Such recordings can be [compared](compare), not repeated.
    #[must_use]
    pub fn hashes(mut self) -> Self {
        self.has_data = false;
        self
    }

    /// Returns the options that the environment sets, if it names a directory.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for a number of bytes that is none, and if the directory cannot be written.
    pub(crate) fn of_environment() -> Result<Option<Self>> {
        const DIRECTORY: &str = "FAST_ALLREDUCE_RECORD_DIR";
        const BYTES: &str = "FAST_ALLREDUCE_RECORD_BYTES";
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let Some(directory) = variable(DIRECTORY) else { return Ok(None) };
        let mut options = Self::new(directory);
        let refuse = |name, value: String, expected| Err(Error::InvalidSetting { name, value, expected });
        let is_writable = nix::unistd::access(&options.directory, nix::unistd::AccessFlags::W_OK).is_ok();
        if !(is_writable && options.directory.is_dir()) {
            return refuse(
                DIRECTORY,
                options.directory.display().to_string(),
                "a directory that can be written",
            );
        }
        if let Some(text) = variable(BYTES) {
            match text.to_str().map(|text| (text, text.parse())) {
                Some(("hashes", _)) => options.has_data = false,
                Some((_, Ok(bytes))) => options.bytes = bytes,
                _ => return refuse(BYTES, text.to_string_lossy().into(), "a number of bytes, or hashes"),
            }
        }
        Ok(Some(options))
    }
}

/// What a file says about its rank and world.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub version: String,
    pub world: u64,
    pub rank: usize,
    pub world_size: usize,
    pub has_data: bool,
    /// Settings that decide how calls are planned, by name.
    pub settings: Vec<(String, String)>,
    /// Encoded table of plans.
    pub table: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Frame {
    Call(Box<SavedCall>),
    /// The call has ended: with its results, or with this error.
    End(Option<String>),
}

/// Returns a hash that differs if one word does.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let words = bytes.chunks_exact(8);
    let rest = words.remainder();
    let word = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let hash = words.fold(bytes.len() as u64, |hash, bytes| mix(hash, word(bytes)));
    rest.iter().fold(hash, |hash, &byte| mix(hash, byte.into()))
}

pub(super) fn unusable(path: &Path, reason: impl Into<String>) -> Error {
    Error::Unavailable { what: format!("the recording {}", path.display()), reason: reason.into() }
}

/// A recording of one rank that is read.
///
/// ```no_run
/// use fast_allreduce::record::Recording;
///
/// let mut recording = Recording::open("/tmp/record/00112233445566aa-0.record".as_ref())?;
/// while let Some(call) = recording.next_call()? {
///     println!("{call}");
/// }
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
pub struct Recording {
    source: Box<dyn Read + Send>,
    path: PathBuf,
    pub(crate) header: Header,
    /// Bytes that have been read, and that are left.
    position: u64,
    left: u64,
    calls: u64,
}

/// A call of a recording.
#[derive(Debug)]
pub struct Entry {
    pub(crate) saved: SavedCall,
    pub(crate) spans: Vec<Span>,
    pub(crate) memory: Vec<UsedMemory>,
    description: String,
    number: u64,
    /// What it read and has written: bytes, or a hash of each span.
    pub(crate) before: Vec<u8>,
    pub(crate) after: Vec<u8>,
    failure: Option<String>,
    has_data: bool,
}

impl Recording {
    /// Opens a file.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], if it cannot be read, is no recording, or is one of another version.
    pub fn open(path: &Path) -> Result<Self> {
        let fail = |error: std::io::Error| unusable(path, error.to_string());
        let file = File::open(path).map_err(fail)?;
        let bytes = file.metadata().map_err(fail)?.len();
        Self::of(Box::new(BufReader::new(file)), bytes, path)
    }

    /// Begins to read `bytes` bytes.
    fn of(source: Box<dyn Read + Send>, bytes: u64, path: &Path) -> Result<Self> {
        let none = Header {
            version: String::new(),
            world: 0,
            rank: 0,
            world_size: 0,
            has_data: false,
            settings: Vec::new(),
            table: String::new(),
        };
        let mut recording =
            Self { source, path: path.to_owned(), header: none, position: 0, left: bytes, calls: 0 };
        let refuse = |reason: &str| Err(unusable(path, reason));
        if recording.take(MAGIC.len() as u64, Vec::new()).ok().as_deref() != Some(MAGIC) {
            return refuse("it does not begin as recordings of this format do");
        }
        let Some((header, _)) = recording.frame::<Header>()? else { return refuse("it has no header") };
        if header.version != env!("CARGO_PKG_VERSION") {
            let (theirs, ours) = (&header.version, env!("CARGO_PKG_VERSION"));
            return refuse(&format!("it is of version {theirs:?} of this library, which is {ours}"));
        }
        if !(1..=MAX_RANKS).contains(&header.world_size) || header.rank >= header.world_size {
            return refuse(&format!("it is of rank {} of {}", header.rank, header.world_size));
        }
        recording.header = header;
        Ok(recording)
    }

    /// Returns the rank and the number of ranks.
    pub fn place(&self) -> (usize, usize) {
        (self.header.rank, self.header.world_size)
    }

    /// Returns the id of the world, which is equal on all ranks.
    pub fn world(&self) -> u64 {
        self.header.world
    }

    /// Returns whether it has inputs and results, not hashes alone.
    pub fn has_data(&self) -> bool {
        self.header.has_data
    }

    /// Reads the next call; `None` at the end.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], which says where the file ends within a call, or what is wrong with it.
    pub fn next_call(&mut self) -> Result<Option<Entry>> {
        self.calls += 1;
        let Some((frame, before)) = self.frame()? else { return Ok(None) };
        let Frame::Call(saved) = frame else { return Err(self.bad("it has results before its beginning")) };
        let (rank, world_size) = self.place();
        let Some(call) = saved.call() else { return Err(self.bad("it lacks an argument")) };
        let checked = call.check(rank, world_size).and_then(|()| {
            Ok((call.spans(rank, world_size)?, call.memory(rank, world_size)?, call.id(None).to_string()))
        });
        let (spans, memory, description) = checked.map_err(|error| self.bad(&error.to_string()))?;
        let length = |is_meant: fn(&Span) -> bool| {
            let of = |span: &Span| if self.header.has_data { span.bytes } else { 8 };
            spans.iter().filter(|one| is_meant(one)).fold(0_u64, |sum, one| sum.saturating_add(of(one)))
        };
        let lengths = [length(|one| one.is_read), length(|one| one.is_written)];
        let Some((Frame::End(failure), after)) = self.frame()? else {
            return Err(self.bad(&format!("the file ends inside it, at byte {}", self.position)));
        };
        let expected = [lengths[0], if failure.is_some() { 0 } else { lengths[1] }];
        if [before.len() as u64, after.len() as u64] != expected {
            return Err(self.bad("its data has another length than its memory"));
        }
        let (number, has_data) = (self.calls, self.header.has_data);
        Ok(Some(Entry {
            saved: *saved,
            spans,
            memory,
            description,
            number,
            before,
            after,
            failure,
            has_data,
        }))
    }

    fn bad(&self, reason: &str) -> Error {
        let what = format!("call {} of the recording {}", self.calls, self.path.display());
        Error::Unavailable { what, reason: reason.to_owned() }
    }

    /// Reads a frame; `None` at the end of the file.
    fn frame<T: DeserializeOwned>(&mut self) -> Result<Option<(T, Vec<u8>)>> {
        if self.left == 0 {
            return Ok(None);
        }
        let words = self.take(WORDS as u64 * 8, Vec::new())?;
        let word = |at: usize| words[8 * at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let [head, data, checksum] = [0, 1, 2].map(word);
        if head > MOST_HEAD {
            return Err(self.bad(&format!("its arguments have {head} bytes")));
        }
        let mut head = self.take(head, Vec::new())?;
        let frame = postcard::take_from_bytes(&head).ok().filter(|(_, rest)| rest.is_empty());
        let Some((frame, _)) = frame else { return Err(self.bad("its arguments cannot be decoded")) };
        let length = head.len();
        head = self.take(data, head)?;
        // The checksum would keep the fuzzer from everything behind it.
        if hash(&head) != checksum && !cfg!(fuzzing) {
            return Err(
                self.bad(&format!("bytes before byte {} are not those that were written", self.position))
            );
        }
        Ok(Some((frame, head.split_off(length))))
    }

    /// Appends bytes of the file to `taken`.
    fn take(&mut self, bytes: u64, mut taken: Vec<u8>) -> Result<Vec<u8>> {
        if bytes > self.left {
            return Err(self.bad(&format!("the file ends inside it, at byte {}", self.position + self.left)));
        }
        // The file has as many, but it may be sparse.
        let (before, added) = (taken.len(), bytes as usize);
        taken.try_reserve_exact(added).map_err(|error| self.bad(&error.to_string()))?;
        taken.resize(before + added, 0);
        let read = self.source.read_exact(&mut taken[before..]);
        read.map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => self.bad("the file has become shorter"),
            _ => self.bad(&error.to_string()),
        })?;
        (self.position, self.left) = (self.position + bytes, self.left - bytes);
        Ok(taken)
    }
}

impl Entry {
    /// Returns why the call failed when it was recorded, if it did.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Returns whether inputs and results are there, not hashes alone.
    pub fn has_data(&self) -> bool {
        self.has_data
    }

    /// Returns hashes of what the call has read, or of what it has written, without an order.
    fn hashes(&self, data: &[u8], is_meant: fn(&Span) -> bool) -> Vec<u64> {
        let mut rest = data;
        let meant = self.spans.iter().filter(|span| is_meant(span));
        let mut hashes: Vec<_> = meant
            .map(|span| {
                let (part, after) = rest.split_at(if self.has_data { span.bytes as usize } else { 8 });
                rest = after;
                part.first_chunk()
                    .filter(|_| !self.has_data)
                    .map_or_else(|| hash(part), |word| u64::from_le_bytes(*word))
            })
            .collect();
        // Buffers may be at other addresses in the other run, in another order.
        hashes.sort_unstable();
        hashes
    }
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "call {}, {}", self.number, self.description)
    }
}

/// How far recordings of one rank of two runs are equal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Comparison {
    /// Number of equal calls at the beginning.
    pub equal: u64,
    /// What differs in the next call, if both have one.
    pub difference: Option<String>,
    /// Whether one recording ends where the other has more calls.
    pub is_one_shorter: bool,
}

/// Compares recordings of one rank of two runs, call by call, as far as both have calls.
///
/// # Errors
///
/// As [`Recording::next_call`].
pub fn compare(one: &mut Recording, other: &mut Recording) -> Result<Comparison> {
    let mut equal = 0;
    loop {
        let (left, right) = match (one.next_call()?, other.next_call()?) {
            (Some(left), Some(right)) => (left, right),
            (left, right) => {
                let is_one_shorter = left.is_some() || right.is_some();
                return Ok(Comparison { equal, difference: None, is_one_shorter });
            }
        };
        let differs = |what| {
            Ok(Comparison { equal, difference: Some(format!("{left} {what}")), is_one_shorter: false })
        };
        let inputs = |entry: &Entry| entry.hashes(&entry.before, |one| one.is_read);
        let results = |entry: &Entry| entry.hashes(&entry.after, |one| one.is_written);
        if left.description != right.description {
            return differs(format!("in one run is {} in the other", right.description));
        }
        if left.failure != right.failure {
            return differs("failed in one run alone".into());
        }
        if inputs(&left) != inputs(&right) {
            return differs("has other inputs".into());
        }
        if left.failure.is_none() && results(&left) != results(&right) {
            return differs("has equal inputs and other results".into());
        }
        equal += 1;
    }
}

#[cfg(fuzzing)]
crate::testing::decoder!(fuzz_recording, |bytes| {
    let (bytes, source) = (bytes.len() as u64, Box::new(std::io::Cursor::new(bytes.to_vec())));
    if let Ok(mut recording) = Recording::of(source, bytes, Path::new("it")) {
        while let Ok(Some(mut entry)) = recording.next_call() {
            entry.saved.relocate(|address| address ^ 64);
        }
    }
});

#[cfg(test)]
mod tests {
    use super::super::arguments::Call;
    use super::super::collective::Collective;
    use super::super::recorder::{Recorder, MOST_END};
    use super::*;
    use crate::catalogue::DType;
    use crate::testing::temporary::Folder;

    fn header(version: &str) -> Header {
        let (settings, table) = (Vec::new(), String::new());
        Header { version: version.into(), world: 7, rank: 1, world_size: 2, has_data: true, settings, table }
    }

    /// Returns a recording of two gathers and of one that failed.
    fn recorded(options: &Options, version: &str) -> (PathBuf, Vec<bool>) {
        let mut recorder = Recorder::create(options, header(version)).unwrap();
        let path = recorder.path.clone();
        let (from, to) = ([3_u32; 5], [4_u32; 10]);
        let (input, output) = (from.as_ptr() as u64, to.as_ptr() as u64);
        let call = Call { collective: Collective::AllGather, input, output, count: 5, dtype: DType::U32 };
        let failures = [None, None, Some(Error::Aborted)];
        let goes_on = failures.iter().map(|failure| {
            // SAFETY: both arrays have the elements of the call.
            unsafe { recorder.begin(&call) && recorder.end(&call, failure.as_ref()) }
        });
        (path, goes_on.collect())
    }

    /// Returns the number of calls that can be read, and the text of the error at the end.
    fn read(bytes: &[u8]) -> (usize, String) {
        let source = Box::new(std::io::Cursor::new(bytes.to_vec()));
        let mut calls = 0;
        let outcome = Recording::of(source, bytes.len() as u64, Path::new("it")).and_then(|mut recording| {
            while recording.next_call()?.is_some() {
                calls += 1;
            }
            Ok(())
        });
        (calls, outcome.err().map_or_else(String::new, |error| error.to_string()))
    }

    #[test]
    fn a_damaged_recording_is_read_up_to_the_damage() {
        let folder = Folder::new();
        let (path, goes_on) = recorded(&Options::new(folder.path()), env!("CARGO_PKG_VERSION"));
        assert_eq!(goes_on, [true, true, false]);
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(read(&bytes), (3, String::new()));
        let mut whole = 0;
        for length in 0..bytes.len() {
            let (calls, error) = read(&bytes[..length]);
            // It may end between calls.
            whole += usize::from(error.is_empty());
            assert!(
                calls < 3 && (error.is_empty() || error.contains("the file ends inside it") || calls == 0)
            );
        }
        assert_eq!(whole, 3);
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            let (calls, error) = read(&changed);
            assert!(calls < 3 && !error.is_empty(), "byte {at}");
        }
        // The file is there.
        assert!(Recorder::create(&Options::new(folder.path()), header("")).is_err());
    }

    #[test]
    fn another_version_and_the_bound_are_told() {
        let folder = Folder::new();
        let (path, _) = recorded(&Options::new(folder.path()), "0.0.7");
        let bytes = std::fs::read(&path).unwrap();
        assert!(read(&bytes).1.contains("version \"0.0.7\""));
        let folder = Folder::new();
        let of = Options::new(folder.path()).bytes(MOST_END + 250);
        let (path, goes_on) = recorded(&of, env!("CARGO_PKG_VERSION"));
        assert_eq!(goes_on, [true, false, false]);
        assert_eq!(read(&std::fs::read(&path).unwrap()), (1, String::new()));
    }
}
