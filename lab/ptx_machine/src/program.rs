//! A module that can be launched. Its functions are compiled when they are first needed.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::AtomicU8;
use std::sync::{Arc, Mutex, PoisonError};

use cranelift_codegen::settings::{self, Configurable};
use cranelift_codegen::Context as Codegen;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use cranelift_jit::{JITBuilder, JITModule};
use cranelift_module::{FuncId, Linkage, Module as _};

use crate::context::Context;
use crate::errors::{LoadError, LoadResult};
use crate::flow::analysis::Flow;
use crate::flow::dead::dead_blocks;
use crate::ir::{Function, Module};
use crate::launch::cluster;
use crate::lower::{self, Around, Facts, Helpers, Watch};
use crate::memory::multimem;
use crate::{runtime, soft};

/// Compiled code of a kernel; see `lower`.
pub(crate) type Step = unsafe extern "C" fn(*mut u8, *mut Context) -> u32;

/// A compiled kernel.
pub(crate) struct Kernel {
    pub number: usize,
    pub step: Step,
    pub facts: Facts,
    /// For each coverage place: whether it has been reached.
    pub covered: Box<[AtomicU8]>,
}

/// A loaded module.
pub struct Program {
    pub(crate) module: Module,
    jit: Mutex<Jit>,
    /// Facts about the functions that kernels call, concatenated.
    pub(crate) function_facts: Facts,
    pub(crate) function_covered: Box<[AtomicU8]>,
    /// The module's variables, in host memory.
    pub(crate) data: Data,
    watch: Watch,
}

/// What is allowed to modules of others.
#[derive(Debug, Clone, Copy)]
struct Foreign {
    unwritten: bool,
}

/// Memory of variables, 16-byte aligned. Kernels on several threads write to it, as on a GPU.
pub(crate) struct Data(Box<[std::cell::UnsafeCell<u128>]>);

// SAFETY: the host reads only the address. Kernels synchronise their accesses themselves, as for all device
// memory.
unsafe impl Sync for Data {}
// SAFETY: as for `Sync`.
unsafe impl Send for Data {}

impl Data {
    fn new(bytes: &[u8]) -> Self {
        let words = bytes.chunks(16).map(|chunk| {
            let mut word = [0; 16];
            word[..chunk.len()].copy_from_slice(chunk);
            std::cell::UnsafeCell::new(u128::from_le_bytes(word))
        });
        Self(words.collect())
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }
}

struct Jit {
    module: JITModule,
    unwritten: bool,
    ids: HashMap<String, FuncId>,
    kernels: HashMap<usize, Arc<Kernel>>,
    builder: FunctionBuilderContext,
}

impl Program {
    /// Parses and checks a module. `observed`: its launches can detect races.
    ///
    /// # Errors
    ///
    /// Unknown or wrong text, with its line.
    pub fn load(text: &str, observed: bool) -> LoadResult<Self> {
        Self::load_for(text, if observed { Watch::Races } else { Watch::Nobody }, None)
    }

    /// Parses and checks a module for the clock. Its launches can only be timed.
    ///
    /// # Errors
    ///
    /// See [`Self::load`].
    pub fn load_timed(text: &str) -> LoadResult<Self> {
        Self::load_for(text, Watch::Clock, None)
    }

    /// Parses and checks a module of others, which may contain instructions that a GPU approximates (such as
    /// `rsqrt.approx`); the machine rounds their exact results. `timed`: for the clock; otherwise its
    /// launches can detect races. `unwritten`: registers that are read before they are written are zero.
    ///
    /// # Errors
    ///
    /// See [`Self::load`].
    pub fn load_foreign(text: &str, timed: bool, unwritten: bool) -> LoadResult<Self> {
        let watch = if timed { Watch::Clock } else { Watch::Races };
        Self::load_for(text, watch, Some(Foreign { unwritten }))
    }

    fn load_for(text: &str, watch: Watch, foreign: Option<Foreign>) -> LoadResult<Self> {
        // The clock times a thread from one stop to the next, within one function.
        let module = crate::parse(text, watch == Watch::Clock, foreign.is_some())?;
        let mut jit = Jit::new(foreign.is_some_and(|foreign| foreign.unwritten))
            .map_err(|what| LoadError::new(0, what))?;
        let mut facts = Facts::default();
        for (number, function) in module.functions.iter().enumerate() {
            if !function.is_entry {
                jit.function(&module, number, &mut facts, watch)?;
            }
        }
        let covered = facts.covers.iter().map(|_| AtomicU8::new(0)).collect();
        let data = Data::new(&module.data);
        Ok(Self {
            module,
            jit: Mutex::new(jit),
            function_facts: facts,
            function_covered: covered,
            data,
            watch,
        })
    }

