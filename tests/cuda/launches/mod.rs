//! Tests of streams, graphs, and other work that shares a GPU with a launch.

pub mod concurrency;
pub mod cost;
pub mod graphs;
pub mod modules;
pub mod programmatic;
pub mod residency;
pub mod streams;

pub fn tests() -> Vec<crate::runner::Trial> {
    [
        concurrency::tests(),
        cost::tests(),
        graphs::tests(),
        modules::tests(),
        programmatic::tests(),
        residency::tests(),
        streams::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
