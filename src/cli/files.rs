//! The list of weight files that a command needs, printed before anything is downloaded or planned.

use super::context::Context;
use crate::Result;
use crate::event::Event;
use crate::hub::{self, Checked, Files, Need};
use crate::segment::needs;
use crate::segment::setup::{self, Description, ModelConfig};
use crate::tensor::weights::read_unchanged;
use crate::units::Bytes;
use serde_json::json;
use std::path::Path;

impl Context {
    /// Finds every file of `needs`, prints which are here, which will be downloaded and which are missing, and refuses
    /// missing files and a disk that is too small. [`Context::locate`] downloads them later.
    pub(super) fn check_files(&self, mut needs: Vec<Need>) -> Result<()> {
        needs.retain(|need| !self.runtime.has_located(&need.spec));
        if needs.is_empty() {
            return Ok(());
        }
        let checked = hub::check(needs, &self.env.hub, self.progress.as_ref());
        self.progress.on(&Event::Note(table(&checked)));
        self.output.record(&record(&checked))?;
        self.runtime.add_located(checked.into_result()?);
        Ok(())
    }

    /// Reads the checkpoint folder of a RUN argument, a path or `hub:...`, with `read`. Checks the files that it needs
    /// first; downloads a run on the hub. A training may replace a local folder meanwhile: `read` is then called again.
    pub(super) fn read_run<T>(
        &self,
        run: &Path,
        base: Option<&str>,
        vision_tower: Option<&str>,
        read: &dyn Fn(&Path) -> Result<T>,
    ) -> Result<T> {
        let name = run.to_string_lossy();
        if !name.starts_with("hub:") {
            let find = || needs::checkpoint_of(run);
            return read_unchanged(find, |folder| {
                self.check_files(needs::of_checkpoint(folder, base, vision_tower)?)?;
                read(folder)
            });
        }
        let run = needs::of_run(&name, &self.env.hub, self.progress.as_ref())?;
        let described = needs::described_folder(&run, &self.env.hub, self.progress.as_ref())?;
        let mut all = vec![run.clone()];
        all.extend(needs::of_checkpoint(&described, base, vision_tower)?);
        self.check_files(all)?;
        read(&self.locate(&run.spec)?)
    }
}

impl Context {
    /// Refuses parts of `model` that are not supported: by the `config.json` and the chat template of those on the hub,
    /// and by the keys of an image encoder on this machine. Downloads no weights.
    pub(super) fn check_architectures(&self, model: &ModelConfig) -> Result<()> {
        let config = Files::Matching(&["config.json", "tokenizer_config.json*", "chat_template.jinja*"]);
        let fetch = |spec: &str| hub::resolve(spec, &config, &self.env.hub, self.progress.as_ref());
        for warning in setup::check_parts(model, &fetch)? {
            self.progress.on(&Event::Warning(warning));
        }
        Ok(())
    }

    /// The description of a run, a path or `hub:...`, without its weights; `None` for published folders, which have none.
    pub(super) fn described(&self, run: &Path) -> Result<Option<Description>> {
        let name = run.to_string_lossy();
        let folder = if name.starts_with("hub:") {
            let run = needs::of_run(&name, &self.env.hub, self.progress.as_ref())?;
            needs::described_folder(&run, &self.env.hub, self.progress.as_ref())?
        } else {
            needs::checkpoint_of(run)?
        };
        if folder.join("model.json").is_file() { setup::describe(&folder).map(Some) } else { Ok(None) }
    }
}

/// The list as text, one line for each file or folder.
fn table(checked: &Checked) -> String {
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
    for (need, error) in &checked.missing {
        add("missing", need, format!("{error}; {}", error.hint()));
    }
    let bytes = checked.download_bytes();
    if bytes > 0 {
        let free = checked.free_bytes.map_or_else(|| "unknown".to_owned(), |free| Bytes(free).to_string());
        lines.push(format!("  to download: {}; free in `{}`: {free}", Bytes(bytes), checked.cache.display()));
    }
    lines.join("\n")
}

fn record(checked: &Checked) -> serde_json::Value {
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
