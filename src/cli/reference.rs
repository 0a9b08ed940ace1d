//! `prsmed reference`: the generated pages of `docs/reference/`.

use super::report::{CommandEnd, CommandResult};
use crate::config::reference::settings_markdown;
use crate::job::lock::make_folder;
use crate::tensor::weights::write_bytes;
use clap::Command;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Write the reference of all settings and commands as Markdown
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  prsmed reference docs/reference")]
pub(super) struct Args {
    /// Folder of `settings.md` and `commands.md`
    #[arg(value_name = "DIR")]
    out: PathBuf,
}

/// `cli` is the whole command line.
pub(super) fn run(args: &Args, cli: clap::Command) -> CommandResult {
    make_folder("DIR", &args.out)?;
    write_bytes(&args.out.join("settings.md"), settings_markdown().as_bytes())?;
    write_bytes(&args.out.join("commands.md"), commands_markdown(cli).as_bytes())?;
    Ok(CommandEnd::Done)
}

/// The long help of all commands.
fn commands_markdown(cli: clap::Command) -> String {
    let mut out = String::from("# Commands\n\nGenerated from `--help`; `scripts/reference` writes it anew.\n");
    let mut cli = cli.term_width(100);
    cli.build();
    add(&mut out, &mut cli, 2);
    out
}

fn add(out: &mut String, command: &mut Command, level: usize) {
    let name = command.get_bin_name().unwrap_or("prsmed").to_owned();
    let help = command.render_long_help().to_string();
    let help: Vec<&str> = help.trim_end().lines().map(str::trim_end).collect();
    write!(out, "\n{} {name}\n\n```text\n{}\n```\n", "#".repeat(level), help.join("\n"))
        .expect("a string can be written to");
    for inner in command.get_subcommands_mut().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help") {
        add(out, inner, level + 1);
    }
}
