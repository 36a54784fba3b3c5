//! A rank process: joins the world, loads its part of the model, and continues the prompt with the other ranks.

use std::io::Write as _;
use std::sync::Arc;

use candle_core::{Device, Module as _, Tensor};
use fast_allreduce::bootstrap::{Bootstrap, Local};
use fast_allreduce::device::host::Bind;
use fast_allreduce::{AnyCommunicator, Communicator, Host};
use fast_allreduce_candle::{AllGather, Collectives, Comm};

use crate::arguments::Arguments;
use crate::backend::Backends;
use crate::generate::{Generator, Outcome, Phase};
use crate::model::Model;
use crate::{launch, weights, Result};

pub fn run(arguments: &Arguments) -> Result {
    let outcome = run_in_world(arguments);
    #[cfg(feature = "mpi")]
    if let (Err(error), true) = (&outcome, arguments.backend.needs_mpi()) {
        // Other ranks may wait for this one in MPI, which does not notice its end.
        crate::print_error(error);
        fast_allreduce::bootstrap::Mpi::abort(1);
    }
    outcome
}

fn run_in_world(arguments: &Arguments) -> Result {
    launch::end_with_launcher();
    let bootstrap = join(arguments)?;
    let (rank, ranks) = (bootstrap.rank(), bootstrap.world_size());
    let threads = launch::threads(arguments, ranks);
    // candle reads the number of threads for products from this variable. The calling thread belongs to the pool:
    // otherwise it would hand work to another thread of the same core and wait.
    std::env::set_var("RAYON_NUM_THREADS", threads.to_string());
    rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build_global()?;

    let source = weights::open(arguments, &bootstrap)?;
    let shape = source.config.shape;
    let prompt = source.text.tokens(&arguments.prompt, shape.vocabulary)?;
    if prompt.len() + arguments.tokens > shape.context {
        return Err(format!(
            "the prompt has {} tokens and {} are to be generated: the model's context is {}",
            prompt.len(),
            arguments.tokens,
            shape.context
        )
        .into());
    }
    // A rank with several threads is not bound: they would share the one core.
    let bind = if threads == 1 { Bind::Core } else { Bind::None };
    let communicator = Communicator::builder()
        .timeout(arguments.timeout)
        .algorithm(arguments.algorithm)
        .build(Host::new().bind(bind), Arc::clone(&bootstrap))?;
    let backends = Arc::new(Backends::new(backends(arguments, communicator.into())?));
    let comm = Comm::of(Arc::clone(&backends) as Arc<dyn Collectives>);
    let model = Model::load(source.config, &*source.shards, &comm, arguments.products())?;
    let mut generator = Generator { model, comm, backends: &backends };

    let mut rounds = vec![Vec::new(); backends.names().count()];
    for round in 0..arguments.rounds {
        for (backend, outcomes) in rounds.iter_mut().enumerate() {
            backends.choose(backend);
            let is_printed = rank == 0 && round == 0 && backend == 0;
            outcomes.push(continue_prompt(&mut generator, &source.text, &prompt, arguments, is_printed)?);
        }
    }
    backends.choose(0);
    let first = rounds[0][0].tokens.clone();
    for (name, outcomes) in backends.names().zip(&rounds) {
        if let Some(other) = outcomes.iter().find(|outcome| outcome.tokens != first) {
            return Err(format!("with {name}, tokens {:?} became {:?}", first, other.tokens).into());
        }
        report(&generator.comm, name, outcomes)?;
    }
    Ok(())
}

fn join(arguments: &Arguments) -> Result<Arc<dyn Bootstrap>> {
    if !arguments.backend.needs_mpi() {
        let local = Local::from_env()?;
        return Ok(Arc::new(local.ok_or("this process was started as an MPI rank: pass --backend mpi")?));
    }
    #[cfg(feature = "mpi")]
    return Ok(Arc::new(fast_allreduce::bootstrap::Mpi::init()?));
    #[cfg(not(feature = "mpi"))]
    Err(launch::WITHOUT_MPI.into())
}

