//! Executes on the CPU what nvcc makes of `csrc/` for GPUs, instruction by instruction: see README.md.

mod analysis;
mod context;
mod decode;
mod effects;
mod errors;
#[allow(missing_docs)]
mod ir;
mod lexer;
mod lower;
mod parser;
mod program;
mod run;
mod runtime;
mod soft;
mod together;
mod types;

pub use errors::{Fault, LaunchError, LoadError, LoadResult};
pub use program::Program;
pub use run::{Launch, Settings};
pub use runtime::{Memory, Range};

use parser::parse;
