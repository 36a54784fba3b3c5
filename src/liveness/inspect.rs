//! Reads the flight records of other processes: of living ones through their descriptors, of dead ones from files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::page::{Header, Page, EXTENSION, MEMORY};
use super::record::{FlightRecord, RankRecord, RankState, UnreadRank};
use super::record_file::name_of_rank;
use crate::error::{Error, Result};

/// A page that was read, in this process's memory.
struct Read {
    page: Box<Page>,
    /// Numbers of calls and of times when the copy was complete.
    later: [u64; 2],
    is_alive: bool,
}

/// Reads the flight records of the worlds in which a process takes part, with those of the other ranks on this machine.
/// The ranks may hang, and need not notice it.
///
/// It needs the permission to read the process's descriptors: the same user, or root. Ranks whose processes have ended
/// are only in the records of their peers ([`Communicator::flight_record`](crate::Communicator::flight_record)) or in
/// files ([`of_directory`]).
///
/// ```no_run
/// for world in fast_allreduce::flight::of_process(4711)? {
///     println!("{}", world.to_json());
/// }
/// # Ok::<(), fast_allreduce::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Unavailable`], if the process cannot be read or has no communicator.
pub fn of_process(process: u32) -> Result<Vec<FlightRecord>> {
    let fail = |reason: String| Error::Unavailable {
        what: format!("the flight record of process {process}"),
        reason,
    };
    let own = pages_of(process).map_err(|error| fail(explained(&error)))?;
    if own.is_empty() {
        return Err(fail("it has no communicator with a flight record".into()));
    }
    let peers: Vec<u32> =
        own.iter().flat_map(|read| read.page.header.peers()).filter(|&peer| peer != 0).collect();
    let ids: Vec<u64> = own.iter().map(|read| read.page.header.world()).collect();
    let mut reads: Vec<Read> = Vec::new();
    let mut reasons = Vec::new();
    let mut asked = vec![process];
    reads.extend(own);
    for peer in peers {
        if asked.contains(&peer) {
            continue;
        }
        asked.push(peer);
        match pages_of(peer) {
            Ok(pages) => reads.extend(pages),
            Err(error) => reasons.push((peer, explained(&error))),
        }
    }
    // A peer may have other communicators.
    reads.retain(|read| ids.contains(&read.page.header.world()));
    let reason = |_, _, process| Some(reasons.iter().find(|(peer, _)| Some(*peer) == process)?.1.clone());
    Ok(worlds(reads, reason))
}

/// Reads the flight records in a directory, which `FAST_ALLREDUCE_FLIGHT_DIR` named when the ranks made their
/// communicators. Ranks that have ended without closing their communicators are there, too.
///
/// # Errors
///
/// [`Error::Unavailable`], if the directory cannot be read, or has no flight record that can be read.
pub fn of_directory(directory: impl AsRef<Path>) -> Result<Vec<FlightRecord>> {
    let directory = directory.as_ref();
    let fail = |reason: String| Error::Unavailable {
        what: format!("flight records in {}", directory.display()),
        reason,
    };
    let (mut reads, mut refused) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(directory).map_err(|error| fail(error.to_string()))? {
        let path = entry.map_err(|error| fail(error.to_string()))?.path();
        if path.extension().is_none_or(|extension| extension != EXTENSION) {
            continue;
        }
        match opened(&path).and_then(|file| Read::of(&file)) {
            Ok(mut read) => {
                read.is_alive = read.page.header.is_alive();
                reads.push(read);
            }
            Err(error) => refused.push((path, error.to_string())),
        }
    }
    let described = |(path, error): &(PathBuf, String)| format!("{}: {error}", path.display());
    if reads.is_empty() {
        let none = || "there are no files of ranks in it".to_owned();
        let all: Vec<_> = refused.iter().map(described).collect();
        return Err(fail(if all.is_empty() { none() } else { all.join("; ") }));
    }
    // The numbers of processes in names are those of the ranks' namespaces.
    let is_of = |path: &Path, world, rank| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&name_of_rank(world, rank)))
    };
    let reason = |world, rank, _| refused.iter().find(|(path, _)| is_of(path, world, rank)).map(described);
    refused.iter().for_each(|one| tracing::warn!(refused = described(one), "not a flight record"));
    Ok(worlds(reads, reason))
}

