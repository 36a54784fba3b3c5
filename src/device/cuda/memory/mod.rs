//! Memory that kernels access: device memory and its export to other ranks, pinned host memory, and copies.

pub(crate) mod allocation;
mod copies;
pub(crate) mod handle;
mod pinned;
pub(crate) mod returned;

pub(crate) use self::allocation::Memory;
pub(crate) use self::copies::{Copies, RawStream};
pub(crate) use self::handle::Handle;
pub use self::handle::Sharing;
pub(crate) use self::pinned::Pinned;
