//! Runs any kernel in the clock, or with race detection, with a launch that the command line describes:
//! `ptx-clock --foreign kernels.ptx --kernel NAME ...` (lab/gpu-model.md has examples).

mod value;

use std::path::PathBuf;

use clap::Parser;
use fast_allreduce_ptx_machine::clock::{self, Chain};
use fast_allreduce_ptx_machine::{Launch, Program, Range, Settings};

use crate::export::{Expected, Export};
use crate::world::{homes, Bytes, Reach};
use crate::{detail, MachineArguments};
use value::{number, value, Addresses, Who};

/// Runs a kernel of any PTX between ranks, and predicts the time of a call.
#[derive(Parser)]
#[command(name = "ptx-clock --foreign")]
struct Arguments {
    /// PTX of any origin.
    ptx: PathBuf,
    /// Prints the names of the kernels with the sizes of their parameters, and exits.
    #[arg(long)]
    list: bool,
    /// The kernel's name, or a part that only its name has.
    #[arg(long, default_value = "")]
    kernel: String,
    #[command(flatten)]
    machine: MachineArguments,
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    ranks: u32,
    /// Blocks: `x,y,z`; missing ones are 1.
    #[arg(long, default_value = "1", value_parser = extents)]
    grid: [u32; 3],
    /// Threads of each block.
    #[arg(long, default_value = "32", value_parser = extents)]
    block: [u32; 3],
    /// Blocks of each cluster.
    #[arg(long, default_value = "1", value_parser = extents)]
    cluster: [u32; 3],
    /// Bytes of dynamic shared memory.
    #[arg(long, default_value_t = 0)]
    shared: u32,
    /// A buffer of each rank, `NAME=BYTES` or `NAME=BYTES:VALUE`, filled with zeros or with the repeated value.
    /// Values are lists of `[TYPE:]TERM[+OFFSET][*COUNT]`, laid out as the members of a struct. Types: u8, u16,
    /// u32, u64, f16, bf16, f32. Terms: numbers; rank, ranks, sum (1 + ... + ranks); addresses of buffers NAME,
    /// NAME@RANK, NAME@next, NAME@all, NAME@multicast.
    #[arg(long)]
    buffer: Vec<String>,
    /// Writes a value into a buffer before the first call: `NAME+OFFSET=VALUE`.
    #[arg(long)]
    put: Vec<String>,
    /// The next argument of the kernel: a value.
    #[arg(long)]
    arg: Vec<String>,
    /// Fails unless a buffer of each rank consists of copies of a value after the last call: `NAME=VALUE`. Zeros count
    /// as right if not all blocks are simulated.
    #[arg(long)]
    expect: Vec<String>,
    /// Registers that are read before they are written are zero instead of an error.
    #[arg(long)]
    unwritten: bool,
    /// Number of consecutive calls.
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// Number of simulated blocks of each rank; 0: all. Fewer only for kernels whose blocks work alike and
    /// communicate only with those of the same number.
    #[arg(long, default_value_t = 0)]
    simulate: u32,
    /// Launches kernels in a stream instead of a graph.
    #[arg(long)]
    stream: bool,
    /// Launches with the attribute for programmatic dependent launch.
    #[arg(long)]
    programmatic: bool,
    /// Instead of the clock: detects data races, in this many orders of the threads' turns, each with new memory.
    #[arg(long)]
    race: Option<u64>,
    /// Shows the critical path of the last call, step by step.
    #[arg(long)]
    path: bool,
    /// Writes the call to this file, for replay.py.
    #[arg(long, requires = "expect")]
    export: Option<PathBuf>,
}

fn extents(text: &str) -> Result<[u32; 3], String> {
    let mut extents = [1; 3];
    let parts: Vec<&str> = text.split(',').collect();
    if parts.len() > 3 {
        return Err(format!("{text} has more than three numbers"));
    }
    for (extent, part) in extents.iter_mut().zip(parts) {
        *extent = part.parse().ok().filter(|&n| n > 0).ok_or_else(|| format!("{part:?} is not a number"))?;
    }
    Ok(extents)
}

