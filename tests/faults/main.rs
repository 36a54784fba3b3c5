//! What goes wrong, on purpose: ranks that disagree, leave, die or fork. Nothing hangs, and nothing wrong is returned
//! as right.

mod calls;
mod environment;
mod fixtures;
mod ranks;
#[path = "../../src/testing/temporary.rs"]
mod temporary;
#[path = "../conformance/suite/tier.rs"]
mod tier;

use fast_allreduce_oracle::random;