/// Reads the pages that a process has open.
fn pages_of(process: u32) -> io::Result<Vec<Read>> {
    let memory = format!("/memfd:{}", MEMORY.to_string_lossy());
    let mut reads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{process}/fd"))? {
        let path: PathBuf = entry?.path();
        // A descriptor that was closed meanwhile.
        let Ok(target) = fs::read_link(&path) else { continue };
        let is_file = target.extension().is_some_and(|extension| extension == EXTENSION);
        if is_file || target.to_string_lossy().starts_with(&memory) {
            // Not a page, or one that is being made.
            reads.extend(opened(&path).and_then(|file| Read::of(&file)).ok());
        }
    }
    Ok(reads)
}

/// Puts the pages of each world together.
///
/// `reason` is why the record of a rank of a world, in a process, could not be read.
fn worlds(reads: Vec<Read>, reason: impl Fn(u64, usize, Option<u32>) -> Option<String>) -> Vec<FlightRecord> {
    let mut ids: Vec<u64> = Vec::new();
    for read in &reads {
        let id = read.page.header.world();
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    let of_world = |&id: &u64| {
        let pages: Vec<&Read> = reads.iter().filter(|read| read.page.header.world() == id).collect();
        let header = &pages[0].page.header;
        let world_size = header.world_size();
        let mut ranks: Vec<RankRecord> = Vec::new();
        for read in &pages {
            let rank = read.page.header.rank();
            if rank < world_size && ranks.iter().all(|known| known.rank != rank) {
                let mut record = RankRecord::of(&read.page, Some(read.later), rank, world_size);
                if record.state == RankState::Open && !read.is_alive {
                    record.state = RankState::Ended;
                }
                ranks.push(record);
            }
        }
        let is_unread = |rank: &usize| ranks.iter().all(|known| known.rank != *rank);
        let unread = (0..world_size).filter(is_unread).map(|rank| {
            let process =
                pages.iter().map(|read| read.page.header.peers()[rank]).find(|&process| process != 0);
            let reason = match (process, reason(id, rank, process)) {
                (None, None) => "it has left no flight record".to_owned(),
                (None, Some(reason)) => reason,
                (Some(process), None) => format!("process {process} has closed this communicator"),
                (Some(process), Some(reason)) => format!("process {process}: {reason}"),
            };
            UnreadRank { rank, reason }
        });
        FlightRecord::new(id, world_size, ranks.clone(), unread.collect())
    };
    ids.iter().map(of_world).collect()
}

impl Read {
    /// Copies the page of a file twice: the counts of the second copy tell which entries of the first are whole.
    fn of(file: &File) -> io::Result<Self> {
        let invalid = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
        let length = file.metadata()?.len();
        if length < size_of::<Header>() as u64 {
            return Err(invalid(format!("it has only {length} bytes")));
        }
        let page = copy_of(file, length)?;
        page.header.check(length).map_err(invalid)?;
        let second = copy_of(file, length)?;
        let later = [second.flight.calls.count(), second.flight.times.count()];
        Ok(Self { page, later, is_alive: true })
    }
}

/// Opens a file without waiting: a pipe may have such a name, too.
fn opened(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Copies a page; what the file does not have is 0.
fn copy_of(file: &File, length: u64) -> io::Result<Box<Page>> {
    // SAFETY: a page consists of atomics, for which zeros are valid.
    let mut page: Box<Page> = unsafe { Box::new(std::mem::zeroed()) };
    let bytes = size_of::<Page>().min(usize::try_from(length).unwrap_or(usize::MAX));
    // SAFETY: the page's own bytes, which nothing else uses; any bits are valid for atomics.
    let to = unsafe { std::slice::from_raw_parts_mut(std::ptr::from_mut(&mut *page).cast::<u8>(), bytes) };
    file.read_exact_at(to, 0)?;
    Ok(page)
}

/// Explains an error of `/proc`.
fn explained(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "there is no such process here".into(),
        io::ErrorKind::PermissionDenied => {
            format!("{error}: only its user and root can read it, in its namespaces")
        }
        _ => error.to_string(),
    }
}