/// A buffer of each rank.
struct Buffer {
    name: String,
    bytes: usize,
    all: Vec<Bytes>,
    /// Addresses that stand for all ranks' buffers; memory is only reserved there.
    multicast: Bytes,
}

struct Buffers(Vec<Buffer>);

impl Addresses for Buffers {
    fn of(&self, name: &str, rank: usize) -> Option<u64> {
        self.find(name).map(|buffer| buffer.all[rank].address())
    }

    fn multicast(&self, name: &str) -> Option<u64> {
        self.find(name).map(|buffer| buffer.multicast.address())
    }
}

impl Buffers {
    fn find(&self, name: &str) -> Option<&Buffer> {
        self.0.iter().find(|buffer| buffer.name == name)
    }

    /// Allocates the buffers, then fills them: their values may have addresses of each other.
    fn new(arguments: &Arguments) -> Result<Self, String> {
        let ranks = arguments.ranks as usize;
        let mut buffers = Self(Vec::new());
        let mut fills = Vec::new();
        for text in &arguments.buffer {
            let wrong = || format!("--buffer {text}: expected NAME=BYTES or NAME=BYTES:VALUE");
            let (name, rest) = text.split_once('=').ok_or_else(wrong)?;
            let (bytes, fill) = match rest.split_once(':') {
                Some((bytes, fill)) => (bytes, Some(fill)),
                None => (rest, None),
            };
            let bytes =
                number(bytes).filter(|&bytes| bytes > 0 && bytes <= 1 << 32).ok_or_else(wrong)? as usize;
            if buffers.find(name).is_some() || matches!(name, "" | "rank" | "ranks" | "sum") {
                return Err(format!("--buffer {text}: this name is taken"));
            }
            fills.extend(fill.map(|fill| (name, 0, bytes, fill)));
            let all = (0..ranks).map(|_| Bytes::new(bytes)).collect();
            buffers.0.push(Buffer { name: name.to_owned(), bytes, all, multicast: Bytes::new(bytes) });
        }
        for text in &arguments.put {
            let wrong = || format!("--put {text}: expected NAME+OFFSET=VALUE");
            let (place, fill) = text.split_once('=').ok_or_else(wrong)?;
            let (name, offset) = place.split_once('+').unwrap_or((place, "0"));
            let offset = number(offset).ok_or_else(wrong)? as usize;
            fills.push((name, offset, 0, fill));
        }
        for (name, offset, bytes, fill) in fills {
            for rank in 0..ranks {
                let own = value(fill, Who { rank, ranks }, &buffers)?;
                let repeated = own.repeat((bytes / own.len()).max(1));
                let buffer = buffers.0.iter_mut().find(|buffer| buffer.name == name);
                let buffer = buffer.ok_or_else(|| format!("there is no buffer {name}"))?;
                if offset.saturating_add(repeated.len()) > buffer.bytes {
                    return Err(format!("{fill} does not fit into {name}"));
                }
                buffer.all[rank].put(offset, &repeated);
            }
        }
        Ok(buffers)
    }

    fn reach(&self) -> Reach {
        let all: Vec<&[Bytes]> = self.0.iter().map(|buffer| &buffer.all[..]).collect();
        let multicast = self.0.iter().map(|buffer| {
            (buffer.multicast.range(), buffer.all.iter().map(Bytes::address).collect::<Vec<u64>>())
        });
        Reach { homes: homes(&all), multicast: multicast.collect() }
    }

    /// Returns the buffer of `NAME=VALUE`, and the value for each rank.
    fn expected(&self, text: &str, ranks: usize) -> Result<(&Buffer, Vec<Vec<u8>>), String> {
        let (name, wanted) = text.split_once('=').ok_or_else(|| format!("--expect {text}: no NAME=VALUE"))?;
        let buffer = self.find(name).ok_or_else(|| format!("there is no buffer {name}"))?;
        let values = (0..ranks).map(|rank| value(wanted, Who { rank, ranks }, self));
        let values: Vec<Vec<u8>> = values.collect::<Result<_, _>>()?;
        match values.iter().find(|value| buffer.bytes % value.len() != 0) {
            Some(value) => Err(format!("--expect {text}: {} bytes do not divide {name}", value.len())),
            None => Ok((buffer, values)),
        }
    }

