//! Reads parts of tensors of safetensors files.

use std::ops::Range;
use std::path::Path;

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Result, Tensor};

use crate::shards::{Shards, Spans};

/// Safetensors files, mapped into memory: parts that a rank does not use are not read.
pub struct Safetensors(MmapedSafetensors);

impl Safetensors {
    /// Opens the files of a model.
    ///
    /// # Errors
    ///
    /// An error if a file cannot be opened or is damaged.
    ///
    /// # Safety
    ///
    /// The files must not change while this exists, as for any mapped file.
    pub unsafe fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        // SAFETY: the caller's contract.
        unsafe { MmapedSafetensors::multi(paths) }.map(Self)
    }
}

impl Shards for Safetensors {
    fn contains(&self, name: &str) -> bool {
        self.0.get(name).is_ok()
    }

    fn dims(&self, name: &str) -> Result<Vec<usize>> {
        Ok(self.0.get(name)?.shape().to_vec())
    }

    /// Returns the part in the type in which it is stored.
    fn shard(&self, name: &str, dim: usize, range: Range<usize>, device: &Device) -> Result<Tensor> {
        let view = self.0.get(name)?;
        let dtype = DType::try_from(view.dtype())?;
        let spans = Spans::new(name, view.shape(), dim, &range)?;
        let size = dtype.size_in_bytes();
        if size == 0 {
            candle_core::bail!("{name}: {dtype:?} is packed, and cannot be divided")
        }
        let mut bytes = Vec::with_capacity(spans.outer * spans.span * size);
        for row in 0..spans.outer {
            bytes.extend_from_slice(
                &view.data()[(row * spans.stride + spans.start) * size..][..spans.span * size],
            );
        }
        Tensor::from_raw_buffer(&bytes, dtype, &spans.dims, device)
    }
}
