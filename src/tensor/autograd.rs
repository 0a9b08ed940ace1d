//! Autograd functions that save memory, gradient hooks, and clearing of gradients.
//!
//! [`checkpoint`] is activation checkpointing (Chen et al. 2016, "Training deep nets with sublinear memory cost"): it
//! saves the inputs of a segment and recomputes the segment in the backward pass. The generator's state is restored
//! before the recomputation, so that dropout repeats its mask. Gradients reach the segment's parameters directly.
//! [`with_gradient_hooks`] uses gradients during the backward pass. [`gelu_conv2d`] and [`gelu_linear`] recompute only
//! the GELU, which is cheap. [`linear_cross_entropy`] saves gradients instead of logits.

use super::native::{self, RawTensor, result};
use super::{Tensor, guard};
use prsmed_base::Result;
use std::ffi::{CString, c_char, c_void};

/// On a GPU libtorch runs and drops it on a thread of its own, possibly after `backward` has returned.
type Closure = Box<dyn Fn(&[Tensor]) -> Tensor + Send + Sync>;

/// Computes `segment(inputs)` and saves only `inputs` for the backward pass.
///
/// The segment runs twice. It must give the same result for the same inputs and generator state. It may own parameters,
/// in a [`Shared`](super::Shared).
///
/// # Panics
/// If the segment panics.
pub fn checkpoint(inputs: &[&Tensor], segment: impl Fn(&[Tensor]) -> Tensor + Send + Sync + 'static) -> Tensor {
    let closure: Box<Closure> = Box::new(Box::new(segment));
    let mut pointers: Vec<RawTensor> = inputs.iter().map(|t| native::raw(t)).collect();
    let count = i64::try_from(pointers.len()).expect("a handful of inputs");
    let closure = Box::into_raw(closure).cast();
    // SAFETY: the callee owns the closure and drops it with `drop_closure`; the inputs outlive the call; libtorch runs
    // the closure in the backward pass on one thread at a time while the caller of `backward` waits.
    result(|out| unsafe {
        native::prsmed_checkpoint(closure, run_closure, drop_closure, pointers.as_mut_ptr(), count, out)
    })
}

/// `gelu(xs).conv2d(weight, bias, ..)` with the exact GELU. Saves `xs` for the backward pass, but not its GELU.
///
/// # Shapes
/// `xs [b, in, h, w]`, `weight [out, in / groups, k, k]`, `bias [out]` to `[b, out, h', w']`; one dtype.
///
/// # Panics
/// Like libtorch's operators.
pub fn gelu_conv2d(xs: &Tensor, weight: &Tensor, bias: &Tensor, stride: i64, padding: i64, groups: i64) -> Tensor {
    let [xs, weight, bias] = [xs, weight, bias].map(native::raw);
    // SAFETY: three live tensors are borrowed for the call; it writes one owned tensor on success.
    result(|out| unsafe { native::prsmed_gelu_conv(xs, weight, bias, stride, padding, groups, out) })
}

/// `gelu(xs).linear(weight, bias)` with the exact GELU. Saves `xs` for the backward pass, but not its GELU.
///
/// # Shapes
/// `xs [.., in]`, `weight [out, in]`, `bias [out]` to `[.., out]`; one dtype.
///
/// # Panics
/// Like libtorch's operators.
pub fn gelu_linear(xs: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
    let [xs, weight, bias] = [xs, weight, bias].map(native::raw);
    // SAFETY: as above.
    result(|out| unsafe { native::prsmed_gelu_linear(xs, weight, bias, out) })
}