    /// Fails unless a buffer consists of copies of a value, or zeros if only a sample of the blocks has run.
    fn expect(&self, text: &str, ranks: usize, sample: bool) -> Result<(), String> {
        let (buffer, values) = self.expected(text, ranks)?;
        let name = &buffer.name;
        for (rank, one) in values.iter().enumerate() {
            let found = &buffer.all[rank].bytes()[..buffer.bytes];
            let others = found.chunks_exact(one.len()).enumerate().filter(|(_, own)| {
                let is_unwritten = sample && own.iter().all(|&byte| byte == 0);
                *own != one && !is_unwritten
            });
            if let Some((i, own)) = others.clone().next() {
                let (of, wrong) = (found.len() / one.len(), others.count());
                return Err(format!(
                    "{wrong} of {of} values of {name} of rank {rank} differ; value {i} is {own:02x?}, not {one:02x?}"
                ));
            }
        }
        Ok(())
    }
}

/// Returns the one kernel whose name is, or contains, the given text.
fn kernel(program: &Program, wanted: &str) -> Result<String, String> {
    if program.kernels().any(|name| name == wanted) {
        return Ok(wanted.to_owned());
    }
    let found: Vec<&str> = program.kernels().filter(|name| name.contains(wanted)).collect();
    match found[..] {
        [one] => Ok(one.to_owned()),
        _ => Err(format!("{} kernels have {wanted:?} in their names; --list prints them", found.len())),
    }
}

/// Returns a rank's parameters.
fn params(
    arguments: &Arguments,
    sizes: &[(u32, u32)],
    who: Who,
    buffers: &Buffers,
) -> Result<Vec<u8>, String> {
    if arguments.arg.len() != sizes.len() {
        return Err(format!("{} arguments, where the kernel has {}", arguments.arg.len(), sizes.len()));
    }
    let mut params = vec![0; sizes.last().map_or(0, |&(offset, bytes)| (offset + bytes) as usize)];
    for (i, (text, &(offset, bytes))) in arguments.arg.iter().zip(sizes).enumerate() {
        let own = value(text, who, buffers)?;
        if own.len() > bytes as usize || own.len() + 8 <= bytes as usize {
            return Err(format!("argument {i} has {} bytes, where the kernel takes {bytes}", own.len()));
        }
        params[offset as usize..][..own.len()].copy_from_slice(&own);
    }
    Ok(params)
}

/// Runs the command with its command line, without `--foreign`.
///
/// # Errors
///
/// Arguments that do not fit, faults of the kernel, and buffers that are not as expected.
pub fn run(line: impl Iterator<Item = String>) -> Result<(), String> {
    let arguments = Arguments::parse_from(line);
    let text = std::fs::read_to_string(&arguments.ptx);
    let text = text.map_err(|error| format!("{}: {error}", arguments.ptx.display()))?;
    let program = Program::load_foreign(&text, arguments.race.is_none(), arguments.unwritten)
        .map_err(|error| format!("{}: {error}", arguments.ptx.display()))?;
    if arguments.list {
        for name in program.kernels() {
            let sizes: Vec<u32> =
                program.parameters(name).unwrap_or_default().iter().map(|&(_, bytes)| bytes).collect();
            println!("{name} {sizes:?}");
        }
        return Ok(());
    }
    let kernel = kernel(&program, &arguments.kernel)?;
    match arguments.race {
        Some(orders) => {
            for seed in 0..orders.max(1) {
                let call = Call::new(&arguments, &program, &kernel)?;
                let settings = Settings { seed, race: true, ..Settings::default() };
                for _ in 0..arguments.turns {
                    program
                        .launch(&call.launches(&arguments, &kernel), settings)
                        .map_err(|e| e.to_string())?;
                }
                call.check(&arguments)?;
            }
            println!("{kernel}: no race in {} orders", orders.max(1));
            Ok(())
        }
        None => time(&arguments, &program, &kernel),
    }
}

/// Memory and parameters of all ranks.
struct Call {
    buffers: Buffers,
    params: Vec<Vec<u8>>,
    reach: Reach,
}

