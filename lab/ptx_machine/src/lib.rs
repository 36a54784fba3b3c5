//! Executes the PTX of `csrc/` on the CPU, instruction by instruction: see README.md.

mod analysis;
mod block;
mod capi;
pub mod clock;
mod context;
pub mod coverage;
mod dead;
mod decode;
mod effects;
mod environment;
mod errors;
pub mod fatbin;
mod grid;
mod idle;
mod ir;
mod lexer;
mod lower;
mod multimem;
mod parser;
mod program;
mod race;
mod report;
mod run;
mod runtime;
mod soft;
mod store_buffer;
mod together;
mod types;

pub use context::MOST_PARTS;
pub use errors::{Fault, LaunchError, LoadError, LoadResult};
pub use program::Program;
pub use run::{Launch, Settings};
pub use runtime::{Memory, Range};

use parser::parse;
