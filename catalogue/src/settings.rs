//! Settings of a communicator.
//!
//! `Cuda::graph_registration` has no row, because only Rust programs can use it: other languages have no function for
//! the calls that must follow a capture.

use Devices::{Both, Cuda, Host};
use Environment::{Nothing, Reader, Variable};
use Kind::{Algorithm, Bytes, Choice, Count, Device, Seconds, Switch, Tuning};

/// Setting of a communicator.
pub struct Setting {
    /// Name, the same in every language.
    pub name: &'static str,
    /// Kind of its values.
    pub kind: Kind,
    /// Environment variable that sets it, unless the program does.
    pub environment: Environment,
    /// Devices that have it. Other devices refuse all values except the default.
    pub devices: Devices,
    /// Whether ranks compare it when they make a communicator, and fail if it differs. Settings of one device are
    /// compared by the device.
    pub agree: bool,
    /// Default: a value, or a description.
    pub default: &'static str,
    /// Documentation in Markdown.
    pub doc: &'static str,
}

/// Kind of a setting's values.
#[derive(Clone, Copy)]
pub enum Kind {
    /// 0 or 1.
    Switch,
    /// A number of seconds; 0 means no limit.
    Seconds,
    /// A number of bytes, with an optional suffix K, M or G.
    Bytes,
    /// A number from 1 to this one.
    Count(usize),
    /// A word.
    Choice(&'static Words),
    /// The name of an algorithm.
    Algorithm,
    /// The path of a tuning file, or `built-in`.
    Tuning,
    /// `cpu`, `cuda` or `cuda:N`.
    Device,
}

/// Environment variable of a setting.
#[derive(Clone, Copy)]
pub enum Environment {
    /// None.
    Nothing,
    /// A variable that every communicator reads.
    Variable(&'static str),
    /// A variable that is used in some cases only. Code for these cases reads it.
    Reader(&'static str),
}

/// Devices that have a setting.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// CPUs.
    Host,
    /// GPUs.
    Cuda,
    /// Both.
    Both,
}

/// Words of a setting: variants of a Rust enum.
pub struct Words {
    /// Name of the enum.
    pub name: &'static str,
    /// Documentation of the enum.
    pub doc: &'static str,
    /// Whether the first word is the default of the enum.
    pub has_default: bool,
    /// Words.
    pub all: &'static [Word],
}

/// Word of a setting.
pub struct Word {
    /// Variant of the enum.
    pub variant: &'static str,
    /// Word.
    pub name: &'static str,
    /// Documentation of the variant.
    pub doc: &'static str,
}

/// Environment variables that are not settings of a communicator: names and documentation.
pub type OtherVariable = (&'static str, &'static str);

impl Environment {
    /// Returns the name of the variable.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Nothing => None,
            Variable(name) | Reader(name) => Some(name),
        }
    }
}

const fn word(variant: &'static str, name: &'static str, doc: &'static str) -> Word {
    Word { variant, name, doc }
}

/// Enums of words.
pub const CHOICES: [&Words; 5] = [&ORDER, &FLIGHT, &WAIT, &BIND, &SHARING];

#[rustfmt::skip]
const ORDER: Words = Words {
    name: "Order",
    doc: "Order in which the elements of the ranks are added: [`Builder::order`](crate::Builder::order).",
    has_default: true,
    all: &[
        word("Fixed", "fixed",
             "Rank order, by direct algorithms: the same bits on every rank, in every run and on every device. The \
              plan uses only direct [`Algorithm`](crate::Algorithm)s. \
              [`Builder::algorithm`](crate::Builder::algorithm) can still force another one."),
        word("Any", "any",
             "Any order: the plan may also use ring, halving-doubling and in-switch reductions (NVLS), where they are \
              expected to be faster. All ranks still get the same bits. Sums of floats may have other bits than those \
              of direct algorithms; those of in-switch reductions may also differ from run to run."),
    ],
};

