//! Whole worlds: ranks in threads and in processes, missing ranks, and ranks that leave.

mod directory;
mod intruders;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::super::socket::Token;
use super::super::socket_name::SOCKET_DIRECTORY;
use super::super::testing::{assert_released, contribution, is_alone, process, resources, LIMIT};
use super::super::world_state::Failure;
use super::*;
use crate::catalogue::settings::JOIN_TIMEOUT_VARIABLE;
use crate::testing::temporary::Folder;
use crate::thread::tests::forbid;

const SHORT: Duration = Duration::from_millis(100);

/// Connects the ranks of a new world.
fn world(id: &UniqueId, world_size: usize) -> Vec<Local> {
    thread::scope(|scope| {
        let connect = |rank| scope.spawn(move || Local::connect(id, rank, world_size, LIMIT).unwrap());
        let threads: Vec<_> = (0..world_size).map(connect).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Reads the id that a child process prints.
fn printed_id(child: &mut Child) -> UniqueId {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let id = lines.map_while(Result::ok).find_map(|line| Some(line.split_once("id=")?.1.to_owned()));
    id.unwrap().parse().unwrap()
}

/// Runs `rank` on all ranks concurrently.
fn on_all<T: Send>(ranks: &[Local], rank: impl Fn(&Local) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|local| scope.spawn(|| rank(local))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn gather_rounds(local: &Local, rounds: usize) {
    for round in 0..rounds {
        let all = local.all_gather(&contribution(local.rank(), round), LIMIT).unwrap();
        let expected: Vec<_> = (0..local.world_size()).map(|rank| contribution(rank, round)).collect();
        assert_eq!(all, expected, "round {round}");
    }
}

/// Opens a connection to the rendezvous, without a rank.
fn bare_link(id: &UniqueId) -> Link {
    connect(&SocketNamespace::Abstract, id.socket_name(), &Deadline::after(LIMIT)).unwrap().unwrap()
}

fn hello(id: &UniqueId, rank: usize, world_size: usize) -> Vec<u8> {
    Request::Hello { token: id.token(), rank, world_size }.frame()
}

/// Waits for the next reply on a bare connection; `None` once it is closed.
fn next_reply(link: &mut Link) -> Option<Reply> {
    loop {
        if let Some(body) = link.next(reply_limit(16)).unwrap() {
            return Some(Reply::decode(&body).unwrap());
        }
        assert!(poll_until(&mut [link.poll_fd()], &Deadline::after(LIMIT)).unwrap(), "no reply");
        link.fill().ok()?;
    }
}

fn is_refused(reply: Option<Reply>, why: &str) -> bool {
    matches!(reply, Some(Reply::Refused { reason }) if reason.contains(why))
}

#[test]
fn gathers_of_different_lengths() {
    for world_size in 1..=5 {
        let ranks = world(&UniqueId::new().unwrap(), world_size);
        on_all(&ranks, |local| gather_rounds(local, 200));
    }
}

#[test]
fn largest_world_and_largest_message() {
    let ranks = world(&UniqueId::new().unwrap(), crate::MAX_RANKS);
    on_all(&ranks, |local| {
        let too_long = local.all_gather(&vec![0; MAX_CONTRIBUTION + 1], LIMIT).unwrap_err();
        assert!(matches!(too_long, Error::InvalidSetting { .. }), "{too_long}");
        let all = local.all_gather(&vec![local.rank() as u8; MAX_CONTRIBUTION], LIMIT).unwrap();
        for (rank, bytes) in all.iter().enumerate() {
            assert!(bytes.len() == MAX_CONTRIBUTION && bytes.iter().all(|byte| *byte == rank as u8));
        }
        local.barrier(LIMIT).unwrap();
    });
}

#[test]
fn arguments_are_checked() {
    let id = UniqueId::new().unwrap();
    for world_size in [0, crate::MAX_RANKS + 1] {
        let error = Local::connect(&id, 0, world_size, LIMIT).unwrap_err();
        assert_eq!(error, Error::WorldSize { world_size });
    }
    let error = Local::connect(&id, 2, 2, LIMIT).unwrap_err();
    assert_eq!(error, Error::RankOutOfRange { rank: 2, world_size: 2 });
    world(&id, 2);
}

#[test]
fn processes_meet() {
    for world_size in 1..=5 {
        let id = UniqueId::new().unwrap();
        let children: Vec<_> = (0..world_size)
            .map(|rank| {
                let mut command = process(module_path!(), "rank_in_a_process");
                command.env(UNIQUE_ID, id.to_string());
                command.env(RANK, rank.to_string()).env(WORLD_SIZE, world_size.to_string());
                command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
        }
    }
}

/// One rank of `processes_meet`. Does nothing if the environment names no world.
#[test]
#[ignore = "a process of other tests"]
fn rank_in_a_process() {
    let Some(local) = Local::from_env().unwrap() else {
        return;
    };
    gather_rounds(&local, 200);
}

#[test]
fn a_killed_process_is_lost() {
    let id = UniqueId::new().unwrap();
    let mut command = process(module_path!(), "rank_that_waits");
    command.env(UNIQUE_ID, id.to_string()).env(RANK, "2").env(WORLD_SIZE, "3");
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let ranks: Vec<_> = thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let id = &id;
            scope.spawn(move || Local::connect(id, rank, 3, LIMIT).unwrap())
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let killer = thread::spawn(move || {
        thread::sleep(SHORT);
        child.kill().unwrap();
        child.wait().unwrap();
    });
    for error in on_all(&ranks, |local| local.barrier(LIMIT).unwrap_err()) {
        assert!(matches!(error, Error::PeerLost { rank: 2, .. }), "{error}");
    }
    killer.join().unwrap();
}

/// The rank of `a_killed_process_is_lost` that is killed.
#[test]
#[ignore = "a process of other tests"]
fn rank_that_waits() {
    let Some(_local) = Local::from_env().unwrap() else {
        return;
    };
    thread::sleep(LIMIT);
}

fn set(variable: &str, value: Option<&OsStr>) {
    // SAFETY: no other thread of this process reads the environment: it runs a test alone.
    unsafe {
        match value {
            Some(value) => std::env::set_var(variable, value),
            None => std::env::remove_var(variable),
        }
    }
}

#[test]
fn the_environment_is_checked() {
    if !is_alone(module_path!(), "the_environment_is_checked") {
        return;
    }
    assert!(Local::from_env().unwrap().is_none());
    let invalid = |variable: &str| {
        let error = Local::from_env().unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { name, .. } if name == variable), "{error}");
    };
    set(UNIQUE_ID, Some("secret".as_ref()));
    invalid(UNIQUE_ID);
    set(UNIQUE_ID, Some(UniqueId::new().unwrap().to_string().as_ref()));
    invalid(RANK);
    set(RANK, Some("-1".as_ref()));
    invalid(RANK);
    set(RANK, Some("0".as_ref()));
    invalid(WORLD_SIZE);
    set(WORLD_SIZE, Some("1".as_ref()));
    Local::from_env().unwrap().unwrap().barrier(LIMIT).unwrap();
    set(UNIQUE_ID, None);
    assert!(Local::from_env().unwrap().is_none());
    let folder = Folder::new();
    set(SOCKET_DIRECTORY, Some(folder.path().as_ref()));
    Local::from_env().unwrap().unwrap().barrier(LIMIT).unwrap();
    // Rank 1 never comes. The limit comes from the environment or from the program.
    set(WORLD_SIZE, Some("2".as_ref()));
    set(JOIN_TIMEOUT_VARIABLE, Some("0.25".as_ref()));
    let waited = |error| match error {
        Error::Timeout { operation: "rendezvous", waited, .. } => waited,
        error => panic!("{error}"),
    };
    assert_eq!(waited(Local::from_env().unwrap_err()), Duration::from_millis(250));
    assert_eq!(waited(Local::from_env_within(SHORT).unwrap_err()), SHORT);
    set(UNIQUE_ID, Some(UniqueId::new().unwrap().to_string().as_ref()));
    assert_eq!(waited(Local::from_env().unwrap_err()), Duration::from_millis(250));
    set(UNIQUE_ID, None);
    set(JOIN_TIMEOUT_VARIABLE, Some("soon".as_ref()));
    invalid(JOIN_TIMEOUT_VARIABLE);
    set(RANK, None);
    assert!(Local::from_env().unwrap().is_none(), "a directory without a rank is for the launcher");
}

#[test]
fn ranks_that_never_come_are_named() {
    let id = UniqueId::new().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| Local::connect(&id, 3, 4, LIMIT).unwrap_err());
        let mut witness = bare_link(&id);
        thread::sleep(SHORT);
        let error = Local::connect(&id, 1, 4, SHORT).unwrap_err();
        let (operation, missing) = ("rendezvous", vec![0, 2]);
        assert_eq!(
            error,
            Error::Timeout {
                operation,
                epoch: 0,
                missing: missing.clone(),
                waited: SHORT,
                last_seen: String::new()
            }
        );
        let error = waiting.join().unwrap();
        assert!(matches!(error, Error::Timeout { missing: named, .. } if named == missing));
        // A rank that comes later finds no rendezvous.
        assert_eq!(next_reply(&mut witness), None);
        assert!(matches!(Local::connect(&id, 0, 4, LIMIT), Err(Error::Rendezvous { .. })));
    });
}

