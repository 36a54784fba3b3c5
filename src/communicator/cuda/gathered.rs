//! All-gathers of quantised rows on the CUDA device, in stream order.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::call::{Call, RawGatheredRows};
use crate::catalogue::Scaling;
use crate::communicator::gathered::{gather_of, GatheredRows};
use crate::communicator::Communicator;
use crate::device::cuda::Cuda;
use crate::element::Element;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

impl<'a, N: Element, S: Element> GatheredRows<'a, Cuda, N, S> {
    /// Describes rows of `hidden` elements in a format: `own` has the numbers and the scales of this rank's rows, and
    /// `all` receives those of all ranks. Lengths of scales are those of [`Scaling::scales`].
    pub fn on_cuda(
        scaling: Scaling,
        hidden: usize,
        own: (&'a dyn DevicePtr<N>, &'a dyn DevicePtr<S>),
        all: (&'a mut dyn DevicePtrMut<N>, &'a mut dyn DevicePtrMut<S>),
    ) -> Self {
        Self { scaling, hidden, own, all }
    }
}

impl Communicator<Cuda> {
    /// Gathers the ranks' quantised rows, in rank order: numbers, and scales in the layout of one message.
    ///
    /// Lengths and results are those of the host's method.
    ///
    /// ```no_run
    #[doc = include_str!("../../example_cuda.txt")]
    /// # fn layer(
    /// #     communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, numbers: &CudaSlice<u8>,
    /// #     scales: &CudaSlice<u8>, all: &mut CudaSlice<u8>, all_scales: &mut CudaSlice<u8>,
    /// # ) -> Result<()> {
    /// let rows = GatheredRows::on_cuda(Scaling::Nvfp4Tiled, 4096, (numbers, scales), (all, all_scales));
    /// communicator.all_gather_rows(stream, rows)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce`]; [`Error::InvalidSetting`] also for rows and slices that the host's method
    /// refuses.
    pub fn all_gather_rows<N: Element, S: Element>(
        &self,
        stream: &Arc<CudaStream>,
        rows: GatheredRows<'_, Cuda, N, S>,
    ) -> Result<()> {
        self.gather_rows(stream, None, rows)
    }

    /// Gathers as [`Communicator::all_gather_rows`] does, with `counts[r]` elements of `numbers` on rank r.
    ///
    /// `counts` is the same on all ranks. Each is a number of whole rows, and may be 0.
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_gather_rows`]; [`Error::InvalidSetting`] also unless there is a count for each
    /// rank.
    pub fn all_gather_rows_v<N: Element, S: Element>(
        &self,
        stream: &Arc<CudaStream>,
        rows: GatheredRows<'_, Cuda, N, S>,
        counts: &[usize],
    ) -> Result<()> {
        self.gather_rows(stream, Some(counts), rows)
    }

    fn gather_rows<N: Element, S: Element>(
        &self,
        stream: &Arc<CudaStream>,
        counts: Option<&[usize]>,
        rows: GatheredRows<'_, Cuda, N, S>,
    ) -> Result<()> {
        let (count, raw) = (rows.own.0.len(), rows.raw(0, 0));
        let call = Call { collective: gather_of(&raw, counts), input: 0, output: 0, count, dtype: N::DTYPE };
        rows.check(&call, self.rank(), self.world_size())?;
        self.check_row(&call)?;
        let GatheredRows { own, all, .. } = rows;
        self.with_slices(stream, Some(own.0), Some(all.0), |numbers| {
            self.with_slices(stream, Some(own.1), Some(all.1), |scales| {
                let raw = RawGatheredRows { scales: scales.input, all_scales: scales.output, ..raw };
                let (input, output) = (numbers.input, numbers.output);
                let call = Call { collective: gather_of(&raw, counts), input, output, ..call };
                // SAFETY: as in `between` of `typed.rs`. `check` has compared the lengths of all slices, and those that
                // are written are borrowed exclusively. The stream is kept alive.
                unsafe { self.run(call, stream.cu_stream(), Some(stream), numbers.captured) }
            })
        })
    }
}
