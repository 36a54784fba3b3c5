//! Faults on purpose: ranks that disagree, leave, die or fork. Every call must end, with the right result or with an
//! error.

mod calls;
mod environment;
mod fixtures;
mod ranks;
#[path = "../../src/testing/temporary.rs"]
mod temporary;
#[path = "../conformance/suite/tier.rs"]
mod tier;

use fast_allreduce_oracle::random;
