//! Instructions one by one, against what the PTX ISA says, written down in other words.

mod errors;
mod floats;
mod integers;
mod multimem;
mod run;
mod threads;
