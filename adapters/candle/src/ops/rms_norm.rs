//! An allreduce fused with the residual addition and the RMSNorm that follow it in a layer.

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, D};
use fast_allreduce::RawFused;

#[cfg(feature = "cuda")]
use super::cuda;
use super::{contiguous, host};
use crate::Comm;

/// Adds the sum of the ranks' tensors to a residual, and normalises its rows (the last dimension) by their root mean
/// square, times a weight.
///
/// It is one call for an [`AllReduce`](super::AllReduce), an addition and an RMSNorm, with the bits of these if each
/// rounds to the tensor's type. Types are F16, BF16 and F32. All ranks have the same residual and weight.
///
/// ```no_run
/// # fn layer(comm: &fast_allreduce_candle::Comm, weight: candle_core::Tensor, xs: candle_core::Tensor,
/// #     residual: candle_core::Tensor) -> candle_core::Result<()> {
/// use fast_allreduce_candle::AllReduceRmsNorm;
///
/// let norm = AllReduceRmsNorm::new(comm, weight, 1e-5);
/// let (normed, residual) = norm.forward(&xs, &residual)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct AllReduceRmsNorm {
    comm: Comm,
    weight: Tensor,
    epsilon: f32,
    unit_offset: bool,
    /// Whether the sum of the ranks' tensors alone is a result as well.
    with_sum: bool,
}

impl AllReduceRmsNorm {
    /// Creates the op for rows of the length of `weight`. `epsilon` is added to the mean of the squares.
    pub fn new(comm: &Comm, weight: Tensor, epsilon: f64) -> Self {
        Self { comm: comm.clone(), weight, epsilon: epsilon as f32, unit_offset: false, with_sum: false }
    }

    /// Multiplies by `1 + weight`, as Gemma does.
    #[must_use]
    pub fn unit_offset(mut self, enabled: bool) -> Self {
        self.unit_offset = enabled;
        self
    }

    /// Returns the normalised rows, and the sum with the residual, which is the next residual.
    ///
    /// # Errors
    ///
    /// An error for tensors of different shapes, types or devices, for types without a norm, and for rows whose length
    /// is not the weight's. The communicator's errors.
    pub fn forward(&self, xs: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        let both = self.results(xs, residual)?;
        Ok((both.get(0)?, both.get(1)?))
    }

    /// Returns the results of [`forward`](Self::forward) and the sum of the ranks' tensors alone, which has the bits of
    /// an [`AllReduce`](super::AllReduce). Ranks may have different residuals.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_with_sum(&self, xs: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let all = Self { with_sum: true, ..self.clone() }.results(xs, residual)?;
        Ok((all.get(0)?, all.get(1)?, all.get(2)?))
    }

    fn results(&self, xs: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let (xs, residual, weight) = (xs.contiguous()?, residual.contiguous()?, self.weight.contiguous()?);
        xs.apply_op3_no_bwd(&residual, &weight, self)
    }

    /// Returns the norm, and the shape of all results together.
    fn plan(&self, layouts: [&Layout; 3]) -> Result<(Norm, Shape)> {
        let [xs, residual, weight] = layouts;
        let hidden = xs.shape().dim(D::Minus1)?;
        if residual.shape() != xs.shape() || weight.dims() != [hidden] {
            candle_core::bail!(
                "all_reduce_fused: a tensor of {:?} takes a residual of that shape and a weight of ({hidden},), \
                 not {:?} and {:?}",
                xs.shape(),
                residual.shape(),
                weight.shape()
            )
        }
        let &Self { epsilon, unit_offset, with_sum, .. } = self;
        let norm = Norm { hidden, epsilon, unit_offset, with_sum };
        let shape = Shape::from([&[norm.results()], xs.dims()].concat());
        Ok((norm, shape))
    }
}

/// A norm without the addresses of its operands.
pub(super) struct Norm {
    hidden: usize,
    epsilon: f32,
    unit_offset: bool,
    with_sum: bool,
}

impl Norm {
    /// Returns the number of results, each of the size of the input.
    pub(super) fn results(&self) -> usize {
        2 + usize::from(self.with_sum)
    }

    /// Returns the call whose results follow each other from `output` on, each of `bytes` bytes: the normalised rows,
    /// the residual, and the plain sum if it is a result.
    pub(super) fn at(&self, residual: u64, weight: u64, output: u64, bytes: usize) -> RawFused {
        let &Self { hidden, epsilon, unit_offset, with_sum } = self;
        let place = |number: usize| output + (number * bytes) as u64;
        let norm = fast_allreduce::Norm::Rms { epsilon, unit_offset };
        let sum = if with_sum { place(2) } else { 0 };
        let (residual_out, rows) = (place(1), output);
        RawFused { residual, residual_out, sum, norm, hidden, weight, rows, ..RawFused::default() }
    }
}

impl CustomOp3 for AllReduceRmsNorm {
    fn name(&self) -> &'static str {
        "all_reduce_fused"
    }

    fn cpu_fwd(
        &self,
        xs: &CpuStorage,
        xs_layout: &Layout,
        residual: &CpuStorage,
        residual_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let layouts = [xs_layout, residual_layout, weight_layout];
        let (norm, shape) = self.plan(layouts)?;
        let [at, residual_at, weight_at] = ranges(layouts)?;
        macro_rules! of_types {
            ($($variant:ident),*) => {
                match (xs, residual, weight) {
                    $((CpuStorage::$variant(xs), CpuStorage::$variant(residual), CpuStorage::$variant(weight)) => {
                        let operands = [&xs[at], &residual[residual_at], &weight[weight_at]];
                        CpuStorage::$variant(host::rms_norm(&self.comm, &norm, operands)?)
                    })*
                    _ => return refused(),
                }
            };
        }
        Ok((of_types!(BF16, F16, F32), shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        xs: &candle_core::CudaStorage,
        xs_layout: &Layout,
        residual: &candle_core::CudaStorage,
        residual_layout: &Layout,
        weight: &candle_core::CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::cuda_backend::CudaStorageSlice;

        let layouts = [xs_layout, residual_layout, weight_layout];
        let (norm, shape) = self.plan(layouts)?;
        let [at, residual_at, weight_at] = ranges(layouts)?;
        let device = xs.device.clone();
        macro_rules! of_types {
            ($($variant:ident),*) => {
                match (&xs.slice, &residual.slice, &weight.slice) {
                    $((
                        CudaStorageSlice::$variant(xs),
                        CudaStorageSlice::$variant(residual),
                        CudaStorageSlice::$variant(weight),
                    ) => {
                        let operands = [xs.slice(at), residual.slice(residual_at), weight.slice(weight_at)];
                        CudaStorageSlice::$variant(cuda::rms_norm(&self.comm, &norm, &device, operands)?)
                    })*
                    _ => return refused(),
                }
            };
        }
        Ok((candle_core::CudaStorage { slice: of_types!(BF16, F16, F32), device }, shape))
    }
}

fn ranges(layouts: [&Layout; 3]) -> Result<[std::ops::Range<usize>; 3]> {
    let [xs, residual, weight] = layouts.map(|layout| contiguous(layout, "all_reduce_fused"));
    Ok([xs?, residual?, weight?])
}

fn refused<T>() -> Result<T> {
    candle_core::bail!(
        "all_reduce_fused: tensors are all F16, all BF16 or all F32; convert them with to_dtype"
    )
}