impl Call {
    fn new(arguments: &Arguments, program: &Program, kernel: &str) -> Result<Self, String> {
        let ranks = arguments.ranks as usize;
        let buffers = Buffers::new(arguments)?;
        let sizes = program.parameters(kernel).unwrap_or_default();
        let params: Result<Vec<Vec<u8>>, String> =
            (0..ranks).map(|rank| params(arguments, sizes, Who { rank, ranks }, &buffers)).collect();
        Ok(Self { params: params?, reach: buffers.reach(), buffers })
    }

    fn launches<'a>(&'a self, arguments: &Arguments, kernel: &'a str) -> Vec<Launch<'a>> {
        let launch = |params: &'a Vec<u8>| Launch {
            kernel,
            grid: arguments.grid,
            block: arguments.block,
            cluster: arguments.cluster,
            dynamic_shared: arguments.shared,
            params,
            memory: &self.reach,
        };
        self.params.iter().map(launch).collect()
    }

    fn expected(&self, arguments: &Arguments) -> Result<Vec<Expected>, String> {
        let mut all = Vec::new();
        for text in &arguments.expect {
            let (buffer, values) = self.buffers.expected(text, arguments.ranks as usize)?;
            let range = |own: &Bytes| Range { low: own.address(), bytes: buffer.bytes as u64 };
            let each = buffer.all.iter().zip(values);
            all.extend(each.map(|(own, value)| Expected { range: range(own), value }));
        }
        Ok(all)
    }

    fn check(&self, arguments: &Arguments) -> Result<(), String> {
        let (ranks, sample) = (arguments.ranks as usize, arguments.simulate > 0 && arguments.race.is_none());
        arguments.expect.iter().try_for_each(|text| self.buffers.expect(text, ranks, sample))
    }
}

