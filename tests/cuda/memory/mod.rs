//! Tests of registered buffers, symmetric memory, and the order in which memory is closed and freed.

pub mod closing;
pub mod fabric;
pub mod freeing;
pub mod registration;
pub mod symmetric;

pub fn tests() -> Vec<crate::runner::Trial> {
    [closing::tests(), fabric::tests(), freeing::tests(), registration::tests(), symmetric::tests()]
        .into_iter()
        .flatten()
        .collect()
}
