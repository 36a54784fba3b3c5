//! In-memory files, which processes map by descriptor: sealed memfds; where a sandbox forbids those, files in
//! `/dev/shm` that never have a name. Both are freed when no process has them open or mapped any more.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{fallocate, fcntl, open, FallocateFlags, FcntlArg, OFlag, SealFlag};
use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::stat::{fstat, FileStat, Mode};
use nix::sys::uio::pwrite;
use nix::unistd::geteuid;

use super::limits::{refuse_file, Limits};
use crate::abi::MAX_RANKS;
use crate::descriptor::above_streams;
use crate::error::explained;

/// Directory of the files that are not memfds.
const SHARED_MEMORY: &str = "/dev/shm";

/// Creates a zeroed file of this size. All of its pages are allocated, and its size cannot change.
/// `name` is for `/proc` alone.
pub(crate) fn create(bytes: usize, name: &CStr) -> Result<OwnedFd, String> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    match above_streams(|| memfd_create(name, flags)) {
        Ok(file) => {
            reserve(bytes, &Limits::of_this_process(), |start, length| allocate_pages(&file, start, length))?;
            let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
            fcntl(&file, FcntlArg::F_ADD_SEALS(seals))
                .map_err(|errno| format!("fcntl(F_ADD_SEALS): {errno}"))?;
            Ok(file)
        }
        Err(refused @ (Errno::EPERM | Errno::ENOSYS | Errno::EACCES)) => {
            let explain =
                |reason| format!("memfd_create: {refused}; instead, a file in {SHARED_MEMORY}: {reason}");
            let file = without_name().map_err(|errno| explain(format!("open: {}", explained(errno))))?;
            reserve(bytes, &Limits::of_this_process(), |start, length| allocate_pages(&file, start, length))
                .map_err(explain)?;
            tracing::debug!(%refused, "memory is shared by a file in {SHARED_MEMORY}: memfd_create is forbidden");
            Ok(file)
        }
        Err(errno) => Err(format!("memfd_create: {}", explained(errno))),
    }
}

/// Checks that a peer's file is of a kind that [`create`] makes. If the peer shrank it, this process would be killed
/// by a signal. So it must be a memfd sealed against shrinking, or a file that nobody else can open; in the second
/// case the peer, which runs as the same user, is trusted.
pub(super) fn check(file: &OwnedFd) -> Result<(), String> {
    let seals = fcntl(file, FcntlArg::F_GET_SEALS)
        .map_err(|errno| format!("its descriptor is not an in-memory file: {errno}"))?;
    let seals = SealFlag::from_bits_truncate(seals);
    // The kernel returns this for tmpfs files, which cannot be sealed.
    let is_unsealable = seals == SealFlag::F_SEAL_SEAL;
    let has_no_name = || fstat(file).is_ok_and(|stat| stat.st_nlink == 0);
    match seals.contains(SealFlag::F_SEAL_SHRINK) || is_unsealable && has_no_name() {
        true => Ok(()),
        false => Err("its shared memory is not sealed against shrinking".into()),
    }
}

/// Creates a zeroed file of this size with a name, for this user alone. All of its pages are allocated.
pub(crate) fn create_named(bytes: usize, path: &Path) -> Result<OwnedFd, String> {
    let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_RDWR | OFlag::O_CLOEXEC;
    let file = above_streams(|| open(path, flags, Mode::S_IRUSR | Mode::S_IWUSR))
        .map_err(|errno| format!("open: {}", explained(errno)))?;
    let reserved =
        reserve(bytes, &Limits::of_this_process(), |start, length| allocate_pages(&file, start, length));
    reserved.map(|()| file).inspect_err(|_| {
        // Whatever becomes of the file, the disk is full.
        let _ = std::fs::remove_file(path);
    })
}

/// Checks a peer's file that may have been made by [`create_named`]: it is this user's alone, who is trusted.
pub(super) fn check_named(file: &OwnedFd) -> Result<(), String> {
    let is_private = |stat: FileStat| {
        stat.st_uid == geteuid().as_raw() && stat.st_mode & (libc::S_IFMT | 0o077) == libc::S_IFREG
    };
    check(file).or_else(|reason| if fstat(file).is_ok_and(is_private) { Ok(()) } else { Err(reason) })
}

