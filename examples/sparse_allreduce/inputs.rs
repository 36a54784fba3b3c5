//! The vectors: like gradients in what matters here, and the same for the same seed.

use crate::regions::even;

/// A rank's gradient: a part that all ranks share and one of its own, in layers of very different scales. So ranks keep
/// many of the same indexes, and these are spread unevenly.
pub fn gradient(seed: u64, rank: usize, count: usize) -> Vec<f32> {
    const LAYERS: usize = 23;
    let (shared, own) = (mix(seed), mix(seed ^ mix(rank as u64 + 1)));
    let mut values = Vec::with_capacity(count);
    for (layer, bounds) in even(count, LAYERS).windows(2).enumerate() {
        let scale = 0.01 * 0.5f32.powi((mix(shared ^ layer as u64) % 6) as i32);
        values.extend((bounds[0]..bounds[1]).map(|index| {
            let index = u64::from(index);
            scale * (bell(mix(shared.wrapping_add(index))) + bell(mix(own.wrapping_add(index))))
        }));
    }
    values
}

/// Random bits of a number: the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
fn mix(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ bits >> 31
}

/// Nearly normal, of mean 0 and variance 1: the sum of four uniform numbers, each of 16 of the bits.
fn bell(bits: u64) -> f32 {
    let sum: u32 = (0..4).map(|part| (bits >> (16 * part)) as u32 & 0xFFFF).sum();
    (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_come_from_the_seed_and_the_rank() {
        let one = gradient(1, 0, 1000);
        assert_eq!(one, gradient(1, 0, 1000));
        assert_ne!(one, gradient(2, 0, 1000));
        assert_ne!(one, gradient(1, 1, 1000));
        assert_eq!(gradient(1, 0, 3).len(), 3);
    }

    #[test]
    fn the_bell_has_mean_0_and_variance_1() {
        let sample: Vec<f64> = (0..100_000).map(|index| f64::from(bell(mix(index)))).collect();
        let mean = sample.iter().sum::<f64>() / 1e5;
        let variance = sample.iter().map(|value| value * value).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }
}
