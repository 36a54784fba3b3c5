//! Reduction operations. The code of an operation is its position in the table, so new operations are added at the end.

/// Classes of types that an operation is defined for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// All types.
    All,
    /// Integers.
    Integers,
    /// Floating-point types.
    Floats,
}

/// Reduction operation.
#[derive(Debug)]
pub struct Op {
    /// Name in this library and in nccl-tests, for example `sum`. The constant of the code is `FA_SUM`.
    pub name: &'static str,
    /// Variant of `ReduceOp`.
    pub variant: &'static str,
    /// Rust type of a parameter that the variant holds. It may differ among ranks.
    pub parameter: Option<&'static str>,
    /// Operation that combines two values, if it is another one (`csrc/reduce/ops.cuh`).
    pub combines_as: Option<&'static str>,
    /// Documentation for Rust.
    pub doc: &'static str,
    /// Documentation for C. The C enum has no operations with a parameter.
    pub c_doc: &'static str,
    /// Types that it is defined for.
    pub takes: Takes,
    /// Name in MPI without `MPI_`, if MPI has the operation.
    pub mpi: Option<&'static str>,
    /// Value of `ncclRedOp_t`, if NCCL has the operation as a constant.
    pub nccl: Option<u8>,
    /// Attribute of `torch.distributed.ReduceOp`, if torch has the operation.
    pub torch: Option<&'static str>,
}

/// All operations.
#[rustfmt::skip]
pub const OPS: [Op; 9] = [
    Op { name: "sum", variant: "Sum", combines_as: None, parameter: None, takes: Takes::All,
         mpi: Some("SUM"), nccl: Some(0), torch: Some("SUM"),
         doc: "Sum.", c_doc: "Sum. Integers wrap." },
    Op { name: "prod", variant: "Prod", combines_as: None, parameter: None, takes: Takes::All,
         mpi: Some("PROD"), nccl: Some(1), torch: Some("PRODUCT"),
         doc: "Product.", c_doc: "Product. Integers wrap." },
    Op { name: "min", variant: "Min", combines_as: None, parameter: None, takes: Takes::All,
         mpi: Some("MIN"), nccl: Some(3), torch: Some("MIN"),
         doc: "Minimum.", c_doc: "IEEE 754-2019 minimum." },
    Op { name: "max", variant: "Max", combines_as: None, parameter: None, takes: Takes::All,
         mpi: Some("MAX"), nccl: Some(2), torch: Some("MAX"),
         doc: "Maximum.", c_doc: "IEEE 754-2019 maximum." },
    Op { name: "avg", variant: "Avg", combines_as: Some("sum"), parameter: None, takes: Takes::All,
         mpi: None, nccl: Some(4), torch: Some("AVG"),
         doc: "Average.", c_doc: "Sum divided by the number of ranks; integers are rounded toward zero." },
    Op { name: "band", variant: "BitAnd", combines_as: None, parameter: None, takes: Takes::Integers,
         mpi: Some("BAND"), nccl: None, torch: Some("BAND"),
         doc: "Bitwise and.", c_doc: "Bitwise and; integers only." },
    Op { name: "bor", variant: "BitOr", combines_as: None, parameter: None, takes: Takes::Integers,
         mpi: Some("BOR"), nccl: None, torch: Some("BOR"),
         doc: "Bitwise or.", c_doc: "Bitwise or; integers only." },
    Op { name: "bxor", variant: "BitXor", combines_as: None, parameter: None, takes: Takes::Integers,
         mpi: Some("BXOR"), nccl: None, torch: Some("BXOR"),
         doc: "Bitwise exclusive or.", c_doc: "Bitwise exclusive or; integers only." },
    Op { name: "premul_sum", variant: "PreMulSum", combines_as: Some("sum"), parameter: Some("Scale"),
         takes: Takes::Floats, mpi: None, nccl: None, torch: Some("PREMUL_SUM"),
         doc: "Sum of each rank's elements times the rank's scale. Scales may differ among ranks.",
         c_doc: "Sum of each rank's elements times the rank's scale." },
];
