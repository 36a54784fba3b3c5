//! Several machines on this one, for tests: Linux namespaces joined by a network. A [`Bed`] has two to four nodes. Each
//! has its own network, host name, boot id, processes, System V IPC, mounts, `/dev/shm` and `/etc/hosts`. Needs root.
//!
//! Addresses are 198.18.0.0/16 (RFC 2544) and fd00:5a::/64 (RFC 4193); nothing is routed out of the bed.
//!
//! The network is either a bridge of the kernel ([`Wire::Bridge`]), for speed, or a [`switch`] in user space
//! ([`Wire::Switch`]), which delays, loses and cuts. The kernel's netem would do that too, but many kernels lack it.

mod bed;
mod node;
pub mod switch;

pub use bed::{Bed, Wire};
pub use switch::Link;
