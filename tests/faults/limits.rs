//! Limits of a container or a shell: an error that names the limit, where the kernel would send a signal.

use std::sync::atomic::{AtomicUsize, Ordering};

use fast_allreduce::bootstrap::{Threads, UniqueId};
use fast_allreduce::{Communicator, Host, Result};
use nix::sys::resource::{getrlimit, setrlimit, Resource};
use nix::sys::signal::{sigaction, SaFlags, SigAction, SigHandler, SigSet, Signal};

use crate::alone::{is_alone, take};
use crate::rank::{limit_descriptors, set_descriptor_limit};
use crate::world::{build, builder};

#[test]
fn a_region_beyond_the_limit_on_files_is_an_error() {
    if !is_alone("limits::a_region_beyond_the_limit_on_files_is_an_error", []) {
        return;
    }
    let (old, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, 3 << 20, hard).unwrap();
    for error in build(2, 1 << 20).into_iter().map(Result::unwrap_err) {
        let text = error.to_string();
        assert!(text.contains("3145728") && text.contains("RLIMIT_FSIZE"), "{text}");
        assert!(text.contains("`ulimit -f`"), "{text}");
    }
    // What is below it is no error.
    assert_eq!(build(2, 64 << 10), [Ok(()), Ok(())]);
    setrlimit(Resource::RLIMIT_FSIZE, old, hard).unwrap();
    assert_eq!(build(2, 1 << 20), [Ok(()), Ok(())]);
}

#[test]
fn a_lack_of_descriptors_names_the_limit() {
    if !is_alone("limits::a_lack_of_descriptors_names_the_limit", []) {
        return;
    }
    let mut lacked = 0;
    for spare in 0..40 {
        let old = limit_descriptors(spare);
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        // Told while the limit holds.
        let met = UniqueId::new().map(drop).map_err(|error| error.to_string());
        let built = build(2, 64 << 10).into_iter().map(|built| built.map_err(|error| error.to_string()));
        let texts: Vec<_> = built.chain([met]).filter_map(Result::err).collect();
        set_descriptor_limit(old);
        let facts = [&format!("RLIMIT_NOFILE is {limit}"), "`ulimit -n`"];
        // A rank that lacks none may hear of one that does only that it is gone.
        let named = texts.iter().any(|text| facts.iter().all(|fact| text.contains(*fact)));
        assert!(named || texts.is_empty(), "{spare} spare: {texts:?}");
        lacked += usize::from(named);
    }
    assert!((1..40).contains(&lacked), "{lacked}");
}

static ALARMS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_alarm(_signal: i32) {
    ALARMS.fetch_add(1, Ordering::Relaxed);
}

/// Allocating takes longer than the time between two signals. Before Linux 6.9 each of them interrupts it.
#[test]
fn signals_do_not_end_an_allocation() {
    if !is_alone("limits::signals_do_not_end_an_allocation", [Signal::SIGALRM]) {
        return;
    }
    let [rank] = Threads::world(1).unwrap().try_into().ok().unwrap();
    let communicator: Communicator<Host> = builder().max_bytes(64 << 10).build(Host::new(), rank).unwrap();
    let action = SigAction::new(SigHandler::Handler(count_alarm), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing but an atomic addition.
    unsafe { sigaction(Signal::SIGALRM, &action) }.unwrap();
    take(Signal::SIGALRM, true);
    let every = |micros| {
        let interval = libc::timeval { tv_sec: 0, tv_usec: micros };
        let timer = libc::itimerval { it_interval: interval, it_value: interval };
        // SAFETY: reads the structure.
        assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) }, 0);
    };
    every(4000);
    let memory = communicator.symmetric_memory::<u8>(256 << 20);
    every(0);
    assert!(ALARMS.load(Ordering::Relaxed) > 0);
    let memory = memory.unwrap();
    assert_eq!(memory.view(0).unwrap().load((256 << 20) - 1), Ok(0));
    memory.free().unwrap();
}
