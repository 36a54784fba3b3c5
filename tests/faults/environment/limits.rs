//! Limits of a container or a shell: an error that names the limit, instead of a signal from the kernel.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Barrier;

use fast_allreduce::bootstrap::{Threads, UniqueId};
use fast_allreduce::{Communicator, Error, Host, ReduceOp, Result};
use nix::errno::Errno;
use nix::sys::resource::{getrlimit, setrlimit, Resource};
use nix::sys::signal::{sigaction, SaFlags, SigAction, SigHandler, SigSet, Signal};

use crate::fixtures::alone::{is_alone, take};
use crate::fixtures::rank::{limit_descriptors, set_descriptor_limit};
use crate::fixtures::world::{build, builder, threads};

#[test]
fn a_region_beyond_the_limit_on_files_is_an_error() {
    if !is_alone("environment::limits::a_region_beyond_the_limit_on_files_is_an_error", []) {
        return;
    }
    let (old, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, 3 << 20, hard).unwrap();
    for error in build(2, 1 << 20).into_iter().map(Result::unwrap_err) {
        let text = error.to_string();
        assert!(text.contains("3145728") && text.contains("RLIMIT_FSIZE"), "{text}");
        assert!(text.contains("`ulimit -f`"), "{text}");
    }
    // Sizes below the limit work.
    assert_eq!(build(2, 64 << 10), [Ok(()), Ok(())]);
    setrlimit(Resource::RLIMIT_FSIZE, old, hard).unwrap();
    assert_eq!(build(2, 1 << 20), [Ok(()), Ok(())]);
}

#[test]
fn a_lack_of_descriptors_names_the_limit() {
    if !is_alone("environment::limits::a_lack_of_descriptors_names_the_limit", []) {
        return;
    }
    let mut lacked = 0;
    for spare in 0..40 {
        let old = limit_descriptors(spare);
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        // Formatted while the limit still applies.
        let met = UniqueId::new().map(drop).map_err(|error| error.to_string());
        let built = build(2, 64 << 10).into_iter().map(|built| built.map_err(|error| error.to_string()));
        let texts: Vec<_> = built.chain([met]).filter_map(Result::err).collect();
        set_descriptor_limit(old);
        let facts = [&format!("RLIMIT_NOFILE is {limit}"), "`ulimit -n`"];
        // A rank that lacks nothing may only learn that another one is gone.
        let named = texts.iter().any(|text| facts.iter().all(|fact| text.contains(*fact)));
        assert!(named || texts.is_empty(), "{spare} spare: {texts:?}");
        lacked += usize::from(named);
    }
    assert!((1..40).contains(&lacked), "{lacked}");
}

/// Limits data to `spare` bytes more than now, or removes the limit. Returns the new limit.
fn limit_data(spare: Option<u64>) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmData:")?.trim().strip_suffix(" kB"));
    let used = kib.unwrap().parse::<u64>().unwrap() * 1024;
    let (_, hard) = getrlimit(Resource::RLIMIT_DATA).unwrap();
    let limit = spare.map_or(hard, |spare| used + spare);
    setrlimit(Resource::RLIMIT_DATA, limit, hard).unwrap();
    limit
}

/// Returns the numbers of descriptors and of mappings of this crate's memory.
fn held() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("memfd:fast-allreduce")).count();
    (std::fs::read_dir("/proc/self/fd").unwrap().count(), mapped)
}

/// After a failed call a buffer's memory becomes private, and then counts as data.
#[test]
fn a_buffer_beyond_the_limit_on_data_is_an_error() {
    if !is_alone("environment::limits::a_buffer_beyond_the_limit_on_data_is_an_error", []) {
        return;
    }
    const BYTES: usize = 64 << 20;
    let meeting = Barrier::new(2);
    threads(
        2,
        |_| builder().max_bytes(64 << 10),
        |communicator| {
            // One rank changes the limit for all, while the others wait.
            let one_does = |change: &dyn Fn() -> u64| {
                meeting.wait();
                let done = (communicator.rank() == 0).then(|| (change(), held()));
                meeting.wait();
                done
            };
            let before = one_does(&|| limit_data(Some(BYTES as u64 / 2)));
            let refused = communicator.alloc::<u8>(BYTES).map(drop).map_err(|error| error.to_string());
            // Sizes below the limit work.
            let small = communicator.alloc::<u8>(BYTES / 8).map(drop);
            let after = one_does(&|| limit_data(None));
            let text = refused.unwrap_err();
            assert!(text.contains("RLIMIT_DATA") && text.contains("`ulimit -d`"), "{text}");
            if let (Some((limit, before)), Some((_, after))) = (before, after) {
                assert!(text.contains(&limit.to_string()), "{limit}: {text}");
                assert_eq!(after, before);
            }
            assert_eq!(small, Ok(()));
            let mut buffer = communicator.alloc::<u8>(BYTES).unwrap();
            buffer.fill(1);
            communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
            assert!(buffer.iter().all(|&element| element == 2));
        },
    );
}