    /// Returns whether launches can detect races.
    pub fn is_observed(&self) -> bool {
        self.watch == Watch::Races
    }

    /// Returns whether launches can be timed.
    pub(crate) fn is_timed(&self) -> bool {
        self.watch == Watch::Clock
    }

    /// Returns offset and size of each parameter of a kernel; None if there is no such kernel.
    pub fn parameters(&self, name: &str) -> Option<&[(u32, u32)]> {
        self.entry(name).map(|(_, function)| &function.params[..])
    }

    /// Returns the unreachable instructions of a kernel: function and index.
    pub(crate) fn dead(&self, kernel: &str) -> LoadResult<BTreeSet<(u32, u32)>> {
        let Some((number, function)) = self.entry(kernel) else { return Ok(BTreeSet::new()) };
        let flow = Flow::of(function)?;
        let blocks = dead_blocks(function, &flow).into_iter().zip(&flow.blocks).filter(|(dead, _)| *dead);
        let all =
            blocks.flat_map(|(_, block)| (block.first..block.last).map(|at| (number as u32, at as u32)));
        Ok(all.collect())
    }

    /// Returns the source file and line of a function's instruction.
    pub(crate) fn source_of(&self, function: usize, at: usize) -> String {
        let loc = self.module.functions[function].code[at].loc;
        let file = self.module.files.get(&loc.file).map_or("?", String::as_str);
        format!("{}:{}", file.rsplit('/').next().unwrap_or(file), loc.line)
    }

    /// Returns the names of the kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.module
            .functions
            .iter()
            .filter(|function| function.is_entry)
            .map(|function| function.name.as_str())
    }

    /// Compiles a kernel, unless it is already compiled.
    ///
    /// # Errors
    ///
    /// An instruction that cannot be compiled.
    pub fn compile(&self, name: &str) -> LoadResult<()> {
        self.kernel(name).map(|_| ())
    }

    pub(crate) fn entry(&self, name: &str) -> Option<(usize, &Function)> {
        let number = *self.module.by_name.get(name)?;
        let function = &self.module.functions[number];
        function.is_entry.then_some((number, function))
    }

    pub(crate) fn kernel(&self, name: &str) -> LoadResult<Arc<Kernel>> {
        let Some((number, _)) = self.entry(name) else {
            return Err(LoadError::new(0, format!("there is no kernel {name}")));
        };
        let mut jit = self.jit.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = jit.kernels.get(&number) {
            return Ok(Arc::clone(kernel));
        }
        let mut facts = Facts::default();
        let code = jit.function(&self.module, number, &mut facts, self.watch)?;
        // SAFETY: `function` compiled the code with the parameters and the result of a `Step`.
        let step = unsafe { std::mem::transmute::<*const u8, Step>(code) };
        let covered = facts.covers.iter().map(|_| AtomicU8::new(0)).collect();
        let kernel = Arc::new(Kernel { number, step, facts, covered });
        jit.kernels.insert(number, Arc::clone(&kernel));
        Ok(kernel)
    }
}

impl Jit {
    fn new(unwritten: bool) -> Result<Self, String> {
        let mut flags = settings::builder();
        let values = [
            ("opt_level", "speed"),
            ("enable_verifier", if cfg!(debug_assertions) { "true" } else { "false" }),
        ];
        for (name, value) in values {
            flags.set(name, value).map_err(|error| error.to_string())?;
        }
        let isa = cranelift_native::builder()?
            .finish(settings::Flags::new(flags))
            .map_err(|error| error.to_string())?;
        let mut builder = JITBuilder::with_isa(isa, cranelift_module::default_libcall_names());
        let symbols: [(&str, *const u8); 12] = [
            ("access", runtime::access as *const u8),
            ("shared", runtime::shared as *const u8),
            ("observe", runtime::observe as *const u8),
            ("hold", runtime::hold as *const u8),
            ("is_in", runtime::is_in as *const u8),
            ("fault", runtime::fault as *const u8),
            ("float", soft::float as *const u8),
            ("convert", soft::convert as *const u8),
            ("atomic", soft::atomic as *const u8),
            ("multimem", multimem::multimem as *const u8),
            ("timer", runtime::timer as *const u8),
            ("cluster", cluster::cluster as *const u8),
        ];
        builder.symbols(symbols);
        let module = JITModule::new(builder);
        Ok(Self {
            module,
            unwritten,
            ids: HashMap::new(),
            kernels: HashMap::new(),
            builder: FunctionBuilderContext::new(),
        })
    }

