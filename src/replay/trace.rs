//! A trace: the allocations of a job, and what its operators cost.

/// Purpose of a tensor. A new tensor gets the category of the thread that allocates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(i32)]
pub enum Category {
    /// Intermediate results, and what autograd saves of them.
    Activations = 0,
    /// Weights that are not trained.
    Frozen = 1,
    /// Weights that are trained (fp32 masters).
    Trainable = 2,
    /// Gradients of trained weights.
    Gradients = 3,
    /// Optimizer state.
    Optimizer = 4,
    /// Moving average of the trained weights.
    Ema = 5,
    /// Batches.
    Inputs = 6,
    /// Buffers of checkpoint reading and writing.
    Workspace = 7,
}

/// All categories with their names, in the order of their numbers.
pub const CATEGORIES: [(Category, &str); 8] = [
    (Category::Activations, "activations"),
    (Category::Frozen, "frozen"),
    (Category::Trainable, "trainable"),
    (Category::Gradients, "gradients"),
    (Category::Optimizer, "optimizer"),
    (Category::Ema, "ema"),
    (Category::Inputs, "inputs"),
    (Category::Workspace, "workspace"),
];

/// Number of a module path. 0 is the root, which has no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModuleId(pub u32);

/// A change of a memory block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockChange {
    /// The block was allocated with this many bytes.
    Allocate(u64),
    /// The block was freed.
    Release,
    /// The block changed its category.
    Move,
}

/// One change of one memory block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEvent {
    /// Number of the block, from 0 in order of allocation.
    pub block: u32,
    /// Kind of event.
    pub change: BlockChange,
    /// Index into [`CATEGORIES`]; 0 for releases.
    pub category: u8,
    /// Index into [`Trace::ops`]; 0 when no operator ran.
    pub op: u16,
    /// Module that was running.
    pub module: ModuleId,
}

/// Arithmetic and memory traffic of one operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Floating-point operations of products, convolutions and attention; a multiply-add is two.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
    /// Bytes of one number of its inputs: 2 for bf16 and fp16, 4 for fp32.
    pub element_bytes: u8,
    /// Whether it is part of a backward pass.
    pub backward: bool,
    /// Index into [`Trace::ops`].
    pub op: u16,
    /// Module that was running. A backward operator has the module of its forward pass.
    pub module: ModuleId,
    /// Number of events before the operator ended.
    pub event: u32,
}

/// All changes of blocks and all operators of a job.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// Changes of blocks in order of time.
    pub events: Vec<TraceEvent>,
    /// Operators in order of time.
    pub costs: Vec<Cost>,
    /// Names of operators (`aten::mm`); the first is empty.
    pub ops: Vec<String>,
    /// Named points in time: name, number of events so far, number of costs so far.
    pub marks: Vec<(&'static str, usize, usize)>,
}
