//! Executes the PTX of `csrc/` on the CPU, instruction by instruction: see README.md.

pub mod clock;
mod context;
pub mod coverage;
mod decode;
mod driver;
mod errors;
mod flow;
mod ir;
mod launch;
mod lexer;
mod lower;
mod memory;
mod parser;
mod program;
mod runtime;
mod soft;
mod types;

pub use context::MOST_PARTS;
pub use driver::fatbin;
pub use errors::{Fault, LaunchError, LoadError, LoadResult};
pub use launch::run::{Launch, Settings};
pub use program::Program;
pub use runtime::{Memory, Range};

use parser::parse;
