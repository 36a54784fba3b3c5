//! Reads parts of tensors of a GGUF file.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use candle_core::quantized::{QStorage, QTensor};
use candle_core::{Device, Result, Tensor};

use crate::shards::{Shards, Spans};

/// A GGUF file, of which each rank reads its part.
pub struct Gguf {
    content: Content,
    file: File,
}

/// The whole blocks that contain a part of a tensor, as stored.
struct Blocks {
    spans: Spans,
    /// First element of each span's blocks.
    first: usize,
    /// Number of elements of each span's blocks.
    elements: usize,
}

impl Gguf {
    /// Opens a file, and reads its header.
    ///
    /// # Errors
    ///
    /// An error if it cannot be opened, is no GGUF file, or is shorter than its tensors.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::of(File::open(path).map_err(candle_core::Error::from).map_err(|error| error.with_path(path))?)
            .map_err(|error| error.with_path(path))
    }

    fn of(file: File) -> Result<Self> {
        let content = Content::read(&mut BufReader::new(&file))?;
        let there = file.metadata()?.len();
        for (name, info) in &content.tensor_infos {
            let end = bytes_of(info, info.shape.elem_count()).and_then(|bytes| {
                content.tensor_data_offset.checked_add(info.offset)?.checked_add(bytes as u64)
            });
            if end.is_none_or(|end| end > there) {
                candle_core::bail!("the file is truncated: it has {there} bytes, and {name} ends after them")
            }
        }
        Ok(Self { content, file })
    }

    /// Returns the model's metadata.
    pub fn metadata(&self) -> &HashMap<String, Value> {
        &self.content.metadata
    }

    /// Returns the file's header, for readers of it such as candle's `TokenizerFromGguf`.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// Returns a part of a tensor as it is stored, for a `QMatMul`.
    ///
    /// # Errors
    ///
    /// Those of [`Shards::shard`], and an error if the part begins or ends within a block: 32 elements of a row for
    /// Q4_0 to Q8_1, 256 for the K-quants. [`Shards::shard`] takes such parts.
    pub fn quantized(&self, name: &str, dim: usize, range: Range<usize>, device: &Device) -> Result<QTensor> {
        let info = self.info(name)?;
        let blocks = Blocks::new(name, info, dim, &range)?;
        if (blocks.first, blocks.elements) != (blocks.spans.start, blocks.spans.span) {
            let block = info.ggml_dtype.block_size();
            candle_core::bail!(
                "{name}: {range:?} of dimension {dim} is no multiple of its stored blocks of {block} elements"
            )
        }
        let dims = blocks.spans.dims.clone();
        self.read(info, &blocks, dims, device)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        match self.content.tensor_infos.get(name) {
            Some(info) => Ok(info),
            None => candle_core::bail!("the file has no tensor {name}"),
        }
    }

    fn read(&self, info: &TensorInfo, blocks: &Blocks, dims: Vec<usize>, device: &Device) -> Result<QTensor> {
        let size = |elements| bytes_of(info, elements).unwrap_or_default();
        let span = size(blocks.elements);
        let mut bytes = vec![0; span * blocks.spans.outer];
        for (row, bytes) in bytes.chunks_exact_mut(span.max(1)).enumerate() {
            let first = size(row * blocks.spans.stride + blocks.first) as u64;
            self.file.read_exact_at(bytes, self.content.tensor_data_offset + info.offset + first)?;
        }
        // Borrowed: candle 0.10 reads owned bytes after it has freed them.
        QTensor::new(QStorage::from_data(Cow::Borrowed(&bytes), device, info.ggml_dtype)?, dims)
    }
}

impl Shards for Gguf {
    fn contains(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    fn dims(&self, name: &str) -> Result<Vec<usize>> {
        Ok(self.info(name)?.shape.dims().to_vec())
    }

    /// Returns the part in f32, whatever its stored type.
    fn shard(&self, name: &str, dim: usize, range: Range<usize>, device: &Device) -> Result<Tensor> {
        let info = self.info(name)?;
        let blocks = Blocks::new(name, info, dim, &range)?;
        let spans = &blocks.spans;
        if spans.outer * spans.span == 0 {
            return Tensor::zeros(spans.dims.clone(), candle_core::DType::F32, device);
        }
        let all = self.read(info, &blocks, vec![spans.outer, blocks.elements], device)?.dequantize(device)?;
        all.narrow(1, spans.start - blocks.first, spans.span)?.contiguous()?.reshape(spans.dims.clone())
    }
}

impl Blocks {
    fn new(name: &str, info: &TensorInfo, dim: usize, range: &Range<usize>) -> Result<Self> {
        let block = info.ggml_dtype.block_size();
        let spans = Spans::new(name, info.shape.dims(), dim, range)?;
        if !spans.stride.is_multiple_of(block) {
            candle_core::bail!(
                "{name}: rows of {} elements are no multiple of its blocks of {block}",
                spans.stride
            )
        }
        let first = spans.start / block * block;
        let elements = (spans.start + spans.span).next_multiple_of(block) - first;
        Ok(Self { spans, first, elements })
    }
}

/// Returns the bytes of `elements` elements, which are whole blocks. `None` on overflow.
fn bytes_of(info: &TensorInfo, elements: usize) -> Option<usize> {
    (elements / info.ggml_dtype.block_size()).checked_mul(info.ggml_dtype.type_size())
}
