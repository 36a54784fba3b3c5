//! The collectives as custom ops of candle: their shapes and parts. `host.rs` and `cuda.rs` run them on each device's
//! memory.

#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod rms_norm;

use candle_core::{CpuStorage, CustomOp1, InplaceOp1, Layout, Module, Result, Shape, Tensor};
use fast_allreduce::{Collective, ReduceOp};

pub use self::rms_norm::AllReduceRmsNorm;
use crate::Comm;

/// Reduces the ranks' tensors element by element. Every rank gets the result.
///
/// All ranks get the same bits from every direct algorithm: elements are added in rank order, f16 and bf16 in f32. As a
/// [`Module`] it takes tensors of any layout, and as an op ([`Tensor::apply_op1_no_bwd`], [`Tensor::inplace_op1`])
/// contiguous ones at any offset. It has no gradient.
#[derive(Debug, Clone)]
pub struct AllReduce {
    comm: Comm,
    op: ReduceOp,
}

impl AllReduce {
    /// Creates the op with any operation.
    pub fn new(comm: &Comm, op: ReduceOp) -> Self {
        Self { comm: comm.clone(), op }
    }

    /// Creates the op that sums, as tensor parallelism needs.
    pub fn sum(comm: &Comm) -> Self {
        Self::new(comm, ReduceOp::Sum)
    }

    /// Returns the communicator.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Reduces into the tensor itself, and thus into all tensors that share its storage. It saves an allocation and its
    /// page faults.
    ///
    /// # Errors
    ///
    /// The communicator's errors, and an error for a tensor that is not contiguous or whose type cannot be reduced.
    pub fn forward_in_place(&self, xs: &Tensor) -> Result<()> {
        xs.inplace_op1(self)
    }
}

impl Module for AllReduce {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        xs.contiguous()?.apply_op1_no_bwd(self)
    }
}

impl CustomOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let count = layout.shape().elem_count();
        let output = host::call(&self.comm, Collective::AllReduce(self.op), storage, layout, count)?;
        Ok((output, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let count = layout.shape().elem_count();
        let output = cuda::call(&self.comm, Collective::AllReduce(self.op), storage, layout, count)?;
        Ok((output, layout.shape().clone()))
    }
}

impl InplaceOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        host::all_reduce_in_place(&self.comm, self.op, storage, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        cuda::all_reduce_in_place(&self.comm, self.op, storage, layout)
    }
}

/// Concatenates the ranks' tensors along a dimension, in rank order. Every rank gets the result.
///
/// As a [`Module`] it takes any layout and dimension, and copies the input and the result if the dimension is not the
/// first. As an op it takes contiguous tensors and concatenates along their first dimension.
#[derive(Debug, Clone)]
pub struct AllGather {
    comm: Comm,
    dim: usize,
    sizes: Option<Vec<usize>>,
}

impl AllGather {
    /// Creates the op for tensors of one shape.
    pub fn new(comm: &Comm, dim: usize) -> Self {
        Self { comm: comm.clone(), dim, sizes: None }
    }

    /// Creates the op for tensors that differ along the dimension: rank r's has length `sizes[r]`. All ranks pass the
    /// same sizes.
    pub fn uneven(comm: &Comm, dim: usize, sizes: &[usize]) -> Self {
        Self { comm: comm.clone(), dim, sizes: Some(sizes.to_vec()) }
    }

    /// Returns the shape of the result, and the number of elements of each rank if they differ.
    fn plan(&self, layout: &Layout) -> Result<(Shape, Option<Vec<usize>>)> {
        let mut dims = layout.dims().to_vec();
        let Some(first) = dims.first_mut() else {
            candle_core::bail!("all_gather: a scalar has no dimension to gather along; reshape it to (1,)")
        };
        let own = *first;
        let counts = match &self.sizes {
            None => {
                *first *= self.comm.world_size();
                None
            }
            Some(sizes) => {
                check_sizes("all_gather", sizes, &self.comm)?;
                if sizes[self.comm.rank()] != own {
                    let said = sizes[self.comm.rank()];
                    candle_core::bail!(
                        "all_gather: the tensor is {own} long, but sizes say {said} of this rank"
                    )
                }
                *first = sizes.iter().sum();
                let each = layout.dims()[1..].iter().product::<usize>();
                Some(sizes.iter().map(|size| size * each).collect())
            }
        };
        Ok((dims.into(), counts))
    }
}

impl Module for AllGather {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        first_to(xs, self.dim, "all_gather", |xs| xs.apply_op1_no_bwd(self))
    }
}