#[rustfmt::skip]
const FLIGHT: Words = Words {
    name: "Flight",
    doc: "Calls whose times a rank records: [`Builder::flight`](crate::Builder::flight).",
    has_default: true,
    all: &[
        word("Sampled", "sampled", "Every 127th call, and each that waits for more than some tens of microseconds."),
        word("All", "all", "All calls: it reads a clock twice in each."),
        word("Off", "off", "None."),
    ],
};

#[rustfmt::skip]
const WAIT: Words = Words {
    name: "Wait",
    doc: "What a rank does while it waits for another rank.",
    has_default: true,
    all: &[
        word("Auto", "auto",
             "[`Wait::Yield`] if this rank's threads have to share cores with other ranks, else [`Wait::Spin`]."),
        word("Spin", "spin", "Polls for some tens of microseconds before it yields its core."),
        word("Yield", "yield", "Polls a few times, then yields its core to other threads."),
    ],
};

const BIND: Words = Words {
    name: "Bind",
    doc: "Binding of each rank's threads to cores.",
    has_default: true,
    all: &[
        word("None", "none", "No binding: threads run wherever the process may."),
        word("Core", "core", "Each thread to a core; they share cores if there are too few."),
        word("Numa", "numa", "Each rank to the cores of a NUMA node."),
    ],
};

#[rustfmt::skip]
const SHARING: Words = Words {
    name: "Sharing",
    doc: "Kind of GPU memory. It decides how other processes map an allocation.",
    has_default: false,
    all: &[
        word("Pointers", "pointers",
             "Addresses: the ranks are threads of one process. Virtual memory management where the device has it."),
        word("Descriptor", "descriptor",
             "Virtual memory management: a POSIX file descriptor, passed over a Unix socket."),
        word("Fabric", "fabric",
             "Virtual memory management: a fabric handle, for ranks on several machines of one NVLink domain."),
        word("Host", "host", "Pinned host memory, for GPUs that cannot access each other's memory."),
        word("Ipc", "ipc", "CUDA IPC: `cuIpcGetMemHandle`, with an offset from the base of the allocation."),
    ],
};

const fn setting(
    name: &'static str,
    kind: Kind,
    environment: Environment,
    devices: Devices,
    agree: bool,
    default: &'static str,
    doc: &'static str,
) -> Setting {
    Setting { name, kind, environment, devices, agree, default, doc }
}

/// Largest value of a [`Kind::Count`] without a limit.
const ANY: usize = usize::MAX;

