//! Checks a launch before its threads run.

use std::sync::Arc;

use crate::context::Site;
use crate::errors::{Fault, LaunchError};
use crate::ir::Function;
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
    /// Blocks of a cluster, and whether the launch or the kernel specifies them.
    pub cluster: [u32; 3],
    pub has_clusters: bool,
    /// Bytes of a block's shared memory.
    pub shared_bytes: u32,
}

/// Maximum shared memory of a block on any GPU.
const MOST_SHARED: u32 = 227 << 10;

/// Returns the blocks of a cluster, and whether the launch or the kernel specifies them.
fn cluster_of(function: &Function, launch: &Launch) -> Result<([u32; 3], bool), String> {
    let asked = launch.cluster != [1; 3];
    let cluster = match function.exact_cluster {
        [0, ..] => launch.cluster,
        exact if asked && exact != launch.cluster => {
            return Err(format!("clusters of {:?} blocks, not {exact:?}", launch.cluster))
        }
        exact => exact,
    };
    let has_clusters = asked || function.exact_cluster != [0; 3];
    if function.explicit_cluster && !has_clusters {
        return Err("the kernel needs clusters".to_owned());
    }
    let most = function.most_cluster;
    let fits = extent(cluster).is_some_and(|blocks| blocks <= most);
    if !fits || launch.grid.iter().zip(cluster).any(|(grid, cluster)| grid % cluster != 0) {
        return Err(format!(
            "{:?} blocks in clusters of {cluster:?}, where a cluster has at most {most} blocks",
            launch.grid
        ));
    }
    Ok((cluster, has_clusters))
}

impl Grid<'_> {
    /// Returns the number of a block's cluster, and the block's rank in it.
    pub fn place(&self, index: [u32; 3]) -> (u32, u32) {
        let linear = |at: [u32; 3], size: [u32; 3]| at[0] + size[0] * (at[1] + size[1] * at[2]);
        let parts = |f: fn(u32, u32) -> u32, of: [u32; 3]| -> [u32; 3] {
            std::array::from_fn(|i| f(of[i], self.cluster[i]))
        };
        let clusters = parts(|grid, cluster| grid / cluster, self.launch.grid);
        let own = parts(|index, cluster| index / cluster, index);
        (linear(own, clusters), linear(parts(|index, cluster| index % cluster, index), self.cluster))
    }

    pub fn cluster_blocks(&self) -> u32 {
        self.cluster.iter().product()
    }
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
        let (cluster, has_clusters) = cluster_of(function, launch).map_err(invalid)?;
        let shared_bytes = match launch.dynamic_shared {
            0 => program.module.shared_bytes,
            bytes => program.module.dynamic_shared().saturating_add(bytes),
        };
        if shared_bytes > MOST_SHARED {
            let text =
                format!("{shared_bytes} bytes of shared memory, where a block has at most {MOST_SHARED}");
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
            cluster,
            has_clusters,
            shared_bytes,
            kernel,
        })
    }
}
