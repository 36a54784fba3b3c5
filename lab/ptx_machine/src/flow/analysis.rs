//! Control flow of a function: basic blocks, loops, live registers, and reads of registers that may be
//! unwritten.

use crate::errors::{LoadError, LoadResult};
use crate::ir::{Function, Op, Reg};

/// A set of registers, one bit each.
#[derive(Clone, PartialEq, Eq)]
pub struct Set(Vec<u64>);

impl Set {
    pub fn new(count: usize, all: bool) -> Self {
        Self(vec![if all { !0 } else { 0 }; count.div_ceil(64)])
    }

    pub fn has(&self, reg: Reg) -> bool {
        self.0[reg as usize / 64] >> (reg % 64) & 1 != 0
    }

    pub fn insert(&mut self, reg: Reg) {
        self.0[reg as usize / 64] |= 1 << (reg % 64);
    }

    pub fn remove(&mut self, reg: Reg) {
        self.0[reg as usize / 64] &= !(1 << (reg % 64));
    }

    pub fn iter(&self) -> impl Iterator<Item = Reg> + '_ {
        let words = self.0.iter().enumerate();
        words.flat_map(|(i, &word)| {
            (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| i as Reg * 64 + bit)
        })
    }

    fn unite(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }

    fn intersect(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a &= b);
    }
}

/// A basic block: instructions `first..last` of a function.
pub struct Block {
    pub first: usize,
    pub last: usize,
    /// Successors. For a conditional branch the branch target is the last.
    pub next: Vec<usize>,
    pub live_in: Set,
    /// Registers that have been written on every path to this block.
    pub written: Set,
    pub reachable: bool,
}

/// Kind of a loop's back edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Back {
    /// Back edge of a loop that polls for another thread's store.
    Poll,
    Other,
}

pub struct Flow {
    pub blocks: Vec<Block>,
    pub back: std::collections::HashMap<(usize, usize), Back>,
    /// Registers that may be read before they are written.
    pub doubtful: Set,
}

impl Flow {
    /// Analyses a function.
    ///
    /// # Errors
    ///
    /// Execution can run past the end of the function.
    pub fn of(function: &Function) -> LoadResult<Self> {
        let mut flow = Self::blocks(function)?;
        flow.find_loops(function);
        flow.find_live(function);
        flow.find_written(function);
        Ok(flow)
    }

    fn blocks(function: &Function) -> LoadResult<Self> {
        let code = &function.code;
        let end = LoadError::new(function.line, format!("{} runs past its end", function.name));
        let mut leads = vec![false; code.len() + 1];
        leads[0] = true;
        function.labels.iter().for_each(|&at| leads[at as usize] = true);
        for (i, instr) in code.iter().enumerate() {
            leads[i + 1] |= instr.ends_block();
        }
        let firsts: Vec<usize> = (0..code.len()).filter(|&i| leads[i]).collect();
        let mut block_at = vec![None; code.len() + 1];
        firsts.iter().enumerate().for_each(|(number, &first)| block_at[first] = Some(number));
        let target =
            |label: u32| block_at[function.labels[label as usize] as usize].ok_or_else(|| end.clone());
        let mut blocks = Vec::new();
        for (i, &first) in firsts.iter().enumerate() {
            let last = firsts.get(i + 1).copied().unwrap_or(code.len());
            let instr = &code[last - 1];
            let mut next = Vec::new();
            let falls = instr.guard.is_some() || !instr.ends_block();
            if falls {
                next.push(block_at[last].ok_or_else(|| end.clone())?);
            }
            match &instr.op {
                Op::Bra { to } => next.push(target(*to)?),
                Op::BrxIdx { to, .. } => {
                    for &label in to {
                        next.push(target(label)?);
                    }
                }
                _ => {}
            }
            let none = Set::new(function.registers.len(), false);
            blocks.push(Block { first, last, next, live_in: none.clone(), written: none, reachable: false });
        }
        if blocks.is_empty() {
            return Err(end);
        }
        let doubtful = Set::new(function.registers.len(), false);
        Ok(Self { blocks, back: Default::default(), doubtful })
    }

