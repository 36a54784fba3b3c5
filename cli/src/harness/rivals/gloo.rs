//! gloo's allreduce on the host's memory: torch.distributed in a Python process beside each rank, which times itself.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fast_allreduce::{CallKind, DType, ReduceOp};
use nix::sys::memfd::{memfd_create, MFdFlags};

use crate::failure::Failure;
use crate::harness::contender::{Placement, Rival};
use crate::harness::device::host::{Cpu, Memory};
use crate::harness::device::{Batch, Call};
use crate::harness::session::Session;
use crate::harness::work::Work;

/// The rank's Python process.
pub struct Gloo {
    process: RefCell<Process>,
    /// Holds the elements of a call; the process maps it.
    elements: File,
    version: String,
    /// Calls that [`Rival::start_in_place`] makes in a row.
    calls: Cell<u64>,
    /// Seconds that the last of these took, by the clock of the process.
    seconds: Cell<f64>,
}

impl Gloo {
    /// Starts the processes, which meet at that of the first rank. Collective.
    pub fn new(session: &Session) -> Result<Self, String> {
        let started = Process::start(session);
        let first = match &started {
            Ok((_, _, first)) => first.clone(),
            Err(reason) => format!("error {reason}"),
        };
        let all = session.exchange(first.as_bytes()).map_err(|failure| failure.to_string())?;
        let (mut process, elements, own) = started?;
        let all: Vec<_> = all.iter().map(|line| String::from_utf8_lossy(line)).collect();
        if let Some(reason) = all.iter().find_map(|line| line.strip_prefix("error ")) {
            return Err(reason.into());
        }
        let words = |line: &str| -> Option<(String, String, String)> {
            let mut words = line.split_whitespace().map(str::to_owned);
            Some((words.next()?, words.next()?, words.next()?))
        };
        let unclear = || format!("its process answers {own:?}");
        let (port, host, _) = words(&all[0]).ok_or_else(unclear)?;
        let (.., version) = words(&own).ok_or_else(unclear)?;
        let host = if session.nodes() > 1 { &*host } else { "127.0.0.1" };
        process.ask(&format!("{host} {port}"), 1)?;
        let process = RefCell::new(process);
        Ok(Self { process, elements, version, calls: Cell::new(1), seconds: Cell::new(0.0) })
    }
}

/// A running process, and the socket to it.
struct Process {
    child: Child,
    socket: BufReader<UnixStream>,
    /// Longest wait for an answer, or for that of one call of many.
    limit: Duration,
}

