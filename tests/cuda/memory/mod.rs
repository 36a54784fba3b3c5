//! Tests of registered buffers, symmetric memory, and the order in which memory is closed and freed.

pub mod closing;
pub mod fabric;
pub mod freeing;
pub mod joining;
pub mod registration;
pub mod suspension;
pub mod symmetric;
pub mod through_host;

pub fn tests() -> Vec<crate::runner::Trial> {
    let rooms = [
        closing::tests(),
        fabric::tests(),
        freeing::tests(),
        joining::tests(),
        registration::tests(),
        suspension::tests(),
        symmetric::tests(),
        through_host::tests(),
    ];
    rooms.into_iter().flatten().collect()
}