/// Sum of the cross-entropy of `rows.linear(weight)`, in fp32. It computes at most `chunk` rows of logits at a time and
/// saves none. The forward pass computes the gradients, in the dtypes of `rows` and `weight`.
///
/// # Shapes
/// `rows [n, d]`, `weight [vocab, d]` (cast to the dtype of `rows`), `labels [n]` i64, negative = ignored; a scalar.
///
/// # Panics
/// Like libtorch's operators, and if `chunk` is below 1.
pub fn linear_cross_entropy(rows: &Tensor, weight: &Tensor, labels: &Tensor, chunk: i64) -> Tensor {
    assert!(chunk > 0, "`chunk` must be at least 1");
    let [rows, weight, labels] = [rows, weight, labels].map(native::raw);
    // SAFETY: three live tensors are borrowed for the call; it writes one owned tensor on success.
    result(|out| unsafe { native::prsmed_linear_cross_entropy(rows, weight, labels, chunk, out) })
}

/// Drops the gradient of a leaf tensor. Its memory is freed, and the optimizer skips it until the next backward pass.
pub fn clear_grad(tensor: &Tensor) {
    // SAFETY: resets a member of a live tensor.
    unsafe { native::prsmed_clear_grad(native::raw(tensor)) };
}

/// Makes `grad` the gradient of `tensor`. The next backward pass adds to it in place.
pub fn set_grad(tensor: &Tensor, grad: &Tensor) {
    // SAFETY: two live tensors of one shape; the callee takes a reference to the second.
    unsafe { native::prsmed_set_grad(native::raw(tensor), native::raw(grad)) };
}

/// Runs `backward`, and calls `work(index)` during the backward pass as soon as the gradient of a parameter in `params`
/// is complete. `work` may change the parameter and drop the gradient. If several segments of [`checkpoint`] share a
/// parameter, `work` is called once for each.
///
/// # Errors
/// Errors of `backward` and `work`. An error of `work` ends the backward pass.
pub fn with_gradient_hooks<T>(
    params: &[Tensor],
    work: impl FnMut(usize) -> Result<()>,
    backward: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let mut hooks = Hooks { params, work: Box::new(work), failure: None };
    let data: *mut Hooks = &raw mut hooks;
    let hooked = params.iter().enumerate().try_for_each(|(index, param)| {
        let index = i64::try_from(index).expect("fewer parameters than 2^63");
        // SAFETY: the hooks are removed below, before `hooks` is dropped; libtorch calls them on one thread at a time
        // while the caller of `backward` waits.
        unsafe { native::check(native::prsmed_hook_gradient(native::raw(param), run_hook, data.cast(), index)) }
    });
    let outcome = hooked.and_then(|()| guard::guard(backward));
    // SAFETY: resets a member of live tensors.
    params.iter().for_each(|param| unsafe { native::prsmed_unhook_gradient(native::raw(param)) });
    // SAFETY: nobody else has the pointer any more.
    match unsafe { (*data).failure.take() } {
        Some(failure) => Err(failure),
        None => outcome,
    }
}

struct Hooks<'a> {
    params: &'a [Tensor],
    work: Box<dyn FnMut(usize) -> Result<()> + 'a>,
    /// The first error of `work`. libtorch would keep only its text.
    failure: Option<prsmed_base::Error>,
}

extern "C" fn run_hook(data: *mut c_void, index: i64) -> *mut c_char {
    // SAFETY: `data` is the structure of `with_gradient_hooks`, which waits; nobody else uses it meanwhile.
    let hooks = unsafe { &mut *data.cast::<Hooks>() };
    let index = usize::try_from(index).expect("an index");
    debug_assert!(index < hooks.params.len());
    match guard::guard(|| (hooks.work)(index)) {
        Ok(()) => std::ptr::null_mut(),
        Err(error) => {
            let text = CString::new(error.to_string().replace('\0', " ")).unwrap_or_default();
            hooks.failure.get_or_insert(error);
            // SAFETY: copies a NUL-terminated string; C++ frees it.
            unsafe { libc::strdup(text.as_ptr()) }
        }
    }
}