#[test]
fn a_rank_that_does_not_gather_is_named() {
    let ranks = world(&UniqueId::new().unwrap(), 3);
    let started = Instant::now();
    let errors = on_all(&ranks[..2], |local| {
        local.barrier(if local.rank() == 0 { 3 * SHORT } else { LIMIT }).unwrap_err()
    });
    assert!(started.elapsed() < GRACE);
    for error in &errors {
        let Error::Timeout { operation: "all_gather", missing, .. } = error else { panic!("{error}") };
        assert_eq!(*missing, [2]);
    }
    assert_eq!(ranks[0].barrier(LIMIT), Err(errors[0].clone()), "a failure stays");
    let late = ranks[2].barrier(LIMIT).unwrap_err();
    assert!(matches!(late, Error::PeerLost { rank: 0, .. }), "{late}");
}

#[test]
fn a_dropped_rank_is_lost() {
    let mut ranks = world(&UniqueId::new().unwrap(), 4);
    let last = ranks.pop().unwrap();
    let is_lost = |result| matches!(result, Err(Error::PeerLost { rank: 3, .. }));
    thread::scope(|scope| {
        let waiting = [scope.spawn(|| ranks[0].barrier(LIMIT)), scope.spawn(|| ranks[1].barrier(LIMIT))];
        thread::sleep(SHORT);
        drop(last);
        assert!(waiting.into_iter().all(|thread| is_lost(thread.join().unwrap())));
    });
    assert!(is_lost(ranks[2].barrier(LIMIT)), "a call after the drop");
    assert!(is_lost(ranks[2].barrier(LIMIT)), "the failure stays");
}

