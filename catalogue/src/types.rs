//! Element types. The code of a type is its position in the table, so new types are added at the end.

/// Class of a type. It decides how the type is reduced, and which operations it supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Floating-point type.
    Float,
    /// Signed integer in two's complement.
    Signed,
    /// Unsigned integer.
    Unsigned,
}

/// Element type.
#[derive(Debug)]
pub struct Type {
    /// Name in this library, for example `f16`. The constant of the code is `FA_F16`. Host kernels have the name, too.
    pub name: &'static str,
    /// Variant of `DType` and of the C enum.
    pub variant: &'static str,
    /// Documentation for Rust.
    pub doc: &'static str,
    /// Documentation for C.
    pub c_doc: &'static str,
    /// Rust type of an element; `None` for 8-bit floats, which optional crates define.
    pub rust: Option<&'static str>,
    /// Size of an element in bytes.
    pub bytes: usize,
    /// Class.
    pub class: Class,
    /// C++ type of an element (`csrc/reduce/element.cuh`).
    pub element: &'static str,
    /// Name of the type's row in [`KERNEL_TYPES`].
    pub kernels: &'static str,
    /// Name in nccl-tests.
    pub nccl_tests: &'static str,
    /// Name in NumPy or `ml_dtypes`.
    pub numpy: &'static str,
    /// Name in torch.
    pub torch: &'static str,
    /// Type code of DLPack (`DLDataTypeCode`). DLPack's number of bits follows from `bytes`.
    pub dlpack: u8,
    /// Name in MPI without `MPI_`, if MPI has the type.
    pub mpi: Option<&'static str>,
    /// Value of `ncclDataType_t`, if NCCL has the type.
    pub nccl: Option<u8>,
}