/// All settings: name, values, environment variable, devices, whether ranks compare it, default, documentation.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    setting("device", Device, Nothing, Both, true, "cpu",
        "Device of the ranks' buffers. `cuda` means `cuda:0`. The number may differ among ranks."),
    setting("timeout", Seconds, Variable("FAST_ALLREDUCE_TIMEOUT"), Both, false,
        "30; 1800 in the plugins of vLLM and SGLang",
        "Longest wait for a rank without progress, also while a communicator is made."),
    setting("first_call_timeout", Seconds, Nothing, Both, false, "`timeout` if it is set, else 600",
        "Limit of calls until one has waited for another rank, which may load weights first."),
    setting("join_timeout", Seconds, Reader("FAST_ALLREDUCE_JOIN_TIMEOUT"), Both, false,
        "120; with an id the program's `timeout` or 30",
        "Time for all ranks to join. Ranks with an id ignore the variable."),
    setting("max_bytes", Bytes, Nothing, Both, true, "1M on CPUs, 8M on GPUs",
        "Bytes that one launch moves through shared memory. Larger messages are divided into pieces."),
    setting("algorithm", Algorithm, Variable("FAST_ALLREDUCE_ALGO"), Both, true, "the plan's choice",
        "Algorithm of all allreduces."),
    setting("order", Choice(&ORDER), Variable("FAST_ALLREDUCE_ORDER"), Both, true, "fixed",
        "Order of additions. `any` permits more algorithms, which give [other bits](algorithms.md#the-same-bits)."),
    setting("check", Switch, Variable("FAST_ALLREDUCE_CHECK"), Both, true, "0; 1 in debug builds",
        "Whether ranks compare their calls, by a separate barrier before each call."),
    setting("calibrate", Switch, Variable("FAST_ALLREDUCE_CALIBRATE"), Both, false, "1",
        "Whether the host may measure its cores to choose a built-in plan. GPUs ignore it."),
    setting("direct_reads", Switch, Variable("FAST_ALLREDUCE_DIRECT_READS"), Both, false,
        "whichever has been faster so far",
        "Whether receivers read large messages directly from the sender's process. GPUs ignore it."),
    setting("flight", Choice(&FLIGHT), Variable("FAST_ALLREDUCE_FLIGHT"), Both, false, "sampled",
        "Calls whose times the [flight record](reliability.md#the-flight-record) has. It always has the latest calls."),
    setting("tuning", Tuning, Reader("FAST_ALLREDUCE_TUNING"), Both, false, "the installed file, else `built-in`",
        "[Plan](#which-plan-is-in-force). The variable is ignored on other devices than its file's."),
    setting("workers", Count(64), Nothing, Host, true, "1",
        "Number of threads of each rank for large messages, including the caller."),
    setting("wait", Choice(&WAIT), Nothing, Host, false, "auto",
        "What a waiting rank does with its core. `auto` spins if the rank shares no core with other ranks."),
    setting("stream_from", Bytes, Variable("FAST_ALLREDUCE_STREAM_FROM"), Host, false, "by the make of CPU",
        "Smallest allreduce whose results [bypass the caches](#results-that-bypass-the-caches)."),
    setting("bind", Choice(&BIND), Nothing, Host, true, "none",
        "Binding of each rank's threads: [cores](#cores)."),
    setting("max_blocks", Count(ANY), Nothing, Cuda, false,
        "half of the multiprocessors that the process has free",
        "Largest grid: [several communicators](gpu.md#several-communicators-on-a-gpu)."),
    setting("one_at_a_time", Switch, Nothing, Cuda, false, "0",
        "Promises that calls of different communicators of the process never run at the same time on a rank's GPU."),
    setting("programmatic_launch", Switch, Nothing, Cuda, false, "0",
        "Uses [programmatic dependent launch](gpu.md#programmatic-dependent-launch). Setting it is also a promise."),
    setting("sharing", Choice(&SHARING), Nothing, Cuda, true, "the first that works",
        "How ranks share GPU memory."),
];

/// Other environment variables that the library and its plugins read.
#[rustfmt::skip]
pub const OTHER_VARIABLES: &[OtherVariable] = &[
    ("FAST_ALLREDUCE_UNIQUE_ID", "Id of the world that `Local::from_env` joins."),
    ("FAST_ALLREDUCE_RANK", "Rank of this process in that world."),
    ("FAST_ALLREDUCE_WORLD_SIZE", "Number of ranks of that world."),
    ("FAST_ALLREDUCE_SOCKET_DIR",
     "Directory in which ranks meet, without an id or by an id that was created with it set. Ranks of MPI pass memory \
      there."),
    ("FAST_ALLREDUCE_GENERATION", "Number or word. Ranks with different ones do not meet in a directory."),
    ("FAST_ALLREDUCE_FLIGHT_DIR",
     "Directory in which each rank keeps its [flight record](reliability.md#the-flight-record) in a file."),
    ("FAST_ALLREDUCE_RECORD_DIR",
     "Directory in which each rank on CPUs [records its calls](reliability.md#record-and-replay)."),
    ("FAST_ALLREDUCE_RECORD_BYTES", "Most bytes of a recording, default 1 GiB; `hashes`: hashes alone."),
    ("FAST_ALLREDUCE_NODE", "Ranks of an MPI world with different values count as on different nodes."),
    ("FAST_ALLREDUCE_VLLM", "Devices for which vLLM uses the plugin: `cpu`, `cuda`, or both."),
    ("FAST_ALLREDUCE_SGLANG", "Devices for which SGLang uses the plugin: `cpu`."),
    ("XDG_CACHE_HOME, HOME", "Parents of the folder of installed tuning files."),
];
