//! The paths: how each selects, how it exchanges, and what it promises.

use fast_allreduce::Result;

use crate::sparse::Sparse;
use crate::traffic::Traffic;
use crate::{
    dense, gaussian_k, gaussian_k_concat, gtop_k, ok_top_k, selection, top_k, top_k_a_opt, top_k_sa,
};

#[derive(Debug)]
pub struct Path {
    pub name: &'static str,
    /// What a rank keeps of its vector, of which about k elements are to be kept.
    pub select: fn(&[f32], usize) -> Sparse,
    /// From what the ranks keep, and k, to the output, which holds zeros.
    pub reduce: fn(&Traffic<'_>, &Sparse, usize, &mut [f32]) -> Result<()>,
    pub promise: Promise,
}

/// What the output is, on every rank and to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// The sum of what the ranks keep, added in rank order.
    Sum,
    /// The k largest elements of that sum.
    TopKOfSum,
    /// What is left at the root of a binary tree that adds two ranks' entries and keeps the k largest at each node.
    TopKOfTree,
}

pub const PATHS: [Path; 9] = [
    Path { name: "dense", select: selection::top_k, reduce: dense::reduce, promise: Promise::Sum },
    Path { name: "top-k", select: selection::top_k, reduce: top_k::reduce, promise: Promise::Sum },
    Path { name: "gtop-k", select: selection::top_k, reduce: gtop_k::reduce, promise: Promise::TopKOfTree },
    Path { name: "ok-topk", select: selection::top_k, reduce: ok_top_k::reduce, promise: Promise::TopKOfSum },
    Path {
        name: "topk-a-opt",
        select: selection::about_top_k,
        reduce: top_k_a_opt::reduce,
        promise: Promise::Sum,
    },
    Path { name: "topk-sa", select: selection::top_k, reduce: top_k_sa::reduce, promise: Promise::Sum },
    Path {
        name: "gaussian-k",
        select: gaussian_k::select,
        reduce: top_k_a_opt::reduce,
        promise: Promise::Sum,
    },
    Path {
        name: "gaussian-k-concat",
        select: gaussian_k::select,
        reduce: gaussian_k_concat::reduce,
        promise: Promise::Sum,
    },
    Path {
        name: "gaussian-k-sa",
        select: gaussian_k::select,
        reduce: top_k_sa::reduce,
        promise: Promise::Sum,
    },
];
