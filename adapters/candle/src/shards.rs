//! Sources of a rank's part of the weights.

use std::ops::Range;

use candle_core::{Device, Result, Tensor};

/// Named tensors that can be read in parts: a file of weights, or a replacement for one.
pub trait Shards {
    /// Returns whether there is a tensor of that name.
    fn contains(&self, name: &str) -> bool;

    /// Returns the dimensions of a tensor. A linear layer's weight is (outputs, inputs).
    ///
    /// # Errors
    ///
    /// An error if there is no tensor of that name.
    fn dims(&self, name: &str) -> Result<Vec<usize>>;

    /// Reads the part of a tensor that is `range` of dimension `dim`. The result is contiguous.
    ///
    /// # Errors
    ///
    /// An error if there is no such tensor, dimension or range, or if it cannot be read.
    fn shard(&self, name: &str, dim: usize, range: Range<usize>, device: &Device) -> Result<Tensor>;

    /// Reads a whole tensor.
    ///
    /// # Errors
    ///
    /// Those of [`Shards::shard`].
    fn whole(&self, name: &str, device: &Device) -> Result<Tensor> {
        let dims = self.dims(name)?;
        self.shard(name, 0, 0..dims.first().copied().unwrap_or(1), device)
    }
}

/// A part of a tensor: `outer` spans of `span` elements, each `start` elements after the begin of a stretch of `stride`
/// elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Spans {
    pub outer: usize,
    pub stride: usize,
    pub start: usize,
    pub span: usize,
    /// The dimensions of the part.
    pub dims: Vec<usize>,
}

impl Spans {
    pub fn new(name: &str, dims: &[usize], dim: usize, range: &Range<usize>) -> Result<Self> {
        if dim >= dims.len() || range.start > range.end || range.end > dims[dim] {
            candle_core::bail!("{name} is {dims:?}: it has no {range:?} of dimension {dim}")
        }
        let inner: usize = dims[dim + 1..].iter().product();
        let mut part = dims.to_vec();
        part[dim] = range.len();
        Ok(Self {
            outer: dims[..dim].iter().product(),
            stride: dims[dim] * inner,
            start: range.start * inner,
            span: range.len() * inner,
            dims: part,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_what_narrow_takes() {
        let all = Tensor::arange(0u32, 2 * 3 * 4, &Device::Cpu).unwrap().reshape((2, 3, 4)).unwrap();
        let flat = all.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        for dim in 0..3 {
            let len = all.dims()[dim];
            for (start, end) in (0..=len).flat_map(|start| (start..=len).map(move |end| (start, end))) {
                let spans = Spans::new("w", all.dims(), dim, &(start..end)).unwrap();
                let taken: Vec<u32> = (0..spans.outer)
                    .flat_map(|row| &flat[row * spans.stride + spans.start..][..spans.span])
                    .copied()
                    .collect();
                let expected = all.narrow(dim, start, end - start).unwrap();
                assert_eq!(spans.dims, expected.dims());
                assert_eq!(taken, expected.flatten_all().unwrap().to_vec1::<u32>().unwrap());
            }
        }
        assert!(Spans::new("w", &[2, 3], 1, &(0..4)).is_err());
        assert!(Spans::new("w", &[2, 3], 2, &(0..1)).is_err());
    }
}
