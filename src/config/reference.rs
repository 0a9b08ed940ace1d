//! Reference of all settings as Markdown (`docs/reference/settings.md`), from their declarations.

use super::{AugmentRun, FinetuneRun, RunConfig, Settings, table_of, typed};
use crate::setting::table::{insert, value_at, wrapped};
use crate::setting::{ResultsEffect, Resume, Setting};
use std::fmt::Write as _;
use toml::Value;

/// All settings of training, of generating pairs and of fine-tuning the generator.
///
/// # Panics
/// Never: a text can be written to.
pub fn settings_markdown() -> String {
    let mut out = String::from(
        "# Settings\n\n\
         Generated from the declarations in the code; `scripts/reference` writes it anew.\n\n\
         A setting has a default. A preset (`--preset NAME`) states what differs from the defaults, a file\n\
         (`--config FILE`) overlays the preset, and `--set KEY=VALUE` overlays both.\n\n\
         - **Results**: *same* (the same numbers), *rounding* (the same arithmetic in another order) or *changes*.\n\
         - **On resume**: *free* (may change), *warns* (may change; results differ from an uninterrupted run) or\n\
           \x20 *fixed* (`prsmed train --resume` refuses another value).\n",
    );
    section::<RunConfig>(&mut out, "Training", "prsmed train", "");
    section::<AugmentRun>(&mut out, "Generating image+mask pairs", "prsmed augment generate", "");
    // the settings of the engine are those of a training
    section::<FinetuneRun>(&mut out, "Fine-tuning the generator", "prsmed augment finetune", "finetune.");
    out
}

/// The settings whose keys start with `prefix`.
fn section<T: Settings>(out: &mut String, title: &str, command: &str, prefix: &str) {
    write!(out, "\n## {title} (`{command}`)\n").expect("a string can be written to");
    for setting in T::settings().iter().filter(|setting| setting.key.starts_with(prefix)) {
        out.push_str(&entry::<T>(setting));
    }
}

fn entry<T: Settings>(setting: &Setting) -> String {
    let default = match value_at(&table_of(&T::default()), setting.key) {
        Some(Value::String(text)) if text.is_empty() => "empty".to_owned(),
        Some(Value::String(text)) => format!("`{text}`"),
        Some(value) => format!("`{value}`"),
        None => "none".to_owned(),
    };
    let results = match setting.results {
        ResultsEffect::Same => "same",
        ResultsEffect::Rounding => "rounding",
        ResultsEffect::Changes => "changes",
    };
    let resume = match setting.resume {
        Resume::Free => "free",
        Resume::Warn => "warns",
        Resume::Fixed => "fixed",
    };
    let mut kind = kind::<T>(setting.key);
    if setting.range.is_some() {
        kind = kind.replace(", 0 or more", "");
    }
    let mut facts = vec![format!("type: {kind}"), format!("default: {default}")];
    facts.extend(setting.range.map(|range| format!("range: {range}")));
    facts.extend([format!("results: {results}"), format!("on resume: {resume}")]);
    let mut lines = vec![format!("\n### `{}`\n\n{}\n", setting.key, wrapped(&setting.help, ""))];
    lines.push(wrapped(&format!("- {}", facts.join("; ")), "  "));
    if !setting.memory.is_empty() {
        lines.push(wrapped(&format!("- memory: {}", setting.memory), "  "));
    }
    if !setting.old_names.is_empty() {
        lines.push(format!("- earlier name: `{}`", setting.old_names.join("`, `")));
    }
    lines.join("\n") + "\n"
}

/// Description of the values that serde accepts for a setting, from its error message for a wrong value.
fn kind<T: Settings>(key: &str) -> String {
    let mut table = table_of(&T::default());
    for wrong in [Value::String("?".into()), Value::Boolean(true)] {
        insert(&mut table, key, wrong);
        if let Err(message) = typed::<T>(&table) {
            let (_, expected) = message.rsplit_once("expected ").unwrap_or(("", &message));
            // some messages end with what is wrong about the value
            let expected = expected.split(": `?`").next().unwrap_or(expected);
            return expected
                .replace("a boolean", "`true` or `false`")
                .replace("a table Sizes", "a table")
                .replace("a string", "text");
        }
    }
    "text".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_what_serde_expects() {
        for (key, expected) in [
            ("train.micro_batch", "a whole number, 0 or more"),
            ("train.learning_rate", "a number"),
            ("train.step_in_backward", "`true` or `false`"),
            ("train.precision", "one of `fp32`, `bf16`, `fp16`"),
            ("train.checkpointing", "`none`, `full` or a number of layers, 0 or more"),
            ("model.base", "text"),
            ("model.sizes", "a table"),
            ("data.labels", "labels from 1 to 65535, for example `1,3`"),
        ] {
            assert_eq!(kind::<RunConfig>(key), expected, "{key}");
        }
    }
}
