//! Probes of what a driver does to ranks that wait for each other. Each is a step, and so a process with its own limit.

mod beside;
pub mod exporter;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fast_allreduce::device::cuda::api::{self, Code};

use self::beside::{Caller, Operation, ON_ONE_GPU, ON_TWO_GPUS};
use super::probe::{new_stream, synchronize, wait_limit, Pinned, ProbeRunner, Workload};
use super::record::{answer, figure, skipped, ONE_GPU};
use crate::arguments::GpuCheck;
use crate::failure::{driver, Failure};
use crate::harness::device::cuda;

/// Longest time that a kernel spins.
const SPIN_LIMIT: Duration = Duration::from_millis(400);

/// A kernel that spins until the host raises its flag.
struct Spinner {
    probes: ProbeRunner,
    flag: Pinned,
}

impl Spinner {
    fn new(probes: ProbeRunner) -> Result<Self, Failure> {
        let flag = Pinned::new(&probes.context, 128)?;
        Ok(Self { probes, flag })
    }

    /// Launches the kernel, and waits until it runs.
    fn start(&mut self) -> Result<(), Failure> {
        const START_LIMIT: Duration = Duration::from_secs(5);
        self.flag.write(&[0, 0]);
        let workload =
            Workload { memory: self.flag.address, count: SPIN_LIMIT.as_nanos() as u64, iterations: 0 };
        let spin = self.probes.function("spin")?;
        self.probes.launch_on(&self.probes.stream, spin, (1, 32), workload, false)?;
        let start = Instant::now();
        while !self.flag.is_answered() {
            if start.elapsed() > START_LIMIT {
                return Err(Failure::Ranks(
                    "a kernel has not begun within 5 s: another program may be using the GPU, end it".into(),
                ));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Ends the kernel, and returns whether it was still spinning.
    fn stop(&self) -> Result<bool, Failure> {
        self.flag.raise();
        Ok(self.probes.words(1)?[0] == 1)
    }
}

/// Runs the step `beside-a-kernel`, which finds calls of the driver that wait for a kernel that spins.
pub fn beside_a_kernel(options: &GpuCheck) -> Result<(), Failure> {
    let mut spinner = Spinner::new(ProbeRunner::new(options)?)?;
    let caller = Caller::new(ProbeRunner::new(options)?);
    let waiting = find_waiting(&mut spinner, &caller, &ON_ONE_GPU, "a kernel that spins on another stream")?;
    answer("Which calls wait for a kernel that spins on another stream?", waiting)?;

    let count = cuda::gpus()?;
    if count < 2 {
        return skipped("calls beside a kernel on another GPU", ONE_GPU);
    }
    let peer = ProbeRunner::on((options.gpu + 1) % count, options.small)?;
    let own = ProbeRunner::new(options)?;
    for (from, to) in [(&own, &peer), (&peer, &own)] {
        from.context.bind_to_thread().map_err(driver("cuCtxSetCurrent"))?;
        // SAFETY: both contexts are retained.
        match unsafe { api::cuCtxEnablePeerAccess(to.context.cu_ctx(), 0) } {
            Ok(()) | Err(Code::PEER_ACCESS_ALREADY_ENABLED) => {}
            Err(code) => {
                let why = driver("cuCtxEnablePeerAccess")(code);
                return skipped("calls beside a kernel on another GPU", why);
            }
        }
    }
    drop(caller);
    let mut spinner = Spinner::new(peer)?;
    let waiting = find_waiting(&mut spinner, &Caller::new(own), &ON_TWO_GPUS, "a peer's kernel that spins")?;
    answer("Which calls wait for a kernel that spins on another GPU, which has access to this one?", waiting)
}

/// Makes each call while the kernel spins and again alone. Returns the names of those that wait for it.
fn find_waiting(
    spinner: &mut Spinner,
    caller: &Caller,
    operations: &[Operation],
    beside: &str,
) -> Result<String, Failure> {
    let table = format!("Milliseconds of a call beside {beside}");
    let mut waiting = Vec::new();
    for Operation { name, prepare } in operations {
        // Returns the time of the call, and how long the kernel could still spin if it ended by itself meanwhile.
        let time = |spinner: Option<&mut Spinner>| -> Result<(Duration, Option<Duration>), Failure> {
            let call = prepare(caller)?;
            let Some(spinner) = spinner else {
                let start = Instant::now();
                let _made = call()?;
                return Ok((start.elapsed(), None));
            };
            let launched = Instant::now();
            spinner.start()?;
            let rest = SPIN_LIMIT.saturating_sub(launched.elapsed());
            let start = Instant::now();
            let made = call();
            let taken = start.elapsed();
            let was_spinning = spinner.stop()?;
            made.map(|_| (taken, (!was_spinning).then_some(rest)))
        };
        let timed = time(Some(&mut *spinner)).and_then(|beside| Ok((beside, time(None)?.0)));
        let ((beside, rest), alone) = match timed {
            Ok(timed) => timed,
            Err(failure) => {
                skipped(name, failure)?;
                continue;
            }
        };
        for (column, time) in [("beside the kernel", beside), ("alone", alone)] {
            figure(&table, name, column, time.as_secs_f64() * 1e3)?;
        }
        if rest.is_some_and(|rest| is_wait(beside, alone, rest)) {
            waiting.push(*name);
        }
    }
    Ok(if waiting.is_empty() { "none of those tried".to_owned() } else { waiting.join("; ") })
}

/// Returns whether a call waited for the rest of a kernel's time, rather than take as long by itself: loading a module
/// may compile it. Half of the rest allows for a call that takes less time beside the kernel than alone.
fn is_wait(beside: Duration, alone: Duration, rest: Duration) -> bool {
    beside >= alone + rest / 2
}

/// Runs the step `run-ahead`: whether a rank that enqueues work behind its kernel blocks the launch of a peer's thread
/// that the kernel waits for.
pub fn run_ahead(options: &GpuCheck) -> Result<(), Failure> {
    const LAUNCHES: u32 = 5000;
    const BYTES: usize = 1 << 20;
    let probes = ProbeRunner::new(options)?;
    let empty = probes.function("empty")?;
    let launches = if probes.small { 50 } else { LAUNCHES };
    ask_beside(
        options,
        &probes,
        "Do 5,000 launches that are queued ahead keep a peer in the same process from its launch?",
        &format!("{launches} launches"),
        || {
            (0..launches).try_for_each(|_| {
                probes.launch_on(&probes.stream, empty, (1, 32), Workload::default(), false)
            })
        },
    )?;
    let (from, mut to) = (probes.device_memory(BYTES)?.0, vec![0; BYTES]);
    ask_beside(
        options,
        &probes,
        "Does a copy to pageable memory behind a kernel keep a peer in the same process from its launch?",
        "a copy to pageable memory",
        || probes.stream.memcpy_dtoh(&from, &mut to).map_err(driver("cuMemcpyDtoHAsync")),
    )
}

/// Lets a thread enqueue work behind a kernel that waits for a peer's launch, and another thread launch it.
fn ask_beside(
    options: &GpuCheck,
    probes: &ProbeRunner,
    question: &str,
    work: &str,
    enqueue: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    const LIMIT: Duration = Duration::from_secs(2);
    let limit = wait_limit(options.gpu, LIMIT)?;
    let spin = probes.function("spin")?;
    let (mut flag, memory) = probes.device_memory(128)?;
    let workload = Workload { memory, ..Workload::default() };
    // Loads the kernels that are launched below.
    for name in ["raise", "empty", "spin"] {
        probes.run(name, (1, 32), workload, false)?;
    }
    probes.stream.memset_zeros(&mut flag).map_err(driver("cuMemsetD8Async"))?;
    synchronize(&probes.stream)?;
    let other = new_stream(&probes.context)?;
    let spinning = Workload { memory, count: limit.as_nanos() as u64, iterations: 0 };
    probes.launch_on(&probes.stream, spin, (1, 32), spinning, false)?;
    let is_queued = AtomicBool::new(false);
    let (queued, raised) = std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            // Until the other thread has enqueued much, or waits.
            std::thread::sleep(Duration::from_millis(300));
            let start = Instant::now();
            let early = !is_queued.load(Ordering::Relaxed);
            probes.launch_on(&other, probes.function("raise")?, (1, 32), workload, false)?;
            Ok::<_, Failure>((start.elapsed(), early))
        });
        let start = Instant::now();
        let queued = enqueue().map(|()| start.elapsed());
        is_queued.store(true, Ordering::Relaxed);
        (queued, peer.join())
    });
    let raised = raised.map_err(|_| Failure::Ranks("the peer's thread has panicked".into()))?;
    let (queued, (raised, early)) = (queued?, raised?);
    synchronize(&probes.stream)?;
    synchronize(&other)?;
    let saw_flag = probes.words(1)?[0] == 1;
    let table = format!("Milliseconds, {work} behind a kernel that spins");
    figure(&table, "to enqueue", "ms", queued.as_secs_f64() * 1e3)?;
    figure(&table, "the peer's launch", "ms", raised.as_secs_f64() * 1e3)?;
    answer(
        question,
        match (saw_flag, early) {
            (true, true) => "no: it was launched meanwhile",
            (true, false) => "no: all was enqueued before it was launched",
            (false, _) => "YES: it was launched only after the kernel had timed out",
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_takes_long_alone_does_not_wait() {
        let ms = Duration::from_millis;
        assert!(is_wait(ms(395), ms(1), ms(390)));
        assert!(is_wait(ms(700), ms(400), ms(390)));
        assert!(!is_wait(ms(600), ms(590), ms(390)));
        assert!(!is_wait(ms(410), ms(600), ms(390)));
    }
}
