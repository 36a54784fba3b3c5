//! The reductions. The order is that of the codes: a new operation goes at the end.

/// Which classes of types an operation is defined for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// All types.
    All,
    /// Integers.
    Integers,
    /// Floating-point types.
    Floats,
}

/// A reduction.
#[derive(Debug)]
pub struct Op {
    /// Its name in this library and in nccl-tests: `sum`. The code's name is `FA_SUM`.
    pub name: &'static str,
    /// The variant of `ReduceOp`.
    pub variant: &'static str,
    /// What the variant holds: the Rust type of a parameter that each rank has.
    pub parameter: Option<&'static str>,
    /// The operation that combines two values for it, where that is another one (`csrc/reduce/ops.cuh`).
    pub combines_as: Option<&'static str>,
    /// One line of documentation for Rust.
    pub doc: &'static str,
    /// One line of documentation for C. An operation with a parameter is no member of C's enum.
    pub c_doc: &'static str,
    /// The types that it is defined for.
    pub takes: Takes,
    /// MPI's name without `MPI_`, where it has the operation.
    pub mpi: Option<&'static str>,
    /// `ncclRedOp_t`.
    pub nccl: Option<u8>,
    /// The attribute of `torch.distributed.ReduceOp`, where it has one.
    pub torch: Option<&'static str>,
}

/// All operations.
#[rustfmt::skip]
pub const OPS: [Op; 9] = [
    Op { name: "sum", variant: "Sum", combines_as: None, parameter: None, takes: Takes::All, mpi: Some("SUM"), nccl: Some(0), torch: Some("SUM"),
         doc: "Sum.", c_doc: "Sum. Integers wrap." },
    Op { name: "prod", variant: "Prod", combines_as: None, parameter: None, takes: Takes::All, mpi: Some("PROD"), nccl: Some(1), torch: Some("PRODUCT"),
         doc: "Product.", c_doc: "Product. Integers wrap." },
    Op { name: "min", variant: "Min", combines_as: None, parameter: None, takes: Takes::All, mpi: Some("MIN"), nccl: Some(3), torch: Some("MIN"),
         doc: "Minimum.", c_doc: "IEEE 754-2019 minimum." },
    Op { name: "max", variant: "Max", combines_as: None, parameter: None, takes: Takes::All, mpi: Some("MAX"), nccl: Some(2), torch: Some("MAX"),
         doc: "Maximum.", c_doc: "IEEE 754-2019 maximum." },
    Op { name: "avg", variant: "Avg", combines_as: Some("sum"), parameter: None, takes: Takes::All, mpi: None, nccl: Some(4), torch: Some("AVG"),
         doc: "Average.", c_doc: "Sum divided by the number of ranks; of integers toward zero." },
    Op { name: "band", variant: "BitAnd", combines_as: None, parameter: None, takes: Takes::Integers, mpi: Some("BAND"), nccl: None, torch: Some("BAND"),
         doc: "Bitwise and.", c_doc: "Bitwise and, of integers." },
    Op { name: "bor", variant: "BitOr", combines_as: None, parameter: None, takes: Takes::Integers, mpi: Some("BOR"), nccl: None, torch: Some("BOR"),
         doc: "Bitwise or.", c_doc: "Bitwise or, of integers." },
    Op { name: "bxor", variant: "BitXor", combines_as: None, parameter: None, takes: Takes::Integers, mpi: Some("BXOR"), nccl: None, torch: Some("BXOR"),
         doc: "Bitwise exclusive or.", c_doc: "Bitwise exclusive or, of integers." },
    Op { name: "premul_sum", variant: "PreMulSum", combines_as: Some("sum"), parameter: Some("Scale"), takes: Takes::Floats, mpi: None, nccl: None,
         torch: Some("PREMUL_SUM"), doc: "Sum of what each rank has times its own scale. Ranks need not have the same.",
         c_doc: "Sum of each rank's elements times its own scale." },
];