#[test]
fn a_rank_that_leaves_while_the_world_forms_is_lost() {
    let id = UniqueId::new().unwrap();
    let mut gone = bare_link(&id);
    gone.send(hello(&id, 1, 3).into());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| Local::connect(&id, 0, 3, LIMIT).unwrap_err());
        thread::sleep(SHORT);
        drop(gone);
        assert!(matches!(waiting.join().unwrap(), Error::PeerLost { rank: 1, .. }));
    });
}

/// A fork does not speak for the rank, and leaves the other ranks' gathers alone.
#[test]
fn a_fork_contributes_nothing() {
    let ranks = world(&UniqueId::new().unwrap(), 2);
    // SAFETY: the child allocates nothing, takes no lock, and ends by _exit.
    match unsafe { libc::fork() } {
        0 => {
            let right = ranks[0].all_gather(b"the child", LIMIT) == Err(Error::Forked);
            ranks[0].interrupt();
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        child => {
            let mut status = -1;
            // SAFETY: the status outlives the call.
            assert_eq!((unsafe { libc::waitpid(child, &mut status, 0) }, status), (child, 0));
        }
    }
    on_all(&ranks, |local| gather_rounds(local, 3));
}

/// Threads of coroutine libraries and some servers have small stacks.
#[test]
fn ranks_need_little_stack() {
    const STACK: usize = 64 << 10;
    let id = UniqueId::new().unwrap();
    thread::scope(|scope| {
        for rank in 0..2 {
            let rank = move || {
                let local = Local::connect(&id, rank, 2, LIMIT).unwrap();
                gather_rounds(&local, 2);
            };
            thread::Builder::new().stack_size(STACK).spawn_scoped(scope, rank).unwrap();
        }
    });
}

/// A rank and a rendezvous end even if a fork of their process lives on.
#[test]
fn a_surviving_fork_keeps_nobody_waiting() {
    let mut command = process(module_path!(), "rank_that_forks_and_leaves");
    let mut child = command.env("FAST_ALLREDUCE_TEST_FORK", "1").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut printed = |word: &str| lines.find_map(|line| Some(line.split_once(word)?.1.to_owned())).unwrap();
    let id: UniqueId = printed("id=").parse().unwrap();
    let started = Instant::now();
    let other = Local::connect(&id, 1, 2, LIMIT).unwrap();
    let fork: i32 = printed("fork=").parse().unwrap();
    let lost = other.barrier(LIMIT).unwrap_err();
    drop(other);
    // The world is over, and with it the rendezvous.
    let over = loop {
        match Local::connect(&id, 1, 2, LIMIT).unwrap_err() {
            error @ Error::Rendezvous { .. } => break error,
            _ => thread::sleep(Duration::from_millis(1)),
        }
    };
    let took = started.elapsed();
    // SAFETY: the fork ends by itself only later, so its process id has not been reused.
    assert_eq!(unsafe { libc::kill(fork, libc::SIGKILL) }, 0, "the fork survived");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(lost, Error::PeerLost { rank: 0, .. }), "{lost}");
    assert!(took < LIMIT / 6, "{over} after {took:?}");
}

