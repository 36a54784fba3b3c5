//! Linear layers whose results have the same bits for every number of ranks.
//!
//! A floating-point sum depends on how it is divided, so a tensor-parallel model sometimes generates other tokens on 2
//! ranks than on 3. These layers avoid that in two ways:
//!
//! * A layer is divided into *units* of outputs or inputs (attention heads, or a fixed number of channels), and
//!   computed unit by unit. All units have one shape, so the result of a unit does not depend on its rank.
//! * The products of units are added exactly: each is rounded to a multiple of 2^-30, and sums of such numbers are
//!   exact in f64 up to 2^23. Exact sums have one result in any order. This is the reproducible summation of Demmel and
//!   Nguyen (Fast Reproducible Floating-Point Summation, ARITH 2013) with one fixed bin.
//!
//! Products are computed in the weight's type, which may differ from the input's. f16 weights halve the bytes that are
//! read for each token, and round each unit's product to 11 bits.
//!
//! The cost is an allreduce of 8 bytes for each element instead of 4, and products of small matrices. Products of 2^21
//! or more in magnitude are rounded more coarsely, and results may then depend on the number of ranks. Activations of
//! language models are far below that.

use std::sync::LazyLock;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor};

use crate::AllReduce;

/// Adding and subtracting this rounds an f64 below 2^21 to a multiple of 2^-30: at 1.5 x 2^22 an f64 has 30 fraction
/// bits left.
const ROUNDER: f64 = 1.5 * (1u64 << 22) as f64;

/// A linear layer whose outputs are divided, in units.
#[derive(Debug, Clone)]
pub struct ColumnLinear {
    /// (units, inputs, outputs of a unit).
    weight: Tensor,
}

impl ColumnLinear {
    /// Creates the layer from this rank's rows of the weight (outputs, inputs), which are whole units.
    ///
    /// # Errors
    ///
    /// An error if the number of outputs is not a multiple of `unit`.
    pub fn new(weight: &Tensor, unit: usize) -> Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        let weight = weight.reshape((units(outputs, unit)?, unit, inputs))?.transpose(1, 2)?.contiguous()?;
        Ok(Self { weight })
    }

    /// Maps (rows, inputs) to (units, rows, outputs of a unit), in the type of `xs`.
    ///
    /// # Errors
    ///
    /// An error if shapes do not fit, or candle cannot multiply the weight's type.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (rows, inputs) = xs.dims2()?;
        let units = self.weight.dim(0)?;
        let own = xs.to_dtype(self.weight.dtype())?;
        let mut own = own.unsqueeze(0)?.broadcast_as((units, rows, inputs))?;
        if !*MULTIPLIES_BROADCAST {
            own = own.contiguous()?;
        }
        own.matmul(&self.weight)?.to_dtype(xs.dtype())
    }
}

/// Whether candle multiplies a matrix that is broadcast over a batch. 0.10 returns wrong products on CPUs.
static MULTIPLIES_BROADCAST: LazyLock<bool> = LazyLock::new(|| {
    let products = || -> Result<Vec<f32>> {
        let ones = Tensor::ones((1, 2), DType::F32, &Device::Cpu)?.broadcast_as((2, 1, 2))?;
        let batch = Tensor::new(&[1f32, 2.0, 4.0, 8.0], &Device::Cpu)?.reshape((2, 2, 1))?;
        ones.matmul(&batch)?.flatten_all()?.to_vec1()
    };
    products().is_ok_and(|products| products == [3.0, 12.0])
});

/// A linear layer whose inputs are divided, in units. It sums the products over units and ranks.
#[derive(Debug, Clone)]
pub struct RowLinear {
    /// (units, inputs of a unit, outputs).
    weight: Tensor,
    all_reduce: AllReduce,
}

impl RowLinear {
    /// Creates the layer from this rank's columns of the weight (outputs, inputs), which are whole units.
    ///
    /// # Errors
    ///
    /// An error if the number of inputs is not a multiple of `unit`.
    pub fn new(weight: &Tensor, unit: usize, all_reduce: AllReduce) -> Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        let weight =
            weight.reshape((outputs, units(inputs, unit)?, unit))?.permute((1, 2, 0))?.contiguous()?;
        Ok(Self { weight, all_reduce })
    }

    /// Maps (units, rows, inputs of a unit) to (rows, outputs), in f32.
    ///
    /// # Errors
    ///
    /// An error if shapes do not fit, or candle cannot multiply the weight's type. The communicator's errors.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let products = xs.to_dtype(self.weight.dtype())?.matmul(&self.weight)?;
        let sum = products.to_dtype(DType::F32)?.apply_op1_no_bwd(&ExactSum)?;
        self.all_reduce.forward_in_place(&sum)?;
        sum.to_dtype(DType::F32)
    }
}

fn units(count: usize, unit: usize) -> Result<usize> {
    match unit {
        0 => candle_core::bail!("a unit has at least one channel"),
        unit if !count.is_multiple_of(unit) => {
            candle_core::bail!("{count} channels are no multiple of units of {unit}")
        }
        unit => Ok(count / unit),
    }
}

/// Sums f32 along the first dimension, exactly, in f64.
struct ExactSum;

impl CustomOp1 for ExactSum {
    fn name(&self) -> &'static str {
        "exact_sum"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let range = super::ops::contiguous(layout, "exact_sum")?;
        let (first, rest) = match layout.dims().split_first() {
            Some((first, rest)) => (*first, rest),
            None => candle_core::bail!("exact_sum: a scalar has no dimension to add along"),
        };
        let data = &storage.as_slice::<f32>()?[range];
        let mut sum = vec![0f64; rest.iter().product()];
        for unit in data.chunks_exact((data.len() / first.max(1)).max(1)) {
            for (sum, product) in sum.iter_mut().zip(unit) {
                *sum += (f64::from(*product) + ROUNDER) - ROUNDER;
            }
        }
        Ok((CpuStorage::F64(sum), rest.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_rounded_to_the_grid() {
        let grid = 1.0 / f64::from(1 << 30);
        for exact in [0.0, 1.0, -1.5, 3.0 * grid, -7.0 * grid, 1000.0 + grid, -2097151.0] {
            assert_eq!((exact + ROUNDER) - ROUNDER, exact);
        }
        assert_eq!((0.4 * grid + ROUNDER) - ROUNDER, 0.0);
        assert_eq!((-0.6 * grid + ROUNDER) - ROUNDER, -grid);
    }

    #[test]
    fn a_sum_has_one_result_in_any_order() {
        let data: Vec<f32> = (0..600)
            .map(|index| ((index * 7919 % 1000) as f32 - 500.0) * 1.1f32.powi(index % 60 - 30))
            .collect();
        let sum = |data: &[f32]| {
            let tensor = Tensor::from_slice(data, (data.len(), 1), &Device::Cpu).unwrap();
            tensor.apply_op1_no_bwd(&ExactSum).unwrap().to_vec1::<f64>().unwrap()[0]
        };
        let forward = sum(&data);
        let reversed: Vec<f32> = data.iter().rev().copied().collect();
        assert_eq!(forward, sum(&reversed));
        for cut in [1, 100, 599] {
            assert_eq!(forward, sum(&data[..cut]) + sum(&data[cut..]));
        }
        let reference: f64 = data.iter().map(|&value| f64::from(value)).sum();
        assert!((forward - reference).abs() < 600.0 / f64::from(1 << 30), "{forward} {reference}");
    }
}
