#!/usr/bin/env python3
"""Copies mistralrs-quant and mistralrs-core 0.8.1 and edits the copies, so that a program can register a transport for
tensor parallelism on CPUs. docs/candle.md explains the edits.

    edit.py DESTINATION QUANT CORE

QUANT and CORE are the folders of the published crates. An edit whose place is not found, or is found another number of
times than expected, fails, and then DESTINATION is not complete."""

import re
import shutil
import sys
from pathlib import Path

ADDED = Path(__file__).resolve().parent / "added"

# For each file below src: a pattern, its replacement, and how often it occurs.
QUANT = {
    "distributed/mod.rs": [
        (r"^pub mod socket;\n", r"\g<0>pub mod external;\n", 1),
        (
            r"pub fn get_global_tp_size_from_devices\(\) .*\{\n",
            r"\g<0>if let Some((_, ranks)) = external::active() { return Ok(ranks); }\n",
            1,
        ),
        (r"pub fn use_nccl\(\) -> bool \{\n", r"\g<0>if external::active().is_some() { return true; }\n", 1),
        (r"Dummy\(dummy::DummyComm\),\n", r"\g<0>External(std::sync::Arc<dyn external::Collectives>),\n", 1),
        (
            r"(?s)pub enum Comm .*?pub fn from_device\(.*?\{\n",
            (
                r"\g<0>if let (Id::External(id), Some((transport, _))) = (id, external::active()) {\n"
                r"if world_size > 1 {\nlet comm = (transport.connect)(id, dev, rank, world_size)?;\n"
                r"return Ok(Self::External(comm));\n}\n}\n"
            ),
            1,
        ),
        (r"Self::Dummy\(comm\) => comm\.(rank|world_size)\(\),\n", r"\g<0>Self::External(comm) => comm.\1(),\n", 2),
        (r"(pub enum Id \{(?s:.*?))Dummy,\n", r"\1Dummy,\nExternal([::core::ffi::c_char; 128]),\n", 1),
        (
            r"(impl Id \{\n.*pub fn new\(\) .*\{\n)",
            r"\1if let Some((transport, _)) = external::active() { return Self::External((transport.id)()); }\n",
            1,
        ),
        (
            r"pub fn uninit\(_internal: .*\{\n",
            r"\g<0>if external::active().is_some() { return Self::External(_internal); }\n",
            1,
        ),
        (r"(id\.internal\(\),\n)(\s*Self::Dummy =>)", r"\1Self::External(id) => id,\n\2", 1),
        (r"dummy_ops::", "external::", 4),
        (r"^mod dummy_ops", r"#[allow(dead_code)]\n\g<0>", 1),
        (r"Comm::Dummy\(_\) => Self", "Comm::Dummy(_) | Comm::External(_) => Self", 2),
    ],
}

RANK_DEVICE = [
    (
        r"candle_core::Device::new_cuda(?:_with_stream)?\((worker_rank \+ 1|0)\)",
        r"distributed::rank_device(device, \1)",
        2,
    )
]
CORE = {
    # A published crate has no such file, and cargo compiles the crate again in each run if a named file is missing.
    "../build.rs": [(r"rerun-if-changed=\.git/HEAD", "rerun-if-changed=build.rs", 1)],
    "lib.rs": [
        (r"^pub mod distributed;\n", r"\g<0>mod lockstep;\n", 1),
        (r'if (cfg!\(feature = "ring"\) \{\n\s*// Ring daemon)', r"if lockstep::active() {\n} else if \1", 1),
        # The thread of a daemon that has nothing to do does not spin.
        (r"loop \{\}", "loop { std::thread::park(); }", 1),
    ],
    "distributed.rs": [
        (
            r"if (cfg!\(feature = \"cuda\"\) && !cfg!\(feature = \"ring\"\)) \{",
            r"if crate::lockstep::active() || (\1) {",
            1,
        ),
        (r"if !\((cfg!\(feature = \"cuda\"\)) \|\|", r"if !(crate::lockstep::active() || \1 ||", 1),
        (r"cmd\.stderr\(.*\n\s*cmd\.stdin\(.*\n", "cmd.stdin(std::process::Stdio::piped());\n", 1),
        (
            r"\n( *let listener = ListenerOptions)",
            r"\nif crate::lockstep::active() { crate::lockstep::lead(children); }\n\1",
            1,
        ),
        (r"(let comm = mistralrs_quant::Comm::from_device\((?s:.*?)\)\?;\n)", r"\1crate::lockstep::started();\n", 1),
        (
            r"^pub\(crate\) fn ipc_name\(",
            (
                "/// Returns the device of a local rank.\n"
                "pub(crate) fn rank_device(device: &Device, rank: usize) -> candle_core::Result<Device> {\n"
                "if crate::lockstep::active() && device.is_cpu() { return Ok(Device::Cpu); }\n"
                "Device::new_cuda(rank)\n}\n\n"
                r"\g<0>"
            ),
            1,
        ),
    ],
    "engine/mod.rs": [
        (r"rx\.try_recv\(\)", "crate::lockstep::next(&mut rx)", 1),
        (
            r"let scheduler_idle = .*\n",
            (
                r"\g<0>if scheduler_idle && crate::lockstep::active() {\n"
                r"if crate::lockstep::wait(&self.rx).await { continue 'lp; } else { break 'lp; }\n}\n"
            ),
            1,
        ),
        (
            r"fn replicate_request_to_daemons\(.*\{\n",
            r"\g<0>if crate::lockstep::active() { return; }\n",
            1,
        ),
    ],
    # A client that goes away in the middle of a stream does not end its sequence on rank 0 alone.
    "pipeline/sampling.rs": [
        (r"(usage_opt\)\s*\.await\s*\.is_err\(\))", r"\1 && !crate::lockstep::active()", 1),
    ],
    # Iteration over a HashMap has another order in each process, and the order decides which sequences are next.
    "scheduler/default_scheduler.rs": [
        (r"collections::\{HashMap, VecDeque\}", "collections::{BTreeMap as HashMap, VecDeque}", 1),
    ],
    # The kernel for one query adds up the sequences of a batch, on one rank as well: batches take the general path.
    "attention/mod.rs": [
        (r"let can_use_flash = q\.device\(\)\.is_cpu\(\)", r"\g<0> && (b_sz == 1 || seq_len > 1)", 1),
    ],
    "pipeline/normal.rs": RANK_DEVICE,
    "pipeline/multimodal.rs": RANK_DEVICE,
}


def edited(source, destination, edits, added):
    shutil.copytree(source, destination)
    for name, replacements in edits.items():
        file = destination / "src" / name
        text = file.read_text(encoding="utf-8")
        for pattern, replacement, expected in replacements:
            text, found = re.subn(pattern, replacement, text, flags=re.MULTILINE)
            if found != expected:
                sys.exit(f"{file}: {found} places, not {expected}, match {pattern!r}")
        file.write_text(text, encoding="utf-8")
    shutil.copy(ADDED / Path(added).name, destination / "src" / added)


def main():
    destination, quant, core = map(Path, sys.argv[1:])
    edited(quant, destination / "mistralrs-quant", QUANT, "distributed/external.rs")
    edited(core, destination / "mistralrs-core", CORE, "lockstep.rs")


main()
