//! What the conformance suite computes: inputs, and the outputs that are expected of them. It is a crate of its own:
//! it is optimised, unlike the rest of the library's tests, and the program checks its results by `number.rs` and
//! `rows.rs`, too.
//!
//! | file | subject |
//! |---|---|
//! | `message.rs` | a collective's inputs and expected outputs |
//! | `collective.rs` | which collective, with what each rank tells of it, and its in-place form |
//! | `number.rs` | element types with the operations |
//! | `oracle.rs`, `order.rs` | what is expected of an element, with a second opinion; of the algorithms that have an order of their own |
//! | `rows.rs`, `quantized_rows.rs` | sums with a residual and an RMSNorm, and rows as numbers of 8 and 4 bits: what is expected, and a call that is compared |
//! | `quantized.rs` | sums with quantised transport, likewise |
//! | `random.rs` | numbers from a printed seed |

pub mod collective;
pub mod message;
pub mod number;
pub mod oracle;
pub mod order;
pub mod quantized;
pub mod quantized_rows;
pub mod random;
pub mod rows;
