//! Published measurements in us; lab/gpu-model.md lists the sources.

/// Programmatic dependent launch in a published measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pdl {
    No,
    /// The software uses it by default or on request; the publication does not say.
    Unsaid,
}

/// A line of published figures.
pub struct Published {
    pub name: &'static str,
    /// Name of the closest row in the table of constants.
    pub machine: &'static str,
    pub ranks: usize,
    /// Bytes and us of each call.
    pub points: &'static [(usize, f64)],
    /// Whether the kernels were launched with programmatic dependent launch.
    pub pdl: Pdl,
    /// Equivalent reference kernels, each with the smallest size that it is used for.
    pub does: &'static [(usize, &'static str)],
}

const K: usize = 1 << 10;
const M: usize = 1 << 20;
const SIZES: [usize; 5] = [8 * K, 64 * K, 512 * K, M, 8 * M];

macro_rules! at_sizes {
    ($a:expr, $b:expr, $c:expr, $d:expr, $e:expr) => {
        &[(SIZES[0], $a), (SIZES[1], $b), (SIZES[2], $c), (SIZES[3], $d), (SIZES[4], $e)]
    };
}

const H100: &str = "h100";

/// All published figures.
#[rustfmt::skip]
pub const PUBLISHED: [Published; 22] = [
    Published { name: "vLLM", machine: H100, ranks: 2, points: at_sizes!(4.4, 4.5, 6.3, 8.3, 45.0),
        pdl: Pdl::No, does: &[(0, "flags_one_shot")] },
    Published { name: "SGLang v2", machine: H100, ranks: 2, points: at_sizes!(2.6, 3.0, 4.5, 5.9, 29.0),
        pdl: Pdl::Unsaid, does: &[(0, "sentinel_one_shot"), (2 * M, "")] },
    Published { name: "TensorRT-LLM", machine: H100, ranks: 2, points: at_sizes!(2.8, 3.1, 4.5, 6.1, 37.5),
        pdl: Pdl::Unsaid, does: &[(0, "sentinel_one_shot"), (2 * M, "")] },
    Published { name: "NCCL", machine: H100, ranks: 2, points: at_sizes!(6.8, 7.3, 10.7, 14.7, 47.0),
        pdl: Pdl::No, does: &[] },
    Published { name: "SGLang v2", machine: H100, ranks: 4, points: at_sizes!(2.8, 3.5, 8.2, 11.1, 44.5),
        pdl: Pdl::Unsaid, does: &[(0, "sentinel_one_shot"), (512 * K, "")] },
    Published { name: "vLLM", machine: H100, ranks: 8, points: at_sizes!(5.1, 6.4, 12.0, 15.0, 51.0),
        pdl: Pdl::No, does: &[(0, "flags_one_shot"), (256 * K, "flags_two_shot")] },
    Published { name: "SGLang v2", machine: H100, ranks: 8, points: at_sizes!(3.55, 4.8, 10.6, 13.5, 63.0),
        pdl: Pdl::Unsaid, does: &[(0, "sentinel_one_shot"), (160 * K, "")] },
    Published { name: "TensorRT-LLM", machine: H100, ranks: 8, points: at_sizes!(3.5, 4.6, 17.6, 26.0, 79.0),
        pdl: Pdl::Unsaid, does: &[(0, "sentinel_one_shot"), (2 * M, "")] },
    Published { name: "NCCL", machine: H100, ranks: 8, points: at_sizes!(16.0, 19.0, 20.0, 25.0, 79.0),
        pdl: Pdl::No, does: &[] },
    Published { name: "MSCCL++ (H200)", machine: H100, ranks: 8,
        points: &[(2 * K, 5.9), (32 * K, 7.2), (128 * K, 8.8), (512 * K, 12.0), (M, 14.0)],
        pdl: Pdl::No, does: &[] },
    Published { name: "vLLM multimem", machine: H100, ranks: 8,
        points: &[(512 * K, 11.0), (M, 14.0), (4 * M, 27.0), (16 * M, 87.0)], pdl: Pdl::No, does: &[] },
    Published { name: "vLLM one-stage (B300)", machine: "b200", ranks: 8,
        points: &[(16 * K, 7.0), (256 * K, 9.0), (M, 17.0), (4 * M, 45.0)],
        pdl: Pdl::No, does: &[(0, "flags_one_shot"), (2 * M, "")] },
    Published { name: "vLLM multimem (B300)", machine: "b200", ranks: 8,
        points: &[(16 * K, 13.0), (256 * K, 15.0), (M, 18.0), (4 * M, 29.0)], pdl: Pdl::No, does: &[] },
    Published { name: "NCCL multicast two-shot (GB200)", machine: "b200", ranks: 8, pdl: Pdl::No,
        points: &[(8 * K, 5.9), (64 * K, 6.3), (256 * K, 7.3), (512 * K, 8.9), (M, 14.0)], does: &[] },
    Published { name: "NCCL (GB200)", machine: "b200", ranks: 8, pdl: Pdl::No,
        points: &[(8 * K, 10.0), (64 * K, 16.6), (M, 18.2)], does: &[] },
    Published { name: "FlashInfer fused norm (GB300)", machine: "b200", ranks: 4, pdl: Pdl::Unsaid,
        points: &[(10 * K, 4.1), (80 * K, 4.3), (320 * K, 5.8), (1280 * K, 9.3), (5 * M, 20.3)], does: &[] },
    Published { name: "FlashInfer fused norm (GB300)", machine: "b200", ranks: 8, pdl: Pdl::Unsaid,
        points: &[(10 * K, 4.8), (80 * K, 5.2), (320 * K, 7.6), (1280 * K, 9.9), (5 * M, 21.5)], does: &[] },
    Published { name: "TensorRT-LLM fused norm", machine: H100, ranks: 2, pdl: Pdl::Unsaid,
        points: &[(72 * K, 7.0)], does: &[] },
    Published { name: "MNNVL fused norm", machine: H100, ranks: 2, pdl: Pdl::Unsaid,
        points: &[(72 * K, 6.1)], does: &[] },
    Published { name: "one-shot", machine: "pcie5", ranks: 4,
        points: &[(K, 6.1), (8 * K, 6.4), (32 * K, 9.2), (128 * K, 17.6), (512 * K, 51.0), (M, 96.0)],
        pdl: Pdl::No, does: &[] },
    Published { name: "NCCL", machine: "pcie5", ranks: 4,
        points: &[(K, 13.5), (8 * K, 13.9), (32 * K, 15.6), (128 * K, 24.7), (512 * K, 72.0), (M, 85.0)],
        pdl: Pdl::No, does: &[] },
    Published { name: "lower bound", machine: H100, ranks: 8, points: at_sizes!(2.5, 3.3, 5.5, 8.0, 43.0),
        pdl: Pdl::No, does: &[] },
];

impl Published {
    /// Returns the name for tables.
    pub fn title(&self) -> String {
        match self.pdl {
            Pdl::No => self.name.to_owned(),
            Pdl::Unsaid => format!("{} (PDL?)", self.name),
        }
    }

    /// Returns the reference kernel that does the same at a size.
    pub fn reference(&self, bytes: usize) -> Option<&'static str> {
        let last = self.does.iter().rev().find(|(from, _)| bytes >= *from)?;
        Some(last.1).filter(|name| !name.is_empty())
    }
}

/// Returns the published launch shape of a reference kernel.
pub fn shape_of(reference: &str) -> (u32, u32) {
    match reference {
        "flags_one_shot" | "flags_two_shot" => (36, 512),
        // One block per multiprocessor.
        _ => (132, 128),
    }
}