/// Opens a file in shared memory that never has a name.
fn without_name() -> nix::Result<OwnedFd> {
    let flags = OFlag::O_TMPFILE | OFlag::O_EXCL | OFlag::O_RDWR | OFlag::O_CLOEXEC;
    above_streams(|| open(SHARED_MEMORY, flags, Mode::S_IRUSR | Mode::S_IWUSR))
}

/// Allocates pages of a file; by writing zeros, where `fallocate` is not available.
fn allocate_pages(file: &OwnedFd, start: libc::off_t, length: libc::off_t) -> nix::Result<()> {
    match fallocate(file, FallocateFlags::empty(), start, length) {
        Err(Errno::EPERM | Errno::ENOSYS | Errno::EOPNOTSUPP) => write_zeros(file, start, length),
        taken => taken,
    }
}

fn write_zeros(file: &OwnedFd, start: libc::off_t, length: libc::off_t) -> nix::Result<()> {
    const ZEROS: [u8; 16 << 10] = [0; 16 << 10];
    let mut at = start;
    while at < start + length {
        // At most `ZEROS.len()`, and positive.
        let left = (start + length - at).min(ZEROS.len() as libc::off_t) as usize;
        match pwrite(file, &ZEROS[..left], at)? {
            0 => return Err(Errno::ENOSPC),
            // At most `left`.
            written => at += written as libc::off_t,
        }
    }
    Ok(())
}

