//! What the ranks of the step `peers` find, and the titles of its tables.

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::gpu_check::record::Record;

/// What a rank has found since the last exchange.
#[derive(Default, Serialize, Deserialize)]
pub struct Findings {
    pub records: Vec<Record>,
    pub cases: u64,
    pub error: Option<String>,
}

impl Findings {
    pub fn figure(&mut self, table: &str, row: impl ToString, column: impl ToString, value: f64) {
        let (row, column) = (row.to_string(), column.to_string());
        self.records.push(Record::Figure { table: table.into(), row, column, value });
    }

    /// Counts cases, or keeps the first error.
    pub fn outcome(&mut self, what: &str, outcome: Result<u64, Failure>) {
        match outcome {
            Ok(cases) => self.cases += cases,
            Err(failure) => self.error = self.error.take().or(Some(format!("{what}: {failure}"))),
        }
    }
}

/// Returns the title of a table.
pub fn title(what: &str, way: &str) -> String {
    format!("{what}; memory shared by {way}")
}

pub const LOAD: &str = "Nanoseconds of a load from a peer";
pub const OWN_LOAD: &str = "Nanoseconds of a load from the GPU's own second-level cache";
pub const SIGNAL: &str = "Nanoseconds of a signal, one way";
pub const KERNEL_READS: &str = "GB/s read from a peer by a kernel";
pub const KERNEL_WRITES: &str = "GB/s written to a peer by a kernel";
pub const COPY_READS: &str = "GB/s read from a peer by a copy engine";
pub const COPY_WRITES: &str = "GB/s written to a peer by a copy engine";
pub const SMALL_COPY_READS: &str = "Nanoseconds of a copy of 8 B from a peer, of 20 in a row";
pub const SMALL_COPY_WRITES: &str = "Nanoseconds of a copy of 8 B to a peer, of 20 in a row";
pub const ONE_MULTIPROCESSOR: &str = "Bytes per cycle that one multiprocessor writes to a peer";
/// By `fit::PAYLOADS`.
pub const TO_ALL: [&str; 3] = [
    "GB/s written to all peers by a kernel, whole lines",
    "GB/s written to all peers by a kernel, 32 B of each line",
    "GB/s written to all peers by a kernel, 16 B of each line",
];
pub const TOGETHER: &str = "GB/s of each GPU while all GPUs access all peers at once";