/// Makes the allocator use only memory that it already has, so that only threads and mappings need more data.
fn stock_up() {
    // SAFETY: these settings of the allocator may change at any time.
    unsafe {
        assert_eq!(libc::mallopt(libc::M_ARENA_MAX, 1), 1);
        assert_eq!(libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 25), 1);
        assert_eq!(libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX), 1);
    }
    let stock: Vec<Vec<u8>> = (0..256).map(|_| Vec::with_capacity(64 << 10)).collect();
    drop(std::hint::black_box(stock));
}

/// A thread that cannot allocate its alternate signal stack would end the process.
#[test]
fn a_lack_of_data_for_threads_is_an_error() {
    if !is_alone("environment::limits::a_lack_of_data_for_threads_is_an_error", []) {
        return;
    }
    stock_up();
    let small = (0..64).map(|step| step << 13);
    let steps: Vec<u64> = small.chain((1..=16).map(|step| step << 20)).collect();
    let meeting = Barrier::new(3);
    let mut before = None;
    let mut lacked = 0;
    for &spare in &steps {
        let built: Vec<Result<()>> = std::thread::scope(|scope| {
            let run = |bootstrap: Threads| {
                let meeting = &meeting;
                scope.spawn(move || {
                    // This thread starts before the limit applies.
                    meeting.wait();
                    meeting.wait();
                    let built = builder().max_bytes(64 << 10).build(Host::new(), bootstrap);
                    meeting.wait();
                    let works = built.and_then(|communicator| communicator.barrier());
                    meeting.wait();
                    works
                })
            };
            let ranks = Threads::world(2).unwrap();
            let running: Vec<_> = ranks.into_iter().map(run).collect();
            meeting.wait();
            limit_data(Some(spare));
            meeting.wait();
            meeting.wait();
            limit_data(None);
            meeting.wait();
            running.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(*before.get_or_insert(held()), held(), "{spare} bytes");
        assert_eq!(built[0].is_ok(), built[1].is_ok(), "{spare} bytes: {built:?}");
        if built[0].is_err() {
            let says_so = |built: &Result<()>| {
                matches!(built, Err(Error::System { call, errno })
                    if call.contains("thread") && *errno == Errno::ENOMEM)
            };
            assert!(built.iter().any(says_so), "{spare} bytes: {built:?}");
            lacked += 1;
        }
    }
    assert!((64..steps.len()).contains(&lacked), "{lacked}");
    assert_eq!(build(2, 64 << 10), [Ok(()), Ok(())]);
}

static ALARMS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_alarm(_signal: i32) {
    ALARMS.fetch_add(1, Ordering::Relaxed);
}

/// Allocating takes longer than the time between two signals. Before Linux 6.9 each signal interrupts it.
#[test]
fn signals_do_not_end_an_allocation() {
    if !is_alone("environment::limits::signals_do_not_end_an_allocation", [Signal::SIGALRM]) {
        return;
    }
    let [rank] = Threads::world(1).unwrap().try_into().ok().unwrap();
    let communicator: Communicator<Host> = builder().max_bytes(64 << 10).build(Host::new(), rank).unwrap();
    let action = SigAction::new(SigHandler::Handler(count_alarm), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler only performs an atomic addition.
    unsafe { sigaction(Signal::SIGALRM, &action) }.unwrap();
    take(Signal::SIGALRM, true);
    let every = |micros| {
        let interval = libc::timeval { tv_sec: 0, tv_usec: micros };
        let timer = libc::itimerval { it_interval: interval, it_value: interval };
        // SAFETY: the call reads one itimerval, which is valid.
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