fn time(arguments: &Arguments, program: &Program, kernel: &str) -> Result<(), String> {
    let machine = arguments.machine.machine_of(arguments.ranks as usize)?;
    let call = Call::new(arguments, program, kernel)?;
    let touched: usize = call.buffers.0.iter().map(|buffer| buffer.bytes).sum();
    let launches = call.launches(arguments, kernel);
    // SAFETY: the ranges are those of the call's own buffers, and no kernel runs.
    let export = |to| unsafe { (Export::of(&arguments.ptx, program, &launches, &call.reach.homes), to) };
    let export = arguments.export.as_ref().map(export);
    let chain = Chain {
        calls: &launches,
        homes: &call.reach.homes,
        turns: arguments.turns,
        blocks: arguments.simulate,
        gap_ns: if arguments.stream { machine.launch_ns } else { machine.node_ns },
        programmatic: arguments.programmatic,
        resident: touched as f64 <= machine.l2_bytes,
    };
    let timing = clock::time(program, &machine, &chain).map_err(|error| error.to_string())?;
    if timing.evenness < clock::EVEN {
        return Err(format!(
            "the simulated blocks' work differs ({:.0} %), so they do not stand for the others: --simulate 0",
            timing.evenness * 100.0
        ));
    }
    println!("{kernel}: {:.2} us", timing.call_ns / 1e3);
    detail(&timing, arguments.path);
    call.check(arguments)?;
    match export {
        Some((export, to)) => export.write(to, arguments.programmatic, &timing, &call.expected(arguments)?),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of two ranks signals the other, waits, and adds both inputs. `ld.ORDER` reads the signal.
    const EXCHANGE: &str = "
.version 9.0
.target sm_90
.address_size 64
.visible .entry exchange(.param .align 8 .b8 inputs[16], .param .u64 flags, .param .u64 peer, .param .u64 out)
{
.reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %d<8>;
ld.param.u64 %d0, [inputs]; ld.param.u64 %d1, [inputs+8]; ld.param.u64 %d2, [flags]; ld.param.u64 %d3, [peer];
ld.param.u64 %d4, [out];
st.global.u32 [%d3+64], 5; st.release.sys.global.u32 [%d3], 1;
WAIT: ld.ORDER.sys.global.u32 %r1, [%d2]; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT;
ld.global.u32 %r2, [%d0]; ld.global.u32 %r3, [%d1]; ld.global.u32 %r4, [%d2+64];
add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; st.global.u32 [%d4], %r2;
ret;
}
";

    /// Runs the command on a file of its own.
    fn command(name: &str, order: &str, more: &[&str]) -> Result<(), String> {
        let path = std::env::temp_dir().join(format!("ptx-clock-{}-{name}.ptx", std::process::id()));
        std::fs::write(&path, EXCHANGE.replace("ORDER", order)).unwrap();
        let line = ["ptx-clock", path.to_str().unwrap(), "--block", "1", "--turns", "1"];
        let buffers = ["--buffer", "in=16:rank+1", "--buffer", "flag=128", "--buffer", "out=4"];
        let arguments = ["--arg", "in@all", "--arg", "flag", "--arg", "flag@next", "--arg", "out"];
        let all = line.iter().chain(&buffers).chain(&arguments).chain(more);
        let result = run(all.map(|word| (*word).to_owned()));
        std::fs::remove_file(&path).unwrap();
        result
    }

    #[test]
    fn ranks_exchange_in_the_clock_and_with_race_detection() {
        command("clock", "acquire", &["--expect", "out=sum+5"]).unwrap();
        command("race", "acquire", &["--race", "4", "--kernel", "exch", "--expect", "out=8"]).unwrap();
        let error = command("relaxed", "relaxed", &["--race", "1"]).unwrap_err();
        assert!(error.contains("data race"), "{error}");
    }

    #[test]
    fn a_call_is_exported_as_it_was_before_it_ran() {
        let to = std::env::temp_dir().join(format!("ptx-clock-{}-export.json", std::process::id()));
        let more = ["--export", to.to_str().unwrap(), "--expect", "out=sum+5", "--one-gpu"];
        command("export", "acquire", &more).unwrap();
        let text = std::fs::read_to_string(&to).unwrap();
        std::fs::remove_file(&to).unwrap();
        assert!(text.contains(r#""kernel":"exchange","grid":[1, 1, 1],"block":[1, 1, 1]"#), "{text}");
        assert!(text.contains(r#""parameters":[[0,16],[16,8],[24,8],[32,8]]"#), "{text}");
        // Inputs of ranks 0 and 1, twice 1 and twice 2; then flags and outputs, still zero; then the results.
        let twice = |value: u64| format!(",128,[[0,{},2]]]", value << 32 | value);
        assert!(text.contains(&twice(1)) && text.contains(&twice(2)), "{text}");
        assert_eq!(
            (text.matches(",[]]").count(), text.matches(",4,\"08000000\"]").count()),
            (4, 2),
            "{text}"
        );
    }

    #[test]
    fn only_written_values_are_compared_if_blocks_are_left_out() {
        let more = ["--buffer", "none=4", "--expect", "none=1", "--expect", "out=8", "--grid", "3"];
        assert!(command("all", "acquire", &more).unwrap_err().contains("differ"));
        command("some", "acquire", &[&more[..], &["--simulate", "2"]].concat()).unwrap();
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        for (i, (more, what)) in [
            (&["--expect", "out=9"][..], "1 of 1 values of out of rank 0 differ"),
            (&["--kernel", "other"], "0 kernels"),
            (&["--arg", "out"], "5 arguments, where the kernel has 4"),
            (&["--buffer", "in=4"], "this name is taken"),
            (&["--buffer", "sum=4"], "this name is taken"),
            (&["--buffer", "x=0"], "expected NAME=BYTES"),
            (&["--put", "in+16=1"], "does not fit"),
            (&["--put", "in=1*0"], "the count is 1"),
            (&["--expect", "out=8*2"], "8 bytes do not divide out"),
            (&["--expect", "in=u8:1*3"], "3 bytes do not divide in"),
            (&["--put", "none=1"], "no buffer none"),
            (&["--machine", "h101"], "no machine h101"),
            (&["--cluster", "2"], "in clusters of"),
        ]
        .into_iter()
        .enumerate()
        {
            let error = command(&format!("wrong{i}"), "acquire", more).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }
}
