//! Facts about element types, operations, kernels, collectives and settings, each stated once, and the generator of
//! every file that repeats them.
//!
//! [`types`], [`ops`], [`kernels`], [`collectives`], [`fused`] and [`settings`] are plain tables, to be read top to
//! bottom; [`facts`] has their words. Codes are positions in the tables, and nothing is computed from them. [`faces`]
//! makes the files of C++, Rust, C and Python from the tables. They are committed;
//! `cargo run -p fast-allreduce-catalogue --example generate` writes them anew, and this crate's test fails when one
//! differs.

pub mod collectives;
pub mod faces;
pub mod facts;
pub mod fused;
pub mod kernels;
pub mod ops;
pub mod settings;
pub mod types;
