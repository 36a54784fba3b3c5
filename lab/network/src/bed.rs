//! Two to four nodes and the network between them.

use std::ffi::OsStr;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use crate::node::{self, children, finish, wait_for, Namespace, Node};
use crate::switch::{Link, Switch};

/// All namespaces of a node.
const ALL: [&str; 5] = ["--net", "--uts", "--ipc", "--pid", "--mount"];

/// What joins the nodes.
#[derive(Debug, Clone, Copy)]
pub enum Wire {
    /// A bridge of the kernel: several GB/s, no faults.
    Bridge,
    /// A switch in user space, with this link from each node to each other; up to about 1 Gbit/s.
    Switch(Link),
}

/// Two to four machines on this one. Dropping it ends all of their processes and removes everything.
///
/// ```no_run
/// use fast_allreduce_network::{Bed, Wire};
///
/// let bed = Bed::new(2, Wire::Bridge)?;
/// let output = bed.command(1, "hostname").output()?;
/// assert_eq!(output.stdout, b"node1\n");
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Bed {
    // Fields are dropped in this order: the switch's interfaces go with their namespaces.
    nodes: Vec<Node>,
    switch: Option<Switch>,
    _hub: Option<Namespace>,
    agents: Agents,
}

impl Bed {
    /// Makes `nodes` nodes with the names `node0`, `node1`, ...
    ///
    /// # Errors
    ///
    /// An error with what was refused: namespaces, `/dev/net/tun`, or a program (`unshare`, `nsenter`, `ip`).
    pub fn new(nodes: usize, wire: Wire) -> io::Result<Self> {
        if !(2..=4).contains(&nodes) {
            return Err(io::Error::other(format!("a bed has 2 to 4 nodes, not {nodes}")));
        }
        let hosts = node::hosts(nodes);
        let nodes = (0..nodes).map(|index| Node::new(index, &hosts)).collect::<io::Result<Vec<_>>>()?;
        let agents = Agents::new(&nodes)?;
        let mut bed = Self { nodes, switch: None, _hub: None, agents };
        match wire {
            Wire::Bridge => bed._hub = Some(bridge(&bed.nodes)?),
            Wire::Switch(link) => {
                let networks = bed.nodes.iter().map(|node| node.namespace.inner).collect();
                bed.switch = Some(Switch::start(networks, link)?);
            }
        }
        for (index, node) in bed.nodes.iter().enumerate() {
            node.configure(index)?;
        }
        Ok(bed)
    }

    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the IPv4 address of a node.
    pub fn v4(&self, node: usize) -> Ipv4Addr {
        self.nodes[node].v4
    }

    /// Returns the IPv6 address of a node.
    pub fn v6(&self, node: usize) -> Ipv6Addr {
        self.nodes[node].v6
    }

    /// Returns a command that runs `program` on a node, in the root directory. Its process id is that of `nsenter`:
    /// [`Bed::kill`] ends the program itself.
    pub fn command(&self, node: usize, program: impl AsRef<OsStr>) -> Command {
        self.nodes[node].namespace.enter(&ALL, program)
    }

    /// Returns a command that runs a launcher such as `mpirun` with a node's network and host name. It sees the
    /// processes of this machine, so that it can start ranks on all nodes by [`Bed::agent`].
    pub fn launcher(&self, node: usize, program: impl AsRef<OsStr>) -> Command {
        self.nodes[node].namespace.enter(&["--net", "--uts"], program)
    }

    /// Returns the path of a program with the arguments of `ssh`: a host's name and a command, which it runs on that
    /// node.
    pub fn agent(&self) -> &Path {
        &self.agents.path
    }

    /// Kills a program that [`Bed::command`] started, with its children, by SIGKILL.
    pub fn kill(&self, program: &Child) {
        fn kill_all(process: Pid) {
            let below = children(process.as_raw() as u32);
            // An error means that it has ended.
            let _ = kill(process, Signal::SIGKILL);
            below.into_iter().for_each(kill_all);
        }
        // `nsenter` itself reports how its child ended.
        children(program.id()).into_iter().for_each(kill_all);
    }

    /// Changes the link from one node to another. No effect on a bridge.
    pub fn set(&self, from: usize, to: usize, link: Link) {
        if let Some(switch) = &self.switch {
            switch.change(from, to, |known| *known = link);
        }
    }

