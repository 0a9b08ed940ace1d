//! Rust declarations of the native layer's C ABI (`native/*.cpp`).

use prsmed_base::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use tch::{Kind, Tensor};

/// An `at::Tensor*`, as tch passes it.
pub(super) type RawTensor = *mut c_void;
/// Runs a checkpointed segment: see `native/autograd.cpp`.
pub(super) type RunSegment = extern "C" fn(*mut c_void, *mut RawTensor, i64, *mut *mut c_char) -> RawTensor;
/// Drops a checkpointed segment.
pub(super) type DropSegment = extern "C" fn(*mut c_void);

/// Handles the gradient of the parameter with that index. Returns null, or an error message from `strdup`. See
/// `native/hooks.cpp`.
pub(super) type GradientWork = extern "C" fn(*mut c_void, i64) -> *mut c_char;

/// A parameter of an AdamW step, as `native/optim.cpp` reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawSlot {
    pub param: RawTensor,
    pub grad: RawTensor,
    pub step: RawTensor,
    pub state: [RawTensor; 4],
}

/// Numbers of an AdamW step, as `native/optim.cpp` reads them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawAdamw {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub weight_decay: f64,
    pub epsilon: f64,
    pub rate: RawTensor,
    pub found_inf: RawTensor,
    pub signed_map: RawTensor,
    pub unsigned_map: RawTensor,
    pub chunk: i64,
}

/// A change of a memory block, as `native/trace.cpp` writes it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawEvent {
    pub bytes: u64,
    pub block: u32,
    pub module: u32,
    pub op: u16,
    pub category: u8,
    pub kind: u8,
    padding: u32,
}

/// Cost of an operator, as `native/trace.cpp` writes it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawCost {
    pub flops: f64,
    pub bytes: f64,
    pub module: u32,
    pub event: u32,
    pub op: u16,
    pub element_bytes: u8,
    pub backward: u8,
    padding: u32,
}

/// The current trace.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawTraceView {
    pub events: *const RawEvent,
    pub num_events: u64,
    pub costs: *const RawCost,
    pub num_costs: u64,
}

/// A live block of the ledger.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawBlock {
    pub bytes: u64,
    pub category: i32,
    pub module: u32,
}

/// State of the ledger at a failed allocation, as `native/ledger.cpp` writes it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawFailure {
    pub requested: u64,
    pub allocated: u64,
    pub reserved: u64,
    pub categories: [u64; 8],
    pub category: i32,
    pub module: u32,
    pub num_largest: i64,
    pub largest: [RawBlock; 10],
}

/// Memory of a GPU in bytes, as `native/memory.cpp` writes it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawDeviceMemory {
    pub allocated: u64,
    pub allocated_peak: u64,
    pub reserved: u64,
    pub reserved_peak: u64,
    pub requested: u64,
    pub requested_peak: u64,
    pub free: u64,
    pub total: u64,
}

/// An NF4 matrix, as `native/nf4.cpp` reads it. Pointers are null without double quantization.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct RawNf4 {
    pub packed: RawTensor,
    pub absmax: RawTensor,
    pub nested_absmax: RawTensor,
    pub nested_map: RawTensor,
    pub offset: f64,
    pub rows: i64,
    pub cols: i64,
}