    /// Compiles a function whose callees are compiled, and adds to the facts.
    fn function(
        &mut self,
        module: &Module,
        number: usize,
        facts: &mut Facts,
        watch: Watch,
    ) -> LoadResult<*const u8> {
        let function = &module.functions[number];
        let flow = Flow::of(function)?;
        let failed = |error: cranelift_module::ModuleError| {
            LoadError::new(function.line, format!("{}: {error:?}", function.name))
        };
        let mut codegen: Codegen = self.module.make_context();
        lower::signature(function.is_entry, &mut codegen.func.signature);
        let name = format!("ptx {}", function.name);
        let id =
            self.module.declare_function(&name, Linkage::Export, &codegen.func.signature).map_err(failed)?;
        let helpers = self.helpers(&mut codegen.func).map_err(failed)?;
        let mut callees = HashMap::new();
        for instr in &function.code {
            if let crate::ir::Op::Call { name, .. } = &instr.op {
                let callee = module.by_name.get(name).map(|&callee| &module.functions[callee]);
                if let (Some(callee), Some(&id), false) =
                    (callee, self.ids.get(name), callees.contains_key(name))
                {
                    callees.insert(
                        name.clone(),
                        (self.module.declare_func_in_func(id, &mut codegen.func), callee),
                    );
                }
            }
        }
        let builder = FunctionBuilder::new(&mut codegen.func, &mut self.builder);
        let target = self.module.target_config();
        let (dynamic, unwritten) = (module.dynamic_shared(), self.unwritten);
        let around = Around {
            number,
            function,
            flow: &flow,
            helpers,
            callees: &callees,
            watch,
            target,
            dynamic,
            unwritten,
        };
        *facts = lower::lower(builder, around, facts)?;
        self.module.define_function(id, &mut codegen).map_err(failed)?;
        self.module.clear_context(&mut codegen);
        self.module.finalize_definitions().map_err(failed)?;
        self.ids.insert(function.name.clone(), id);
        Ok(self.module.get_finalized_function(id))
    }

    #[allow(clippy::result_large_err)] // Called once for each function.
    fn helpers(
        &mut self,
        func: &mut cranelift_codegen::ir::Function,
    ) -> Result<Helpers, cranelift_module::ModuleError> {
        use cranelift_codegen::ir::types::{I32, I64};
        use cranelift_codegen::ir::AbiParam;
        let mut import = |name: &str,
                          params: &[cranelift_codegen::ir::Type],
                          returns: Option<cranelift_codegen::ir::Type>| {
            let mut signature = self.module.make_signature();
            signature.params.extend(params.iter().map(|&ty| AbiParam::new(ty)));
            signature.returns.extend(returns.map(AbiParam::new));
            let id = self.module.declare_function(name, Linkage::Import, &signature)?;
            Ok::<_, cranelift_module::ModuleError>(self.module.declare_func_in_func(id, func))
        };
        Ok(Helpers {
            access: import("access", &[I64, I64, I32, I32, I64, I64], Some(I32))?,
            shared: import("shared", &[I64, I64, I32, I32, I64], Some(I32))?,
            observe: import("observe", &[I64, I64, I32, I32, I64], Some(I32))?,
            hold: import("hold", &[I64, I64, I32, I64], Some(I32))?,
            is_in: import("is_in", &[I64, I64, I32], Some(I32))?,
            fault: import("fault", &[I64, I32, I64], None)?,
            float: import("float", &[I32, I32, I32, I32], Some(I32))?,
            convert: import("convert", &[I32, I64], Some(I64))?,
            atomic: import("atomic", &[I32, I64, I64], Some(I64))?,
            multimem: import("multimem", &[I64, I64, I32, I32, I64], Some(I32))?,
            timer: import("timer", &[], Some(I64))?,
            cluster: import("cluster", &[I64, I32, I64, I32], Some(I64))?,
        })
    }
}
