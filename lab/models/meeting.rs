//! Models of how ranks of a world form the next one: the name at which they meet, which the first to come serves
//! (`Meeting` in `src/bootstrap/local/directory.rs`, and `hub.rs` beside it), and the two gathers by which all of them
//! leave the old world or none does (`enter_locked` in `src/communicator/returning.rs`).
//!
//! What the operating system does in one call, such as listening on a name that nobody has, is one critical section.

use std::rc::Rc;

use loom::sync::Mutex;
use loom::thread;

use super::explore::{found, within, HANG};

const RANKS: usize = 2;
const REFUSED: &str = "a rank was refused by a world that has formed";
const APART: &str = "survivors that do not meet again";

/// Rules of the name in which tests plant bugs.
#[derive(Clone, Copy)]
struct Rules {
    /// The server gives up the name before any rank knows that the world has formed.
    frees_first: bool,
    /// Only one can listen on the name.
    is_exclusive: bool,
}

const SOCKETS: Rules = Rules { frees_first: true, is_exclusive: true };

#[derive(Default)]
struct Server {
    joined: [bool; RANKS],
    has_formed: bool,
}

#[derive(Default)]
struct Sockets {
    /// The server that listens on the name.
    listening: Option<usize>,
    servers: Vec<Server>,
}

/// Meets the other rank, and returns the number of the server.
fn meet(sockets: &Mutex<Sockets>, rank: usize, rules: Rules) -> usize {
    let found = sockets.lock().unwrap().listening;
    let server = found.unwrap_or_else(|| {
        let mut sockets = sockets.lock().unwrap();
        // Another may have come first.
        match sockets.listening.filter(|_| rules.is_exclusive) {
            Some(server) => server,
            None => {
                sockets.servers.push(Server::default());
                let server = sockets.servers.len() - 1;
                sockets.listening = Some(server);
                server
            }
        }
    });
    let is_last = {
        let joined = &mut sockets.lock().unwrap().servers[server].joined;
        assert!(!joined[rank], "{REFUSED}");
        joined[rank] = true;
        joined.iter().all(|&has_joined| has_joined)
    };
    // The last one does what the server's thread does then.
    if is_last {
        let free = || sockets.lock().unwrap().listening = None;
        let tell = || sockets.lock().unwrap().servers[server].has_formed = true;
        match rules.frees_first {
            true => (free(), tell()),
            false => (tell(), free()),
        };
    }
    while !sockets.lock().unwrap().servers[server].has_formed {
        thread::yield_now();
    }
    server
}

/// The ranks meet twice at one name, as those of a world that grows and grows again.
fn twice(rules: Rules) -> impl Fn() + Send + Sync + 'static {
    move || {
        let sockets = Rc::new(Mutex::new(Sockets::default()));
        let run = move |sockets: &Mutex<Sockets>, rank| [(); 2].map(|()| meet(sockets, rank, rules));
        let other = {
            let sockets = Rc::clone(&sockets);
            thread::spawn(move || run(&sockets, 1))
        };
        let own = run(&sockets, 0);
        assert_eq!(own, other.join().unwrap());
        assert_ne!(own[0], own[1]);
    }
}

/// What happens to the third rank, which is not one of the survivors that are compared, or to the server.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// It cannot map the memory of the others.
    Fails,
    /// It is killed before it contributes to this gather.
    DiesBefore(usize),
    /// The server is killed when it has told one rank the result of the first gather.
    ServerDies,
}

/// When a rank keeps the secrets of the new world instead of those of the old one.
#[derive(Clone, Copy, PartialEq)]
enum Keeps {
    /// When it knows that all ranks can map.
    AfterTheFirst,
    /// When it can map itself.
    BeforeTheFirst,
    /// When it knows that all ranks have mapped: the old mappings are gone before.
    AfterTheSecond,
}

#[derive(Default)]
struct Gather {
    given: [Option<bool>; 3],
    /// Whether all succeeded; false if a rank was lost.
    outcome: Option<bool>,
    told: usize,
}

