//! Catalogue: the tables of facts about element types, operations, kernels, collectives and settings, and the
//! generator of all files that repeat these facts.
//!
//! [`types`], [`ops`], [`kernels`], [`collectives`], [`fused`] and [`settings`] are plain tables. [`facts`] defines
//! the enums that they use. Codes are positions in the tables; nothing else is computed from them.
//!
//! [`faces`] generates files for C++, Rust, C and Python, and tables of the documentation. They are committed. After a
//! change, run `cargo run -p fast-allreduce-catalogue --example generate`. A test of this crate fails if a file
//! differs.

pub mod collectives;
pub mod faces;
pub mod facts;
pub mod fused;
pub mod kernels;
pub mod ops;
pub mod settings;
pub mod types;