/// Allocates all pages of a file by `take`, so that a lack of memory is an error here and not a signal at first
/// touch.
///
/// Beyond the limits the kernel kills a process instead of refusing memory, so no more is requested than the limits
/// leave. Other ranks may allocate under the same limits at the same time. So unless there is room for all of them,
/// pages are allocated piece by piece, and the limits are checked before each piece, with one piece for every rank to
/// spare.
fn reserve(
    bytes: usize,
    limits: &Limits,
    take: impl Fn(libc::off_t, libc::off_t) -> nix::Result<()>,
) -> Result<(), String> {
    const PIECE_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=16 << 20;
    /// A call that a signal interrupts frees its pages again; the next call is half as long, so that some calls end
    /// between two signals.
    const MAX_INTERRUPTIONS: u32 = 1000;
    let (bytes, ranks) = (bytes as u64, MAX_RANKS as u64);
    // Exceeding this limit would also be a signal.
    refuse_file(bytes)?;
    let piece = (bytes / 64).clamp(*PIECE_BYTES.start(), *PIECE_BYTES.end());
    let spare = piece * ranks;
    let (mut done, mut longest, mut interruptions) = (0, bytes, 0);
    while done < bytes {
        let left = bytes - done;
        let plenty = left.saturating_mul(ranks);
        let length = match limits.least_room(plenty) {
            Some(room) if room.bytes < left.saturating_add(spare) => {
                return Err(format!("{room}; {left} are needed, and {spare} more must stay free"));
            }
            Some(room) if room.bytes < plenty => left.min(piece),
            _ => left,
        };
        let length = length.min(longest);
        let range = (libc::off_t::try_from(done), libc::off_t::try_from(length));
        let (Ok(start), Ok(size)) = range else { return Err("too large for a file".into()) };
        match take(start, size) {
            Ok(()) => (done, interruptions) = (done + length, 0),
            Err(Errno::EINTR) if interruptions < MAX_INTERRUPTIONS => {
                interruptions += 1;
                longest = (length / 2).max(*PIECE_BYTES.start());
            }
            Err(errno) => return Err(format!("fallocate: {}", explained(errno))),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::os::unix::fs::FileExt as _;
    use std::path::Path;

    use super::*;
    use crate::testing::temporary::Folder;
    use crate::thread::tests::forbid;

    /// Reserves `bytes` under these limits. `take` gets the number and the length of each call. Returns the result,
    /// the successful calls, and the number of calls.
    fn reserved(
        bytes: usize,
        limits: &Limits,
        take: impl Fn(usize, i64) -> nix::Result<()>,
    ) -> (Result<(), String>, Vec<(i64, i64)>, usize) {
        let (taken, calls) = (RefCell::new(Vec::new()), RefCell::new(0));
        let result = reserve(bytes, limits, |start, length| {
            *calls.borrow_mut() += 1;
            take(*calls.borrow(), length).inspect(|()| taken.borrow_mut().push((start, length)))
        });
        (result, taken.into_inner(), calls.into_inner())
    }

    /// Returns whether each call begins where the previous one ended, up to the last byte.
    fn is_whole(bytes: usize, taken: &[(i64, i64)]) -> bool {
        let end = taken.iter().try_fold(0, |end, &(start, length)| (start == end).then_some(end + length));
        end == Some(bytes as i64)
    }

    #[test]
    fn interrupted_calls_are_retried_with_less() {
        let unlimited = Limits::below(Path::new("/nowhere"));
        let bytes = (40 << 20) + 1;
        let (result, taken, calls) = reserved(bytes, &unlimited, |_, _| Ok(()));
        assert_eq!((result, taken, calls), (Ok(()), vec![(0, bytes as i64)], 1));
        // Calls that take longer than the time between two signals do not succeed.
        let interrupted = |call, length| match length > 1 << 20 || call % 3 == 0 {
            true => Err(Errno::EINTR),
            false => Ok(()),
        };
        let (result, taken, _) = reserved(bytes, &unlimited, interrupted);
        assert!(result.is_ok() && is_whole(bytes, &taken), "{result:?} {taken:?}");
    }

    #[test]
    fn interruptions_without_end_are_an_error() {
        let unlimited = Limits::below(Path::new("/nowhere"));
        let (result, taken, calls) = reserved(1 << 20, &unlimited, |_, _| Err(Errno::EINTR));
        assert!(result.unwrap_err().contains("EINTR"));
        assert!(taken.is_empty() && calls < 2000, "{calls}");
    }

    /// Another rank allocates as much at the same time: the limit is checked repeatedly and not exhausted.
    #[test]
    fn pieces_stop_short_of_a_limit() {
        let root = Folder::new();
        let left = RefCell::new(0);
        let leave = |bytes: i64| {
            left.replace(bytes);
            root.write("proc/meminfo", format!("MemAvailable: {} kB\n", bytes / 1024));
        };
        let limits = Limits::below(root.path());
        let take_both = |_, length: i64| {
            let before = *left.borrow();
            leave(before - 2 * length);
            Ok(())
        };
        for (mib, fits) in [(4000, true), (150, true), (105, false), (80, false), (60, false)] {
            leave(mib << 20);
            let (result, taken, _) = reserved(50 << 20, &limits, take_both);
            assert!(*left.borrow() >= 0, "{mib}: {result:?} {taken:?}");
            assert_eq!((result.is_ok(), is_whole(50 << 20, &taken)), (fits, fits), "{mib}: {result:?}");
        }
    }

    /// Returns a file created by a thread whose sandbox forbids these system calls.
    fn created(refused: &'static [i64]) -> OwnedFd {
        let create = move || {
            refused.iter().for_each(|&call| forbid(call));
            create(3 << 20, c"test").unwrap()
        };
        std::thread::spawn(create).join().unwrap()
    }

    #[test]
    fn files_are_complete_whatever_a_sandbox_forbids() {
        let all: [&[i64]; 4] = [
            &[],
            &[libc::SYS_fallocate],
            &[libc::SYS_memfd_create],
            &[libc::SYS_memfd_create, libc::SYS_fallocate],
        ];
        for refused in all {
            let file = std::fs::File::from(created(refused));
            let metadata = file.metadata().unwrap();
            let blocks = std::os::unix::fs::MetadataExt::blocks(&metadata);
            assert_eq!((metadata.len(), blocks * 512), (3 << 20, 3 << 20), "{refused:?}");
            assert_eq!(std::os::unix::fs::MetadataExt::nlink(&metadata), 0, "{refused:?}");
            let mut bytes = vec![1; 3 << 20];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 0), "{refused:?}");
            check(&file.into()).unwrap();
        }
    }

    #[test]
    fn files_that_can_shrink_are_refused() {
        let unsealed = memfd_create(c"test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        assert!(check(&unsealed).unwrap_err().contains("not sealed"));
        let folder = Folder::new();
        let on_disk = std::fs::File::open(folder.write("file", "")).unwrap();
        check(&on_disk.into()).unwrap_err();
        let name = format!("{SHARED_MEMORY}/fast-allreduce-test-{}", std::process::id());
        let file = OwnedFd::from(std::fs::File::create(&name).unwrap());
        let checked = check(&file);
        std::fs::remove_file(&name).unwrap();
        assert!(checked.unwrap_err().contains("not sealed"), "while it has a name");
        check(&file).unwrap();
    }
}
