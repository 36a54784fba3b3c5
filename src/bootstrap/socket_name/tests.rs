//! Sockets with names in a directory, and files that killed processes left there.

use super::*;
use crate::testing::temporary::Folder;

const LIMIT: Duration = Duration::from_secs(10);
const NAME: &[u8] = b"fast-allreduce-name";

fn directory(path: &Path) -> (SocketNamespace, Arc<Directory>) {
    match SocketNamespace::new(Some(path)).unwrap() {
        SocketNamespace::Directory(directory) => {
            (SocketNamespace::Directory(Arc::clone(&directory)), directory)
        }
        SocketNamespace::Abstract => unreachable!("a directory was given"),
    }
}

fn names(folder: &Folder) -> usize {
    std::fs::read_dir(folder.path()).unwrap().count()
}

/// Creates a socket's file of the given age at which nobody listens.
fn abandon(folder: &Folder, name: &str, age: Duration) {
    let path = folder.path().join(name);
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let time = (SystemTime::now() - age).duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let time = nix::sys::time::TimeSpec::from_duration(time);
    let flags = nix::sys::stat::UtimensatFlags::NoFollowSymlink;
    nix::sys::stat::utimensat(nix::fcntl::AT_FDCWD, &path, &time, &time, flags).unwrap();
}

#[test]
fn a_socket_is_reached_by_its_file_until_it_is_closed() {
    let folder = Folder::new();
    let (namespace, _) = directory(folder.path());
    assert_eq!(namespace.connect(SockType::Stream, NAME).unwrap_err(), Errno::ECONNREFUSED);
    let listener = namespace.listen(SockType::Stream, NAME).unwrap();
    let _stream = namespace.connect(SockType::Stream, NAME).unwrap();
    socket::accept(listener.as_fd()).unwrap();
    listener.hide();
    assert_eq!(namespace.connect(SockType::Stream, NAME).unwrap_err(), Errno::ECONNREFUSED);
    assert_eq!(names(&folder), 0);
}

#[test]
fn a_socket_that_may_not_listen_leaves_no_file() {
    let folder = Folder::new();
    let (namespace, _) = directory(folder.path());
    let listening = std::thread::spawn(move || {
        thread::tests::forbid(libc::SYS_listen);
        namespace.listen(SockType::Stream, NAME).map(drop)
    });
    listening.join().unwrap().unwrap_err();
    assert_eq!(names(&folder), 0);
    // A failed attempt does not remove the file of another socket.
    let (namespace, _) = directory(folder.path());
    let listener = namespace.listen(SockType::Stream, NAME).unwrap();
    namespace.listen(SockType::Stream, NAME).unwrap_err();
    assert_eq!(names(&folder), 1);
    drop(listener);
}

#[test]
fn a_directory_without_sockets_is_named() {
    let namespace = SocketNamespace::new(Some(Path::new("/proc"))).unwrap();
    let error = namespace.listen(SockType::Stream, NAME).unwrap_err().to_string();
    assert!(error.contains("socket directory") && error.contains("/proc ("), "{error}");
}

#[test]
fn paths_may_be_longer_than_an_address() {
    let folder = Folder::new();
    let deep = folder.path().join("x".repeat(100)).join("y".repeat(100));
    std::fs::create_dir_all(&deep).unwrap();
    let (namespace, _) = directory(&deep);
    let listener = namespace.listen(SockType::Stream, NAME).unwrap();
    let _stream = namespace.connect(SockType::Stream, NAME).unwrap();
    socket::accept(listener.as_fd()).unwrap();
}

#[test]
fn names_cannot_leave_the_directory() {
    let folder = Folder::new();
    let (namespace, _) = directory(folder.path());
    for name in ["fast-allreduce-/../x", "../x", "/x", "x", "", "fast-allreduce-\0"] {
        assert_eq!(
            namespace.connect(SockType::Stream, name.as_bytes()).unwrap_err(),
            Errno::EINVAL,
            "{name}"
        );
    }
    let error = SocketNamespace::new(Some(Path::new("/nonexistent"))).unwrap_err();
    assert!(error.to_string().contains("/nonexistent"), "{error}");
    assert!(SocketNamespace::new(Some(&folder.write("file", ""))).is_err());
}

#[test]
fn a_well_known_name_belongs_to_one_listener_until_it_ends() {
    let folder = Folder::new();
    let (namespace, shared) = directory(folder.path());
    let listen = || shared.listen_well_known(NAME, &Deadline::after(LIMIT)).unwrap();
    let first = listen().unwrap();
    assert!(listen().is_none(), "somebody listens");
    assert_eq!(names(&folder), 1);
    drop(first);
    assert_eq!(names(&folder), 0);
    // A killed process left its file.
    abandon(&folder, "fast-allreduce-name", Duration::ZERO);
    let second = listen().unwrap();
    let _stream = namespace.connect(SockType::Stream, NAME).unwrap();
    assert_eq!(names(&folder), 1);
    drop(second);
    assert_eq!(names(&folder), 0);
}

#[test]
fn a_directory_has_one_lock_at_a_time() {
    let folder = Folder::new();
    let [(_, first), (_, second)] = [directory(folder.path()), directory(folder.path())];
    let lock = first.lock(&Deadline::after(LIMIT)).unwrap();
    let refused = second.lock(&Deadline::after(Duration::from_millis(10))).map(drop).unwrap_err();
    assert!(refused.to_string().contains("another process holds the lock of"), "{refused}");
    drop(lock);
    let lock = second.lock(&Deadline::after(LIMIT)).unwrap();
    // If unlocking is forbidden, the lock ends with its descriptor.
    let forbidding = std::thread::spawn(move || {
        thread::tests::forbid(libc::SYS_flock);
        drop(lock);
    });
    forbidding.join().unwrap();
    drop(first.lock(&Deadline::after(LIMIT)).unwrap());
}

#[test]
fn the_file_of_another_socket_stays() {
    let folder = Folder::new();
    let (_, shared) = directory(folder.path());
    let first = shared.listen_well_known(NAME, &Deadline::after(LIMIT)).unwrap().unwrap();
    // Simulates that the first process no longer listens and that another one has taken over the name.
    shared.remove(NAME).unwrap();
    let _second = shared.listen_well_known(NAME, &Deadline::after(LIMIT)).unwrap().unwrap();
    first.hide();
    assert_eq!(names(&folder), 1);
    // A file that is not a socket is never removed.
    let folder = Folder::new();
    folder.write("fast-allreduce-name", "mine");
    let (_, shared) = directory(folder.path());
    let error = shared.listen_well_known(NAME, &Deadline::after(LIMIT)).unwrap_err().to_string();
    assert!(error.contains("fast-allreduce-name is not a socket"), "{error}");
    assert_eq!(names(&folder), 1);
}

#[test]
fn abandoned_files_are_removed() {
    let folder = Folder::new();
    let (namespace, shared) = directory(folder.path());
    abandon(&folder, "fast-allreduce-old", 2 * STALE);
    abandon(&folder, "fast-allreduce-new", Duration::ZERO);
    abandon(&folder, "other-old", 2 * STALE);
    let live = namespace.listen(SockType::SeqPacket, b"fast-allreduce-live").unwrap();
    let listener = shared.listen_well_known(NAME, &Deadline::after(LIMIT)).unwrap().unwrap();
    assert!(!folder.path().join("fast-allreduce-old").exists());
    assert_eq!(names(&folder), 4, "new, other, live and the name");
    drop((live, listener));
}
