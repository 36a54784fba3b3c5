//! Tests of failing driver calls, lost contexts, ranks that do not call, and machines without CUDA.

pub mod driver_errors;
pub mod errors;
pub mod injection_scenario;
pub mod injection_sweep;
pub mod lost_context;
pub mod settings;

pub fn tests() -> Vec<crate::runner::Trial> {
    [
        driver_errors::tests(),
        errors::tests(),
        injection_sweep::tests(),
        lost_context::tests(),
        settings::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