    fn find_loops(&mut self, function: &Function) {
        // Depth-first search: an edge to a block that is still open is a back edge.
        let mut state = vec![0u8; self.blocks.len()];
        let mut stack = vec![(0, 0)];
        let mut back = Vec::new();
        while let Some((block, edge)) = stack.pop() {
            state[block] = 1;
            self.blocks[block].reachable = true;
            match self.blocks[block].next.get(edge) {
                Some(&next) => {
                    stack.push((block, edge + 1));
                    match state[next] {
                        0 => stack.push((next, 0)),
                        1 => back.push((block, next)),
                        _ => {}
                    }
                }
                None => state[block] = 2,
            }
        }
        let mut before = vec![Vec::new(); self.blocks.len()];
        for (i, block) in self.blocks.iter().enumerate() {
            block.next.iter().for_each(|&next| before[next].push(i));
        }
        let looks = |block: usize| {
            let Block { first, last, .. } = self.blocks[block];
            function.code[first..last].iter().any(|instr| instr.looks())
        };
        // Each back edge with the blocks of its loop.
        let loops: Vec<((usize, usize), Vec<usize>)> = back
            .iter()
            .map(|&(from, to)| {
                let mut body = vec![to];
                let mut open = vec![from];
                while let Some(block) = open.pop() {
                    if !body.contains(&block) {
                        body.push(block);
                        open.extend(&before[block]);
                    }
                }
                body.sort_unstable();
                ((from, to), body)
            })
            .collect();
        for (edge, body) in &loops {
            let looks_at = |body: &[usize]| body.iter().any(|&block| looks(block));
            let is_innermost = !loops.iter().any(|(other, inner)| {
                other != edge
                    && inner.len() < body.len()
                    && looks_at(inner)
                    && inner.iter().all(|b| body.binary_search(b).is_ok())
            });
            let poll = looks_at(body) && is_innermost;
            self.back.insert(*edge, if poll { Back::Poll } else { Back::Other });
        }
    }

    fn find_live(&mut self, function: &Function) {
        let mut changed = true;
        while changed {
            changed = false;
            for i in (0..self.blocks.len()).rev() {
                let block = &self.blocks[i];
                let live = self.live_before(function, i, block.first);
                if live != self.blocks[i].live_in {
                    self.blocks[i].live_in = live;
                    changed = true;
                }
            }
        }
    }

    /// Returns the registers that are live before instruction `at` of a block; `at` may be the block's end.
    pub fn live_before(&self, function: &Function, block: usize, at: usize) -> Set {
        let block = &self.blocks[block];
        let mut live = Set::new(function.registers.len(), false);
        block.next.iter().for_each(|&next| live.unite(&self.blocks[next].live_in));
        for instr in function.code[at..block.last].iter().rev() {
            if instr.guard.is_none() {
                instr.writes(&mut |reg| live.remove(reg));
            }
            instr.reads(&mut |reg| live.insert(reg));
        }
        live
    }

    fn find_written(&mut self, function: &Function) {
        let count = function.registers.len();
        // The fixed point is approached from above: at first every register counts as written.
        let mut written = vec![Set::new(count, true); self.blocks.len()];
        written[0] = Set::new(count, false);
        let mut changed = true;
        while changed {
            changed = false;
            for i in 0..self.blocks.len() {
                if !self.blocks[i].reachable {
                    continue;
                }
                let mut now = written[i].clone();
                for instr in &function.code[self.blocks[i].first..self.blocks[i].last] {
                    if instr.guard.is_none() {
                        instr.writes(&mut |reg| now.insert(reg));
                    }
                }
                for &next in &self.blocks[i].next {
                    let mut both = written[next].clone();
                    both.intersect(&now);
                    if next == 0 {
                        both = Set::new(count, false);
                    }
                    changed |= both != written[next];
                    written[next] = both;
                }
            }
        }
        for (i, set) in written.into_iter().enumerate() {
            let mut now = set.clone();
            if self.blocks[i].reachable {
                for instr in &function.code[self.blocks[i].first..self.blocks[i].last] {
                    instr.reads(&mut |reg| {
                        if !now.has(reg) {
                            self.doubtful.insert(reg);
                        }
                    });
                    if instr.guard.is_none() {
                        instr.writes(&mut |reg| now.insert(reg));
                    }
                }
            }
            self.blocks[i].written = set;
        }
    }
}
