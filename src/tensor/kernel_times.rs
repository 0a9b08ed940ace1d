//! Time of each kernel of a GPU, or of each operator of the CPU, by libtorch's profiler.

use super::{Device, native};
use prsmed_base::Result;

/// Time of the calls of one kernel (on the CPU: of one operator, without those that it calls).
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct KernelTime {
    /// Its name in libtorch.
    pub name: String,
    /// Number of calls.
    pub calls: u64,
    /// Their time in seconds.
    pub seconds: f64,
}

/// The kernels that `work` runs on `device`, the longest first.
///
/// # Errors
/// Those of `work`; [`prsmed_base::Error::Torch`] if the profiler does not start.
pub fn measure(device: Device, work: impl FnOnce() -> Result<()>) -> Result<Vec<KernelTime>> {
    let on_gpu = matches!(device, Device::Cuda(_));
    // SAFETY: starts libtorch's profiler on this thread.
    unsafe { native::check(native::prsmed_kernel_times_begin(on_gpu))? };
    let done = work();
    super::synchronize(device);
    // SAFETY: the callee ends the profiler of this thread, and writes a message.
    let text = unsafe { native::made_text(|out| native::prsmed_kernel_times_end(on_gpu, out)) }?;
    done?;
    let mut found: Vec<KernelTime> = text.lines().filter_map(line).collect();
    found.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Ok(found)
}

fn line(line: &str) -> Option<KernelTime> {
    let mut words = line.splitn(3, ' ');
    let (calls, ns): (u64, f64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some(KernelTime { calls, seconds: ns * 1e-9, name: words.next()?.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, Tensor};
    use prsmed_base::Error;

    #[test]
    fn operators_are_counted_with_their_own_time() {
        let xs = Tensor::ones([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let start = std::time::Instant::now();
        let found = measure(Device::Cpu, || {
            for _ in 0..3 {
                xs.matmul(&xs).relu().sum(Kind::Float).backward();
            }
            Ok(())
        });
        let (found, elapsed) = (found.unwrap(), start.elapsed().as_secs_f64());
        let calls = |name: &str| found.iter().find(|kernel| kernel.name == name).map_or(0, |kernel| kernel.calls);
        // forward, and two products of the backward pass
        assert_eq!((calls("aten::relu"), calls("aten::mm")), (3, 9), "{found:?}");
        let sum: f64 = found.iter().map(|kernel| kernel.seconds).sum();
        assert!(sum > 0.0 && sum <= elapsed, "times of operators that call others count once: {sum} {elapsed}");
        assert!(found.is_sorted_by(|a, b| a.seconds >= b.seconds));
    }

    #[test]
    fn an_error_of_the_work_ends_the_profiler_too() {
        let fails = || measure(Device::Cpu, || Err(Error::Interrupted));
        assert!(matches!(fails(), Err(Error::Interrupted)) && matches!(fails(), Err(Error::Interrupted)));
    }
}
