//! Sets of link classes.

use crate::topology::LinkClass;

/// A set of [`LinkClass`]es.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Links(u8);

impl Links {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self((1 << LinkClass::ALL.len()) - 1);
    pub const NVLINK: Self = Self(1 << LinkClass::NvSwitch as u8 | 1 << LinkClass::NvLinkMesh as u8);
    pub const PCIE: Self = Self(1 << LinkClass::Pcie as u8);
    /// Ranks that share pinned host memory, because some pair's GPUs cannot access each other's memory or because the
    /// setting `sharing` says so.
    pub const THROUGH_HOST: Self = Self(1 << LinkClass::Unreachable as u8);
    pub const SAME_DEVICE: Self = Self(1 << LinkClass::SameDevice as u8);

    pub fn contains(self, link: LinkClass) -> bool {
        self.0 & 1 << link as u8 != 0
    }

    #[must_use]
    pub fn with(self, link: LinkClass) -> Self {
        Self(self.0 | 1 << link as u8)
    }

    #[must_use]
    pub fn without(self, link: LinkClass) -> Self {
        Self(self.0 & !(1 << link as u8))
    }

    /// Iterates over the classes, the best link first.
    pub fn iter(self) -> impl Iterator<Item = LinkClass> {
        LinkClass::ALL.into_iter().filter(move |&link| self.contains(link))
    }
}
