//! Plans the memory of a training, on this machine and on others, before anything is loaded.
//!
//! ```text
//! cargo run --example plan_memory
//! ```
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use prsmed::prelude::*;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = RunConfig::preset_with("tiny", &["model.image_size=64", "train.micro_batch=2"])?;
    let plan = config.plan(&Runtime::new())?;
    println!("this machine\n{}\n{}\n", plan.table(), plan.summary());
    for name in ["cpu:2gb", "8gb"] {
        let plan = config.plan_for(Job::Step, &Machine::named(name)?)?;
        println!("{name}: a step needs {}, {}", plan.device_peak, plan.summary());
        assert!(plan.fits);
    }
    Ok(())
}
