//! An allreduce that goes on with a residual and an RMSNorm: what follows it in a layer, in the same call.

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, D};
use fast_allreduce::RawRmsNorm;

#[cfg(feature = "cuda")]
use super::cuda;
use super::{contiguous, host};
use crate::Comm;

/// Adds the sum of the ranks' tensors to a residual, and normalises the rows of that: along the last dimension, by their root mean
/// square, times a weight.
///
/// It is an [`AllReduce`](super::AllReduce), an addition and an RMSNorm in one, with the bits of these where each rounds to the
/// tensor's type, for F16, BF16 and F32. All ranks have the same residual and weight.
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
}

impl AllReduceRmsNorm {
    /// Of rows that are as long as `weight`; `epsilon` is added to the mean of the squares.
    pub fn new(comm: &Comm, weight: Tensor, epsilon: f64) -> Self {
        Self { comm: comm.clone(), weight, epsilon: epsilon as f32, unit_offset: false }
    }

    /// Multiplies by `1 + weight`, as Gemma does.
    #[must_use]
    pub fn unit_offset(mut self, enabled: bool) -> Self {
        self.unit_offset = enabled;
        self
    }

    /// The normalised rows, and the sum with the residual: the next residual.
    ///
    /// # Errors
    ///
    /// For tensors of different shapes, types or devices, types that have no norm, rows of another length than the weight, and
    /// those of the call.
    pub fn forward(&self, xs: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        let (xs, residual, weight) = (xs.contiguous()?, residual.contiguous()?, self.weight.contiguous()?);
        let both = xs.apply_op3_no_bwd(&residual, &weight, self)?;
        Ok((both.get(0)?, both.get(1)?))
    }

    /// What the call is told, and the shape of both results together.
    fn plan(&self, layouts: [&Layout; 3]) -> Result<(Norm, Shape)> {
        let [xs, residual, weight] = layouts;
        let hidden = xs.shape().dim(D::Minus1)?;
        if residual.shape() != xs.shape() || weight.dims() != [hidden] {
            candle_core::bail!(
                "all_reduce_rms_norm: a tensor of {:?} takes a residual of that and a weight of ({hidden},), not {:?} and {:?}",
                xs.shape(),
                residual.shape(),
                weight.shape()
            )
        }
        let shape = Shape::from([&[2], xs.dims()].concat());
        Ok((Norm { hidden, epsilon: self.epsilon, unit_offset: self.unit_offset }, shape))
    }
}

/// A norm, but for where its operands are.
pub(super) struct Norm {
    hidden: usize,
    epsilon: f32,
    unit_offset: bool,
}

impl Norm {
    pub(super) fn at(&self, weight: u64, output: u64) -> RawRmsNorm {
        let &Self { hidden, epsilon, unit_offset } = self;
        RawRmsNorm { hidden, epsilon, weight, unit_offset, output, quantized: None }
    }
}

impl CustomOp3 for AllReduceRmsNorm {
    fn name(&self) -> &'static str {
        "all_reduce_rms_norm"
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
    let [xs, residual, weight] = layouts.map(|layout| contiguous(layout, "all_reduce_rms_norm"));
    Ok([xs?, residual?, weight?])
}

fn refused<T>() -> Result<T> {
    candle_core::bail!(
        "all_reduce_rms_norm: tensors are all F16, all BF16 or all F32; convert them with to_dtype"
    )
}