extern "C" fn run_closure(data: *mut c_void, inputs: *mut RawTensor, count: i64, error: *mut *mut c_char) -> RawTensor {
    // on a GPU libtorch recomputes on a thread of its own, where nothing else catches a panic
    let outcome = guard::guard(|| {
        // SAFETY: `data` is the box made in `checkpoint`, alive until `drop_closure`.
        let closure = unsafe { &*data.cast::<Closure>() };
        let inputs: Vec<Tensor> = (0..usize::try_from(count).expect("not negative"))
            .map(|i| {
                // SAFETY: the callee passes `count` valid tensors; `shallow_clone` makes an own handle and the
                // borrowed one is forgotten, not freed.
                unsafe {
                    let borrowed = std::mem::ManuallyDrop::new(native::owned(*inputs.add(i)));
                    borrowed.shallow_clone()
                }
            })
            .collect();
        Ok(closure(&inputs))
    });
    match outcome {
        Ok(out) => {
            // tch has no `into_raw`: return a second handle to the same tensor
            let out = std::mem::ManuallyDrop::new(out);
            native::raw(&out)
        }
        Err(failure) => {
            let text = failure.to_string().replace('\0', " ");
            let text = CString::new(text).unwrap_or_default();
            // SAFETY: `error` is a valid place for one pointer; `strdup` gives memory that C++ frees.
            unsafe { *error = libc::strdup(text.as_ptr()) };
            std::ptr::null_mut()
        }
    }
}

