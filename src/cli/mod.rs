//! Commands: standard output is data, standard error is progress and errors, exit codes are in [`report`].

pub mod env;
pub mod output;
pub mod progress;
pub mod report;

mod augment;
mod bench;
mod claim;
mod data;
mod eval;
mod hub;
mod memory;
mod merge;
mod plan;
mod predict;
mod preset;
mod solve;
mod trace;
mod train;

use crate::Error;
use crate::hub::Files;
use crate::segment::fit::Surroundings;
use crate::tensor::{self, kernels, ledger};
use clap::{Parser, Subcommand};
use env::Env;
use output::Output;
use progress::{Progress, Style};
use report::Outcome;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    Merge(merge::Args),
    Plan(plan::Args),
    Preset(preset::Args),
    Solve(solve::Args),
    Bench(Box<bench::Args>),
    #[command(subcommand)]
    Augment(augment::Command),
    #[command(subcommand)]
    Data(data::Command),
    #[command(subcommand)]
    Hub(hub::Command),
    Trace(trace::Args),
}

impl Command {
    fn saves_on_interrupt(&self) -> bool {
        matches!(self, Self::Train(_) | Self::Bench(_) | Self::Augment(_))
    }
}

/// What commands share.
struct Context {
    env: Env,
    output: Arc<Output>,
    progress: Box<dyn crate::event::Observer>,
    memory: memory::Memory,
    interrupt: Arc<AtomicBool>,
}

/// Runs the command line `args` (program name first) and returns the exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    // SAFETY: ignoring a signal touches no memory. A file that grows over a limit is then an error, not the end.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // SAFETY: no thread was started and no operator ran.
    unsafe { crate::tensor::memory::bound_kernel_caches() };
    ledger::install();
    crate::tensor::use_flash_attention();
    let env = Env::read();
    let is_terminal = std::io::stderr().is_terminal();
    let color = is_terminal && !env.no_color;
    let output = Arc::new(Output::stdout(cli.json));
    let style = Style { is_terminal, color, every_steps: 10 };
    let inner: Box<dyn crate::event::Observer> =
        if cli.quiet { Box::new(crate::event::Silent) } else { Box::new(Progress::new(style, Arc::clone(&output))) };
    let memory = memory::Memory::default();
    let progress = Box::new(memory::Remembering { inner, memory: memory.clone() });
    if let (Some(cache), true) = (&env.cache, tensor::default_device() != tensor::Device::Cpu) {
        let folder = cache.join("kernels");
        // without it every run compiles them again
        if std::fs::create_dir_all(&folder).is_ok() {
            kernels::set_folder(&folder);
        }
    }
    let context = Context { env, output, progress, memory, interrupt: Arc::default() };
    listen_for_interrupts(&context, cli.command.saves_on_interrupt());
    let result = guarded(|| dispatch(cli.command, &context));
    if let Err(error) = &result {
        let _ = report::write_error(&mut std::io::stderr(), error, color);
        if let Some(error) = report::find(error) {
            let _ = memory::report(error, &context.memory, &mut std::io::stderr(), &context.output);
        }
    }
    report::exit_code(&result)
}

/// Ends the process without the destructors of libtorch's tables, which would touch 100 MB of memory for nothing. Everything
/// was written and flushed by then.
pub fn leave(code: u8) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(i32::from(code)) }
}

fn dispatch(command: Command, context: &Context) -> anyhow::Result<Outcome> {
    match command {
        Command::Train(args) => train::run(&args, context),
        Command::Eval(args) => eval::run(&args, context),
        Command::Predict(args) => predict::run(&args, context),
        Command::Merge(args) => merge::run(&args, context),
        Command::Plan(args) => plan::run(&args, context),
        Command::Preset(args) => preset::run(&args, context),
        Command::Solve(args) => solve::run(&args, context),
        Command::Bench(args) => bench::run(&args, context),
        Command::Augment(command) => augment::run(&command, context),
        Command::Data(command) => data::run(&command, context),
        Command::Hub(command) => hub::run(&command, context),
        Command::Trace(args) => trace::run(&args, context),
    }
}

/// A bug must not show a backtrace: it becomes an error that asks for a report.
fn guarded(work: impl FnOnce() -> anyhow::Result<Outcome>) -> anyhow::Result<Outcome> {
    std::panic::set_hook(Box::new(|_| ()));
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(anyhow::anyhow!("internal error, please report it with the command line: {text}"))
    })
}

/// Where something can be saved, the first Ctrl-C asks the work to save and stop, and the second ends the process;
/// elsewhere the first does.
fn listen_for_interrupts(context: &Context, saves: bool) {
    let flag = Arc::clone(&context.interrupt);
    let listening = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::SeqCst) || !saves {
            // SAFETY: ends the process without running destructors; files are replaced atomically.
            unsafe { libc::_exit(130) };
        }
    });
    if let Err(error) = listening {
        context.progress.on(&crate::event::Event::Warning(format!("Ctrl-C will not save: {error}")));
    }
}

/// Values of `--set` with those of other flags over them, as [`crate::config::Sources`] takes them.
fn sets_of(sets: &[String], flags: impl IntoIterator<Item = (String, String)>) -> Vec<(String, String)> {
    sets.iter().map(|set| (set.clone(), "--set".to_owned())).chain(flags).collect()
}

/// Makes the folder of a command's results and tries it, before the expensive work.
fn make_folder(flag: &str, folder: &Path) -> crate::Result<()> {
    if folder.exists() && !folder.is_dir() {
        let reason = format!("`{}` is a file", folder.display());
        return Err(Error::config(flag, reason, "choose another folder"));
    }
    std::fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
    tempfile::tempfile_in(folder).map(drop).map_err(Error::io(folder, "write"))
}

impl Context {
    /// Where and under whose eyes this process trains. `locate` is [`Self::locate`] of the same context.
    fn surroundings<'a>(&'a self, locate: &'a dyn Fn(&str) -> crate::Result<PathBuf>) -> Surroundings<'a> {
        Surroundings {
            device: tensor::default_device(),
            locate,
            cache: self.env.cache.as_deref(),
            observer: self.progress.as_ref(),
            interrupt: &self.interrupt,
        }
    }

    /// A `hub:` name or a path as a local path.
    fn locate(&self, spec: &str) -> crate::Result<PathBuf> {
        if spec.starts_with("hub:") {
            return crate::hub::resolve(spec, &Files::Checkpoint, &self.env.hub, self.progress.as_ref());
        }
        let path = PathBuf::from(spec);
        if path.exists() {
            return Ok(path);
        }
        let hint = "check the path, or write `hub:owner/name` for a repository";
        Err(Error::weights(path, "there is no such file or folder", hint))
    }
}
