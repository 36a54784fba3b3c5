//! Random numbers and elements from one printed seed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::OnceLock;

use fast_allreduce::DType;

pub const SEED: &str = "FAST_ALLREDUCE_TEST_SEED";

/// Returns the seed of this run: `FAST_ALLREDUCE_TEST_SEED`, or else the time.
pub fn seed() -> u64 {
    static SEED_OF_RUN: OnceLock<u64> = OnceLock::new();
    *SEED_OF_RUN.get_or_init(|| match std::env::var(SEED) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{SEED}={text}: {error}")),
        Err(_) => {
            let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            time.map_or(1, |time| time.as_nanos() as u64 % 1_000_000_000)
        }
    })
}

static SAID: AtomicBool = AtomicBool::new(false);

/// Prints the seed once, for targets whose output is not captured.
pub fn say_seed() {
    eprintln!("{SEED}={}", seed());
    SAID.store(true, Ordering::Relaxed);
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    /// Creates a stream of random numbers; each name has a separate one.
    pub fn new(stream: &str) -> Self {
        if !SAID.load(Ordering::Relaxed) {
            println!("{stream}: {SEED}={}", seed());
        }
        let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(stream.bytes().fold(seed() ^ 0xcbf2_9ce4_8422_2325, hash))
    }

    /// Creates a stream that is the same in every run.
    pub fn fixed(seed: u64) -> Self {
        Self(seed)
    }

    /// Creates a stream from this one's state and `number`, without advancing this one.
    pub fn fork(&self, number: usize) -> Self {
        let mut fork = Self(self.0 ^ (number as u64 + 1).wrapping_mul(0xd6e8_feb8_6659_fd93));
        fork.bits();
        fork
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// Range of random elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// Floats with magnitudes from 0.5 to 4 and any sign, so that products of 16 stay in range; any integers.
    Plain,
    /// Any bits.
    Bits,
    /// Limits of the type, zeros of both signs, infinities, subnormals, NaNs with several payloads.
    Special,
}

impl Values {
    pub const ALL: [Self; 3] = [Self::Plain, Self::Bits, Self::Special];
}

/// Returns `count` random elements as bytes.
pub fn elements(random: &mut Random, dtype: DType, count: usize, values: Values) -> Vec<u8> {
    let special = special(dtype);
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for _ in 0..count {
        let bits = match values {
            Values::Plain => plain(random, dtype),
            Values::Bits => random.bits(),
            Values::Special => random.pick(&special),
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..dtype.size()]);
    }
    bytes
}

/// Returns the numbers of exponent and mantissa bits of a float type.
fn widths(dtype: DType) -> Option<(u32, u32)> {
    match dtype {
        DType::F16 => Some((5, 10)),
        DType::Bf16 => Some((8, 7)),
        DType::F32 => Some((8, 23)),
        DType::F64 => Some((11, 52)),
        DType::F8E4M3 => Some((4, 3)),
        DType::F8E5M2 => Some((5, 2)),
        _ => None,
    }
}

fn plain(random: &mut Random, dtype: DType) -> u64 {
    let bits = random.bits();
    let Some((exponent, mantissa)) = widths(dtype) else { return bits };
    let bias = (1 << (exponent - 1)) - 1;
    let (sign, power) = (bits >> 63, bias - 1 + (bits >> 60 & 3) % 3);
    (sign << exponent | power) << mantissa | (bits & ((1 << mantissa) - 1))
}

fn special(dtype: DType) -> Vec<u64> {
    let Some((exponent, mantissa)) = widths(dtype) else {
        let most = u64::MAX >> (64 - 8 * dtype.size() as u32);
        let highest = most >> 1;
        let mut integers = vec![0, 1, 2, 3, most, most - 1, highest, highest - 1, highest + 1, highest + 2];
        integers.extend([most / 3, most / 7, highest / 3, most - highest / 5]);
        return integers;
    };
    // All ones above the mantissa. In e4m3 this is an ordinary number, and only the last code is NaN.
    let infinity = ((1 << exponent) - 1) << mantissa;
    let one = ((1 << (exponent - 1)) - 1) << mantissa;
    let (normal, quiet) = (1 << mantissa, 1 << (mantissa - 1));
    let positive = [
        0,
        1,
        normal - 1,
        normal,
        normal + 1,
        one - 1,
        one,
        one + 1,
        infinity - 1,
        infinity - normal,
        infinity,
        infinity | 1,
        infinity | quiet,
        infinity | quiet | 1,
        infinity | (normal - 1),
    ];
    let sign = 1 << (exponent + mantissa);
    // Sums of NaNs and infinities hide everything else, so finite values are more frequent.
    let finite = positive[..10].iter().cycle().take(60);
    finite.chain(&positive).flat_map(|&bits| [bits, bits | sign]).collect()
}
