//! Checks a launch before its threads run.

use std::sync::Arc;

use crate::context::Site;
use crate::errors::{Fault, LaunchError};
use crate::launch::run::Launch;
use crate::program::{Kernel, Program};
use crate::runtime::Range;

/// One of the launches that run together.
pub(crate) struct Grid<'a> {
    pub launch: &'a Launch<'a>,
    pub kernel: Arc<Kernel>,
    pub params: Vec<u128>,
    pub sites: Vec<Site>,
    pub function_sites: Vec<Site>,
    /// Ranges that the memory has reported so far, ordered by address.
    pub ranges: Vec<Range>,
}

fn extent(sizes: [u32; 3]) -> Option<u32> {
    let product = sizes.iter().try_fold(1u32, |product, &size| product.checked_mul(size))?;
    (product > 0).then_some(product)
}

impl<'a> Grid<'a> {
    pub fn new(program: &Program, launch: &'a Launch<'a>) -> Result<Self, LaunchError> {
        let invalid =
            |what: String| LaunchError { fault: Fault::Launch, kernel: launch.kernel.to_owned(), what };
        let kernel = program.kernel(launch.kernel).map_err(|error| invalid(error.to_string()))?;
        let function = &program.module.functions[kernel.number];
        let most = function.most_threads;
        let fits = extent(launch.block).is_some_and(|threads| threads <= most)
            && extent(launch.grid).is_some_and(|blocks| blocks <= 4096);
        if !fits {
            let text = format!(
                "{:?} blocks of {:?} threads, where a block has at most {most}",
                launch.grid, launch.block
            );
            return Err(invalid(text));
        }
        if function.exact_threads != [0; 3] && function.exact_threads != launch.block {
            return Err(invalid(format!(
                "blocks of {:?} threads, not {:?}",
                launch.block, function.exact_threads
            )));
        }
        if launch.params.len() != function.param_bytes as usize {
            let text = format!("{} bytes of parameters, not {}", launch.params.len(), function.param_bytes);
            return Err(invalid(text));
        }
        let words = launch.params.chunks(16).map(|chunk| {
            let mut bytes = [0; 16];
            bytes[..chunk.len()].copy_from_slice(chunk);
            u128::from_le_bytes(bytes)
        });
        Ok(Self {
            launch,
            params: words.collect(),
            sites: vec![Site::NONE; kernel.facts.sites as usize],
            function_sites: vec![Site::NONE; program.function_facts.sites as usize],
            ranges: Vec::new(),
            kernel,
        })
    }
}