/// Declares functions that return null, or a message for [`check`].
macro_rules! fallible {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?);)*) => {
        unsafe extern "C" { $($(#[$attribute])* pub(super) fn $name($($argument: $kind),*) -> *mut c_char;)* }
    };
}

fallible! {
    fn prsmed_device_limit(fraction: f64);
    fn prsmed_device_memory(index: i32, asks_driver: bool, out: *mut RawDeviceMemory);
    fn prsmed_device_reset_peaks(index: i32);
    fn prsmed_device_release_cache();
    fn prsmed_cudnn_version(out: *mut i64);
    fn prsmed_allow_tf32(is_allowed: bool);
    fn prsmed_kernel_times_begin(on_gpu: bool);
    fn prsmed_kernel_times_end(on_gpu: bool, out: *mut *mut c_char);
    fn prsmed_is_ieee_fp32(out: *mut bool);
    fn prsmed_set_deterministic(is_on: bool);
    fn prsmed_group_shutdown(group: *mut c_void);
    fn prsmed_module_follow();
    fn prsmed_trace_begin(counts_host: bool, costs: bool);
    fn prsmed_meta_install();
    fn prsmed_checkpoint(closure: *mut c_void, run: RunSegment, drop: DropSegment, inputs: *mut RawTensor, count: i64,
        out: *mut RawTensor);
    fn prsmed_gelu_conv(xs: RawTensor, weight: RawTensor, bias: RawTensor, stride: i64, padding: i64, groups: i64,
        out: *mut RawTensor);
    fn prsmed_gelu_linear(xs: RawTensor, weight: RawTensor, bias: RawTensor, out: *mut RawTensor);
    fn prsmed_nf4_quantize(dense: RawTensor, into: *const RawNf4, offset: *mut f64);
    fn prsmed_nf4_dequantize(weight: *const RawNf4, kind: i32, composed: bool, out: *mut RawTensor);
    fn prsmed_nf4_linear(xs: RawTensor, weight: *const RawNf4, bias: RawTensor, out: *mut RawTensor);
    fn prsmed_linear_cross_entropy(rows: RawTensor, weight: RawTensor, labels: RawTensor, chunk: i64,
        out: *mut RawTensor);
    fn prsmed_rms_norm(xs: RawTensor, weight: RawTensor, eps: f64, out: *mut RawTensor);
    fn prsmed_swiglu(gate: RawTensor, up: RawTensor, out: *mut RawTensor);
    fn prsmed_low_rank(ys: *mut RawTensor, xs: RawTensor, a: *mut RawTensor, b: *mut RawTensor, count: i64, scale: f64,
        dropout: f64, out: *mut RawTensor);
    fn prsmed_rotate(xs: RawTensor, cos: RawTensor, sin: RawTensor, out: *mut RawTensor);
    fn prsmed_packed_bias(blocks: RawTensor, kind: i32, out: *mut RawTensor);
    fn prsmed_keeps_groups(q: RawTensor, k: RawTensor, v: RawTensor, mask: RawTensor, causal: bool, out: *mut bool);
    fn prsmed_grouped_attention(q: RawTensor, k: RawTensor, v: RawTensor, mask: RawTensor, causal: bool,
        out: *mut RawTensor);
    fn prsmed_takes_segments(xs: RawTensor, heads: i64, groups: i64, out: *mut bool);
    fn prsmed_packed_attention(q: RawTensor, k: RawTensor, v: RawTensor, from: RawTensor, to: RawTensor,
        queries: RawTensor, keys: RawTensor, lengths: *const i64, count: i64, width: i64, out: *mut RawTensor);
    fn prsmed_rng_state(gpu: i32, out: *mut RawTensor);
    fn prsmed_set_rng_state(gpu: i32, state: RawTensor);
    fn prsmed_gradient_norm(grads: *mut RawTensor, count: i64, factor: f64, out: *mut RawTensor);
    fn prsmed_clip_scale(norm: RawTensor, clip_norm: f64, out: *mut RawTensor);
    fn prsmed_zero(tensors: *mut RawTensor, count: i64);
    fn prsmed_clip_gradients(grads: *mut RawTensor, count: i64, scale: RawTensor);
    fn prsmed_adamw_step(slots: *const RawSlot, count: i64, numbers: *const RawAdamw);
    #[cfg(test)]
    fn prsmed_adamw8_composed(slot: *const RawSlot, numbers: *const RawAdamw);
    fn prsmed_encode8(values: RawTensor, map: RawTensor, codes: RawTensor, scales: RawTensor);
    fn prsmed_decode8(codes: RawTensor, scales: RawTensor, map: RawTensor, values: RawTensor);
    fn prsmed_hook_gradient(tensor: RawTensor, work: GradientWork, data: *mut c_void, index: i64);
    fn prsmed_pinned_copy(host: RawTensor, out: *mut RawTensor);
    fn prsmed_pinned_empty(bytes: i64, out: *mut RawTensor);
    fn prsmed_async_copy_send(host: RawTensor, is_pinned: bool, index: i32, out: *mut RawTensor,
        completion: *mut *mut c_void);
    fn prsmed_async_copy_complete(completion: *mut c_void);
    fn prsmed_send_small(host: RawTensor, index: i32, out: *mut RawTensor);
    fn prsmed_fetch_begin(tensor: RawTensor, out: *mut *mut c_void);
    fn prsmed_fetch_is_complete(fetch: *mut c_void, out: *mut bool);
    fn prsmed_fetch_end(fetch: *mut c_void, out: *mut RawTensor);
    fn prsmed_graph_pool(out: *mut u64);
    fn prsmed_stream_enter(device: i32, before: *mut *mut c_void);
    fn prsmed_stream_leave(before: *mut c_void);
    fn prsmed_synchronize(device: i32);
    fn prsmed_graph_begin(device: i32, pool: *const u64, out: *mut *mut c_void);
    fn prsmed_graph_end(graph: *mut c_void);
    fn prsmed_graph_replay(graph: *mut c_void);
    fn prsmed_seeds_draw(places: RawTensor, count: i64);
    fn prsmed_kernels_run(name: *const c_char, own: bool, inputs: *mut RawTensor, count: i64, number: f64,
        out: *mut RawTensor, out_count: *mut i64);
    #[cfg(test)]
    fn prsmed_kernels_time(name: *const c_char, inputs: *mut RawTensor, count: i64, number: f64, seconds: *mut f64);
    fn prsmed_kernels_choices();
    fn prsmed_kernels_compile(capability: i32, bytes: *mut u64, binary: *mut bool);
    fn prsmed_kernels_unavailable();
    fn prsmed_torch_build(out: *mut *mut c_char);
    fn prsmed_set_device(index: i32);
    fn prsmed_store_open(host: *const c_char, port: i32, listener: i32, connect_seconds: f64, seconds: f64, prefix: *const c_char,
        out: *mut *mut c_void);
    fn prsmed_store_set(store: *mut c_void, key: *const c_char, value: *const c_char);
    fn prsmed_store_get(store: *mut c_void, key: *const c_char, seconds: f64, out: *mut *mut c_char);
    fn prsmed_store_has(store: *mut c_void, key: *const c_char, out: *mut bool);
    fn prsmed_store_add(store: *mut c_void, key: *const c_char, amount: i64, out: *mut i64);
    fn prsmed_group_gloo(store: *mut c_void, name: *const c_char, rank: i32, size: i32, seconds: f64,
        interface: *const c_char, out: *mut *mut c_void);
    fn prsmed_group_nccl(store: *mut c_void, name: *const c_char, rank: i32, size: i32, seconds: f64,
        out: *mut *mut c_void);
    fn prsmed_all_reduce(group: *mut c_void, tensor: RawTensor, code: i32, out: *mut *mut c_void);
    fn prsmed_reduce(group: *mut c_void, tensor: RawTensor, root: i32, out: *mut *mut c_void);
    fn prsmed_broadcast(group: *mut c_void, tensor: RawTensor, root: i32, out: *mut *mut c_void);
    fn prsmed_transfer(group: *mut c_void, tensor: RawTensor, other: i32, sends: bool);
    fn prsmed_all_gather(
        group: *mut c_void,
        part: RawTensor,
        whole: RawTensor,
        after_copies: bool,
        out: *mut *mut c_void,
    );
    fn prsmed_work_wait(work: *mut c_void);
    fn prsmed_reduce_numbers(group: *mut c_void, values: *mut f64, count: i64, code: i32);
}

unsafe extern "C" {
    pub(super) fn prsmed_ledger_install();
    pub(super) fn prsmed_ledger_enter(category: i32) -> i32;
    pub(super) fn prsmed_ledger_read(out: *mut u64);
    pub(super) fn prsmed_ledger_reset_peak();
    pub(super) fn prsmed_ledger_move(tensor: RawTensor, category: i32) -> bool;
    pub(super) fn prsmed_ledger_largest(out: *mut RawBlock, count: i64) -> i64;
    pub(super) fn prsmed_ledger_read_window(out: *mut u64);
    pub(super) fn prsmed_ledger_begin_window();
    pub(super) fn prsmed_ledger_release_cached() -> u64;
    pub(super) fn prsmed_ledger_failure(out: *mut RawFailure) -> bool;
    pub(super) fn prsmed_ledger_clear_failure();
    pub(super) fn prsmed_ledger_set_limit(bytes: u64);
    pub(super) fn prsmed_torch_version() -> *const c_char;
    pub(super) fn prsmed_cuda_side(detail: *mut *const c_char, folder: *mut *const c_char) -> i32;
    pub(super) fn prsmed_module_unfollow();
    pub(super) fn prsmed_module_forget();
    pub(super) fn prsmed_module() -> u32;
    pub(super) fn prsmed_module_set(next: u32) -> u32;
    pub(super) fn prsmed_trace_view(out: *mut RawTraceView);
    pub(super) fn prsmed_trace_name(index: u64) -> *const c_char;
    pub(super) fn prsmed_trace_end();
    pub(super) fn prsmed_meta_target(target: i32) -> i32;
    pub(super) fn prsmed_meta_target_now() -> i32;
    pub(super) fn prsmed_meta_gpu(capability: i32, multiprocessors: i32);
    pub(super) fn prsmed_meta_move(tensor: RawTensor, category: i32) -> bool;
    pub(super) fn prsmed_nf4_values(out: *mut f32);
    pub(super) fn prsmed_flash_attention();
    pub(super) fn prsmed_is_deterministic() -> bool;
    pub(super) fn prsmed_grad_enabled() -> bool;
    pub(super) fn prsmed_unhook_gradient(tensor: RawTensor);
    pub(super) fn prsmed_clear_grad(tensor: RawTensor);
    fn prsmed_free_message(text: *mut c_char);
    pub(super) fn prsmed_store_close(store: *mut c_void);
    pub(super) fn prsmed_group_close(group: *mut c_void, is_shut_down: bool);
    pub(super) fn prsmed_graph_abandon(graph: *mut c_void);
    pub(super) fn prsmed_graph_free(graph: *mut c_void);
    pub(super) fn prsmed_set_grad(tensor: RawTensor, grad: RawTensor);
    pub(super) fn prsmed_seeds_capture(places: RawTensor) -> i64;
    pub(super) fn prsmed_kernels_mode(mode: i32);
    pub(super) fn prsmed_kernels_folder(path: *const c_char);
    pub(super) fn prsmed_kernels_disable(reason: *const c_char);
    pub(super) fn prsmed_kernels_refuse(reason: *const c_char);
    #[cfg(test)]
    pub(super) fn prsmed_kernels_use_launcher(launcher: *const c_void);
    #[cfg(test)]
    pub(super) fn prsmed_seeds_example(place: *mut i64) -> i64;
}

/// The pointer tch holds for `tensor`; valid while the tensor lives.
pub(super) fn raw(tensor: &Tensor) -> RawTensor {
    tensor.as_ptr().cast_mut().cast()
}

/// libtorch's number for a floating-point dtype.
pub(super) fn scalar_type(kind: Kind) -> i32 {
    match kind {
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::BFloat16 => 15,
        other => unreachable!("{other:?} is not a floating-point dtype"),
    }
}

/// Takes ownership of a tensor made by the native layer.
///
/// # Safety
/// `pointer` must come from `new at::Tensor` and be owned by nobody else.
pub(super) unsafe fn owned(pointer: RawTensor) -> Tensor {
    // SAFETY: the caller passes ownership of a `at::Tensor*`, which is what tch stores.
    unsafe { Tensor::from_ptr(pointer.cast()) }
}

/// Converts a message of the native layer to an error, and frees it.
///
/// # Safety
/// `message` must be null or come from a `prsmed_*` function.
pub(super) unsafe fn check(message: *mut c_char) -> Result<()> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: a message of the native layer.
    Err(super::guard::classify(&unsafe { text(message) }))
}

/// A text from the native layer that is not an error.
///
/// # Safety
/// `message` must come from a `prsmed_*` function and must not be null.
pub(super) unsafe fn text(message: *mut c_char) -> String {
    // SAFETY: a NUL-terminated string from `strdup`, freed exactly once below.
    let text = unsafe { CStr::from_ptr(message).to_string_lossy().into_owned() };
    // SAFETY: as above.
    unsafe { prsmed_free_message(message) };
    text
}

/// What `call` writes over `value`, if it returns no message.
///
/// # Safety
/// `call` must return the result of a `prsmed_*` function.
pub(super) unsafe fn written<T>(mut value: T, call: impl FnOnce(*mut T) -> *mut c_char) -> Result<T> {
    let message = call(&raw mut value);
    // SAFETY: the caller's promise.
    unsafe { check(message) }.map(|()| value)
}

/// The tensor that `call` makes.
///
/// # Safety
/// As [`written`]; without a message, `call` has written an owned tensor.
pub(super) unsafe fn made(call: impl FnOnce(*mut RawTensor) -> *mut c_char) -> Result<Tensor> {
    // SAFETY: the caller's promise.
    unsafe { written(std::ptr::null_mut(), call).map(|raw| owned(raw)) }
}

/// The text that `call` makes.
///
/// # Safety
/// As [`written`]; without a message, `call` has written one for [`text()`].
pub(super) unsafe fn made_text(call: impl FnOnce(*mut *mut c_char) -> *mut c_char) -> Result<String> {
    // SAFETY: the caller's promise.
    unsafe { written(std::ptr::null_mut(), call).map(|message| text(message)) }
}

/// The tensor that a native function returns. A native error becomes a panic.
pub(super) fn result(call: impl FnOnce(*mut RawTensor) -> *mut c_char) -> Tensor {
    // SAFETY: `call` returns the result of a `prsmed_*` function; on success it has written an owned tensor.
    unsafe { made(call) }.unwrap_or_else(|error| raise(error))
}

/// The answer that a native function gives. A native error becomes a panic.
pub(super) fn answer(call: impl FnOnce(*mut bool) -> *mut c_char) -> bool {
    // SAFETY: `call` returns the result of a `prsmed_*` function.
    unsafe { written(false, call) }.unwrap_or_else(|error| raise(error))
}

/// Raises a native failure as a panic, as tch's own operators do; `guard` converts it.
pub(super) fn raise(error: Error) -> ! {
    std::panic::panic_any(super::guard::Raised(error))
}
