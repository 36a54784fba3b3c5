//! Prebuilt CUDA kernels of [fast-allreduce](https://docs.rs/fast-allreduce), which embeds them with its feature
//! `prebuilt`. This crate has no code: its build script passes a folder of fatbins on.
#![no_std]
