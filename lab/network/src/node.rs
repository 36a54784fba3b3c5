//! A node: a process that holds the namespaces, and entry into them.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::MetadataExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

/// Kinds of namespaces that a node has, as options of `unshare`.
const NODE: [&str; 7] = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child"];

/// The holder of a node: it prepares the mounts, and ends when its standard input closes, that is with the process that
/// made it. It is the first process of its PID namespace: all others end with it. `$1` is the host name, `$2` the text
/// of `/etc/hosts`. That and a boot id of the node's own stay mounted after their file system has gone from `/dev/shm`.
const HOLD_NODE: &str = r#"
    set -e
    mount -t tmpfs none /dev/shm
    printf '%s' "$2" >/dev/shm/hosts
    mount --bind /dev/shm/hosts /etc/hosts
    cat /proc/sys/kernel/random/uuid >/dev/shm/boot
    mount --bind /dev/shm/boot /proc/sys/kernel/random/boot_id
    umount -l /dev/shm
    mount -t tmpfs none /dev/shm
    hostname "$1"
    echo ready
    cat >/dev/null || :
"#;

/// Processes in their own namespaces. Dropping it ends all processes of its PID namespace.
pub(crate) struct Namespace {
    holder: Child,
    /// The process in the namespaces, which is a child of the holder if there is a PID namespace.
    pub inner: Pid,
}

impl Namespace {
    /// Makes the namespaces of a node.
    pub fn of_node(host_name: &str, hosts: &str) -> io::Result<Self> {
        let arguments = ["--mount-proc", "--", "sh", "-c", HOLD_NODE, "sh", host_name, hosts];
        let holder = hold(NODE.iter().chain(&arguments))?;
        let holder_pid = holder.id();
        let mut namespace = Self { holder, inner: Pid::from_raw(0) };
        namespace.inner =
            children(holder_pid).first().copied().ok_or_else(|| missing("the node's process"))?;
        Ok(namespace)
    }

    /// Makes a network namespace.
    pub fn of_network() -> io::Result<Self> {
        let holder = hold(["--net", "--", "sh", "-c", "echo ready; cat >/dev/null"].iter())?;
        let inner = pid(holder.id());
        Ok(Self { holder, inner })
    }

    /// Kills all processes of the PID namespace, if there is one.
    pub fn end(&mut self) {
        // Another process may have the number once the holder has ended.
        if matches!(self.holder.try_wait(), Ok(None)) && self.inner.as_raw() > 0 {
            // An error means that it has ended.
            let _ = kill(self.inner, Signal::SIGKILL);
        }
        drop(self.holder.stdin.take());
    }

    /// Returns a command that runs `program` in this network namespace only.
    pub fn in_network(&self, program: impl AsRef<OsStr>) -> Command {
        self.enter(&["--net"], program)
    }

    /// Returns a command that runs `program` in these namespaces.
    pub fn enter(&self, kinds: &[&str], program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.inner.to_string()]).args(kinds).arg("--").arg(program);
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.end();
        // The holder reaps the process in the namespaces, which has ended when all others in them have.
        let _ = self.holder.wait();
    }
}

/// One machine of a bed.
pub(crate) struct Node {
    pub namespace: Namespace,
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Node {
    pub fn new(index: usize, hosts: &str) -> io::Result<Self> {
        let namespace = Namespace::of_node(&format!("node{index}"), hosts)?;
        Ok(Self { namespace, v4: v4(index), v6: v6(index) })
    }

    /// Configures the node's interface, which exists.
    pub fn configure(&self, index: usize) -> io::Result<()> {
        self.ip(&format!("link set eth0 address {}", hardware_address(index)))?;
        self.ip(&format!("address add {}/16 dev eth0", self.v4))?;
        self.ip(&format!("address add {}/64 dev eth0 nodad", self.v6))?;
        self.ip("link set lo up")?;
        self.ip("link set eth0 up")
    }

    /// Runs `ip` with these arguments in the node's network.
    pub fn ip(&self, arguments: &str) -> io::Result<()> {
        finish(self.namespace.in_network("ip").args(arguments.split(' ')))
    }

    /// Returns all processes of the node, except the one that holds it.
    pub fn processes(&self) -> io::Result<Vec<Pid>> {
        let own = std::fs::metadata(format!("/proc/{}/ns/pid", self.namespace.inner))?.ino();
        let of_node = |pid: &Pid| {
            let namespace = std::fs::metadata(format!("/proc/{pid}/ns/pid"));
            *pid != self.namespace.inner && namespace.is_ok_and(|found| found.ino() == own)
        };
        Ok(all_processes()?.into_iter().filter(of_node).collect())
    }

    /// Stops the node's processes, or lets them go on.
    pub fn stop(&self, is_stopped: bool) -> io::Result<()> {
        for process in self.processes()? {
            // An error means that it has ended.
            let _ = match is_stopped {
                true => kill(process, Signal::SIGSTOP),
                // `nsenter`, which started it, stops itself when its child stops.
                false => parent(process)
                    .map_or(Ok(()), |parent| kill(parent, Signal::SIGCONT))
                    .and(kill(process, Signal::SIGCONT)),
            };
        }
        Ok(())
    }
}

pub(crate) fn v4(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, index as u8 + 1)
}

pub(crate) fn v6(index: usize) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x5a, 0, 0, 0, 0, 0, index as u16 + 1)
}

/// The last byte of a node's hardware address is its index.
fn hardware_address(index: usize) -> String {
    format!("02:00:00:00:00:{index:02x}")
}

/// Returns `/etc/hosts` of all nodes.
pub(crate) fn hosts(nodes: usize) -> String {
    let mut text = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
    for index in 0..nodes {
        for address in [IpAddr::from(v4(index)), v6(index).into()] {
            text += &format!("{address} node{index}\n");
        }
    }
    text
}

/// Runs a command; its failure becomes an error with what it printed.
pub(crate) fn finish(command: &mut Command) -> io::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(io::Error::other(format!("{command:?}: {}", said.trim())))
        }
    }
}

/// Waits until a condition holds.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> io::Result<bool>) -> io::Result<()> {
    let start = Instant::now();
    while !holds()? {
        if start.elapsed() > Duration::from_secs(30) {
            return Err(missing(what));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Starts `unshare` with these arguments, and waits until the process in it says that it is ready.
fn hold<'a>(arguments: impl Iterator<Item = &'a &'a str>) -> io::Result<Child> {
    let mut command = Command::new("unshare");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut holder = command.spawn()?;
    let mut line = String::new();
    let stdout = holder.stdout.take().ok_or_else(|| missing("its output"))?;
    BufReader::new(stdout).read_line(&mut line)?;
    if line == "ready\n" {
        return Ok(holder);
    }
    let output = holder.wait_with_output()?;
    Err(io::Error::other(format!(
        "namespaces are refused: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    )))
}

/// Returns the children of a process that has one thread.
pub(crate) fn children(parent: u32) -> Vec<Pid> {
    let listed =
        std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    listed.split_whitespace().filter_map(|child| child.parse().ok().map(Pid::from_raw)).collect()
}

fn parent(process: Pid) -> Option<Pid> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok().map(Pid::from_raw).filter(|parent| parent.as_raw() > 1)
}

fn all_processes() -> io::Result<Vec<Pid>> {
    let entries = std::fs::read_dir("/proc")?.filter_map(Result::ok);
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid::from_raw)).collect())
}

fn pid(id: u32) -> Pid {
    // Process ids are below 2^22.
    Pid::from_raw(id as i32)
}

fn missing(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("{what} does not appear"))
}
