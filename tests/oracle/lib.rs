//! Computes inputs and expected outputs for the conformance suite. A separate crate, because it is optimised, unlike
//! the library's other tests, and because the program checks its results with `number.rs` and `rows.rs` as well.
//!
//! | file | subject |
//! |---|---|
//! | `message.rs` | inputs and expected outputs of a collective |
//! | `collective.rs` | collectives with the arguments of every rank, and their in-place forms |
//! | `number.rs` | element types and their operations |
//! | `oracle.rs`, `order.rs` | expected elements, checked twice; algorithms with their own order of additions |
//! | `rows.rs`, `quantized_rows.rs` | sums with residual and norm; quantised rows: results and a checked call |
//! | `norms.rs` | norms of rows, in the documented order and from the formula |
//! | `experts.rs` | inputs that are computed from experts' rows |
//! | `quantized.rs` | sums with quantised transport: results and a checked call |
//! | `sharded.rs` | RMSNorm of rows that are divided among ranks: results and a checked call |
//! | `random.rs` | random numbers from a printed seed |

pub mod collective;
pub mod experts;
pub mod message;
pub mod norms;
pub mod number;
pub mod oracle;
pub mod order;
pub mod quantized;
pub mod quantized_rows;
pub mod random;
pub mod rows;
pub mod sharded;
