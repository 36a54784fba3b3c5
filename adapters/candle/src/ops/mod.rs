//! The collectives as custom ops of candle: their shapes and parts. `host.rs` and `cuda.rs` run them on each device's
//! memory.

#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod rms_norm;

use candle_core::{CpuStorage, CustomOp1, InplaceOp1, Layout, Module, Result, Shape, Tensor};
use fast_allreduce::{Collective, ReduceOp};

pub use self::rms_norm::AllReduceRmsNorm;
use crate::dtype::{movable, reducible};
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

    fn run<S>(
        &self,
        layout: &Layout,
        call: impl FnOnce(Collective<'_>, usize) -> Result<S>,
    ) -> Result<(S, Shape)> {
        let shape = layout.shape();
        Ok((call(Collective::AllReduce(self.op), shape.elem_count())?, shape.clone()))
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

    fn run<S>(
        &self,
        layout: &Layout,
        call: impl FnOnce(Collective<'_>, usize) -> Result<S>,
    ) -> Result<(S, Shape)> {
        let (comm, mut dims) = (&self.comm, layout.dims().to_vec());
        let Some(first) = dims.first_mut() else {
            candle_core::bail!("all_gather: a scalar has no dimension to gather along; reshape it to (1,)")
        };
        let counts = counts("all_gather", self.sizes.as_deref(), comm, layout)?;
        *first = match &self.sizes {
            None => *first * comm.world_size(),
            Some(sizes) if sizes[comm.rank()] == *first => sizes.iter().sum(),
            Some(sizes) => candle_core::bail!(
                "all_gather: the tensor is {first} long, but the sizes have {} for this rank",
                sizes[comm.rank()]
            ),
        };
        let collective = counts.as_deref().map_or(Collective::AllGather, Collective::AllGatherV);
        Ok((call(collective, layout.shape().elem_count())?, dims.into()))
    }
}

impl Module for AllGather {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        first_to(xs, self.dim, "all_gather", |xs| xs.apply_op1_no_bwd(self))
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

    fn run<S>(
        &self,
        layout: &Layout,
        call: impl FnOnce(Collective<'_>, usize) -> Result<S>,
    ) -> Result<(S, Shape)> {
        let (comm, mut dims) = (&self.comm, layout.dims().to_vec());
        let Some(first) = dims.first_mut() else {
            candle_core::bail!("reduce_scatter: a scalar has no dimension to divide")
        };
        let (all, ranks) = (*first, comm.world_size());
        let counts = counts("reduce_scatter", self.sizes.as_deref(), comm, layout)?;
        *first = match &self.sizes {
            None if all.is_multiple_of(ranks) => all / ranks,
            None => candle_core::bail!(
                "reduce_scatter: {all} do not divide by {ranks} ranks; ReduceScatter::uneven takes sizes"
            ),
            Some(sizes) if sizes.iter().sum::<usize>() == all => sizes[comm.rank()],
            Some(sizes) => candle_core::bail!(
                "reduce_scatter: the tensor is {all} long, but sizes add up to {}",
                sizes.iter().sum::<usize>()
            ),
        };
        let collective = match &counts {
            None => Collective::ReduceScatter(self.op),
            Some(counts) => Collective::ReduceScatterV(self.op, counts),
        };
        let shape = Shape::from(dims);
        Ok((call(collective, shape.elem_count())?, shape))
    }
}

impl Module for ReduceScatter {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        first_to(xs, self.dim, "reduce_scatter", |xs| xs.apply_op1_no_bwd(self))
    }
}

/// Implements candle's trait for an op, whose `run` calls a device with the collective and its count.
macro_rules! custom_op {
    ($op:ty, $name:literal) => {
        impl CustomOp1 for $op {
            fn name(&self) -> &'static str {
                $name
            }

            fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
                self.run(layout, |collective, count| {
                    host::call(&self.comm, collective, storage, layout, count)
                })
            }

            #[cfg(feature = "cuda")]
            fn cuda_fwd(
                &self,
                storage: &candle_core::CudaStorage,
                layout: &Layout,
            ) -> Result<(candle_core::CudaStorage, Shape)> {
                self.run(layout, |collective, count| {
                    cuda::call(&self.comm, collective, storage, layout, count)
                })
            }
        }
    };
}

custom_op!(AllReduce, "all_reduce");
custom_op!(AllGather, "all_gather");
custom_op!(ReduceScatter, "reduce_scatter");

/// Returns the number of elements of each rank, if `sizes` along the first dimension are given.
fn counts(op: &str, sizes: Option<&[usize]>, comm: &Comm, layout: &Layout) -> Result<Option<Vec<usize>>> {
    let Some(sizes) = sizes else { return Ok(None) };
    if sizes.len() != comm.world_size() {
        candle_core::bail!("{op}: {} sizes for {} ranks", sizes.len(), comm.world_size())
    }
    let each = layout.dims()[1..].iter().product::<usize>();
    Ok(Some(sizes.iter().map(|size| size * each).collect()))
}

/// Returns the type in which a collective takes elements of candle's type, and how many there are in one of candle's.
fn element(dtype: candle_core::DType, collective: Collective<'_>) -> Result<(fast_allreduce::DType, usize)> {
    let op = collective.name();
    match collective {
        Collective::AllReduce(_) | Collective::ReduceScatter(_) | Collective::ReduceScatterV(..) => {
            Ok((reducible(dtype, op)?, 1))
        }
        _ => movable(dtype, op),
    }
}

/// Calls `run` with a collective whose counts are multiplied by `factor`.
fn scaled<R>(collective: Collective<'_>, factor: usize, run: impl FnOnce(Collective<'_>) -> R) -> R {
    match collective {
        Collective::AllGatherV(counts) if factor != 1 => {
            let counts: Vec<_> = counts.iter().map(|count| count * factor).collect();
            run(Collective::AllGatherV(&counts))
        }
        collective => run(collective),
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
