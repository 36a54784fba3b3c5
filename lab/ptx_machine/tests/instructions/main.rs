//! Instructions one by one, compared with an independent formulation of the PTX ISA.

mod clusters;
mod errors;
mod floats;
mod integers;
mod multimem;
mod run;
mod threads;
