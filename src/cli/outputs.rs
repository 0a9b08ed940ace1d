//! Inputs and outputs of a command line, compared before the command starts.
//!
//! What changes its input by design is not an input here: `--resume` continues `--out` (also with the settings file and
//! the run of `--init` that are there), `augment filter` rewrites `--extra`, `data prepare --append` and repeated
//! commands add to `--out`.

use crate::Result;
use crate::job::outputs::{self, InputPath, OutputPath, Read, Written};
use clap::{Arg, ArgMatches, Command};
use std::path::{Path, PathBuf};

/// What an argument names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OutputRole {
    /// Files that are read; a part of the argument may choose in them.
    Reads(Read),
    /// Settings, whose values may be files.
    Settings,
    /// Files that the command writes.
    Writes(Written),
}

/// The role of an argument of a command, for example of `data prepare`; `None` if it names no files.
pub(super) fn role(command: &str, argument: &str) -> Option<OutputRole> {
    let parts =
        |names: &[&str]| OutputRole::Writes(Written::Parts(names.iter().map(|name| (*name).to_owned()).collect()));
    Some(match (command, argument) {
        ("train" | "augment finetune", "out") => OutputRole::Writes(Written::Run),
        ("data prepare", "out") => parts(&["annotations"]),
        ("data scan", "out") => parts(&["pairs.csv", "scan.json", "scan.html"]),
        ("augment filter", "extra") => parts(&["annotations", "rejected", "manifest.jsonl", "report.html"]),
        ("merge", "out") => OutputRole::Writes(Written::New),
        ("augment filter", "filter_models") | (_, "out") => OutputRole::Writes(Written::Folder),
        (_, "mask_out" | "overlay_out" | "record_out" | "probabilities" | "timeline" | "html") => {
            OutputRole::Writes(Written::File)
        }
        (_, "data_root" | "extra" | "external" | "root") => OutputRole::Reads(Read::DataRoot),
        (_, "run" | "runs" | "others" | "init" | "resume" | "base" | "vision_tower" | "model" | "spec") => {
            OutputRole::Reads(Read::Weights)
        }
        (
            _,
            "annotations" | "dir" | "pairs" | "image" | "images" | "mask_in" | "masks" | "patients" | "templates"
            | "loras" | "sample" | "predictions" | "truths",
        ) => OutputRole::Reads(Read::Files),
        (_, "config" | "sets") => OutputRole::Settings,
        _ => return None,
    })
}

/// Checks that no output of a command replaces an input or another output.
///
/// # Errors
/// [`Error::Config`](crate::Error::Config) with both names.
pub(super) fn check(program: &Command, matches: &ArgMatches) -> Result<()> {
    let (mut command, mut matches, mut path) = (program, matches, Vec::new());
    while let Some((name, inner)) = matches.subcommand() {
        let Some(found) = command.find_subcommand(name) else { break };
        (command, matches) = (found, inner);
        path.push(name);
    }
    let path = path.join(" ");
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for argument in command.get_arguments() {
        let id = argument.get_id().as_str();
        let Some(role) = role(&path, id) else { continue };
        let Ok(Some(values)) = matches.try_get_raw(id) else { continue };
        let values: Vec<String> = values.map(|value| value.to_string_lossy().into_owned()).collect();
        let name = name_of(argument);
        match role {
            OutputRole::Writes(written) => outputs.extend(values.iter().map(|value| OutputPath {
                name: name.clone(),
                path: value.into(),
                written: written.clone(),
            })),
            OutputRole::Reads(read) => {
                let paths = values.iter().filter_map(|value| outputs::existing(value));
                inputs.extend(paths.map(|path| InputPath { name: name.clone(), path, read }));
            }
            OutputRole::Settings => inputs.extend(settings(&name, &values)),
        }
    }
    if outputs.is_empty() {
        return Ok(());
    }
    fit(&path, matches, &mut inputs, &mut outputs);
    outputs::check(&inputs, &outputs)
}

