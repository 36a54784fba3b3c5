//! `replay`: recorded calls are made again, or two recordings are compared.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use fast_allreduce::bootstrap::{Bootstrap, Local};
use fast_allreduce::record::{compare, Recording};
use fast_allreduce::ReduceOp;

use crate::arguments::Replay;
use crate::environment;
use crate::failure::{Failure, EXIT_WRONG};
use crate::launch;

/// Longest wait of a rank for another, which may read a large input from a slow disk.
const LIMIT: Duration = Duration::from_secs(600);

/// The files of a world, by rank.
struct World {
    id: u64,
    files: Vec<PathBuf>,
    has_data: bool,
}

/// Replays the recordings of one world, or compares those of two.
pub fn run(options: &Replay) -> Result<ExitCode, Failure> {
    let worlds = worlds(&options.files)?;
    match &worlds[..] {
        [one, other] => compared(one, other),
        [one] if !one.has_data => {
            let what = "the recording has hashes alone, so that its calls cannot be made again";
            Err(Failure::Usage(format!("{what}: give a second one to compare it with")))
        }
        [one] if environment::is_rank() => launch::as_rank(|| replay(one)),
        [one] => launch::launch(one.files.len(), std::env::args_os().skip(1)),
        _ => {
            Err(Failure::Usage(format!("the files are of {} worlds: give those of one or two", worlds.len())))
        }
    }
}

/// Sorts files by world and rank.
fn worlds(files: &[PathBuf]) -> Result<Vec<World>, Failure> {
    let mut worlds: Vec<(World, Vec<usize>)> = Vec::new();
    for path in files {
        let recording = Recording::open(path)?;
        let ((rank, world_size), has_data) = (recording.place(), recording.has_data());
        let found = worlds.iter().position(|(world, _)| world.id == recording.world());
        let index = found.unwrap_or_else(|| {
            let files = vec![PathBuf::new(); world_size];
            worlds.push((World { id: recording.world(), files, has_data }, Vec::new()));
            worlds.len() - 1
        });
        let (world, ranks) = &mut worlds[index];
        let refuse = |what: String| Err(Failure::Usage(format!("{}: {what}", path.display())));
        if (world.files.len(), world.has_data) != (world_size, has_data) {
            return refuse("it is of another recording than other files of its world".into());
        }
        if ranks.contains(&rank) {
            return refuse(format!(
                "rank {rank} of its world has another file, {}",
                world.files[rank].display()
            ));
        }
        ranks.push(rank);
        world.files[rank] = path.clone();
    }
    for (world, ranks) in &worlds {
        let missing: Vec<_> = (0..world.files.len()).filter(|rank| !ranks.contains(rank)).collect();
        if !missing.is_empty() {
            let (id, size) = (world.id, world.files.len());
            return Err(Failure::Usage(format!(
                "of the {size} ranks of world {id:016x} files lack: {missing:?}"
            )));
        }
    }
    Ok(worlds.into_iter().map(|(world, _)| world).collect())
}

fn compared(one: &World, other: &World) -> Result<ExitCode, Failure> {
    if one.files.len() != other.files.len() {
        let sizes = (one.files.len(), other.files.len());
        return Err(Failure::Usage(format!("the worlds have {} and {} ranks", sizes.0, sizes.1)));
    }
    let (mut differs, mut damage) = (false, None);
    for (rank, (left, right)) in one.files.iter().zip(&other.files).enumerate() {
        match compare(&mut Recording::open(left)?, &mut Recording::open(right)?) {
            Ok(found) => {
                differs |= found.difference.is_some();
                let rest = match &found.difference {
                    Some(difference) => format!(": {difference}"),
                    None if found.is_one_shorter => "; one recording ends there".to_owned(),
                    None => String::new(),
                };
                print(&format!("rank {rank}: {} equal calls{rest}", found.equal))?;
            }
            // The calls before it are equal. The file of a process that was killed may end inside a call.
            Err(error) => damage = damage.or(Some(error)),
        }
    }
    match damage {
        Some(error) => Err(error.into()),
        None => Ok(ExitCode::from(if differs { EXIT_WRONG } else { 0 })),
    }
}

/// Makes the calls of one rank again. Returns whether all results of all ranks are as recorded.
fn replay(world: &World) -> Result<bool, Failure> {
    let Some(bootstrap) = Local::from_env()? else {
        return Err(Failure::Usage("the environment names no world".into()));
    };
    let bootstrap: Arc<dyn Bootstrap> = Arc::new(bootstrap);
    if bootstrap.world_size() != world.files.len() {
        let (files, ranks) = (world.files.len(), bootstrap.world_size());
        return Err(Failure::Usage(format!("the files are of {files} ranks, and this is one of {ranks}")));
    }
    let path = &world.files[bootstrap.rank()];
    let (calls, cut) = whole_calls(path)?;
    let mut recording = Recording::open(path)?;
    let (builder, host) = recording.builder()?;
    let communicator = builder.check(true).timeout(LIMIT).build(host, Arc::clone(&bootstrap))?;
    // The shortest recording decides.
    let mut common = [calls];
    communicator.all_reduce_in_place(&mut common, ReduceOp::Min)?;
    let (mut differing, mut first) = (0, String::new());
    for _ in 0..common[0] {
        let Some(call) = recording.next_call()? else { break };
        if let Some(found) = communicator.replay(&call)? {
            differing += 1;
            if first.is_empty() {
                first = format!("rank {}, {call}: {found}\n", bootstrap.rank());
            }
        }
    }
    if differing > 1 {
        first += &format!("rank {}: {differing} calls differ\n", bootstrap.rank());
    }
    let gathered = |text: &str| -> Result<String, Failure> {
        let all = bootstrap.all_gather(text.as_bytes(), LIMIT)?;
        Ok(all.iter().map(|text| String::from_utf8_lossy(text)).collect())
    };
    let found = gathered(&first)?;
    let rest = gathered(&cut)?;
    if bootstrap.rank() == 0 {
        print(&format!(
            "world {:016x}: {} calls of {} ranks\n{found}",
            world.id,
            common[0],
            world.files.len()
        ))?;
    }
    match found.is_empty() && !rest.is_empty() {
        true => Err(Failure::Usage(rest.trim_end().to_owned())),
        false => Ok(found.is_empty()),
    }
}

/// Returns the number of calls that can be made again, and why there are no more, if the recording does not just end.
fn whole_calls(path: &Path) -> Result<(u64, String), Failure> {
    let mut recording = Recording::open(path)?;
    let mut calls = 0;
    loop {
        match recording.next_call() {
            Ok(Some(call)) => match call.failure() {
                None => calls += 1,
                Some(reason) => return Ok((calls, format!("{}: {call} failed: {reason}\n", path.display()))),
            },
            Ok(None) => return Ok((calls, String::new())),
            Err(error) => return Ok((calls, format!("{error}\n"))),
        }
    }
}

fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.trim_end().as_bytes())?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
