//! Settings of a communicator: name, values, environment variable, devices, default and documentation of each.
//!
//! What only Rust programs can use has a method and no row: `Cuda::graph_registration`, since other languages have no
//! call for what is due after capture.

use Devices::{Both, Cuda, Host};
use Environment::{Nothing, Reader, Variable};
use Kind::{Algorithm, Bytes, Choice, Count, Device, Seconds, Switch, Tuning};

/// A setting.
pub struct Setting {
    /// Its name, in every language.
    pub name: &'static str,
    /// Its values.
    pub kind: Kind,
    /// The environment variable that sets it where the program does not.
    pub environment: Environment,
    /// The devices that have it. The others refuse any value except the default.
    pub devices: Devices,
    /// Whether ranks compare it when they make a communicator, and have an error where they differ. Settings of one
    /// device are compared by the device.
    pub agree: bool,
    /// What holds where nothing sets it: a value, or words.
    pub default: &'static str,
    /// One line of documentation, in Markdown.
    pub doc: &'static str,
}

/// The values of a setting.
#[derive(Clone, Copy)]
pub enum Kind {
    /// 0 or 1.
    Switch,
    /// A number of seconds; 0 is no limit.
    Seconds,
    /// A number of bytes, which K, M or G may follow.
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

/// The environment variable of a setting.
#[derive(Clone, Copy)]
pub enum Environment {
    /// None.
    Nothing,
    /// One that every communicator reads.
    Variable(&'static str),
    /// One that counts in some cases only, and has a reader of its own, which is given its name.
    Reader(&'static str),
}

/// The devices that have a setting.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// CPUs.
    Host,
    /// GPUs.
    Cuda,
    /// Both.
    Both,
}

/// The words that a setting takes: variants of a Rust enum.
pub struct Words {
    /// The enum.
    pub name: &'static str,
    /// Its documentation.
    pub doc: &'static str,
    /// Whether the first word is the enum's default.
    pub has_default: bool,
    /// The words.
    pub all: &'static [Word],
}

/// A word.
pub struct Word {
    /// The enum's variant.
    pub variant: &'static str,
    /// The word.
    pub name: &'static str,
    /// The variant's documentation.
    pub doc: &'static str,
}

/// Environment variables that are no settings of a communicator: their names, and one line of documentation.
pub type OtherVariable = (&'static str, &'static str);

impl Environment {
    /// The variable's name.
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

/// The enums of words.
pub const CHOICES: [&Words; 4] = [&ORDER, &WAIT, &BIND, &SHARING];

#[rustfmt::skip]
const ORDER: Words = Words {
    name: "Order",
    doc: "In which order the ranks' elements are added up: [`Builder::order`](crate::Builder::order).",
    has_default: true,
    all: &[
        word("Fixed", "fixed",
             "Rank order, by every direct [`Algorithm`](crate::Algorithm): the same bits on every rank, in every run, on every device. \
              The plan takes direct algorithms only. [`Builder::algorithm`](crate::Builder::algorithm) may still name another one."),
        word("Any", "any",
             "Any order: the plan may also take ring, halving-doubling and in-switch reductions (NVLS), where it expects them to be faster. \
              All ranks still have the same bits. Sums of floats may have other bits than by the direct algorithms, and by an in-switch \
              reduction other bits in another run, as far as the order of additions matters."),
    ],
};

const WAIT: Words = Words {
    name: "Wait",
    doc: "What a rank does while it waits for another.",
    has_default: true,
    all: &[
        word(
            "Auto",
            "auto",
            "[`Wait::Spin`] where every rank can have a core of its own, else [`Wait::Yield`].",
        ),
        word("Spin", "spin", "Polls for some tens of microseconds before it gives up its core."),
        word("Yield", "yield", "Polls a few times, then gives its core to other threads."),
    ],
};

const BIND: Words = Words {
    name: "Bind",
    doc: "What the threads of each rank are bound to.",
    has_default: true,
    all: &[
        word("None", "none", "Nothing: they run wherever the process may."),
        word("Core", "core", "A core for each thread."),
        word("Numa", "numa", "A NUMA node for each rank."),
    ],
};

const SHARING: Words = Words {
    name: "Sharing",
    doc: "Which kind of memory an allocation on a GPU is, and so how other processes map it.",
    has_default: false,
    all: &[
        word("Pointers", "pointers", "Ranks are threads of one process: plain pointers."),
        word(
            "Descriptor",
            "descriptor",
            "Virtual memory management: a POSIX file descriptor, passed over a Unix socket.",
        ),
        word("Ipc", "ipc", "`cuIpcGetMemHandle`, with an offset from the allocation's base."),
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

/// No limit of a [`Kind::Count`].
const ANY: usize = usize::MAX;

/// Name, values, environment variable, devices, whether ranks compare it, default, documentation.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    setting("device", Device, Nothing, Both, true, "cpu",
        "Where the ranks' buffers are. `cuda` is `cuda:0`; the number may differ among ranks."),
    setting("timeout", Seconds, Variable("FAST_ALLREDUCE_TIMEOUT"), Both, false, "30; 1800 in the plugins for vLLM and SGLang",
        "Longest wait for another rank without progress, in a call or in a step of making the communicator."),
    setting("first_call_timeout", Seconds, Nothing, Both, false, "`timeout` where that is set, else 600",
        "Limit of calls up to the first that has waited for a rank, which may load weights before it."),
    setting("join_timeout", Seconds, Reader("FAST_ALLREDUCE_JOIN_TIMEOUT"), Both, false,
        "120; for ranks that are given an id, what the program sets `timeout` to, else 30",
        "Longest wait for all ranks to come. The variable does not count for ranks that are given an id."),
    setting("max_bytes", Bytes, Nothing, Both, true, "1M on CPUs, 8M on GPUs",
        "Bytes that one launch takes through shared memory. Larger messages go in pieces."),
    setting("algorithm", Algorithm, Variable("FAST_ALLREDUCE_ALGO"), Both, true, "the plan's choice",
        "One algorithm for all allreduces."),
    setting("order", Choice(&ORDER), Variable("FAST_ALLREDUCE_ORDER"), Both, true, "fixed",
        "Order of additions. `any` lets the plan take algorithms that give other bits, \
         [in-switch reductions](algorithms.md#sums-by-the-switch-nvls) among them."),
    setting("check", Switch, Variable("FAST_ALLREDUCE_CHECK"), Both, true, "0; 1 in debug builds",
        "Whether ranks compare their calls by a barrier of its own before each."),
    setting("calibrate", Switch, Variable("FAST_ALLREDUCE_CALIBRATE"), Both, false, "1",
        "Whether the host may measure its cores to choose between its built-in plans. No effect on GPUs."),
    setting("direct_reads", Switch, Variable("FAST_ALLREDUCE_DIRECT_READS"), Both, false, "whichever has been faster so far",
        "Whether a receiver in another process reads large messages where they are. No effect on GPUs."),
    setting("tuning", Tuning, Reader("FAST_ALLREDUCE_TUNING"), Both, false, "the file installed for this machine, else `built-in`",
        "The [plan](#which-plan-is-in-force). The variable counts if its file is of the communicator's device."),
    setting("workers", Count(64), Nothing, Host, true, "1",
        "Threads of each rank for large messages, the caller's included."),
    setting("wait", Choice(&WAIT), Nothing, Host, false, "auto",
        "What a waiting rank does with its core. `auto` spins where every rank can have one."),
    setting("bind", Choice(&BIND), Nothing, Host, true, "none",
        "What each rank's threads are bound to: [cores](#cores)."),
    setting("max_blocks", Count(ANY), Nothing, Cuda, false,
        "half of the multiprocessors that the process's communicators have left",
        "Most blocks of a launch: [several communicators](gpu.md#several-communicators-on-a-gpu)."),
    setting("one_at_a_time", Switch, Nothing, Cuda, false, "0",
        "Promises that no call runs on the GPU at the same time as one of another communicator of the process, on any rank."),
    setting("programmatic_launch", Switch, Nothing, Cuda, false, "0",
        "Launches with the attribute of [programmatic dependent launch](gpu.md#programmatic-dependent-launch), which is also a promise."),
    setting("sharing", Choice(&SHARING), Nothing, Cuda, true, "the first that is found to work",
        "How ranks share memory."),
];

/// Other variables that the library and its plugins read.
#[rustfmt::skip]
pub const OTHER_VARIABLES: &[OtherVariable] = &[
    ("FAST_ALLREDUCE_UNIQUE_ID", "Id of the world that `Local::from_env` joins."),
    ("FAST_ALLREDUCE_RANK", "This rank in it."),
    ("FAST_ALLREDUCE_WORLD_SIZE", "Its number of ranks."),
    ("FAST_ALLREDUCE_SOCKET_DIR",
     "Directory to meet in, by ids that are made where it is set, or without an id; for ranks of MPI, to hand over memory in."),
    ("FAST_ALLREDUCE_GENERATION", "A number or a word. Ranks of different ones do not meet in a directory."),
    ("FAST_ALLREDUCE_NODE", "Ranks of an MPI world in which it differs count as on different nodes."),
    ("FAST_ALLREDUCE_VLLM", "What vLLM uses the plugin for: `cpu`, `cuda`, or both."),
    ("FAST_ALLREDUCE_SGLANG", "What SGLang uses the plugin for: `cpu`."),
    ("XDG_CACHE_HOME, HOME", "Where installed tuning files are."),
];