/// The name of an argument in messages.
fn name_of(argument: &Arg) -> String {
    let value = || argument.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    argument.get_long().map(|long| format!("--{long}")).or_else(value).unwrap_or_default()
}

/// The files that `--config` and `--set` name.
fn settings(name: &str, values: &[String]) -> Vec<InputPath> {
    let mut found = Vec::new();
    for value in values {
        if let Some((key, value)) = value.split_once('=').filter(|_| name == "--set") {
            let words = value.split(['[', ']', '"', ',']).filter_map(|word| outputs::existing(word.trim()));
            let weights = |path| InputPath { name: format!("--set {key}"), path, read: Read::Weights };
            found.extend(words.map(weights));
        } else {
            let file = PathBuf::from(value);
            found.extend(named_in(name, &file));
            found.push(InputPath { name: name.to_owned(), path: file, read: Read::Files });
        }
    }
    found
}

/// The folders of weights that a settings file names.
fn named_in(name: &str, settings: &Path) -> Vec<InputPath> {
    let paths = outputs::paths_in(settings).into_iter();
    paths.map(|path| InputPath { name: format!("{name} {}", settings.display()), path, read: Read::Weights }).collect()
}

/// What depends on several arguments.
fn fit(command: &str, matches: &ArgMatches, inputs: &mut Vec<InputPath>, outputs: &mut Vec<OutputPath>) {
    let text = |id: &str| {
        let values = matches.try_get_raw(id).ok().flatten();
        values.and_then(|mut values| values.next()).map(|value| value.to_string_lossy().into_owned())
    };
    let out = outputs.iter().position(|output| output.name == "--out");
    match (command, out) {
        // the mask of a volume
        ("predict", Some(out)) if text("images").is_none() => outputs[out].written = Written::File,
        ("data prepare", Some(out)) => {
            if let Written::Parts(parts) = &mut outputs[out].written {
                parts.extend(text("modality"));
            }
        }
        ("train" | "augment finetune", Some(out)) => {
            let out = outputs[out].path.clone();
            let continues = text("resume").is_some_and(|from| from == "latest" || outputs::is_in(from.as_ref(), &out));
            let is_of_run = |name: &str| ["--resume", "--init", "--config"].contains(&name);
            inputs.retain(|input| !(continues && is_of_run(&input.name) && outputs::is_in(&input.path, &out)));
        }
        // models may be in the folder of pairs
        ("augment filter", _) => {
            outputs.dedup_by(|a, b| outputs::is_in(&a.path, &b.path) && outputs::is_in(&b.path, &a.path));
        }
        _ => {}
    }
    // the base of a run
    let runs: Vec<InputPath> = inputs.iter().filter(|input| input.read == Read::Weights).cloned().collect();
    for run in runs {
        for folder in [run.path.clone(), run.path.join("best"), run.path.join("last")] {
            inputs.extend(named_in(&run.name, &folder.join("config.toml")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory as _;

    fn walk(command: &Command, path: &str, found: &mut Vec<(String, Arg)>) {
        found.extend(command.get_arguments().map(|argument| (path.to_owned(), argument.clone())));
        for inner in command.get_subcommands() {
            walk(inner, format!("{path} {}", inner.get_name()).trim(), found);
        }
    }

    #[test]
    fn the_role_of_every_path_is_known() {
        let mut program = Cli::command();
        program.build();
        let mut all = Vec::new();
        walk(&program, "", &mut all);
        let path = clap::value_parser!(PathBuf).type_id();
        all.retain(|(_, argument)| argument.get_value_parser().type_id() == path);
        assert!(all.len() > 40, "{}", all.len());
        for (command, argument) in all {
            let id = argument.get_id().as_str();
            assert!(role(&command, id).is_some(), "`prsmed {command}`: say in `role` what `{id}` reads or writes");
        }
    }
}
