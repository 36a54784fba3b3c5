//! Suspended ranks that CRIU dumps and ends, and restores later.
//!
//! `FAST_ALLREDUCE_CRIU` is a CRIU that works on this kernel, such as that of `scripts/debian-packages.sh criu`.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use fast_allreduce::bootstrap::{Local, UniqueId};
use fast_allreduce::{Buffer, Communicator, Host, ReduceOp};
use nix::errno::Errno;
use nix::sys::signal::{kill, Signal};
use nix::unistd::{setsid, Pid};

use crate::launch::{this_test, LIMIT};
use crate::random::Random;
use crate::runner::{Found, Missing};
use crate::temporary::Folder;
use crate::world::builder;

tests! {
    criu => suspended_ranks_are_dumped_and_restored;
}

const TEST: &str = "checkpoint::suspended_ranks_are_dumped_and_restored";
/// Set in a rank's process: its number, the id, and the folder of the test.
const RANK: &str = "FAST_ALLREDUCE_TEST_CHECKPOINT";
const RANKS: usize = 2;
const COUNT: usize = 10_000;

/// Returns the program, or nothing in a rank's process.
fn criu() -> Found<Option<PathBuf>> {
    let missing = |reason: String| Missing::new("criu", reason);
    if std::env::var_os(RANK).is_some() {
        return Ok(None);
    }
    let program = std::env::var_os("FAST_ALLREDUCE_CRIU").map(PathBuf::from);
    let program = program.ok_or_else(|| missing("FAST_ALLREDUCE_CRIU is not the path of CRIU".into()))?;
    let checked = Command::new(&program).arg("check").output();
    let checked = checked.map_err(|error| missing(format!("{}: {error}", program.display())))?;
    match checked.status.success() {
        true => Ok(Some(program)),
        false => Err(missing(format!("criu check: {}", String::from_utf8_lossy(&checked.stderr)))),
    }
}

/// Waits for a file, which appears at once with its content.
fn wait_for(path: &Path) {
    let started = std::time::Instant::now();
    while !path.exists() {
        assert!(started.elapsed() < LIMIT, "{} does not come", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn suspended_ranks_are_dumped_and_restored(criu: Option<PathBuf>) {
    match (criu, std::env::var(RANK)) {
        (Some(criu), _) => dump_and_restore(&criu),
        (None, Ok(settings)) => rank(&settings),
        (None, Err(error)) => panic!("{error}"),
    }
}

/// The number of a rank's process, which is ended with the test. A restored process is no child of this one.
struct Process(Pid);

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = kill(self.0, Signal::SIGKILL);
    }
}

fn dump_and_restore(criu: &Path) {
    let folder = Folder::new();
    let at = |name: String| folder.path().join(name);
    let id = UniqueId::new().unwrap();
    let start = |rank: usize| -> Child {
        let output = File::create(at(format!("output {rank}"))).unwrap();
        let mut command = this_test(TEST);
        command
            .env(RANK, format!("{rank} {id} {}", folder.path().display()))
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        // CRIU dumps whole sessions, and no pipes or sockets to others, which this process may have inherited.
        let alone = || {
            setsid()?;
            // SAFETY: a system call that touches no memory. If the kernel lacks it, the dump may fail.
            unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
            Ok(())
        };
        // SAFETY: it makes two system calls.
        unsafe { command.pre_exec(alone) };
        command.spawn().unwrap()
    };
    let children: Vec<_> = (0..RANKS).map(start).collect();
    let pids: Vec<_> = children.iter().map(|child| Pid::from_raw(child.id() as i32)).collect();
    let _processes: Vec<_> = pids.iter().map(|&pid| Process(pid)).collect();
    let run = |rank: usize, what: &str, arguments: &[&str]| {
        let images = at(format!("images {rank}"));
        std::fs::create_dir_all(&images).unwrap();
        let log = format!("{what}.log");
        let run = Command::new(criu)
            .arg(what)
            .args(arguments)
            .arg("--images-dir")
            .arg(&images)
            .args(["--log-file", &log])
            .output()
            .unwrap();
        let log = || std::fs::read_to_string(images.join(&log)).unwrap_or_default();
        assert!(run.status.success(), "{what}: {run:?}\n{}", log());
    };
    (0..RANKS).for_each(|rank| wait_for(&at(format!("suspended {rank}"))));
    for (rank, mut child) in children.into_iter().enumerate() {
        run(rank, "dump", &["--tree", &pids[rank].to_string()]);
        child.wait().unwrap();
    }
    // Nobody is there.
    pids.iter().for_each(|&pid| assert_eq!(kill(pid, None), Err(Errno::ESRCH)));
    (0..RANKS).for_each(|rank| run(rank, "restore", &["--restore-detached"]));
    File::create(at("go".into())).unwrap();
    for (rank, &pid) in pids.iter().enumerate() {
        let started = std::time::Instant::now();
        while kill(pid, None).is_ok() {
            assert!(started.elapsed() < LIMIT, "rank {rank} does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = std::fs::read_to_string(at(format!("output {rank}"))).unwrap();
        assert!(output.contains("1 passed"), "rank {rank}: {output}");
    }
}

fn rank(settings: &str) {
    let [rank, id, folder] = settings.splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("{settings}") };
    let rank: usize = rank.parse().unwrap();
    let folder = Path::new(folder);
    let local = Local::connect(&id.parse().unwrap(), rank, RANKS, LIMIT).unwrap();
    let communicator = builder().build(Host::new(), local).unwrap();
    let mut buffer = communicator.alloc::<f32>(COUNT).unwrap();
    let memory = communicator.symmetric_memory::<u64>(1).unwrap();
    let mut random = Random::new(TEST).fork(rank);
    let inputs: Vec<f32> = (0..COUNT).map(|_| random.below(1 << 20) as f32 / 3.0).collect();
    let sum = |communicator: &Communicator<Host>, buffer: &mut Buffer<f32, Host>| {
        communicator.all_reduce_in_place(buffer, ReduceOp::Sum).unwrap();
        buffer.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>()
    };
    buffer.copy_from_slice(&inputs);
    let before = sum(&communicator, &mut buffer);
    // What the suspended process keeps.
    buffer.copy_from_slice(&inputs);
    memory.view(rank).unwrap().store(0, 42 + rank as u64).unwrap();

    communicator.suspend().unwrap();
    File::create(folder.join(format!("suspended {rank}"))).unwrap();
    wait_for(&folder.join("go"));
    communicator.resume(LIMIT).unwrap();
    assert!(sum(&communicator, &mut buffer) == before, "the same bits");
    assert_eq!(memory.view(1 - rank).unwrap().load(0).unwrap(), 43 - rank as u64);
    communicator.barrier().unwrap();
}
