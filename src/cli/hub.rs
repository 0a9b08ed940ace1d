//! `prsmed hub`: downloads models and data sets from the Hugging Face Hub, lists their files, and checks the cache.

use super::context::Context;
use super::report::{CommandEnd, CommandResult};
use crate::hub::{self, Files, HubSource, RepoKind, Spec, State, VerifiedFile};
use crate::units::{Bytes, counted};
use serde_json::json;

/// Download a model or a data set, list its files, or check the cache
///
/// Files go to the cache folder of Python's `huggingface_hub`, which both programs share. Environment variables of that
/// client apply: HF_HOME (cache folder), HF_TOKEN (private and gated repositories), HF_ENDPOINT (a mirror),
/// HF_HUB_OFFLINE=1 (cache only), HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT (seconds for which a silent server is
/// awaited). The token is sent to the hub only, not to other hosts that it redirects to.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    Get(GetArgs),
    Ls(LsArgs),
    Verify(VerifyArgs),
}

pub(super) fn run(command: &Command, context: &Context) -> CommandResult {
    match command {
        Command::Get(args) => get(args, context),
        Command::Ls(args) => ls(args, context),
        Command::Verify(args) => verify(args, context),
    }
}

/// Download a repository and print its local folder
///
/// Files in the cache are not downloaded again, and an interrupted download continues where it stopped. Each download is
/// compared with its hash; `prsmed hub verify` compares files in the cache again.
///
/// Without `--include` it downloads all files of a data set (`dataset:owner/name`). Of a model it downloads all `.json`
/// files, `tokenizer.model`, and the `.safetensors` files (if there are none, the `.bin`, `.pth` and `.pt` files).
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed hub get hub:microsoft/llava-med-v1.5-mistral-7b
  prsmed hub get hub:owner/name@v1.0 --include '*.json' --include model.safetensors
  prsmed hub get dataset:owner/name --include '*.csv'
  prsmed train --set model.base=$(prsmed hub get --quiet hub:owner/name) ...")]
pub(super) struct GetArgs {
    /// `hub:owner/name` for a model, `dataset:owner/name` for a data set; `@REV` at the end for a branch, tag or commit
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
    /// `hub:owner/name[@REV]`, `dataset:owner/name[@REV]`, or a folder
    #[arg(value_name = "SPEC")]
    spec: String,
}

/// Compare the cached files of a repository with their hashes
///
/// Finds files that a failing disk, a power cut or somebody else changed. Needs no network and changes nothing. Prints
/// each file that is damaged, and the commands that replace it. The exit code is 1 if a file is damaged.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  prsmed hub verify hub:microsoft/llava-med-v1.5-mistral-7b
  prsmed hub verify hub:owner/name@v1.0")]
pub(super) struct VerifyArgs {
    /// `hub:owner/name` or `dataset:owner/name` for all revisions in the cache; with `@REV` at the end for one
    #[arg(value_name = "SPEC")]
    spec: String,
}

fn get(args: &GetArgs, context: &Context) -> CommandResult {
    let patterns: Vec<&str> = args.include.iter().map(String::as_str).collect();
    let is_dataset = matches!(Spec::parse(&args.spec)?, Spec::Hub(source) if source.kind == RepoKind::Dataset);
    let files = match patterns.as_slice() {
        [] if is_dataset => Files::All,
        [] => Files::Checkpoint,
        patterns => Files::Matching(patterns),
    };
    let folder = hub::resolve(&args.spec, &files, &context.env.hub, context.progress.as_ref())?;
    context.done(folder.display(), &json!({ "kind": "result", "spec": args.spec, "folder": folder }))
}

fn ls(args: &LsArgs, context: &Context) -> CommandResult {
    let files = hub::ls(&args.spec, &context.env.hub, context.progress.as_ref())?;
    let total = hub::sum(files.iter().filter_map(|file| file.size));
    for file in &files {
        let size = file.size.map_or_else(|| "?".to_owned(), |size| Bytes(size).to_string());
        context.output.line(format!("{size:>12}  {}", file.name))?;
    }
    context.output.line(format!("{:>12}  in {}", Bytes(total).to_string(), counted(files.len(), "file")))?;
    let files: Vec<_> = files.iter().map(|file| json!({ "name": file.name, "bytes": file.size })).collect();
    context.output.record(&json!({ "kind": "result", "spec": args.spec, "files": files, "total_bytes": total }))?;
    Ok(CommandEnd::Done)
}

fn verify(args: &VerifyArgs, context: &Context) -> CommandResult {
    let files = hub::verify(&args.spec, &context.env.hub, context.progress.as_ref())?;
    let of = |wanted: fn(&State) -> bool| files.iter().filter(|file| wanted(&file.state)).collect::<Vec<_>>();
    let good = of(|state| *state == State::Good).len();
    let unknown = of(|state| *state == State::Unknown);
    let damaged = of(|state| matches!(state, State::Damaged(_)));
    for file in &damaged {
        if let State::Damaged(reason) = &file.state {
            context.output.line(format!("damaged  {}: {reason}", file.name))?;
        }
    }
    for file in &unknown {
        context.output.line(format!("no hash  {}", file.name))?;
    }
    let counts = format!("{good} good, {} damaged, {} without a hash", damaged.len(), unknown.len());
    context.output.line(counts)?;
    let commands = replace_commands(&args.spec, &damaged)?;
    if !commands.is_empty() {
        context.output.line(format!("to replace the damaged files:\n  {}", commands.join("\n  ")))?;
    }
    context.output.record(&json!({
        "kind": "result",
        "spec": args.spec,
        "files": files.iter().map(record).collect::<Vec<_>>(),
        "damaged": damaged.len(),
        "commands": commands,
    }))?;
    Ok(if damaged.is_empty() { CommandEnd::Done } else { CommandEnd::No })
}

fn record(file: &VerifiedFile) -> serde_json::Value {
    let (state, reason) = match &file.state {
        State::Good => ("good", None),
        State::Damaged(reason) => ("damaged", Some(reason)),
        State::Unknown => ("unknown", None),
    };
    json!({ "name": file.name, "path": file.path, "commit": file.commit, "state": state, "reason": reason })
}

/// Shell commands that delete damaged files and download them again.
fn replace_commands(spec: &str, damaged: &[&VerifiedFile]) -> crate::Result<Vec<String>> {
    let Spec::Hub(source) = Spec::parse(spec)? else { return Ok(Vec::new()) };
    let quoted = |text: &str| format!("'{}'", text.replace('\'', "'\\''"));
    let delete = damaged.iter().map(|file| format!("rm -f {}", quoted(&file.path.display().to_string())));
    let at = |commit: &str| HubSource { inside: String::new(), revision: Some(commit.to_owned()), ..source.clone() };
    let download =
        damaged.iter().map(|file| format!("prsmed hub get {} --include {}", at(&file.commit), quoted(&file.name)));
    Ok(delete.chain(download).collect())
}