extern "C" fn drop_closure(data: *mut c_void) {
    // SAFETY: called exactly once with the pointer made in `checkpoint`.
    drop(unsafe { Box::from_raw(data.cast::<Closure>()) });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Kind, Shared, rng};

    fn gradients(checkpointed: bool) -> (Tensor, Tensor, Tensor) {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(3);
        let weight = Tensor::randn([6, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let xs = Tensor::randn([4, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let captured = Shared::new(weight.shallow_clone());
        let segment = move |inputs: &[Tensor]| inputs[0].matmul(&captured).gelu("none").dropout(0.5, true);
        let ys = if checkpointed { checkpoint(&[&xs], segment) } else { segment(&[xs.shallow_clone()]) };
        let ys = ys.dropout(0.5, true);
        ys.square().sum(Kind::Float).backward();
        (ys.detach(), weight.grad(), xs.grad())
    }

    #[test]
    fn a_recomputed_gelu_gives_libtorchs_gradients() {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(5);
        let leaf = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let run = |inputs: &[&Tensor; 3], forward: &dyn Fn(&[&Tensor; 3]) -> Tensor| {
            for input in inputs {
                clear_grad(input);
            }
            let ys = forward(inputs);
            ys.square().sum(Kind::Float).backward();
            let mut all = vec![ys.detach()];
            all.extend(inputs.iter().map(|t| t.grad()));
            all
        };
        let same =
            |inputs: [Tensor; 3], ours: &dyn Fn(&[&Tensor; 3]) -> Tensor, theirs: &dyn Fn(&[&Tensor; 3]) -> Tensor| {
                let inputs = inputs.each_ref();
                for (a, b) in run(&inputs, ours).iter().zip(run(&inputs, theirs)) {
                    let error = (a - &b).norm().double_value(&[]) / b.norm().double_value(&[]);
                    assert!(error < 1e-6, "{error}");
                }
            };
        for (groups, stride, kernel) in [(1, 1, 1), (4, 2, 3), (1, 2, 3)] {
            let padding = kernel / 2;
            same(
                [leaf(&[2, 4, 6, 5]), leaf(&[8, 4 / groups, kernel, kernel]), leaf(&[8])],
                &|i| gelu_conv2d(i[0], i[1], i[2], stride, padding, groups),
                &|i| i[0].gelu("none").conv2d(i[1], Some(i[2]), [stride; 2], [padding; 2], [1, 1], groups),
            );
        }
        same([leaf(&[2, 3, 4]), leaf(&[6, 4]), leaf(&[6])], &|i| gelu_linear(i[0], i[1], i[2]), &|i| {
            i[0].gelu("none").linear(i[1], Some(i[2]))
        });
    }

    /// Loss and gradients of rows and weight: chunked, and by libtorch's cross-entropy.
    fn cross_entropies(kind: Kind, weight_kind: Kind, chunk: i64) -> [Vec<Tensor>; 2] {
        let _lock = rng::TEST_LOCK.lock();
        rng::seed(9);
        let leaf = |shape: &[i64], kind| {
            Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind).detach().set_requires_grad(true)
        };
        let (rows, weight) = (leaf(&[7, 12], kind), leaf(&[50, 12], weight_kind));
        let labels = Tensor::from_slice(&[3_i64, 49, -100, 0, 17, -100, 3]);
        let run = |loss: &dyn Fn() -> Tensor| {
            clear_grad(&rows);
            clear_grad(&weight);
            let loss = loss();
            // a factor, as in averaging and loss scaling
            (&loss * 0.25).backward();
            vec![loss.detach(), rows.grad(), weight.grad()]
        };
        let ours = run(&|| linear_cross_entropy(&rows, &weight, &labels, chunk));
        let theirs = run(&|| {
            let logits = rows.linear(&weight.to_kind(kind), None::<&Tensor>).to_kind(Kind::Float);
            logits.cross_entropy_loss(&labels, None::<&Tensor>, crate::Reduction::Sum, -100, 0.0)
        });
        [ours, theirs]
    }

    #[test]
    fn a_chunked_cross_entropy_agrees_with_libtorchs() {
        let check = |[ours, theirs]: [Vec<Tensor>; 2], tolerance: f64, what: &str| {
            for (a, b) in ours.iter().zip(&theirs) {
                assert_eq!((a.kind(), a.size()), (b.kind(), b.size()));
                let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
                let error = (a - &b).norm().double_value(&[]) / b.norm().double_value(&[]);
                assert!(error < tolerance, "{what}: {error:.1e}");
            }
        };
        for chunk in [1, 2, 3, 7, 100] {
            check(cross_entropies(Kind::Float, Kind::Float, chunk), 1e-6, &format!("fp32, {chunk}"));
            check(cross_entropies(Kind::BFloat16, Kind::BFloat16, chunk), 1e-2, &format!("bf16, {chunk}"));
            check(cross_entropies(Kind::BFloat16, Kind::Float, chunk), 1e-2, &format!("bf16, fp32 weight, {chunk}"));
        }
    }

    #[test]
    fn only_ignored_labels_give_zero_loss_and_gradients() {
        let rows = Tensor::ones([2, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let weight = Tensor::ones([4, 3], (Kind::Float, Device::Cpu));
        let loss = linear_cross_entropy(&rows, &weight, &Tensor::from_slice(&[-100_i64, -100]), 1);
        loss.backward();
        assert_eq!((loss.double_value(&[]), rows.grad()), (0.0, Tensor::zeros([2, 3], (Kind::Float, Device::Cpu))));
    }

    #[test]
    fn checkpointing_repeats_gradients_and_dropout_exactly() {
        let plain = gradients(false);
        let checkpointed = gradients(true);
        assert_eq!(plain.0, checkpointed.0);
        assert_eq!(plain.1, checkpointed.1);
        assert_eq!(plain.2, checkpointed.2);
    }

    #[test]
    fn parameters_of_a_checkpoint_get_gradients_if_no_input_needs_one() {
        let weight = Tensor::ones([3, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let captured = Shared::new(weight.shallow_clone());
        let xs = Tensor::ones([1, 3], (Kind::Float, Device::Cpu));
        checkpoint(&[&xs], move |i| i[0].matmul(&captured)).sum(Kind::Float).backward();
        assert_eq!(weight.grad(), Tensor::ones([3, 3], (Kind::Float, Device::Cpu)));
    }

    #[test]
    fn an_error_inside_a_checkpoint_keeps_its_type() {
        let error = guard::guard(|| {
            let xs = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
            Ok(checkpoint(&[&xs], |i| i[0].matmul(&i[0])))
        })
        .unwrap_err();
        assert!(matches!(error, prsmed_base::Error::Shape { .. }), "{error:?}");
    }
}