/// The process of `a_surviving_fork_keeps_nobody_waiting`: a rank that also serves the rendezvous.
#[test]
#[ignore = "a process of other tests"]
fn rank_that_forks_and_leaves() {
    if std::env::var_os("FAST_ALLREDUCE_TEST_FORK").is_none() {
        return;
    }
    let id = UniqueId::new().unwrap();
    println!("id={id}");
    let local = Local::connect(&id, 0, 2, LIMIT).unwrap();
    // SAFETY: the child calls only async-signal-safe functions.
    match unsafe { libc::fork() } {
        0 => loop {
            // SAFETY: both calls are async-signal-safe; the alarm ends the child after 30 s.
            unsafe {
                libc::alarm(30);
                libc::pause();
            }
        },
        fork => println!("fork={fork}"),
    }
    drop(local);
    thread::sleep(LIMIT);
}

#[test]
fn a_rank_may_leave_once_it_has_the_result() {
    for _ in 0..50 {
        let ranks = world(&UniqueId::new().unwrap(), 3);
        let threads: Vec<_> =
            ranks.into_iter().map(|rank| thread::spawn(move || rank.barrier(LIMIT))).collect();
        for thread in threads {
            thread.join().unwrap().unwrap();
        }
    }
}

#[test]
fn the_end_of_the_process_of_an_id_is_noticed() {
    let mut command = process(module_path!(), "process_that_makes_an_id");
    let mut child = command.env("FAST_ALLREDUCE_TEST_MAKE_ID", "1").stdout(Stdio::piped()).spawn().unwrap();
    let id = printed_id(&mut child);
    let ranks = world(&id, 2);
    on_all(&ranks, |local| gather_rounds(local, 5));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| ranks[0].barrier(LIMIT));
        thread::sleep(SHORT);
        child.kill().unwrap();
        child.wait().unwrap();
        let errors = [waiting.join().unwrap(), ranks[1].barrier(LIMIT), ranks[1].barrier(LIMIT)];
        assert!(errors.iter().all(|error| matches!(error, Err(Error::Rendezvous { .. }))), "{errors:?}");
    });
    let started = Instant::now();
    assert!(matches!(Local::connect(&id, 0, 2, LIMIT), Err(Error::Rendezvous { .. })));
    assert!(started.elapsed() < GRACE);
}

