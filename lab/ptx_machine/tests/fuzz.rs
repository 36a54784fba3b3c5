//! No text makes the machine itself fail: the text loads or is rejected, and what loads runs or faults.

use std::time::Duration;

use fast_allreduce_ptx_machine::{fatbin, Launch, Memory, Program, Range, Settings};
use proptest::prelude::*;

/// A module with some of every feature.
const SAMPLE: &str = include_str!("sample.ptx");

struct One(Range);

impl Memory for One {
    fn find(&self, _address: u64) -> Option<Range> {
        Some(self.0)
    }
}

/// Loads, compiles and runs as much of a text as possible.
fn try_all(text: &str) -> bool {
    let Ok(program) = Program::load(text, false) else { return false };
    let memory = vec![0u64; 256];
    let range = Range { low: memory.as_ptr() as u64, bytes: 2048 };
    for kernel in program.kernels() {
        let bytes =
            program.parameters(kernel).and_then(|all| all.last()).map_or(0, |&(at, bytes)| at + bytes);
        let mut params = vec![0; bytes as usize];
        params.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&range.low.to_le_bytes()));
        let settings = Settings { limit: Duration::from_millis(5), seed: 1, ..Settings::default() };
        let launch = Launch {
            kernel,
            grid: [2, 1, 1],
            block: [33, 1, 1],
            cluster: [1; 3],
            dynamic_shared: 0,
            params: &params,
            memory: &One(range),
        };
        let _ = program.launch(&[launch], settings);
    }
    true
}

#[test]
fn the_sample_itself_is_sound() {
    if let Err(error) = Program::load(SAMPLE, false) {
        panic!("{error}");
    }
    assert!(try_all(SAMPLE));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn bytes_that_change(changes in prop::collection::vec((any::<prop::sample::Index>(), 0x20u8..0x7F), 1..6)) {
        let mut text = SAMPLE.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(text.len());
            text[at] = byte;
        }
        try_all(&String::from_utf8(text).unwrap());
    }

    #[test]
    fn words_that_change_places(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..4)
    ) {
        let mut words: Vec<&str> = SAMPLE.split_inclusive([' ', ',', ';', '\n', '.']).collect();
        for (a, b) in changes {
            let (a, b) = (a.index(words.len()), b.index(words.len()));
            words[a] = words[b];
        }
        try_all(&words.concat());
    }

    #[test]
    fn lines_that_are_left_out(first in any::<prop::sample::Index>(), count in 1usize..5) {
        let lines: Vec<&str> = SAMPLE.lines().collect();
        let first = first.index(lines.len());
        let kept = lines.iter().enumerate().filter(|(i, _)| *i < first || *i >= first + count);
        let text: Vec<&str> = kept.map(|(_, line)| *line).collect();
        try_all(&text.join("\n"));
    }

    #[test]
    fn texts_that_end_early(end in 0..SAMPLE.len()) {
        try_all(SAMPLE.get(..end).unwrap_or_default());
    }

    #[test]
    fn containers(bytes in prop::collection::vec(any::<u8>(), 0..200), sound in any::<bool>()) {
        let mut image = bytes;
        if sound && image.len() >= 16 {
            image[..8].copy_from_slice(&[0x50, 0xED, 0x55, 0xBA, 1, 0, 16, 0]);
            let size = image.len() as u64 - 16;
            image[8..16].copy_from_slice(&size.to_le_bytes());
        }
        let _ = fatbin::texts(&image);
    }
}
