//! Parts of tensors in files.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use fast_allreduce_candle::{share, Gguf, Safetensors, Shards};

use crate::world::{numbers, values};

/// A file that is removed on drop.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("fast-allreduce-candle-{}-{name}", std::process::id())))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn write_gguf(path: &Path, tensors: &[(&str, QTensor)]) {
    let architecture = Value::String("llama".into());
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    gguf_file::write(&mut File::create(path).unwrap(), &[("general.architecture", &architecture)], &tensors)
        .unwrap();
}

#[test]
fn parts_of_gguf_are_those_of_the_whole() {
    let file = Temporary::new("parts.gguf");
    let types = [GgmlDType::F32, GgmlDType::F16, GgmlDType::Q4_1, GgmlDType::Q8_0, GgmlDType::Q4K];
    let names: Vec<String> = types.iter().map(|dtype| format!("{dtype:?}")).collect();
    let tensors: Vec<_> = types
        .iter()
        .zip(&names)
        .map(|(&dtype, name)| (name.as_str(), QTensor::quantize(&numbers(1, &[9, 512]), dtype).unwrap()))
        .collect();
    write_gguf(&file.0, &tensors);
    let gguf = Gguf::open(&file.0).unwrap();
    for (name, tensor) in &tensors {
        let whole = tensor.dequantize(&Device::Cpu).unwrap();
        assert_eq!(gguf.dims(name).unwrap(), [9, 512]);
        assert_eq!(values(&gguf.whole(name, &Device::Cpu).unwrap()), values(&whole));
        for ranks in [2, 4, 9] {
            for (rank, dim) in (0..ranks).flat_map(|rank| [(rank, 0), (rank, 1)]) {
                let own = share([9, 512][dim], rank, ranks);
                let part = gguf.shard(name, dim, own.clone(), &Device::Cpu).unwrap();
                let expected = whole.narrow(dim, own.start, own.len()).unwrap();
                assert_eq!(
                    (part.dims(), values(&part)),
                    (expected.dims(), values(&expected)),
                    "{name} {dim} {own:?}"
                );
                // As stored, if blocks are whole.
                let block = tensor.dtype().block_size();
                let is_whole = dim == 0 || own.start.is_multiple_of(block) && own.end.is_multiple_of(block);
                match gguf.quantized(name, dim, own, &Device::Cpu) {
                    Ok(part) => {
                        assert!(is_whole && part.dtype() == tensor.dtype());
                        assert_eq!(values(&part.dequantize(&Device::Cpu).unwrap()), values(&expected));
                    }
                    Err(error) => assert!(!is_whole && error.to_string().contains("blocks"), "{error}"),
                }
            }
        }
    }
    assert!(gguf.contains("Q8_0") && !gguf.contains("q8_0"));
    assert!(gguf.whole("q8_0", &Device::Cpu).unwrap_err().to_string().contains("no tensor q8_0"));
    assert!(gguf.shard("F32", 0, 5..10, &Device::Cpu).is_err());
    assert!(gguf.shard("F32", 2, 0..1, &Device::Cpu).is_err());
    assert_eq!(gguf.shard("Q8_0", 1, 7..7, &Device::Cpu).unwrap().dims(), [9, 0]);
}

/// Opening a truncated file fails, wherever it ends.
#[test]
fn truncated_gguf_is_refused() {
    let file = Temporary::new("truncated.gguf");
    write_gguf(&file.0, &[("w", QTensor::quantize(&numbers(2, &[4, 64]), GgmlDType::F32).unwrap())]);
    let bytes = std::fs::read(&file.0).unwrap();
    assert!(Gguf::open(&file.0).is_ok());
    // Padding at the end is allowed.
    for length in (0..bytes.len() - 32).step_by(13) {
        std::fs::write(&file.0, &bytes[..length]).unwrap();
        let error =
            Gguf::open(&file.0).err().unwrap_or_else(|| panic!("{length} bytes are accepted")).to_string();
        assert!(error.contains("truncated.gguf"), "{error}");
    }
    std::fs::write(&file.0, b"not a model").unwrap();
    assert!(Gguf::open(&file.0).is_err());
    assert!(Gguf::open(file.0.with_extension("missing")).is_err());
}

#[test]
fn parts_of_safetensors_are_those_of_the_whole() {
    let file = Temporary::new("parts.safetensors");
    let all = HashMap::from([
        ("bf16".to_owned(), numbers(3, &[6, 10]).to_dtype(DType::BF16).unwrap()),
        ("f32".to_owned(), numbers(4, &[6, 10])),
        ("i64".to_owned(), Tensor::arange(0i64, 60, &Device::Cpu).unwrap().reshape((6, 10)).unwrap()),
    ]);
    candle_core::safetensors::save(&all, &file.0).unwrap();
    // SAFETY: no other process or thread uses the file.
    let safetensors = unsafe { Safetensors::open(&[&file.0]) }.unwrap();
    for (name, whole) in &all {
        assert_eq!(values(&safetensors.whole(name, &Device::Cpu).unwrap()), values(whole));
        for (rank, dim) in (0..4).flat_map(|rank| [(rank, 0), (rank, 1)]) {
            let own = share([6, 10][dim], rank, 4);
            let part = safetensors.shard(name, dim, own.clone(), &Device::Cpu).unwrap();
            let expected = whole.narrow(dim, own.start, own.len()).unwrap();
            assert_eq!((part.dims(), part.dtype()), (expected.dims(), whole.dtype()));
            assert_eq!(values(&part), values(&expected), "{name} {dim} {own:?}");
        }
    }
    assert!(!safetensors.contains("f64") && safetensors.dims("f64").is_err());
    std::fs::write(&file.0, b"short").unwrap();
    // SAFETY: as above.
    assert!(unsafe { Safetensors::open(&[&file.0]) }.is_err());
}