/// The process of `the_end_of_the_process_of_an_id_is_noticed`.
#[test]
#[ignore = "a process of other tests"]
fn process_that_makes_an_id() {
    if std::env::var_os("FAST_ALLREDUCE_TEST_MAKE_ID").is_some() {
        println!("id={}", UniqueId::new().unwrap());
        thread::sleep(LIMIT);
    }
}

/// The rendezvous was stopped. It first reads the timeout of a rank, then the message that this rank waited for.
#[test]
fn a_timeout_is_answered_after_all_messages_that_have_arrived() {
    let mut command = process(module_path!(), "process_that_makes_an_id");
    let mut child = command.env("FAST_ALLREDUCE_TEST_MAKE_ID", "1").stdout(Stdio::piped()).spawn().unwrap();
    let id = printed_id(&mut child);
    let server = child.id() as i32;
    let stop = || {
        // SAFETY: the child has not been waited for, so that no other process has its id; the status pointer may be
        // null.
        unsafe {
            assert_eq!(libc::kill(server, libc::SIGSTOP), 0);
            // Returns when all its threads have stopped.
            assert_eq!(libc::waitpid(server, std::ptr::null_mut(), libc::WUNTRACED), server);
        }
    };
    // SAFETY: as above.
    let go_on = || assert_eq!(unsafe { libc::kill(server, libc::SIGCONT) }, 0);
    let mut first = bare_link(&id);
    first.send(hello(&id, 0, 2).into());
    // The hub serves connections in their order.
    thread::sleep(SHORT);

    stop();
    first.send(Request::GiveUp { sequence: 0 }.frame().into());
    let mut second = bare_link(&id);
    second.send(hello(&id, 1, 2).into());
    go_on();
    assert_eq!(next_reply(&mut first), Some(Reply::Event(Event::Formed)));
    assert_eq!(next_reply(&mut second), Some(Reply::Event(Event::Formed)));

    stop();
    first.send(Request::Gather { sequence: 1, bytes: vec![1] }.frame().into());
    first.send(Request::GiveUp { sequence: 1 }.frame().into());
    second.send(Request::Gather { sequence: 1, bytes: vec![2] }.frame().into());
    go_on();
    let gathered = Reply::Event(Event::Gathered { sequence: 1, parts: vec![vec![1], vec![2]] });
    assert_eq!(next_reply(&mut first), Some(gathered.clone()));
    assert_eq!(next_reply(&mut second), Some(gathered));

    // Without the message of the other rank, that rank is missing.
    first.send(Request::Gather { sequence: 2, bytes: vec![] }.frame().into());
    first.send(Request::GiveUp { sequence: 2 }.frame().into());
    let failure = Failure::TimedOut { sequence: 2, by: 0, missing: vec![1], refused: String::new() };
    assert_eq!(next_reply(&mut first), Some(Reply::Event(Event::Failed(failure))));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_timeout_says_who_was_refused() {
    let id = UniqueId::new().unwrap();
    let mut first = bare_link(&id);
    first.send(hello(&id, 0, 2).into());
    // The hub serves connections in their order.
    let mut second = bare_link(&id);
    second.send(hello(&id, 1, 3).into());
    let sizes = "it joins a world of 3, but this one has 2 ranks";
    assert!(is_refused(next_reply(&mut second), sizes));
    first.send(Request::GiveUp { sequence: 0 }.frame().into());
    let Some(Reply::Event(Event::Failed(failure))) = next_reply(&mut first) else { panic!("no failure") };
    let error = failure.to_error(0, LIMIT).to_string();
    assert!(error.contains("waiting for rank 1") && error.contains(sizes), "{error}");
}

#[test]
fn a_server_that_hangs_is_not_waited_for() {
    let name = socket::random_name().unwrap();
    let id = UniqueId::encode(&name, &Token::random().unwrap(), 0);
    let _listener = SocketNamespace::Abstract.listen(SockType::Stream, &name).unwrap();
    let started = Instant::now();
    let error = Local::connect(&id, 0, 2, SHORT).unwrap_err();
    assert!(matches!(&error, Error::Rendezvous { reason } if reason.contains("does not answer")), "{error}");
    assert!(started.elapsed() < SHORT + 2 * GRACE);
}

#[test]
fn the_last_gather_reaches_all_if_the_server_ends_after_it() {
    for _ in 0..20 {
        let mut command = process(module_path!(), "rank_that_serves_and_ends");
        command.env("FAST_ALLREDUCE_TEST_SERVE", "1");
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let id = printed_id(&mut child);
        thread::scope(|scope| {
            for rank in [1, 2] {
                let id = &id;
                scope.spawn(move || Local::connect(id, rank, 3, LIMIT).unwrap().barrier(LIMIT).unwrap());
            }
        });
        assert!(child.wait().unwrap().success());
    }
}

/// Rank 0 of `the_last_gather_reaches_all_if_the_server_ends_after_it`.
#[test]
#[ignore = "a process of other tests"]
fn rank_that_serves_and_ends() {
    if std::env::var_os("FAST_ALLREDUCE_TEST_SERVE").is_some() {
        let id = UniqueId::new().unwrap();
        println!("id={id}");
        let local = Local::connect(&id, 0, 3, LIMIT).unwrap();
        local.barrier(LIMIT).unwrap();
        std::process::exit(0);
    }
}

#[test]
fn nothing_leaks() {
    if !is_alone(module_path!(), "nothing_leaks") {
        return;
    }
    let before = resources();
    for cycle in 0..200 {
        let id = UniqueId::new().unwrap();
        let _silent = bare_link(&id);
        if cycle % 4 == 0 {
            let unformed = Local::connect(&id, 0, 2, Duration::ZERO).unwrap_err();
            assert!(matches!(unformed, Error::Timeout { .. }), "{unformed}");
        } else {
            on_all(&world(&id, 1 + cycle % 3), |local| gather_rounds(local, 2));
        }
    }
    assert_released(before);
}

/// Old kernels lack accept4, and sandboxes written for them refuse it.
#[test]
fn a_rendezvous_without_accept4_serves() {
    let folder = Folder::new();
    let first = thread::scope(|scope| {
        let serving = scope.spawn(|| {
            // The hub's thread inherits the filter from this one.
            forbid(libc::SYS_accept4);
            let local = Local::in_directory(folder.path(), 0, 2, LIMIT).unwrap();
            local.all_gather(&[7], LIMIT).unwrap()
        });
        let other = scope.spawn(|| {
            let local = Local::in_directory(folder.path(), 1, 2, LIMIT).unwrap();
            local.all_gather(&[8], LIMIT).unwrap()
        });
        (serving.join().unwrap(), other.join().unwrap())
    });
    assert_eq!(first, (vec![vec![7], vec![8]], vec![vec![7], vec![8]]));
}

/// The error comes at once, not after the limit.
#[test]
fn a_rendezvous_that_cannot_accept_is_reported() {
    let folder = Folder::new();
    let started = Instant::now();
    let refused = thread::scope(|scope| {
        let serving = scope.spawn(|| {
            forbid(libc::SYS_accept4);
            forbid(libc::SYS_accept);
            let id = UniqueId::new().unwrap();
            [Local::in_directory(folder.path(), 0, 2, LIMIT), Local::connect(&id, 0, 2, LIMIT)]
                .map(Result::unwrap_err)
        });
        serving.join().unwrap()
    });
    assert_eq!(refused[0], Error::System { call: "accept of a rank", errno: Errno::EPERM });
    assert!(matches!(refused[1], Error::Rendezvous { .. }), "{}", refused[1]);
    assert!(started.elapsed() < LIMIT / 2);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
