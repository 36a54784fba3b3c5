//! RMSNorm of rows whose elements are divided among the ranks, on the CUDA device, in stream order.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::call::{same_length, Call, Collective, RawShardedRows};
use crate::catalogue::DType;
use crate::communicator::sharded::{raw_parts, ShardedColumns};
use crate::communicator::Communicator;
use crate::device::cuda::Cuda;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

/// Nothing that is written, with a type that `with_slices` accepts.
const fn none<'a, T>() -> Option<&'a mut dyn DevicePtrMut<T>> {
    None
}

impl<T: Element> ShardedColumns<'_, Cuda, T> {
    /// Selects `columns` of this rank's rows, of `total` elements on all ranks.
    ///
    /// Ranks may have different numbers of columns. If several ranks have a copy of the same elements, these count
    /// several times in `total`.
    pub fn on_cuda(columns: Range<usize>, total: usize) -> Self {
        Self::new(columns, total)
    }
}

impl Communicator<Cuda> {
    /// Normalises rows whose elements are divided among the ranks, in one launch: RMSNorm over the whole rows.
    ///
    /// `input` and `output` have rows of `width` elements. A call normalises one or two parts of each row, for example
    /// a rank's queries and keys, and leaves other columns of the output as they are. All ranks have the same number of
    /// rows. The bits are those of the host's method.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn layer(
    /// #     communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, input: &CudaSlice<f32>,
    /// #     output: &mut CudaSlice<f32>, weight: &CudaSlice<f32>,
    /// # ) -> Result<()> {
    /// let columns = ShardedColumns::on_cuda(0..768, 6144).weight(weight);
    /// communicator.sharded_rms_norm(stream, input, output, 768, &[columns])?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce`]; [`Error::InvalidSetting`] and [`Error::InvalidPointer`] also for
    /// arguments that the host's method refuses.
    pub fn sharded_rms_norm<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        input: &impl DevicePtr<T>,
        output: &mut impl DevicePtrMut<T>,
        width: usize,
        parts: &[ShardedColumns<'_, Cuda, T>],
    ) -> Result<()> {
        same_length(input.len(), output.len())?;
        let rows = self.check_sharded(parts, output.len(), width)?;
        self.with_slices(stream, Some(input), Some(output), |own| {
            self.sharded(stream, ([own.input, own.output], own.captured), rows, width, parts)
        })
    }

    /// Normalises as [`Communicator::sharded_rms_norm`] does, in place.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn layer(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, mut qkv: CudaSlice<f32>) -> Result<()> {
    /// let (queries, keys) = (ShardedColumns::on_cuda(0..768, 6144), ShardedColumns::on_cuda(768..896, 1024));
    /// communicator.sharded_rms_norm_in_place(stream, &mut qkv, 1024, &[queries, keys])?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::sharded_rms_norm`], except [`Error::LengthMismatch`].
    pub fn sharded_rms_norm_in_place<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        data: &mut impl DevicePtrMut<T>,
        width: usize,
        parts: &[ShardedColumns<'_, Cuda, T>],
    ) -> Result<()> {
        let rows = self.check_sharded(parts, data.len(), width)?;
        self.with_slices(stream, None::<&dyn DevicePtr<T>>, Some(data), |own| {
            self.sharded(stream, ([own.output; 2], own.captured), rows, width, parts)
        })
    }

    /// Refuses arguments that no launch can carry out, before the addresses of slices are taken. Returns the number of
    /// rows.
    fn check_sharded<T: Element>(
        &self,
        parts: &[ShardedColumns<'_, Cuda, T>],
        length: usize,
        width: usize,
    ) -> Result<usize> {
        let rows = ShardedColumns::check_parts(parts, length, width)?;
        // Any aligned addresses that are not null.
        let raw = raw_parts(parts, [16; 2], [0; 2], width);
        let collective = Collective::ShardedRmsNorm(&raw[..parts.len()]);
        let call = Call { collective, input: 0, output: 0, count: rows, dtype: T::DTYPE };
        call.check(self.rank(), self.world_size())?;
        Ok(rows)
    }

    /// Carries out a call whose arguments have been checked, from one address to another.
    fn sharded<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        (memory, captured): ([u64; 2], bool),
        rows: usize,
        width: usize,
        parts: &[ShardedColumns<'_, Cuda, T>],
    ) -> Result<()> {
        let weight = |number: usize| parts.get(number).and_then(|part| part.weight);
        self.with_slices(stream, weight(0), none::<T>(), |first| {
            self.with_slices(stream, weight(1), none::<T>(), |second| {
                let raw = raw_parts(parts, memory, [first.input, second.input], width);
                let collective = Collective::ShardedRmsNorm(&raw[..parts.len()]);
                let call = Call { collective, input: 0, output: 0, count: rows, dtype: T::DTYPE };
                // SAFETY: as in `between` of `typed.rs`. `check_sharded` has compared lengths, and columns that are
                // written are disjoint. The stream is kept alive.
                unsafe { self.run(call, stream.cu_stream(), Some(stream), captured) }
            })
        })
    }

    /// Normalises as [`Communicator::sharded_rms_norm`] does, with memory by address and a raw stream.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # unsafe fn layer(communicator: &Communicator<Cuda>, stream: CUstream, queries: u64) -> Result<()> {
    /// let part = RawShardedRows { columns: 768, total: 6144, ..RawShardedRows::in_place(queries, 1024) };
    /// communicator.sharded_rms_norm_raw(stream, &[part], 32, DType::Bf16)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::collective_raw`] and [`Communicator::sharded_rms_norm`].
    ///
    /// # Safety
    ///
    /// As [`Communicator::collective_raw`], for the memory whose addresses are in `parts`: it is valid for the reads
    /// and writes that [`RawShardedRows`] describes, of `rows` rows.
    pub unsafe fn sharded_rms_norm_raw(
        &self,
        stream: CUstream,
        parts: &[RawShardedRows],
        rows: usize,
        dtype: DType,
    ) -> Result<()> {
        // SAFETY: the caller's obligation.
        unsafe { self.collective_raw(stream, Collective::ShardedRmsNorm(parts), 0, 0, rows, dtype) }
    }
}