/// All element types.
#[rustfmt::skip]
pub const TYPES: [Type; 12] = [
    Type { name: "f16", rust: Some("half::f16"), variant: "F16", bytes: 2, class: Class::Float, element: "F16",
           kernels: "f16", nccl_tests: "half", numpy: "float16", torch: "float16",
           dlpack: 2, mpi: None, nccl: Some(6),
           doc: "IEEE binary16; accumulated in f32.", c_doc: "IEEE binary16; sums accumulate in f32." },
    Type { name: "bf16", rust: Some("half::bf16"), variant: "Bf16", bytes: 2, class: Class::Float, element: "Bf16",
           kernels: "bf16", nccl_tests: "bfloat16", numpy: "bfloat16", torch: "bfloat16",
           dlpack: 4, mpi: None, nccl: Some(9),
           doc: "bfloat16; accumulated in f32.", c_doc: "bfloat16; sums accumulate in f32." },
    Type { name: "f32", rust: Some("f32"), variant: "F32", bytes: 4, class: Class::Float, element: "float",
           kernels: "f32", nccl_tests: "float", numpy: "float32", torch: "float32",
           dlpack: 2, mpi: Some("FLOAT"), nccl: Some(7), doc: "IEEE binary32.", c_doc: "float." },
    Type { name: "f64", rust: Some("f64"), variant: "F64", bytes: 8, class: Class::Float, element: "double",
           kernels: "f64", nccl_tests: "double", numpy: "float64", torch: "float64",
           dlpack: 2, mpi: Some("DOUBLE"), nccl: Some(8), doc: "IEEE binary64.", c_doc: "double." },
    Type { name: "i8", rust: Some("i8"), variant: "I8", bytes: 1, class: Class::Signed, element: "i8",
           kernels: "integers", nccl_tests: "int8", numpy: "int8", torch: "int8",
           dlpack: 0, mpi: Some("INT8_T"), nccl: Some(0), doc: "Signed 8-bit integer.", c_doc: "int8_t." },
    Type { name: "u8", rust: Some("u8"), variant: "U8", bytes: 1, class: Class::Unsigned, element: "u8",
           kernels: "integers", nccl_tests: "uint8", numpy: "uint8", torch: "uint8",
           dlpack: 1, mpi: Some("UINT8_T"), nccl: Some(1), doc: "Unsigned 8-bit integer.", c_doc: "uint8_t." },
    Type { name: "i32", rust: Some("i32"), variant: "I32", bytes: 4, class: Class::Signed, element: "i32",
           kernels: "integers", nccl_tests: "int32", numpy: "int32", torch: "int32",
           dlpack: 0, mpi: Some("INT32_T"), nccl: Some(2), doc: "Signed 32-bit integer.", c_doc: "int32_t." },
    Type { name: "u32", rust: Some("u32"), variant: "U32", bytes: 4, class: Class::Unsigned, element: "u32",
           kernels: "integers", nccl_tests: "uint32", numpy: "uint32", torch: "uint32",
           dlpack: 1, mpi: Some("UINT32_T"), nccl: Some(3), doc: "Unsigned 32-bit integer.", c_doc: "uint32_t." },
    Type { name: "i64", rust: Some("i64"), variant: "I64", bytes: 8, class: Class::Signed, element: "i64",
           kernels: "integers", nccl_tests: "int64", numpy: "int64", torch: "int64",
           dlpack: 0, mpi: Some("INT64_T"), nccl: Some(4), doc: "Signed 64-bit integer.", c_doc: "int64_t." },
    Type { name: "u64", rust: Some("u64"), variant: "U64", bytes: 8, class: Class::Unsigned, element: "u64",
           kernels: "integers", nccl_tests: "uint64", numpy: "uint64", torch: "uint64",
           dlpack: 1, mpi: Some("UINT64_T"), nccl: Some(5), doc: "Unsigned 64-bit integer.", c_doc: "uint64_t." },
    Type { name: "f8e4m3", rust: None, variant: "F8E4M3", bytes: 1, class: Class::Float, element: "F8E4M3",
           kernels: "f8", nccl_tests: "fp8_e4m3", numpy: "float8_e4m3fn", torch: "float8_e4m3fn",
           dlpack: 10, mpi: None, nccl: Some(10),
           doc: "8-bit float with 4 bits of exponent and 3 bits of mantissa, without infinities (OCP OFP8 e4m3; \
                 `float8_e4m3fn`); accumulated in f32. A value that rounds beyond 448 becomes NaN.",
           c_doc: "8-bit float e4m3 of OCP's OFP8, without infinities; sums accumulate in f32." },
    Type { name: "f8e5m2", rust: None, variant: "F8E5M2", bytes: 1, class: Class::Float, element: "F8E5M2",
           kernels: "f8", nccl_tests: "fp8_e5m2", numpy: "float8_e5m2", torch: "float8_e5m2",
           dlpack: 12, mpi: None, nccl: Some(11),
           doc: "8-bit float with 5 bits of exponent and 2 bits of mantissa (OCP OFP8 e5m2; `float8_e5m2`); \
                 accumulated in f32. A value that rounds beyond 57344 becomes infinite.",
           c_doc: "8-bit float e5m2 of OCP's OFP8; sums accumulate in f32." },
];

/// Type that GPU kernels are compiled for (`csrc/cuda/any_world.cu`). All integers share one kernel type, and both
/// 8-bit floats share one: these kernels get the element type at run time.
#[derive(Debug)]
pub struct KernelType {
    /// Name, as in [`Type::kernels`].
    pub name: &'static str,
    /// C++ type of the elements.
    pub element: &'static str,
    /// Whether it is in the hot set: specialised kernels for sums by direct algorithms between few ranks.
    pub hot: bool,
}

/// All kernel types.
#[rustfmt::skip]
pub const KERNEL_TYPES: [KernelType; 6] = [
    KernelType { name: "f16",      element: "F16",        hot: true },
    KernelType { name: "bf16",     element: "Bf16",       hot: true },
    KernelType { name: "f32",      element: "float",      hot: true },
    KernelType { name: "f64",      element: "double",     hot: false },
    KernelType { name: "integers", element: "AnyInteger", hot: false },
    KernelType { name: "f8",       element: "AnyF8",      hot: false },
];

/// World sizes that the hot set has kernels for. Not 7: its kernels would be 270 KB of PTX, and servers do not run
/// models on 7 GPUs, because few numbers of heads are multiples of 7.
pub const HOT_WORLDS: [u32; 6] = [2, 3, 4, 5, 6, 8];