fn backends(
    arguments: &Arguments,
    communicator: AnyCommunicator,
) -> Result<Vec<(&'static str, Box<dyn Collectives>)>> {
    #[cfg(feature = "mpi")]
    if arguments.backend.needs_mpi() {
        let mpi = crate::backend::mpi::Mpi::new(communicator.rank(), communicator.world_size())?;
        let mpi: (_, Box<dyn Collectives>) = ("mpi", Box::new(mpi));
        return Ok(match arguments.backend {
            crate::arguments::Backend::Mpi => vec![mpi],
            _ => vec![("fast-allreduce", Box::new(communicator)), mpi],
        });
    }
    let _ = arguments;
    Ok(vec![("fast-allreduce", Box::new(communicator))])
}

/// Continues the prompt, and prints the text as it is generated if `is_printed`.
fn continue_prompt(
    generator: &mut Generator<'_>,
    text: &crate::text::Text,
    prompt: &[u32],
    arguments: &Arguments,
    is_printed: bool,
) -> Result<Outcome> {
    let mut print = |text: &str| {
        if is_printed {
            print!("{text}");
            // An error means that the reader has closed the pipe.
            let _ = std::io::stdout().flush();
        }
    };
    print(&arguments.prompt);
    if matches!(text, crate::text::Text::Numbers) {
        print(": ");
    }
    let mut write = text.writer(&mut print);
    let outcome = generator.run(prompt, arguments.tokens, &mut |token| {
        let is_last = text.is_end(token) && !arguments.ignore_end;
        write(token)?;
        Ok(is_last)
    })?;
    drop(write);
    print("\n");
    Ok(outcome)
}

/// Gathers the ranks' measurements, which rank 0 prints.
fn report(comm: &Comm, backend: &str, outcomes: &[Outcome]) -> Result {
    // The digest goes in two halves as f64, because candle has no u64.
    let digest = outcomes[0].digest;
    let own = [
        median(outcomes, |outcome| outcome.prompt.spent.seconds / outcome.prompt.seconds),
        median(outcomes, |outcome| outcome.decode.spent.seconds / outcome.decode.seconds),
        (digest >> 32) as f64,
        (digest & 0xffff_ffff) as f64,
    ];
    let all = AllGather::new(comm, 0).forward(&Tensor::new(&[own], &Device::Cpu)?)?.to_vec2::<f64>()?;
    if comm.rank() != 0 {
        return Ok(());
    }
    let digest = all.iter().fold(0u64, |sum, rank| sum.wrapping_add((rank[2] as u64) << 32 | rank[3] as u64));
    let ranks = comm.world_size();
    for (index, phase) in
        [|outcome: &Outcome| outcome.prompt, |outcome: &Outcome| outcome.decode].into_iter().enumerate()
    {
        let Phase { tokens, spent, .. } = phase(&outcomes[0]);
        if tokens == 0 {
            continue;
        }
        let seconds = median(outcomes, |outcome| phase(outcome).seconds);
        let shares: Vec<_> = all.iter().map(|rank| 100.0 * rank[index]).collect();
        let (least, most) =
            (shares.iter().copied().fold(f64::MAX, f64::min), shares.iter().copied().fold(0.0, f64::max));
        println!(
            "# {backend}, {}, {}: {tokens} tokens in {seconds:.3} s, {:.1} tokens/s; \
             allreduce {:.1} % ({least:.1} to {most:.1} by rank): {} calls of {} bytes",
            if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") },
            ["prompt", "decode"][index],
            tokens as f64 / seconds,
            shares.iter().sum::<f64>() / ranks as f64,
            spent.calls,
            spent.bytes.checked_div(spent.calls).unwrap_or(0),
        );
    }
    println!(
        "# tokens {:016x}, logits {digest:016x}",
        outcomes[0].tokens.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &token| {
            (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3)
        })
    );
    Ok(())
}

fn median(outcomes: &[Outcome], of: impl Fn(&Outcome) -> f64) -> f64 {
    let mut values: Vec<_> = outcomes.iter().map(of).filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