impl Process {
    /// Starts the process of this rank. Returns it with the file of its elements and its first line: a port, a host
    /// and torch's version.
    fn start(session: &Session) -> Result<(Self, File, String), String> {
        let failed = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
        let memory = memfd_create(c"fast-allreduce-gloo", MFdFlags::MFD_CLOEXEC);
        let elements = File::from(memory.map_err(|errno| format!("memfd_create: {errno}"))?);
        let path = format!("/proc/{}/fd/{}", std::process::id(), elements.as_raw_fd());
        let (own, theirs) = UnixStream::pair().map_err(failed("socketpair"))?;
        own.set_read_timeout(Some(session.limit())).map_err(failed("a time limit"))?;
        let theirs = OwnedFd::from(theirs);
        let child = Command::new("python3")
            .args(["-c", include_str!("gloo.py"), &path])
            .args([session.rank().to_string(), session.world_size().to_string()])
            // Shorter than that of the answers, which then have its reason.
            .arg((session.limit() / 2).as_secs_f64().to_string())
            .args([crate::facts::cpus(), session.nodes().to_string()])
            .stdin(Stdio::from(theirs.try_clone().map_err(failed("dup"))?))
            .stdout(Stdio::from(theirs))
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed("python3, with whose torch it runs"))?;
        let mut process = Self { child, socket: BufReader::new(own), limit: session.limit() };
        let first = process.read()?;
        Ok((process, elements, first))
    }

    /// Sends a line that asks for a number of calls, and returns the answer.
    fn ask(&mut self, line: &str, calls: u64) -> Result<String, String> {
        let limit = self.limit.saturating_mul(calls.clamp(1, 1 << 20) as u32);
        let limited = self.socket.get_ref().set_read_timeout(Some(limit));
        limited.map_err(|error| format!("a time limit: {error}"))?;
        let sent = writeln!(self.socket.get_mut(), "{line}");
        sent.map_err(|error| format!("its process has ended: {error}"))?;
        self.read()
    }

    fn read(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.socket.read_line(&mut line) {
            Ok(0) => Err("its process has ended".into()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                Err("its process does not answer within the limit".into())
            }
            Err(error) => Err(format!("its process does not answer: {error}")),
            Ok(_) => match line.strip_prefix("error ") {
                Some(reason) => Err(reason.trim_end().into()),
                None => Ok(line.trim_end().into()),
            },
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Rival<Cpu> for Gloo {
    fn name(&self) -> &'static str {
        "gloo"
    }

    fn library(&self) -> String {
        format!(
            "torch.distributed's backend gloo of torch {}, in a Python process of each rank",
            self.version
        )
    }

    fn refusal(&self, kind: CallKind, dtype: DType, op: ReduceOp) -> Option<&'static str> {
        match (type_name(dtype), operation(op)) {
            _ if kind != CallKind::AllReduce => Some("only its allreduce is compared"),
            (None, _) => Some("gloo has no such type"),
            (_, None) => Some("gloo has no such operation"),
            _ => None,
        }
    }

    fn has(&self, kind: CallKind, placement: Placement) -> bool {
        kind == CallKind::AllReduce && placement == Placement::InPlace
    }

    fn start(&self, _: &Cpu, _: &Work, _: &Memory, _: &mut Memory) -> Result<(), Failure> {
        Err(Failure::Usage("gloo's allreduce is in place".into()))
    }

    fn start_in_place(&self, _: &Cpu, work: &Work, data: &mut Memory) -> Result<(), Failure> {
        let failed = |error| Failure::System("exchanging elements with gloo's process", error);
        let data = &mut data[..work.bytes(work.elements())];
        let (Some(dtype), Some(op)) = (type_name(work.dtype), operation(work.op)) else {
            return Err(Failure::Usage("gloo has no such call".into()));
        };
        self.elements.set_len(data.len() as u64).map_err(failed)?;
        self.elements.write_all_at(data, 0).map_err(failed)?;
        let calls = self.calls.get();
        let request = format!("{dtype} {op} {} {calls}", work.elements());
        let answer = self.process.borrow_mut().ask(&request, calls);
        let answer = answer.map_err(|reason| Failure::Ranks(format!("gloo: {reason}")))?;
        let seconds =
            answer.parse().map_err(|_| Failure::Ranks(format!("gloo: its process answers {answer:?}")))?;
        self.seconds.set(seconds);
        self.elements.read_exact_at(data, 0).map_err(failed)
    }

    fn batch<'a>(&'a self, _: &'a Cpu, call: Call<'a>) -> Result<Batch<'a>, Failure> {
        // One request for all calls, so that the time is of gloo alone.
        Ok(Batch::new(1, move |calls| {
            self.calls.set(calls);
            let made = if calls > 0 { call() } else { Ok(()) };
            self.calls.set(1);
            made.map(|()| self.seconds.get())
        }))
    }
}

/// Returns torch's name of a type that gloo reduces.
fn type_name(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F16 => "float16",
        DType::Bf16 => "bfloat16",
        DType::F32 => "float32",
        DType::F64 => "float64",
        DType::I8 => "int8",
        DType::U8 => "uint8",
        DType::I32 => "int32",
        DType::I64 => "int64",
        _ => return None,
    })
}

/// Returns torch's name of an operation that gloo has for all of these types.
fn operation(op: ReduceOp) -> Option<&'static str> {
    Some(match op {
        ReduceOp::Sum => "SUM",
        ReduceOp::Prod => "PRODUCT",
        ReduceOp::Min => "MIN",
        ReduceOp::Max => "MAX",
        _ => return None,
    })
}