impl CustomOp1 for AllGather {
    fn name(&self) -> &'static str {
        "all_gather"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (shape, counts) = self.plan(layout)?;
        let collective = counts.as_deref().map_or(Collective::AllGather, Collective::AllGatherV);
        let output = host::call(&self.comm, collective, storage, layout, layout.shape().elem_count())?;
        Ok((output, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (shape, counts) = self.plan(layout)?;
        let collective = counts.as_deref().map_or(Collective::AllGather, Collective::AllGatherV);
        let output = cuda::call(&self.comm, collective, storage, layout, layout.shape().elem_count())?;
        Ok((output, shape))
    }
}

/// Reduces the ranks' tensors element by element. Rank r gets part r of the result along a dimension.
///
/// Results have the bits of an [`AllReduce`]. Layouts and dimensions are as for [`AllGather`].
#[derive(Debug, Clone)]
pub struct ReduceScatter {
    comm: Comm,
    op: ReduceOp,
    dim: usize,
    sizes: Option<Vec<usize>>,
}

impl ReduceScatter {
    /// Creates the op for equal parts.
    pub fn new(comm: &Comm, op: ReduceOp, dim: usize) -> Self {
        Self { comm: comm.clone(), op, dim, sizes: None }
    }

    /// Creates the op for parts of different lengths: rank r's has length `sizes[r]`. All ranks pass the same sizes.
    pub fn uneven(comm: &Comm, op: ReduceOp, dim: usize, sizes: &[usize]) -> Self {
        Self { comm: comm.clone(), op, dim, sizes: Some(sizes.to_vec()) }
    }

    /// Returns the shape of the result, and the number of elements of each rank if they differ.
    fn plan(&self, layout: &Layout) -> Result<(Shape, Option<Vec<usize>>)> {
        let mut dims = layout.dims().to_vec();
        let Some(first) = dims.first_mut() else {
            candle_core::bail!("reduce_scatter: a scalar has no dimension to divide")
        };
        let (all, ranks) = (*first, self.comm.world_size());
        let counts = match &self.sizes {
            None if !all.is_multiple_of(ranks) => {
                candle_core::bail!(
                    "reduce_scatter: {all} do not divide by {ranks} ranks; ReduceScatter::uneven takes sizes"
                )
            }
            None => {
                *first /= ranks;
                None
            }
            Some(sizes) => {
                check_sizes("reduce_scatter", sizes, &self.comm)?;
                let said: usize = sizes.iter().sum();
                if said != all {
                    candle_core::bail!("reduce_scatter: the tensor is {all} long, but sizes add up to {said}")
                }
                *first = sizes[self.comm.rank()];
                let each = layout.dims()[1..].iter().product::<usize>();
                Some(sizes.iter().map(|size| size * each).collect())
            }
        };
        Ok((dims.into(), counts))
    }
}

impl Module for ReduceScatter {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        first_to(xs, self.dim, "reduce_scatter", |xs| xs.apply_op1_no_bwd(self))
    }
}

impl CustomOp1 for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce_scatter"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (shape, counts) = self.plan(layout)?;
        let collective = match &counts {
            None => Collective::ReduceScatter(self.op),
            Some(counts) => Collective::ReduceScatterV(self.op, counts),
        };
        Ok((host::call(&self.comm, collective, storage, layout, shape.elem_count())?, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (shape, counts) = self.plan(layout)?;
        let collective = match &counts {
            None => Collective::ReduceScatter(self.op),
            Some(counts) => Collective::ReduceScatterV(self.op, counts),
        };
        Ok((cuda::call(&self.comm, collective, storage, layout, shape.elem_count())?, shape))
    }
}

fn check_sizes(op: &str, sizes: &[usize], comm: &Comm) -> Result<()> {
    match sizes.len() == comm.world_size() {
        true => Ok(()),
        false => candle_core::bail!("{op}: {} sizes for {} ranks", sizes.len(), comm.world_size()),
    }
}

/// Applies an op that works along the first dimension along dimension `dim`.
fn first_to(
    xs: &Tensor,
    dim: usize,
    op: &str,
    apply: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if dim >= xs.rank() {
        candle_core::bail!("{op}: there is no dimension {dim} in {:?}", xs.shape())
    }
    if dim == 0 {
        return apply(&xs.contiguous()?);
    }
    apply(&xs.transpose(0, dim)?.contiguous()?)?.transpose(0, dim)
}

/// Returns the range of a contiguous tensor's elements in its storage.
pub(crate) fn contiguous(layout: &Layout, op: &str) -> Result<std::ops::Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => candle_core::bail!("{op}: the tensor is not contiguous, call contiguous() first"),
    }
}
