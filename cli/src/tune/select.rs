//! Selects the best candidate for each size, and makes the steps of a plan from them.

use fast_allreduce::plan::{Choice, Step};

/// How much faster a challenger must be.
const MARGIN: f64 = 0.05;

/// The measurements of one size.
#[derive(Debug, Clone)]
pub struct Size {
    pub bytes: usize,
    /// By candidate, the built-in plan first: the first candidate with the same plan at this size, which was
    /// measured for both.
    pub same_as: Vec<usize>,
    /// By candidate: seconds of a call in each round; empty if it was not measured.
    pub seconds: Vec<Vec<f64>>,
}

impl Size {
    /// Returns the median seconds of a call; `None` if the candidate was not measured.
    pub fn median(&self, candidate: usize) -> Option<f64> {
        median(&self.seconds[self.same_as[candidate]])
    }

    fn fastest(&self) -> usize {
        let measured = (0..self.seconds.len()).filter_map(|one| Some((one, median(&self.seconds[one])?)));
        measured.min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(one, _)| one)
    }
}

pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    Some(sorted[(share * last as f64).round() as usize])
}

/// Returns the median of `a` / `b` over rounds, in each of which both were timed.
pub fn ratio(a: &[f64], b: &[f64]) -> Option<f64> {
    median(&ratios(a, b))
}

fn ratios(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).filter(|(_, b)| **b > 0.0).map(|(a, b)| a / b).collect()
}

/// Returns whether the challenger is faster beyond noise: by the margin in the median, and at all in three of four
/// rounds.
pub fn beats(challenger: &[f64], incumbent: &[f64]) -> bool {
    let ratios = ratios(challenger, incumbent);
    let below = |share, limit| quantile(&ratios, share).is_some_and(|ratio| ratio < limit);
    below(0.5, 1.0 - MARGIN) && below(0.75, 1.0)
}

/// Returns the winner of each size: that of the size before, or the built-in plan, unless another is faster beyond
/// noise.
pub fn winners(sizes: &[Size]) -> Vec<usize> {
    let mut before = 0;
    let pick = |size: &Size| {
        let fastest = size.fastest();
        let stays = |candidate: usize| {
            let measured = &size.seconds[size.same_as[candidate]];
            !measured.is_empty() && !beats(&size.seconds[fastest], measured)
        };
        before = match size.same_as[before] {
            // A candidate with the same plan as the built-in one is the built-in one.
            0 if stays(0) => 0,
            _ if stays(before) => before,
            _ if stays(0) => 0,
            _ => fastest,
        };
        before
    };
    sizes.iter().map(pick).collect()
}

/// Returns the steps of a plan that uses `winners[i]` up to `sizes[i]`, and the last one for all larger sizes.
/// `None` stands for the built-in steps of its range.
pub fn steps(sizes: &[usize], winners: &[Option<Choice>], built_in: &[Step]) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut add = |step: Step| match steps.last_mut() {
        Some(last) if last.choice == step.choice => last.max_bytes = step.max_bytes,
        _ => steps.push(step),
    };
    let mut done = None;
    for (index, winner) in winners.iter().enumerate() {
        let is_last = index + 1 == winners.len();
        let max_bytes = if is_last { u64::MAX } else { sizes[index] as u64 };
        match winner {
            Some(choice) => add(Step { max_bytes, choice: *choice }),
            None => {
                for step in built_in.iter().filter(|step| done.is_none_or(|done| step.max_bytes > done)) {
                    add(Step { max_bytes: step.max_bytes.min(max_bytes), choice: step.choice });
                    if step.max_bytes >= max_bytes {
                        break;
                    }
                }
            }
        }
        done = Some(max_bytes);
    }
    steps
}

#[cfg(test)]
mod tests {
    use fast_allreduce::Algorithm::{self, OneShotPull, OneShotPush, TwoShotPull};

    use super::*;

    fn size(bytes: usize, microseconds: &[f64]) -> Size {
        let seconds = microseconds.iter().map(|&time| if time > 0.0 { vec![time; 7] } else { vec![] });
        let seconds: Vec<_> = seconds.collect();
        Size { bytes, same_as: (0..seconds.len()).collect(), seconds }
    }

    #[test]
    fn a_change_must_win_by_more_than_noise() {
        assert!(beats(&[0.94; 7], &[1.0; 7]) && !beats(&[0.96; 7], &[1.0; 7]));
        // Faster in the median, but slower in two of seven rounds.
        let noisy = [0.5, 0.5, 0.5, 0.5, 0.5, 1.5, 1.5];
        assert!(!beats(&noisy, &[1.0; 7]));
        assert!(!beats(&[], &[]) && !beats(&[0.0; 7], &[0.0; 7]));
        // Drift that both see does not count.
        let drift = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        assert!(beats(&drift.map(|time| time * 0.9), &drift));
    }

    #[test]
    fn the_one_before_stays_until_it_is_beaten() {
        let sizes = [
            size(1, &[1.0, 0.97, 2.0]),  // the built-in plan, as 3 % is noise
            size(2, &[1.0, 0.80, 0.9]),  // 1 is faster
            size(4, &[0.99, 1.0, 0.98]), // still 1: none is faster by 5 %
            size(8, &[1.0, 1.0, 0.5]),   // 2
            size(16, &[0.5, 1.0, 0.0]),  // 2 was not measured: the built-in plan
            size(32, &[0.0, 0.0, 0.0]),
        ];
        assert_eq!(winners(&sizes)[..5], [0, 1, 1, 2, 0]);
    }

    #[test]
    fn what_does_the_same_as_the_built_in_plan_is_it() {
        let mut same = size(2, &[1.0, 0.0]);
        same.same_as[1] = 0;
        assert_eq!(winners(&[size(1, &[1.0, 0.5]), same.clone(), size(4, &[1.0, 0.5])]), [1, 0, 1]);
        assert_eq!(same.median(1), Some(1.0));
    }

    fn choice(algorithm: Algorithm) -> Choice {
        Choice::host(algorithm, 1, 4096, 4096)
    }

    fn step(max_bytes: u64, algorithm: Algorithm) -> Step {
        Step { max_bytes, choice: choice(algorithm) }
    }

    #[test]
    fn neighbours_of_one_choice_are_one_step() {
        let built_in = [step(24, OneShotPull), step(u64::MAX, TwoShotPull)];
        let (push, none) = (Some(choice(OneShotPush)), None);
        let of = |winners: &[Option<Choice>]| steps(&[8, 16, 32, 64], winners, &built_in);
        assert_eq!(of(&[none; 4]), built_in);
        assert_eq!(of(&[push; 4]), [step(u64::MAX, OneShotPush)]);
        assert_eq!(
            of(&[push, push, none, none]),
            [step(16, OneShotPush), step(24, OneShotPull), step(u64::MAX, TwoShotPull)]
        );
        assert_eq!(
            of(&[none, none, none, push]),
            [step(24, OneShotPull), step(32, TwoShotPull), step(u64::MAX, OneShotPush)]
        );
        assert_eq!(
            of(&[none, push, none, push]),
            [
                step(8, OneShotPull),
                step(16, OneShotPush),
                step(24, OneShotPull),
                step(32, TwoShotPull),
                step(u64::MAX, OneShotPush)
            ]
        );
    }
}
