//! A flag that a command does not have, but whose name is a setting: the error says how to set it.

use crate::config::{AugmentRun, FinetuneRun, RunConfig, Settings as _, setting_named};
use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;

/// Adds the assignment to the error of `program` about an unknown flag in `args` (`--epochs 3` becomes
/// `--set train.epochs=3`).
pub(super) fn explained(mut error: clap::Error, program: &Command, args: &[OsString]) -> clap::Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return error };
    let position = args.iter().position(|arg| arg.to_str() == Some(flag));
    let before = |steps| position.and_then(|at| args.get(at.checked_sub(steps)?)?.to_str());
    let tip = match flag.split('=').next() {
        _ if before(2) == Some("--set") => before(1).map(|key| format!("write '--set {key}={flag}'")),
        Some("--device" | "--cuda" | "--gpu" | "--cpu") => {
            Some("the first GPU is used if there is one; the environment variable CUDA_VISIBLE_DEVICES chooses another, or none".to_owned())
        }
        _ => assignment(flag, program, args).map(|assignment| format!("it is a setting: use '--set {assignment}'")),
    };
    if let Some(tip) = tip {
        // a flag with a similar name is not what was meant
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// `key=value` for `flag` and its value in `args`.
fn assignment(flag: &str, program: &Command, args: &[OsString]) -> Option<String> {
    let args: Vec<&str> = args.iter().skip(1).filter_map(|arg| arg.to_str()).collect();
    let (mut at, mut path) = (program, Vec::new());
    for arg in &args {
        if let Some(inner) = at.find_subcommand(arg) {
            at = inner;
            path.push(inner.get_name());
        }
    }
    at.get_arguments().find(|argument| argument.get_long() == Some("set"))?;
    let settings = match path.as_slice() {
        ["augment", "generate"] => AugmentRun::settings(),
        ["augment", "finetune"] => FinetuneRun::settings(),
        _ => RunConfig::settings(),
    };
    let key = setting_named(flag.trim_start_matches('-'), &settings)?;
    let number = args.iter().position(|arg| arg.split('=').next() == Some(flag))?;
    let value = args[number].split_once('=').map(|(_, value)| value);
    let next = args.get(number + 1).copied().filter(|next| !next.starts_with("--"));
    Some(format!("{key}={}", value.or(next).unwrap_or("VALUE")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::{CommandFactory as _, Parser as _};

    fn message(line: &str) -> String {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        explained(Cli::try_parse_from(&args).expect_err("an unknown flag"), &Cli::command(), &args).to_string()
    }

    #[test]
    fn flags_of_other_trainers_lead_to_the_setting() {
        for (flags, expected) in [
            ("--epochs 3", "--set train.epochs=3"),
            ("--epochs=3", "--set train.epochs=3"),
            ("--lr 1e-4", "--set train.learning_rate=1e-4"),
            ("--learning-rate 1e-4", "--set train.learning_rate=1e-4"),
            ("--batch-size 8", "--set train.micro_batch=8"),
            ("--batch_size 8", "--set train.micro_batch=8"),
            ("--max-steps", "--set train.max_steps=VALUE"),
            ("--num-workers 2", "--set data.workers=2"),
        ] {
            let text = message(&format!("prsmed train --data-root data {flags}"));
            assert!(text.contains(&format!("it is a setting: use '{expected}'")), "{text}");
            assert!(text.matches("tip:").count() == 1 && !text.contains("similar argument"), "{text}");
        }
    }

    #[test]
    fn a_setting_has_an_equals_sign() {
        let text = message("prsmed train --data-root data --set train.epochs 3");
        assert!(text.contains("tip: write '--set train.epochs=3'"), "{text}");
    }

    #[test]
    fn a_device_is_chosen_by_the_environment() {
        for flag in ["--device cuda", "--device=cpu", "--cuda"] {
            let text = message(&format!("prsmed train --data-root data {flag}"));
            assert!(text.contains("CUDA_VISIBLE_DEVICES chooses another"), "{text}");
        }
    }

    #[test]
    fn each_command_has_its_own_settings() {
        let finetune = message("prsmed augment finetune --rank 4");
        assert!(finetune.contains("--set finetune.rank=4"), "{finetune}");
        let generate = message("prsmed augment generate --strength 0.3");
        assert!(generate.contains("--set augment.strength=0.3"), "{generate}");
        let plan = message("prsmed plan --epochs 3");
        assert!(plan.contains("--set train.epochs=3"), "{plan}");
    }

    #[test]
    fn other_flags_and_commands_without_settings_keep_their_error() {
        for line in ["prsmed train --colour red", "prsmed doctor --epochs 3", "prsmed merge --lr 1"] {
            let text = message(line);
            assert!(text.contains("unexpected argument") && !text.contains("it is a setting"), "{text}");
        }
    }
}
