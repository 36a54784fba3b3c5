//! Declares the typed collectives of every device: names, arguments, documentation. A device carries them out.

/// The example of a collective. On the host it runs on two ranks, with `rank` as a number of 32 bits. On a GPU it is
/// only compiled: `input`, `output` and `data` are slices of `f32` there.
macro_rules! example {
    (host, $setup:literal, $method:literal, $arguments:literal, $result:literal) => {
        concat!(
            "```\n",
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/example_ranks.txt")),
            "# ranks(2, |communicator| {\n# let rank = communicator.rank() as u32;\n",
            $setup,
            "\ncommunicator.",
            $method,
            "(",
            $arguments,
            ")?;\n",
            $result,
            "\n# Ok(()) });\n```"
        )
    };
    (cuda, $setup:literal, $method:literal, $arguments:literal, $result:literal) => {
        concat!(
            "```no_run\n",
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/example_cuda.txt")),
            "# fn example(communicator: &Communicator<Cuda>, stream: &Arc<CudaStream>, input: CudaSlice<f32>,\n",
            "#     mut output: CudaSlice<f32>, mut data: CudaSlice<f32>) -> Result<()> {\n",
            "communicator.",
            $method,
            "(stream, ",
            $arguments,
            ")?;\n# Ok(()) }\n```"
        )
    };
}
pub(super) use example;