/// Contributes to a gather, and waits for its outcome, unless this rank is killed.
fn gather(gathers: &Mutex<[Gather; 2]>, number: usize, rank: usize, fault: Fault) -> bool {
    if fault == Fault::ServerDies && number > 0 {
        return false;
    }
    {
        let gather = &mut gathers.lock().unwrap()[number];
        gather.given[rank] = Some(true);
        if gather.outcome.is_none() && gather.given.iter().all(Option::is_some) {
            gather.outcome = Some(gather.given.iter().all(|given| *given == Some(true)));
        }
    }
    loop {
        let gather = &mut gathers.lock().unwrap()[number];
        if let Some(outcome) = gather.outcome {
            gather.told += 1;
            return outcome && !(fault == Fault::ServerDies && gather.told > 1);
        }
        thread::yield_now();
    }
}

/// Returns whether a survivor has the secrets of the new world, and whether its old mappings are gone.
fn enters(gathers: &Mutex<[Gather; 2]>, rank: usize, keeps: Keeps, fault: Fault) -> (bool, bool) {
    let mut is_new = keeps == Keeps::BeforeTheFirst;
    if !gather(gathers, 0, rank, fault) {
        return (is_new, false);
    }
    is_new |= keeps == Keeps::AfterTheFirst;
    let has_mapped = gather(gathers, 1, rank, fault);
    (is_new || has_mapped, true)
}

fn entered(keeps: Keeps, fault: Fault) -> impl Fn() + Send + Sync + 'static {
    move || {
        let gathers = Rc::new(Mutex::new(<[Gather; 2]>::default()));
        let other = {
            let gathers = Rc::clone(&gathers);
            thread::spawn(move || enters(&gathers, 1, keeps, fault))
        };
        let third = {
            let gathers = Rc::clone(&gathers);
            thread::spawn(move || {
                for number in 0..2 {
                    let mut gathers = gathers.lock().unwrap();
                    if matches!(fault, Fault::DiesBefore(last) if last <= number) {
                        // The server tells all ranks of each gather that needs this one.
                        gathers[number].outcome = Some(false);
                        continue;
                    }
                    let gather = &mut gathers[number];
                    gather.given[2] = Some(!(number == 0 && fault == Fault::Fails));
                    if gather.given.iter().all(Option::is_some) {
                        gather.outcome = Some(gather.given.iter().all(|given| *given == Some(true)));
                    }
                }
            })
        };
        let own = enters(&gathers, 0, keeps, fault);
        let other = other.join().unwrap();
        third.join().unwrap();
        assert_eq!(own.0, other.0, "{APART}");
        // Without its old mappings a rank cannot go on in the old world.
        assert!([own, other].iter().all(|(is_new, has_left)| is_new == has_left), "{APART}");
    }
}

#[test]
fn ranks_that_meet_twice_at_a_name_find_each_other() {
    within(3, twice(SOCKETS));
}

#[test]
fn a_name_that_is_kept_until_the_ranks_know_is_found() {
    found(&[REFUSED], Some(3), twice(Rules { frees_first: false, ..SOCKETS }));
}

#[test]
fn a_name_that_two_can_take_is_found() {
    found(&[HANG], Some(3), twice(Rules { is_exclusive: false, ..SOCKETS }));
}

#[test]
fn survivors_leave_the_old_world_together() {
    for fault in [Fault::None, Fault::Fails, Fault::DiesBefore(0), Fault::DiesBefore(1)] {
        within(2, entered(Keeps::AfterTheFirst, fault));
    }
}

#[test]
fn secrets_that_are_kept_too_early_or_too_late_are_found() {
    found(&[APART], Some(2), entered(Keeps::BeforeTheFirst, Fault::Fails));
    found(&[APART], Some(2), entered(Keeps::AfterTheSecond, Fault::DiesBefore(1)));
}

/// The limit that `docs/reliability.md` states.
#[test]
fn a_server_that_is_killed_while_it_tells_is_found() {
    found(&[APART], Some(2), entered(Keeps::AfterTheFirst, Fault::ServerDies));
}
