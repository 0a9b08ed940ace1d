//! The list of weight files that a job needs, shown before anything is downloaded or planned.

use crate::Result;
use crate::event::Event;
use crate::hub::{self, CheckedWeights, Files, Need};
use crate::runtime::Runtime;
use crate::segment::setup::{self, Description};
use crate::segment::{RunConfig, needs};
use crate::tensor::weights::read_unchanged;
use crate::units::Bytes;
use serde_json::json;
use std::path::Path;

/// Finds every file of `needs`, shows which are here, which will be downloaded and which are missing, and refuses missing
/// files and a disk that is too small. [`Runtime::locate`] downloads them later.
///
/// # Errors
/// [`crate::Error::Hub`] or [`crate::Error::Weights`] for missing files; [`crate::Error::Config`] for a disk that is too
/// small.
pub fn check(mut needs: Vec<Need>, runtime: &Runtime) -> Result<()> {
    needs.retain(|need| !runtime.has_located(&need.spec));
    if needs.is_empty() {
        return Ok(());
    }
    let is_remote = |need: &&Need| need.spec.starts_with("hub:");
    if let Some(need) = needs.iter().find(is_remote).filter(|_| !runtime.has_hub()) {
        return runtime.locate(&need.spec).map(drop);
    }
    let checked = hub::check(needs, runtime.hub(), runtime.observer().as_ref());
    runtime.note(table(&checked));
    runtime.observer().on(&Event::Record(record(&checked)));
    runtime.add_located(checked.into_result()?);
    Ok(())
}

/// Reads the checkpoint folder of a run, a path or `hub:...`, with `read`. Checks the files that it needs first; downloads
/// a run on the hub. A training may replace a local folder meanwhile: `read` is then called again.
///
/// # Errors
/// Those of [`check`] and of `read`.
pub fn read_run<T>(
    run: &Path,
    base: Option<&str>,
    vision_tower: Option<&str>,
    runtime: &Runtime,
    read: &dyn Fn(&Path) -> Result<T>,
) -> Result<T> {
    let name = run.to_string_lossy();
    if !name.starts_with("hub:") {
        let find = || needs::checkpoint_of(run);
        return read_unchanged(find, |folder| {
            check(needs::of_checkpoint(folder, base, vision_tower)?, runtime)?;
            read(folder)
        });
    }
    let run = needs::of_run(&name, runtime.hub(), runtime.observer().as_ref())?;
    let described = needs::described_folder(&run, runtime.hub(), runtime.observer().as_ref())?;
    let mut all = vec![run.clone()];
    all.extend(needs::of_checkpoint(&described, base, vision_tower)?);
    check(all, runtime)?;
    read(&runtime.locate(&run.spec)?)
}

/// Refuses parts of the model that are not supported: by their `config.json`, which it downloads of those on the hub and
/// adds to `config` for plans, and by the keys of an image encoder on this machine. Downloads no weights.
///
/// # Errors
/// [`crate::Error::Weights`] naming the part.
pub fn check_architectures(config: &mut RunConfig, runtime: &Runtime) -> Result<()> {
    let files = Files::Matching(&["config.json", "tokenizer_config.json*", "chat_template.jinja*"]);
    let fetch = |spec: &str| hub::resolve(spec, &files, runtime.hub(), runtime.observer().as_ref());
    for warning in setup::check_parts(&config.model, &mut config.configs, &fetch)? {
        runtime.warn(warning);
    }
    Ok(())
}

/// The description of a run, a path or `hub:...`, without its weights; `None` for published folders, which have none.
///
/// # Errors
/// [`crate::Error::Hub`]; [`crate::Error::Weights`] for a folder without a run.
pub fn described(run: &Path, runtime: &Runtime) -> Result<Option<Description>> {
    let name = run.to_string_lossy();
    let folder = if name.starts_with("hub:") {
        let run = needs::of_run(&name, runtime.hub(), runtime.observer().as_ref())?;
        needs::described_folder(&run, runtime.hub(), runtime.observer().as_ref())?
    } else {
        needs::checkpoint_of(run)?
    };
    if folder.join("model.json").is_file() { setup::describe(&folder).map(Some) } else { Ok(None) }
}

/// The list as text, one line for each file or folder.
fn table(checked: &CheckedWeights) -> String {
    let mut lines = vec!["weight files of this command".to_owned()];
    let mut add = |state: &str, need: &Need, rest: String| lines.push(format!("  {state:<9} {}: {rest}", need.key));
    for (need, located) in &checked.found {
        let size = Bytes(located.bytes());
        if located.num_missing == 0 {
            add("ready", need, format!("{} ({size} in {})", need.spec, located.path.display()));
        } else {
            let (total, download) = (located.files.len(), Bytes(located.download_bytes));
            add("download", need, format!("{} ({download}, {} of {total} files)", need.spec, located.num_missing));
        }
    }
    // the error that follows gives the reason of a single one, and what to do
    for (need, error) in &checked.missing {
        add("missing", need, if checked.missing.len() == 1 { need.spec.clone() } else { error.to_string() });
    }
    let bytes = checked.download_bytes();
    if bytes > 0 {
        let free = checked.free_bytes.map_or_else(|| "unknown".to_owned(), |free| Bytes(free).to_string());
        lines.push(format!("  to download: {}; free in `{}`: {free}", Bytes(bytes), checked.cache.display()));
    }
    lines.join("\n")
}

fn record(checked: &CheckedWeights) -> serde_json::Value {
    let found = checked.found.iter().map(|(need, located)| {
        json!({
            "key": need.key,
            "spec": need.spec,
            "state": if located.num_missing == 0 { "ready" } else { "download" },
            "path": located.path,
            "bytes": located.bytes(),
            "download_bytes": located.download_bytes,
        })
    });
    let missing = checked.missing.iter().map(|(need, error)| {
        json!({
            "key": need.key,
            "spec": need.spec,
            "state": "missing",
            "reason": error.to_string(),
            "hint": error.hint(),
        })
    });
    json!({
        "kind": "files",
        "files": found.chain(missing).collect::<Vec<_>>(),
        "download_bytes": checked.download_bytes(),
        "free_bytes": checked.free_bytes,
        "cache": checked.cache,
    })
}