/// Declares the typed collectives of a device, except the allreduce. `$on` selects the examples: `host` or `cuda`.
/// `$stream` is the argument that orders calls, if the device has one. `$input` and `$output` are the types of
/// buffers of elements `T`. The device has `between` and `in_place`, which carry out a
/// [`Collective`](crate::Collective) on buffers.
macro_rules! typed_collectives {
    ($on:ident, $device:ty, $input:ty, $output:ty $(, $stream:ident: $stream_type:ty)?) => {
        impl Communicator<$device> {
            /// Sums the ranks' `input`s into every rank's `output`, with about one byte per element on the links.
            ///
            /// This is for slow links, such as PCIe, and callers who accept a lower accuracy.
            ///
            /// Each input is quantised once, and the sum once, in groups of 32 elements of the message. No element of
            /// the result differs from the exact sum by more than `tolerance` times the sum over the ranks of the
            /// largest magnitude in its group. A tolerance below what the transport guarantees
            /// ([`Transport::error_bound`]) is refused. The result has the same bits on all ranks and devices,
            /// independent of algorithm, plan and region. A group with a NaN or an infinity on any rank, or with a sum
            /// beyond f32, becomes NaN. `docs/quantized.md` has the format. In a world of one rank nothing is
            /// quantised.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = ([1.0_f32; 64], [0.0; 64]);",
                "all_reduce_quantized",
                "&input, &mut output, Transport::Int8, 0.01",
                "assert!(output.iter().all(|sum| (sum - 2.0).abs() <= 0.01 * (1.0 + 1.0)));"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`]; [`Error::InvalidSetting`] for a type other than f16, bf16 and f32, and for a
            /// tolerance below the transport's bound; [`Error::Disagreement`] also where transports or tolerances
            /// differ; [errors of every call](Communicator#errors-of-every-call).
            pub fn all_reduce_quantized<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                transport: Transport,
                tolerance: f32,
            ) -> Result<()> {
                let collective = Collective::AllReduceQuantized(QuantizedTransport { transport, tolerance });
                self.between($($stream,)? collective, input.len(), input, output)
            }

            /// Sums the ranks' `data` in place, with about one byte per element on the links.
            ///
            /// Results, accuracy and errors are those of [`Communicator::all_reduce_quantized`].
            ///
            #[doc = example!(
                $on,
                "let mut data = [1.0_f32; 64];",
                "all_reduce_quantized_in_place",
                "&mut data, Transport::F8E4M3, 0.2",
                "assert!(data.iter().all(|sum| (sum - 2.0).abs() <= 0.2 * (1.0 + 1.0)));"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::InvalidSetting`] for a type other than f16, bf16 and f32, and for a tolerance below the
            /// transport's bound; [`Error::Disagreement`] also where transports or tolerances differ; [errors of every
            /// call](Communicator#errors-of-every-call).
            pub fn all_reduce_quantized_in_place<T: Element>(
                &self,
                $($stream: $stream_type,)?
                data: &mut $output,
                transport: Transport,
                tolerance: f32,
            ) -> Result<()> {
                let collective = Collective::AllReduceQuantized(QuantizedTransport { transport, tolerance });
                self.in_place($($stream,)? collective, data)
            }

            /// Gathers the ranks' `input`s, in rank order, in every rank's `output`.
            ///
            /// All inputs have the same length, and `output` has that length times the number of ranks.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = ([rank, 5], [0; 4]);",
                "all_gather",
                "&input, &mut output",
                "assert_eq!(output, [0, 5, 1, 5]);"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`]; [errors of every call](Communicator#errors-of-every-call).
            pub fn all_gather<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
            ) -> Result<()> {
                self.between($($stream,)? Collective::AllGather, input.len(), input, output)
            }

            /// Gathers `counts[r]` elements from each rank r, in rank order, in every rank's `output`.
            ///
            /// `counts` is the same on all ranks. `input` has `counts[rank]` elements, and `output` has the sum of all
            /// counts.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = (vec![rank; 1 + rank as usize], [9; 3]);",
                "all_gather_v",
                "&input, &mut output, &[1, 2]",
                "assert_eq!(output, [0, 1, 1]);"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`]; [`Error::InvalidSetting`] unless there is a count for each rank;
            /// [`Error::Disagreement`] also where counts differ; [errors of every
            /// call](Communicator#errors-of-every-call).
            pub fn all_gather_v<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                counts: &[usize],
            ) -> Result<()> {
                self.between($($stream,)? Collective::AllGatherV(counts), 0, input, output)
            }

            /// Reduces the ranks' `input`s element by element, and stores share r of the result in rank r's `output`.
            ///
            /// All outputs have the same length, and `input` has that length times the number of ranks. The bits are
            /// those of an allreduce by a direct algorithm.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = ([1.0, 2.0, 3.0, 4.0], [0.0; 2]);",
                "reduce_scatter",
                "&input, &mut output, ReduceOp::Sum",
                "assert_eq!(output, [[2.0, 4.0], [6.0, 8.0]][rank as usize]);"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`]; [`Error::InvalidSetting`] for an operation that the type does not have;
            /// [errors of every call](Communicator#errors-of-every-call).
            pub fn reduce_scatter<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                op: ReduceOp,
            ) -> Result<()> {
                self.between($($stream,)? Collective::ReduceScatter(op), output.len(), input, output)
            }

            /// Reduces the ranks' `input`s element by element, and stores `counts[r]` elements of the result in rank
            /// r's `output`.
            ///
            /// `counts` is the same on all ranks. `input` has the sum of all counts, and `output` has `counts[rank]`
            /// elements, which follow those of the lower ranks in the result.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = ([1.0, 2.0, 3.0], vec![0.0; 1 + rank as usize]);",
                "reduce_scatter_v",
                "&input, &mut output, &[1, 2], ReduceOp::Max",
                "assert_eq!(output, [&[1.0][..], &[2.0, 3.0]][rank as usize]);"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`]; [`Error::InvalidSetting`] unless there is a count for each rank, and for an
            /// operation that the type does not have; [`Error::Disagreement`] also where counts differ; [errors of
            /// every call](Communicator#errors-of-every-call).
            pub fn reduce_scatter_v<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                counts: &[usize],
                op: ReduceOp,
            ) -> Result<()> {
                self.between($($stream,)? Collective::ReduceScatterV(op, counts), 0, input, output)
            }

            /// Copies the root's `data` to every rank's `data`, of the same length.
            ///
            #[doc = example!(
                $on,
                "let mut data = [rank, 10 * rank];",
                "broadcast",
                "&mut data, 1",
                "assert_eq!(data, [1, 10]);"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::RankOutOfRange`] for the root; [errors of every call](Communicator#errors-of-every-call).
            pub fn broadcast<T: Element>(
                &self,
                $($stream: $stream_type,)?
                data: &mut $output,
                root: usize,
            ) -> Result<()> {
                self.in_place($($stream,)? Collective::Broadcast { root }, data)
            }

            /// Reduces the ranks' `input`s element by element into the root's `output`, of the same length.
            ///
            /// The other ranks' `output` is not used, and may have any length. The bits are those of an allreduce by a
            /// direct algorithm.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = ([rank as f32, 2.0], [0.0; 2]);",
                "reduce",
                "&input, &mut output, ReduceOp::Sum, 0",
                "assert_eq!(output, if rank == 0 { [1.0, 4.0] } else { [0.0; 2] });"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`]; [`Error::RankOutOfRange`] for the root; [`Error::InvalidSetting`] for an
            /// operation that the type does not have; [errors of every call](Communicator#errors-of-every-call).
            pub fn reduce<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                op: ReduceOp,
                root: usize,
            ) -> Result<()> {
                self.between($($stream,)? Collective::Reduce { op, root }, input.len(), input, output)
            }

            /// Gathers the ranks' `input`s, in rank order, in the root's `output`.
            ///
            /// All inputs have the same length, and the root's `output` has that length times the number of ranks.
            /// The other ranks' `output` is not used, and may have any length.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = ([rank, 5], [0; 4]);",
                "gather",
                "&input, &mut output, 0",
                "assert_eq!(output, if rank == 0 { [0, 5, 1, 5] } else { [0; 4] });"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`]; [`Error::RankOutOfRange`] for the root;
            /// [errors of every call](Communicator#errors-of-every-call).
            pub fn gather<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                root: usize,
            ) -> Result<()> {
                self.between($($stream,)? Collective::Gather { root }, input.len(), input, output)
            }

            /// Copies share r of the root's `input` to rank r's `output`.
            ///
            /// All outputs have the same length, and the root's `input` has that length times the number of ranks.
            /// The other ranks' `input` is not used, and may have any length.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = ([1, 2, 3, 4], [0; 2]);",
                "scatter",
                "&input, &mut output, 0",
                "assert_eq!(output, [[1, 2], [3, 4]][rank as usize]);"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`]; [`Error::RankOutOfRange`] for the root;
            /// [errors of every call](Communicator#errors-of-every-call).
            pub fn scatter<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
                root: usize,
            ) -> Result<()> {
                self.between($($stream,)? Collective::Scatter { root }, output.len(), input, output)
            }

            /// Sends share r of every rank's `input` to rank r, and stores what arrives in `output`, in rank order.
            ///
            /// Shares are equal: `input` and `output` have the same length, a multiple of the number of ranks.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = ([10 * rank, 10 * rank + 1], [0; 2]);",
                "all_to_all",
                "&input, &mut output",
                "assert_eq!(output, [[0, 10], [1, 11]][rank as usize]);"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`], also where the length is not a multiple of the number of ranks;
            /// [errors of every call](Communicator#errors-of-every-call).
            pub fn all_to_all<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                output: &mut $output,
            ) -> Result<()> {
                self.between($($stream,)? Collective::AllToAll, input.len() / self.world_size(), input, output)
            }

            /// Sends `send_counts[r]` elements to each rank r, and receives `receive_counts[r]` from it.
            ///
            /// Shares are stored in rank order, so `input` has the sum of `send_counts`, and `output` that of
            /// `receive_counts`. A rank's `receive_counts[r]` is rank r's `send_counts` for it.
            ///
            #[doc = example!(
                $on,
                "let (input, mut output) = (vec![rank; 3], vec![9; 2 + 2 * rank as usize]);",
                "all_to_all_v",
                "&input, &[1, 2], &mut output, &[1 + communicator.rank(); 2]",
                "assert_eq!(output, [&[0, 1][..], &[0, 0, 1, 1]][rank as usize]);"
            )]
            ///
            /// # Errors
            ///
            /// [`Error::LengthMismatch`]; [`Error::InvalidSetting`] unless there are two counts for each rank;
            /// [`Error::Disagreement`] also where a rank sends more or fewer elements than its peer receives;
            /// [errors of every call](Communicator#errors-of-every-call).
            pub fn all_to_all_v<T: Element>(
                &self,
                $($stream: $stream_type,)?
                input: &$input,
                send_counts: &[usize],
                output: &mut $output,
                receive_counts: &[usize],
            ) -> Result<()> {
                let collective = Collective::AllToAllV { send: send_counts, receive: receive_counts };
                self.between($($stream,)? collective, 0, input, output)
            }
        }
    };
}
pub(super) use typed_collectives;
