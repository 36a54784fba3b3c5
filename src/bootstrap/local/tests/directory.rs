//! Worlds that meet in a directory, and the remains of earlier worlds there.

use super::super::super::exchange_descriptors;
use super::super::directory::file_name;
use super::*;

/// Connects the ranks of a world that meets in a directory.
fn world_in(directory: &Path, world_size: usize) -> Vec<Local> {
    thread::scope(|scope| {
        // Rank 0, which serves the rendezvous, comes last.
        let connect = |rank| {
            scope.spawn(move || {
                thread::sleep(if rank == 0 { SHORT } else { Duration::ZERO });
                Local::in_directory(directory, rank, world_size, LIMIT).unwrap()
            })
        };
        let threads: Vec<_> = (0..world_size).map(connect).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn files(folder: &Folder) -> usize {
    std::fs::read_dir(folder.path()).unwrap().count()
}

#[test]
fn ranks_meet_in_a_directory() {
    let folder = Folder::new();
    for world_size in 1..=4 {
        let ranks = world_in(folder.path(), world_size);
        assert_eq!(files(&folder), 0, "after a world has formed, another may use the directory");
        on_all(&ranks, |local| {
            gather_rounds(local, 20);
            let own = std::fs::File::open("/dev/null").unwrap();
            let passed = exchange_descriptors(local, own.as_fd(), LIMIT).unwrap();
            assert_eq!(passed.iter().flatten().count(), world_size - 1);
        });
        assert_eq!(files(&folder), 0);
    }
}

#[test]
fn an_abandoned_rendezvous_is_taken_over() {
    let folder = Folder::new();
    let socket = folder.path().join("fast-allreduce-rendezvous");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert!(socket.exists());
    let error = Local::in_directory(folder.path(), 1, 2, SHORT).unwrap_err();
    let Error::Timeout { operation: "rendezvous", missing, last_seen, .. } = &error else {
        panic!("{error}")
    };
    assert!(*missing == [0] && last_seen.contains("nobody answers"), "{error}");
    on_all(&world_in(folder.path(), 2), |local| gather_rounds(local, 3));
    assert_eq!(files(&folder), 0);
}

#[test]
fn one_world_at_a_time_forms_in_a_directory() {
    let folder = Folder::new();
    thread::scope(|scope| {
        let first = scope.spawn(|| Local::in_directory(folder.path(), 0, 2, 30 * SHORT).unwrap_err());
        await_file(&folder);
        let error = Local::in_directory(folder.path(), 0, 2, SHORT).unwrap_err();
        assert!(
            matches!(&error, Error::Rendezvous { reason } if reason.contains("its own directory")),
            "{error}"
        );
        let error = Local::in_directory(folder.path(), 1, 3, SHORT).unwrap_err();
        assert!(matches!(&error, Error::Refused { reason } if reason.contains("a world of 3")), "{error}");
        let error = first.join().unwrap();
        assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
    });
    assert_eq!(files(&folder), 0, "a world that did not form also leaves no files");
    let error = Local::in_directory(folder.path().join("none"), 0, 2, LIMIT).unwrap_err();
    assert!(matches!(error, Error::InvalidSetting { name: "socket directory", .. }), "{error}");
    let error = Local::in_directory(folder.path(), 2, 2, LIMIT).unwrap_err();
    assert_eq!(error, Error::RankOutOfRange { rank: 2, world_size: 2 });
}

/// Communicators of such a world share memory, and split.
#[test]
fn a_world_of_a_directory_shrinks() {
    let folder = Folder::new();
    let ranks = world_in(folder.path(), 3);
    thread::scope(|scope| {
        for local in ranks {
            scope.spawn(|| {
                let rank = local.rank();
                let all =
                    crate::Communicator::builder().timeout(LIMIT).build(crate::Host::new(), local).unwrap();
                let two = all.split(Some(u32::from(rank == 1)), 0).unwrap().unwrap();
                let mut data = [1.0f32; 100];
                two.all_reduce_in_place(&mut data, crate::ReduceOp::Sum).unwrap();
                assert_eq!(data, [if rank == 1 { 1.0 } else { 2.0 }; 100]);
            });
        }
    });
    assert_eq!(files(&folder), 0);
}

/// Waits until rank 0 serves the rendezvous.
fn await_file(folder: &Folder) {
    let deadline = Deadline::after(LIMIT);
    while files(folder) == 0 {
        assert!(!deadline.has_passed(), "nobody serves");
        thread::sleep(Duration::from_millis(1));
    }
}

const EARLIER: &str = "FAST_ALLREDUCE_TEST_EARLIER";

/// A rank of an earlier start of the program, which waits in the directory until it is killed.
struct Earlier(Child);

impl Earlier {
    fn start(folder: &Folder, rank: usize, world_size: usize) -> Self {
        let mut command = process(module_path!(), "rank_of_an_earlier_start");
        let who = format!("{rank} {world_size} {}", folder.path().display());
        let mut child = command.env(EARLIER, who).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("it looks")));
        Self(child)
    }

    fn is_there(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Earlier {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
#[ignore = "a process of other tests"]
fn rank_of_an_earlier_start() {
    let Ok(who) = std::env::var(EARLIER) else { return };
    let words: Vec<_> = who.splitn(3, ' ').collect();
    println!("it looks");
    let local =
        Local::in_directory(words[2], words[0].parse().unwrap(), words[1].parse().unwrap(), 2 * LIMIT);
    panic!("{local:?}: an earlier world formed, or its rank gave up");
}

/// Starts a world of 3, rank 0 last, and kills the earlier ranks after the new ones have met them.
fn forms_after(folder: &Folder, generation: Option<&str>, mut earlier: Vec<Earlier>) {
    let name = &file_name(generation.map(AsRef::as_ref));
    let formed = thread::scope(|scope| {
        let connect = |rank| {
            scope.spawn(move || {
                thread::sleep(if rank == 0 { 2 * SHORT } else { Duration::ZERO });
                Local::at(folder.path(), name.clone(), rank, 3, LIMIT).unwrap()
            })
        };
        let threads: Vec<_> = (0..3).map(connect).collect();
        thread::sleep(4 * SHORT);
        assert!(earlier.iter_mut().all(Earlier::is_there));
        drop(earlier);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    on_all(&formed, |local| gather_rounds(local, 5));
}

/// The earlier rank 0 waits for more ranks than the new world has. If it waits for the same number, generations are
/// needed to distinguish them.
#[test]
fn a_world_forms_despite_a_rank_0_of_an_earlier_start() {
    for (size, generation) in [(4, None), (3, Some("2"))] {
        let folder = Folder::new();
        let earlier = Earlier::start(&folder, 0, size);
        await_file(&folder);
        forms_after(&folder, generation, vec![earlier]);
    }
}

#[test]
fn a_world_forms_despite_ranks_of_an_earlier_start() {
    for (rank, size, generation) in [(1, 4, None), (2, 4, None), (1, 3, Some("2")), (2, 3, Some("2"))] {
        let folder = Folder::new();
        forms_after(&folder, generation, vec![Earlier::start(&folder, rank, size)]);
    }
}

/// A rank joins and ends before the last rank comes: another process replaces it.
#[test]
fn a_rank_that_ends_while_the_world_forms_is_replaced() {
    let folder = Folder::new();
    thread::scope(|scope| {
        let (first, earlier) = (
            scope.spawn(|| Local::in_directory(folder.path(), 0, 3, LIMIT).unwrap()),
            Earlier::start(&folder, 1, 3),
        );
        await_file(&folder);
        thread::sleep(SHORT);
        drop(earlier);
        let others = [1, 2].map(|rank| {
            let folder = &folder;
            scope.spawn(move || Local::in_directory(folder.path(), rank, 3, LIMIT).unwrap())
        });
        let ranks = [first].into_iter().chain(others).map(|rank| rank.join().unwrap());
        on_all(&ranks.collect::<Vec<_>>(), |local| gather_rounds(local, 5));
    });
    assert_eq!(files(&folder), 0);
}

/// The socket is removed before the error is returned, because the process may end as soon as it is.
#[test]
fn a_rank_0_that_gives_up_leaves_nothing() {
    let folder = Folder::new();
    for _ in 0..20 {
        let error = Local::in_directory(folder.path(), 0, 2, Duration::from_millis(5)).unwrap_err();
        assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
        assert_eq!(files(&folder), 0);
    }
}

#[test]
fn a_rank_that_ends_while_the_world_forms_is_missing_at_the_limit() {
    let folder = Folder::new();
    thread::scope(|scope| {
        let waiting = [0, 1].map(|rank| {
            let folder = &folder;
            scope.spawn(move || Local::in_directory(folder.path(), rank, 3, 20 * SHORT).unwrap_err())
        });
        let earlier = Earlier::start(&folder, 2, 4);
        await_file(&folder);
        drop(earlier);
        for error in waiting.map(|thread| thread.join().unwrap()) {
            let Error::Timeout { operation: "rendezvous", missing, .. } = &error else { panic!("{error}") };
            assert!(missing.contains(&2), "{error}");
        }
    });
}

#[test]
fn generations_do_not_meet() {
    let folder = Folder::new();
    let in_generation = |generation: &str, rank| {
        let name = file_name(Some(generation.as_ref()));
        Local::at(folder.path(), name, rank, 2, LIMIT).unwrap()
    };
    thread::scope(|scope| {
        // Rank 0 of one generation and rank 1 of the other come first.
        let first = scope.spawn(|| in_generation("0", 0));
        let second = scope.spawn(|| in_generation("1", 1));
        await_file(&folder);
        thread::sleep(SHORT);
        let others = [scope.spawn(|| in_generation("0", 1)), scope.spawn(|| in_generation("1", 0))];
        let mut ranks: Vec<_> =
            [first, second].into_iter().chain(others).map(|rank| rank.join().unwrap()).collect();
        ranks.swap(1, 2);
        for world in ranks.chunks(2) {
            on_all(world, |local| gather_rounds(local, 3));
        }
    });
    assert_eq!(files(&folder), 0);
}
