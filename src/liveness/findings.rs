//! Conclusions from flight records, in words.

use super::record::{FlightRecord, RankRecord};

impl RankRecord {
    /// Describes what the rank is doing, for example `in call 7, all_gather of 4096 f16, waiting for rank 2, for 3 s`.
    #[must_use]
    pub fn doing(&self) -> String {
        let Some(last) = self.calls.last() else { return "has made no call".into() };
        let mut text = match () {
            () if last.captured => format!("captured call {}, {}", last.number, last.call),
            () if self.ended < self.begun => format!("in call {}, {}", last.number, last.call),
            () => format!("returned from call {}, {}", last.number, last.call),
        };
        if let Some(waiting) = self.waiting_for {
            text += &format!(", waiting for rank {waiting}");
        }
        let seconds = self.unchanged_ns.unwrap_or(0) / 1_000_000_000;
        if seconds > 0 {
            text += &format!(", for {seconds} s");
        }
        text
    }
}

impl FlightRecord {
    /// Returns conclusions, a sentence each: which ranks are behind, and which rank was waited for most.
    #[must_use]
    pub fn findings(&self) -> Vec<String> {
        let mut findings = Vec::new();
        for rank in self.ranks.iter().filter(|rank| rank.behind > 0) {
            let calls = if rank.behind == 1 { "call" } else { "calls" };
            findings.push(format!("rank {} is {} {calls} behind: {}", rank.rank, rank.behind, rank.doing()));
        }
        let waited = |of: usize| -> u128 {
            self.ranks.iter().filter_map(|rank| rank.waited_ns.get(of)).map(|&ns| u128::from(ns)).sum()
        };
        let sums: Vec<u128> = (0..self.world_size).map(waited).collect();
        let total: u128 = sums.iter().sum();
        if let Some((rank, &most)) = sums.iter().enumerate().max_by_key(|(_, ns)| **ns).filter(|_| total > 0)
        {
            let (share, seconds) = (most * 100 / total, |ns: u128| ns as f64 / 1e9);
            findings.push(format!(
                "rank {rank} was waited for {share} % of all waiting time, {:.3} s of {:.3} s",
                seconds(most),
                seconds(total)
            ));
        }
        findings
    }
}
