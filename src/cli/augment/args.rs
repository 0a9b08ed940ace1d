//! What several `augment` commands do.

use crate::Result;
use crate::cli::args::RootArgs;
use crate::cli::context::Context;
use crate::cli::next;
use crate::config::RunConfig;
use crate::data::manifest::Manifest;
use crate::job::machine;
use crate::job::training::check_memory;
use crate::segment::{needs, weight_files};
use crate::shell::ShellCommand;
use std::path::Path;

/// Checks the files of a segmenter that is trained on `real`, and its memory if a plan is made.
pub(super) fn check_segmenter(config: &mut RunConfig, real: &Manifest, plans: bool, context: &Context) -> Result<()> {
    let runtime = &context.runtime;
    weight_files::check_architectures(config, runtime)?;
    weight_files::check(needs::of_model(&config.model), runtime)?;
    if plans {
        check_memory(&config.with_cache_for(real), &machine::here(runtime)?, &context.memory, runtime)?;
    }
    Ok(())
}

/// The ablation of the pairs in `extra`, made from `num_real` images of these rows.
pub(super) fn ablation_command(data: &RootArgs, extra: &Path, num_real: usize) -> ShellCommand {
    let command = data.add_to(ShellCommand::new("prsmed augment ablation")).flag("--extra", [extra]);
    let command = command.flag("--real-images", Some(num_real.to_string()).filter(|_| num_real > 0));
    command.flag("--out", next::free_instead_of("runs/ablation"))
}