    /// Cuts both links between two nodes, or mends them. No effect on a bridge.
    pub fn cut(&self, one: usize, other: usize, is_cut: bool) {
        if let Some(switch) = &self.switch {
            for (from, to) in [(one, other), (other, one)] {
                switch.change(from, to, |link| link.is_cut = is_cut);
            }
        }
    }

    /// Cuts all links between these nodes and the other ones. No effect on a bridge.
    pub fn isolate(&self, nodes: &[usize]) {
        for &inside in nodes {
            for outside in (0..self.nodes.len()).filter(|node| !nodes.contains(node)) {
                self.cut(inside, outside, true);
            }
        }
    }

    /// Stops all programs of a node.
    ///
    /// # Errors
    ///
    /// That of reading `/proc`.
    pub fn pause(&self, node: usize) -> io::Result<()> {
        self.nodes[node].stop(true)
    }

    /// Lets the programs of a paused node go on.
    ///
    /// # Errors
    ///
    /// That of reading `/proc`.
    pub fn go_on(&self, node: usize) -> io::Result<()> {
        self.nodes[node].stop(false)
    }

    /// Ends a node at once, with its processes, addresses and connections. No packet says goodbye, except on a bridge.
    pub fn power_off(&mut self, node: usize) {
        if let Some(switch) = &self.switch {
            for other in (0..self.nodes.len()).filter(|&other| other != node) {
                switch.change(node, other, |link| link.is_cut = true);
            }
        }
        self.nodes[node].namespace.end();
    }

    /// Gives a node another IPv4 address instead of the one that it has.
    ///
    /// # Errors
    ///
    /// That of `ip`.
    pub fn readdress(&mut self, node: usize) -> io::Result<()> {
        let node = &mut self.nodes[node];
        let old = node.v4;
        node.v4 = Ipv4Addr::from(u32::from(old) + 256);
        node.ip(&format!("address del {old}/16 dev eth0"))?;
        node.ip(&format!("address add {}/16 dev eth0", node.v4))
    }

    /// Returns the number of processes of a node.
    ///
    /// # Errors
    ///
    /// That of reading `/proc`: the node has ended.
    pub fn processes(&self, node: usize) -> io::Result<usize> {
        self.nodes[node].processes().map(|processes| processes.len())
    }
}

/// Makes a bridge in its own network namespace, and a virtual cable from it to each node.
fn bridge(nodes: &[Node]) -> io::Result<Namespace> {
    let hub = Namespace::of_network()?;
    let ip = |arguments: &str| finish(hub.in_network("ip").args(arguments.split(' ')));
    ip("link add name swch type bridge forward_delay 0")?;
    ip("link set swch up")?;
    for (index, node) in nodes.iter().enumerate() {
        let inner = node.namespace.inner;
        // The name of the other end comes from its place in the command, so it needs four letters to be no keyword.
        ip(&format!("link add name port{index} type veth peer name eth0 netns {inner}"))?;
        ip(&format!("link set port{index} master swch up"))?;
    }
    Ok(hub)
}

/// The program that stands for `ssh`, in a folder of its own. Dropping it removes the folder.
struct Agents {
    folder: PathBuf,
    path: PathBuf,
}

impl Agents {
    fn new(nodes: &[Node]) -> io::Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fast-allreduce-network-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder)?;
        let agents = Self { path: folder.join("on"), folder };
        let mut script = "#!/bin/sh\n# Runs a command on a node: on [OPTIONS] NODE COMMAND...\n".to_owned();
        script += "while case $1 in -*) true ;; *) false ;; esac; do shift; done\ncase $1 in\n";
        for (index, node) in nodes.iter().enumerate() {
            script += &format!("node{index} | {} | {}) pid={} ;;\n", node.v4, node.v6, node.namespace.inner);
        }
        script += "*) echo \"no node is named $1\" >&2; exit 1 ;;\nesac\nshift\n";
        script += &format!("exec nsenter --target \"$pid\" {} -- sh -c \"cd '$PWD' && $*\"\n", ALL.join(" "));
        std::fs::write(&agents.path, script)?;
        std::fs::set_permissions(&agents.path, std::fs::Permissions::from_mode(0o755))?;
        // A fork of another thread may still hold the file open for writing, and it could not be executed.
        wait_for("the agent", || {
            let tried = Command::new(&agents.path).arg("nobody").output();
            Ok(!tried.is_err_and(|error| error.raw_os_error() == Some(libc::ETXTBSY)))
        })?;
        Ok(agents)
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        // An error would leave a small file behind, which is no reason to fail.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
