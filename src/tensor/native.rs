//! Declarations of the C ABI in `native/*.cpp`.

use crate::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use tch::Tensor;

/// A `torch::Tensor*`, as tch passes it.
pub(super) type RawTensor = *mut c_void;
/// Runs a checkpointed segment: see `native/autograd.cpp`.
pub(super) type Segment = extern "C" fn(*mut c_void, *mut RawTensor, i64, *mut *mut c_char) -> RawTensor;
/// Drops a checkpointed segment.
pub(super) type DropSegment = extern "C" fn(*mut c_void);

unsafe extern "C" {
    pub(super) fn prsmed_ledger_install();
    pub(super) fn prsmed_ledger_enter(category: i32) -> i32;
    pub(super) fn prsmed_ledger_read(out: *mut u64);
    pub(super) fn prsmed_ledger_reset_peak();
    pub(super) fn prsmed_ledger_move(tensor: RawTensor, category: i32) -> bool;
    pub(super) fn prsmed_meta_install() -> *mut c_char;
    pub(super) fn prsmed_meta_target(target: i32) -> i32;
    pub(super) fn prsmed_meta_target_now() -> i32;
    pub(super) fn prsmed_meta_card(capability: i32, multiprocessors: i32);
    pub(super) fn prsmed_meta_move(tensor: RawTensor, category: i32) -> bool;
    pub(super) fn prsmed_device_usage(index: i32, reset: bool, out: *mut u64) -> *mut c_char;
    pub(super) fn prsmed_checkpoint(
        closure: *mut c_void,
        run: Segment,
        drop: DropSegment,
        inputs: *mut RawTensor,
        count: i64,
        out: *mut RawTensor,
    ) -> *mut c_char;
    pub(super) fn prsmed_gelu_conv(
        xs: RawTensor,
        weight: RawTensor,
        bias: RawTensor,
        stride: i64,
        padding: i64,
        groups: i64,
        out: *mut RawTensor,
    ) -> *mut c_char;
    pub(super) fn prsmed_gelu_linear(
        xs: RawTensor,
        weight: RawTensor,
        bias: RawTensor,
        out: *mut RawTensor,
    ) -> *mut c_char;
    pub(super) fn prsmed_rng_state(out: *mut RawTensor) -> *mut c_char;
    pub(super) fn prsmed_set_rng_state(state: RawTensor) -> *mut c_char;
    pub(super) fn prsmed_fused_adamw(
        params: *mut RawTensor,
        grads: *mut RawTensor,
        first: *mut RawTensor,
        second: *mut RawTensor,
        steps: *mut RawTensor,
        count: i64,
        settings: *const f64,
    ) -> *mut c_char;
    pub(super) fn prsmed_clear_grad(tensor: RawTensor);
    fn prsmed_free_message(text: *mut c_char);
}

/// The pointer tch holds for `tensor`; valid while the tensor lives.
pub(super) fn raw(tensor: &Tensor) -> RawTensor {
    tensor.as_ptr().cast_mut().cast()
}

/// Takes ownership of a tensor made by the native layer.
///
/// # Safety
/// `pointer` must come from `new torch::Tensor` and be owned by nobody else.
pub(super) unsafe fn owned(pointer: RawTensor) -> Tensor {
    // SAFETY: the caller passes ownership of a `torch::Tensor*`, which is what tch stores.
    unsafe { Tensor::from_ptr(pointer.cast()) }
}

/// Turns a message of the native layer into an error and frees it.
///
/// # Safety
/// `message` must be null or come from a `prsmed_*` function.
pub(super) unsafe fn check(message: *mut c_char) -> Result<()> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: a non-null message is a NUL-terminated string from `strdup`, freed exactly once below.
    let text = unsafe { CStr::from_ptr(message).to_string_lossy().into_owned() };
    // SAFETY: as above.
    unsafe { prsmed_free_message(message) };
    Err(super::guard::classify(&text))
}

impl Error {
    /// Raises a native failure as a panic, as tch's own operators do; `guard` converts it.
    pub(super) fn raise(self) -> ! {
        std::panic::panic_any(super::guard::Raised(self))
    }
}
