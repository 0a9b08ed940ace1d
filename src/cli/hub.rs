//! `prsmed hub`: downloads model repositories from the Hugging Face Hub, or lists their files.

use super::context::Context;
use super::report::Outcome;
use crate::hub::{self, Files};
use crate::units::Bytes;
use serde_json::json;

/// Download a model repository, or list its files
///
/// Files go to the cache folder of Python's `huggingface_hub`, which both programs share. Environment variables of that
/// client apply: HF_HOME (cache folder), HF_TOKEN (private and gated repositories), HF_ENDPOINT (a mirror),
/// HF_HUB_OFFLINE=1 (cache only).
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    Get(GetArgs),
    Ls(LsArgs),
}

pub(super) fn run(command: &Command, context: &Context) -> anyhow::Result<Outcome> {
    match command {
        Command::Get(args) => get(args, context),
        Command::Ls(args) => ls(args, context),
    }
}

/// Download a repository and print its local folder
///
/// Files in the cache are not downloaded again, and an interrupted download continues where it stopped.
///
/// Without `--include` it downloads all `.json` files, `tokenizer.model`, and the `.safetensors` files (if there are
/// none, the `.bin`, `.pth` and `.pt` files).
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed hub get hub:microsoft/llava-med-v1.5-mistral-7b
  prsmed hub get hub:owner/name@v1.0 --include '*.json' --include model.safetensors
  prsmed train --set model.base=$(prsmed hub get --quiet hub:owner/name) ...")]
pub(super) struct GetArgs {
    /// `hub:owner/name`, or `hub:owner/name@REV` for a branch, tag or commit
    #[arg(value_name = "SPEC")]
    spec: String,
    /// Download only these files: a name, or a pattern in which `*` matches anything; may be repeated
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
}

/// List the files of a repository or folder with their sizes
///
/// Downloads no files.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  prsmed hub ls hub:openai/clip-vit-large-patch14-336")]
pub(super) struct LsArgs {
    /// `hub:owner/name[@REV]`, or a folder
    #[arg(value_name = "SPEC")]
    spec: String,
}

fn get(args: &GetArgs, context: &Context) -> anyhow::Result<Outcome> {
    let patterns: Vec<&str> = args.include.iter().map(String::as_str).collect();
    let files = if patterns.is_empty() { Files::Checkpoint } else { Files::Matching(&patterns) };
    let folder = hub::resolve(&args.spec, &files, &context.env.hub, context.progress.as_ref())?;
    context.output.line(folder.display())?;
    context.output.record(&json!({ "kind": "result", "spec": args.spec, "folder": folder }))?;
    Ok(Outcome::Done)
}

fn ls(args: &LsArgs, context: &Context) -> anyhow::Result<Outcome> {
    let files = hub::ls(&args.spec, &context.env.hub, context.progress.as_ref())?;
    let total: u64 = files.iter().filter_map(|file| file.size).sum();
    for file in &files {
        let size = file.size.map_or_else(|| "?".to_owned(), |size| Bytes(size).to_string());
        context.output.line(format!("{size:>12}  {}", file.name))?;
    }
    let count = files.len();
    let plural = if count == 1 { "" } else { "s" };
    context.output.line(format!("{:>12}  in {count} file{plural}", Bytes(total).to_string()))?;
    let files: Vec<_> = files.iter().map(|file| json!({ "name": file.name, "bytes": file.size })).collect();
    context.output.record(&json!({ "kind": "result", "spec": args.spec, "files": files, "total_bytes": total }))?;
    Ok(Outcome::Done)
}
