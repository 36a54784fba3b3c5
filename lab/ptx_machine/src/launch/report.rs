//! Formats reports of failures: the place, the thread, and the state of the other threads.

use crate::context::Record;
use crate::errors::{Fault, LaunchError};
use crate::ir::Instr;
use crate::launch::block::{Block, State};
use crate::memory::race::Race;
use crate::program::Program;

pub(crate) fn instr(program: &Program, at: u64) -> &Instr {
    &program.module.functions[(at >> 32) as usize].code[at as u32 as usize]
}

/// Returns the path of a source file, relative to the folder of the sources.
fn file(program: &Program, number: u32) -> &str {
    let name = program.module.files.get(&number).map_or("?", String::as_str);
    let name = name.rsplit("/../").next().unwrap_or(name);
    name.rsplit("csrc/").next().unwrap_or(name)
}

/// Describes the place of an instruction.
pub(crate) fn place(program: &Program, at: u64) -> String {
    let instr = instr(program, at);
    let loc = instr.loc;
    let mut text = format!("PTX line {}", instr.line);
    if loc.file != 0 {
        text += &format!(", {}:{}", file(program, loc.file), loc.line);
    }
    if loc.into.0 != 0 {
        text += &format!(" in {}:{}", file(program, loc.into.0), loc.into.1);
    }
    text
}

pub(crate) fn who(block: &Block, thread: u32) -> String {
    format!("block {:?}, thread {thread}", block.index)
}

/// Describes the error that compiled code or the runtime has recorded.
pub(crate) fn failed(
    program: &Program,
    kernel: &str,
    record: Record,
    race: Option<Race>,
    block: &Block,
    thread: u32,
) -> LaunchError {
    let all = [
        Fault::Misaligned,
        Fault::IllegalAddress,
        Fault::ReadOnly,
        Fault::UndefinedRegister,
        Fault::UndefinedShared,
        Fault::Limit,
        Fault::Trap,
        Fault::Race,
        Fault::EndedBlock,
    ];
    let fault = all.into_iter().find(|&fault| fault as u32 == record.fault).unwrap_or(Fault::Trap);
    let mut what = format!("{}, {}", place(program, record.at), who(block, thread));
    if record.bytes > 0 {
        what += &format!(", {} bytes at {:#x}", record.bytes, record.address);
    }
    if let (Fault::Race, Some(race)) = (fault, race) {
        what += &format!("; with {}, thread {} of all", place(program, race.at), race.other);
    }
    LaunchError { fault, kernel: kernel.to_owned(), what }
}

/// Describes where all threads of a block are.
pub(crate) fn waiting(program: &Program, block: &Block) -> String {
    let key = |i: usize| match block.states[i] {
        State::Ready | State::Ended => (block.states[i], 0),
        state => (state, block.requests[i].at),
    };
    let mut text = format!("block {:?}:", block.index);
    let mut first = 0;
    for i in 1..=block.states.len() {
        if i < block.states.len() && key(i) == key(first) {
            continue;
        }
        let (state, at) = key(first);
        let does = match state {
            State::Ready => "run or poll".to_owned(),
            State::Ended => "have ended".to_owned(),
            State::AtBarrier => format!("wait at the barrier of {}", place(program, at)),
            State::InCluster => format!("wait for their cluster at {}", place(program, at)),
            State::InWarp => format!("wait for their warp at {}", place(program, at)),
        };
        text += &format!(" threads {first} to {} {does};", i - 1);
        first = i;
    }
    text.trim_end_matches(';').to_owned()
}
