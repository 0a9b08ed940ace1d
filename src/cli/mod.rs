//! Command line: standard output has data, standard error has progress and errors, exit codes are in [`report`].

pub mod env;
pub mod report;

mod args;
mod augment;
mod calibrate;
mod compare;
mod context;
mod data;
mod doctor;
mod eval;
mod hub;
mod memory;
mod merge;
mod next;
mod outputs;
mod plan;
mod predict;
mod predict_many;
mod predict_volume;
mod prepare;
mod preset;
mod ranks;
mod reference;
mod scan;
mod serve;
mod solve;
mod train;
mod unknown_flag;

use crate::Error;
use crate::console::{DataOutput, ProgressDisplay, Style};
use crate::event::{Observer, Silent};
use crate::job::memory::Memory;
use crate::panics;
use crate::runtime::Runtime;
use crate::shell::command_line;
use crate::tensor::{self, threads};
use crate::trainer::distributed::Rendezvous;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use context::Context;
use env::Env;
use memory::MemoryObserver;
pub use report::leave;
use report::{CommandEnd, CommandResult, INTERRUPTED};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Train, evaluate and use PRS-Med: an image and a question give a mask and an answer.
#[derive(Debug, Parser)]
#[command(name = "prsmed", version, about, max_term_width = 100)]
struct Cli {
    /// Write one JSON object a line on standard output instead of text
    #[arg(long, global = true, display_order = 900)]
    json: bool,
    /// Say nothing on standard error but errors
    #[arg(short, long, global = true, display_order = 901)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

// Their summaries are the first lines of the documentation of their arguments.
#[derive(Debug, Subcommand)]
enum Command {
    Train(Box<train::Args>),
    Eval(eval::Args),
    Predict(predict::Args),
    Serve(Box<serve::Args>),
    Merge(merge::Args),
    Plan(plan::Args),
    Preset(preset::Args),
    Solve(solve::Args),
    Calibrate(calibrate::Args),
    #[command(subcommand)]
    Augment(augment::Command),
    #[command(subcommand)]
    Data(data::Command),
    #[command(subcommand)]
    Hub(hub::Command),
    Doctor(doctor::Args),
    #[command(hide = true)]
    Reference(reference::Args),
}

impl Command {
    /// True for work that several processes can do together; the first one reports for all.
    fn may_be_divided(&self) -> bool {
        use augment::Command::{Finetune, Generate};
        matches!(self, Self::Train(_) | Self::Eval(_) | Self::Augment(Finetune(_) | Generate(_)))
    }
}

/// Runs the command line `args` (program name first) and returns the exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let parsed = Cli::command().try_get_matches_from(&args);
    let typed = |matches: &_| Cli::from_arg_matches(matches).map_err(|error| error.format(&mut Cli::command()));
    let parsed = parsed.and_then(|matches| Ok((typed(&matches)?, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            let error = unknown_flag::explained(error, &Cli::command(), &args);
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let context = check_words(&args, &cli.command)
        .and_then(|()| outputs::check(&Cli::command(), &matches))
        .and_then(|()| context(&args, &cli));
    let context = match context {
        Ok(context) => context,
        Err(error) => {
            let _ = report::write_error(&mut std::io::stderr(), &error.into(), false);
            return 2;
        }
    };
    let saves = matches!(cli.command, Command::Train(_) | Command::Augment(_) | Command::Serve(_));
    listen_for_interrupts(&context, saves);
    let color = has_color(&context.env);
    let rank = context.rendezvous.as_ref().map_or(0, |joined| joined.rank);
    let go_on = context.rendezvous.is_none().then(|| go_on(&args, &cli.command));
    let result = guarded(|| dispatch(cli.command, &context));
    if let (Ok(CommandEnd::Ended(INTERRUPTED)), Some(go_on)) = (&result, &go_on) {
        let _ = report::write_interrupt(&mut std::io::stderr(), go_on, color);
    }
    if let Err(error) = &result {
        let _ = match &go_on {
            Some(go_on) if report::is_interrupt(error) => report::write_interrupt(&mut std::io::stderr(), go_on, color),
            // the first process speaks for all
            None if report::is_interrupt(error) && rank > 0 => Ok(()),
            _ => report::write_error(&mut std::io::stderr(), error, color),
        };
        if let Some(error) = report::find(error) {
            let _ = memory::report(error, &context.memory, &mut std::io::stderr(), &context.output);
        }
    }
    report::exit_code(&result)
}

/// Refuses words and folders that reports and tables cannot name.
fn check_words(args: &[OsString], command: &Command) -> crate::Result<()> {
    let Some(word) = other_text(args, command) else { return Ok(()) };
    let reason = "is not UTF-8, in which reports and tables name files";
    Err(Error::config(word.to_string_lossy(), reason, "rename the file or folder, or use a link to it"))
}

/// True if messages have colours.
fn has_color(env: &Env) -> bool {
    std::io::stderr().is_terminal() && !env.no_color
}

/// The run context of a command.
fn context(args: &[OsString], cli: &Cli) -> crate::Result<Context> {
    // before any thread starts
    let runtime = Runtime::new();
    let env = Env::read();
    let (rendezvous, runtime) = joined(&cli.command, runtime)?;
    if !env.sets_threads {
        threads::adapt_to_load();
    }
    let style = Style { is_terminal: std::io::stderr().is_terminal(), color: has_color(&env), every_steps: 10 };
    let (inner, output) = outputs(cli, style, rendezvous.as_ref());
    let memory = Memory::default();
    let progress = MemoryObserver { inner, memory: memory.clone(), output: Arc::clone(&output) };
    let progress: Arc<dyn Observer> = Arc::new(progress);
    let runtime = runtime.with_hub(env.hub.clone()).with_visible_gpus(env.cuda_visible_devices.clone());
    let mut runtime = runtime.with_observer(Arc::clone(&progress));
    if let Some(cache) = &env.cache {
        runtime = runtime.with_cache(cache);
    }
    if let Some(joined) = &rendezvous {
        runtime = runtime.with_local_rank(joined.local_rank);
    }
    let command = command_line(args.iter().filter_map(|word| word.to_str()).filter(|word| *word != "--json"));
    Ok(Context { runtime, env, output, progress, memory, command, rendezvous })
}

/// The observer of events and the output of this process. Of several processes only the first one reports.
fn outputs(cli: &Cli, style: Style, joined: Option<&Rendezvous>) -> (Box<dyn Observer>, Arc<DataOutput>) {
    let output = Arc::new(DataOutput::stdout(cli.json));
    let inner: Box<dyn Observer> =
        if cli.quiet { Box::new(Silent) } else { Box::new(ProgressDisplay::new(style, Arc::clone(&output))) };
    let joined = joined.filter(|_| cli.command.may_be_divided());
    match joined.map(|joined| joined.rank).filter(|rank| *rank > 0) {
        Some(rank) => (Box::new(ranks::OtherRank { rank, inner }), Arc::new(DataOutput::none())),
        None => (inner, output),
    }
}

/// The command that continues this one after an interrupt.
fn go_on(args: &[OsString], command: &Command) -> String {
    let mut words: Vec<&str> = args.iter().filter_map(|word| word.to_str()).collect();
    if matches!(command, Command::Train(_) | Command::Augment(augment::Command::Finetune(_))) {
        // from its own checkpoint, also if it was started from another one
        let mut follows_resume = false;
        words.retain(|word| {
            let is_value = std::mem::take(&mut follows_resume) && !word.starts_with('-');
            follows_resume = *word == "--resume";
            !(is_value || follows_resume || word.starts_with("--resume="))
        });
        words.push("--resume");
    }
    command_line(words)
}

/// A word of the command line that is not UTF-8, or the working folder of a command that writes absolute paths.
fn other_text(args: &[OsString], command: &Command) -> Option<OsString> {
    let word = args.iter().skip(1).find(|word| word.to_str().is_none()).cloned();
    let folder = if matches!(command, Command::Augment(_)) { std::env::current_dir().ok() } else { None };
    word.or_else(|| folder.map(PathBuf::into_os_string).filter(|folder| folder.to_str().is_none()))
}

/// How this process joins a training of several processes, and the runtime on its GPU.
fn joined(command: &Command, runtime: Runtime) -> crate::Result<(Option<Rendezvous>, Runtime)> {
    // other commands work alone, also in a job of several processes
    if !command.may_be_divided() && !matches!(command, Command::Plan(_)) {
        return Ok((None, runtime));
    }
    let Some(found) = Rendezvous::from_vars(|name| std::env::var(name).ok())? else { return Ok((None, runtime)) };
    ranks::choose_gpu(&found)?;
    Ok((Some(found), runtime.on(tensor::default_device())))
}

fn dispatch(command: Command, context: &Context) -> CommandResult {
    match command {
        Command::Train(args) if args.only_checks() => train::check(&args, context),
        Command::Train(args) => args.gpus.run(args.print_config, context, |ranks| train::run(&args, ranks, context)),
        Command::Eval(args) => args.gpus.run(false, context, |ranks| eval::run(&args, ranks, context)),
        Command::Predict(args) => predict::run(&args, context),
        Command::Serve(args) => serve::run(&args, context),
        Command::Merge(args) => merge::run(&args, context),
        Command::Plan(args) => plan::run(&args, context),
        Command::Preset(args) => preset::run(&args, context),
        Command::Solve(args) => solve::run(&args, context),
        Command::Calibrate(args) => calibrate::run(&args, context),
        Command::Augment(command) => augment::run(&command, context),
        Command::Data(command) => data::run(&command, context),
        Command::Hub(command) => hub::run(&command, context),
        Command::Doctor(args) => doctor::run(&args, context),
        Command::Reference(args) => reference::run(&args, <Cli as clap::CommandFactory>::command()),
    }
}

/// Converts a panic to an error that asks for a bug report and names message, file and line.
fn guarded(work: impl FnOnce() -> CommandResult) -> CommandResult {
    panics::record();
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Error::Internal { reason: panics::describe(&*panic) }.into()))
}

/// Handles Ctrl-C, SIGTERM and SIGHUP. In commands that can save, the first one saves and stops, and the second one ends
/// the process. In other commands the first one ends the process. SIGUSR1 saves and stops as well. SIGHUP stays ignored
/// under `nohup`, whose purpose is that a closed terminal ends nothing.
fn listen_for_interrupts(context: &Context, saves: bool) {
    let flag = Arc::clone(context.runtime.interrupt());
    // SAFETY: `signal` only sets a disposition; no handler is replaced, because none is installed before this.
    let has_nohup = unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) } == libc::SIG_IGN;
    let listening = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::SeqCst) || !saves {
            // SAFETY: ends the process without running destructors; files are replaced atomically.
            unsafe { libc::_exit(130) };
        }
    });
    if has_nohup {
        // SAFETY: as above; `set_handler` has just replaced what `nohup` had set.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    }
    if let Err(error) = listening {
        context.runtime.warn(format!("Ctrl-C will not save: {error}"));
    }
    // batch systems such as Slurm send it before the end of the allotted time
    if saves && let Err(error) = signal_hook::flag::register(libc::SIGUSR1, Arc::clone(context.runtime.interrupt())) {
        context.runtime.warn(format!("the signal USR1 will not save: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_training_goes_on_from_its_own_checkpoint() {
        let continued = |line: &str| {
            let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            go_on(&args, &Cli::try_parse_from(&args).expect("a command").command)
        };
        let train = "prsmed train --data-root d --out r";
        for resume in ["", " --resume", " --resume=latest", " --resume runs/b/best", " --resume none"] {
            assert_eq!(continued(&format!("{train}{resume}")), format!("{train} --resume"), "{resume}");
        }
        assert_eq!(continued(&format!("{train} --resume --quiet")), format!("{train} --quiet --resume"));
        assert_eq!(continued("prsmed augment finetune --data-root d --out r").split(' ').next_back(), Some("--resume"));
        let predict = "prsmed predict r --images d --question Where? --out o";
        assert_eq!(continued(predict), predict.replace("Where?", "'Where?'"));
    }

    #[test]
    fn an_internal_error_names_message_file_and_line() {
        let line = line!() + 1;
        let error = guarded(|| panic!("number {} is impossible", 7)).unwrap_err();
        drop(std::panic::take_hook());
        let expected = format!(
            "internal error, please report it with the command line: number 7 is impossible (at src/cli/mod.rs:{line})"
        );
        assert_eq!(error.to_string(), expected);
    }
}
