//! Shows progress of the commands: bars on a terminal, lines elsewhere, both on standard error. With `--json`, events
//! are objects on standard output.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use super::output::{DataOutput, printable};
use crate::data::familiarity::add_fields;
use crate::event::{Event, MemoryReport, Observer, StepReport};
use crate::metrics::order::quantile;
use crate::trainer::records;
use crate::units::{Bytes, clock};

/// Interval of progress lines without a terminal, for phases other than training steps.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Style of the progress display.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// Whether standard error is a terminal.
    pub is_terminal: bool,
    /// Whether to use colours (on a terminal, without `NO_COLOR`).
    pub color: bool,
    /// Without a terminal: number of training steps between two lines, at least 1.
    pub every_steps: u64,
}

/// Shows events as they arrive. Output errors do not stop the command: errors on standard error are ignored, and the
/// first error on standard output is reported as a warning.
pub struct ProgressDisplay {
    style: Style,
    output: Arc<DataOutput>,
    bars: MultiProgress,
    state: Mutex<State>,
}

struct State {
    lines: Box<dyn Write + Send>,
    phases: Vec<Phase>,
    /// Seconds of the latest training steps.
    step_seconds: StepSeconds,
    output_failed: bool,
    /// Whether generated text is on standard output without a newline after it.
    answering: bool,
}

struct Phase {
    name: String,
    total: u64,
    unit: &'static str,
    done: u64,
    started: Instant,
    last_line: Instant,
    bar: Option<ProgressBar>,
}

impl ProgressDisplay {
    /// Progress on standard error, data on `output`.
    pub fn new(style: Style, output: Arc<DataOutput>) -> Self {
        Self::to(Box::new(std::io::stderr()), style, output)
    }

    /// Progress on any writer (bars still go to standard error).
    pub fn to(lines: Box<dyn Write + Send>, style: Style, output: Arc<DataOutput>) -> Self {
        let target = if style.is_terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let state = State {
            lines,
            phases: Vec::new(),
            step_seconds: StepSeconds::default(),
            output_failed: false,
            answering: false,
        };
        Self { style, output, bars: MultiProgress::with_draw_target(target), state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn print_line(&self, state: &mut State, text: &str) {
        // Bars are hidden while the line is written.
        self.bars.suspend(|| {
            let _ = writeln!(state.lines, "{text}").and_then(|()| state.lines.flush());
        });
    }

    fn labelled(&self, label: &str, code: &str, text: &str) -> String {
        let text = printable(text);
        if self.style.color { format!("\x1b[1;{code}m{label}\x1b[0m {text}") } else { format!("{label} {text}") }
    }

    fn start(&self, state: &mut State, name: &str, total: u64, unit: &'static str) {
        let name = printable(name);
        let bar = self.style.is_terminal.then(|| {
            let bar = self.bars.add(ProgressBar::new(total).with_style(bar_style(total, unit, self.style.color)));
            bar.set_prefix(name.to_string());
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        if bar.is_none() {
            let amount = if total == 0 { String::new() } else { format!(": {}", amount(total, unit)) };
            self.print_line(state, &format!("{name}{amount}"));
        }
        let now = Instant::now();
        state.phases.push(Phase { name: name.into_owned(), total, unit, done: 0, started: now, last_line: now, bar });
    }

    fn advance(&self, state: &mut State, done: u64) {
        let Some(phase) = state.phases.last_mut() else { return };
        phase.done = done;
        if let Some(bar) = &phase.bar {
            bar.set_position(done);
        } else if phase.last_line.elapsed() >= LINE_EVERY {
            phase.last_line = Instant::now();
            let line = advance_line(&phase.name, done, phase.total, phase.unit, phase.started.elapsed());
            self.print_line(state, &line);
        }
    }

    fn finish(&self, state: &mut State) {
        let Some(phase) = state.phases.pop() else { return };
        if let Some(bar) = &phase.bar {
            bar.finish_and_clear();
            self.bars.remove(bar);
        }
        let elapsed = phase.started.elapsed();
        // On a terminal, short phases leave no line.
        if phase.bar.is_none() || elapsed >= Duration::from_secs(2) {
            self.print_line(state, &format!("{}: done in {}", phase.name, clock(elapsed)));
        }
    }

    fn step(&self, state: &mut State, report: &StepReport) {
        state.step_seconds.add(report.elapsed);
        let (losses, pace) = (loss_text(report), pace_text(report, state.step_seconds.typical()));
        if let Some(phase) = state.phases.last_mut() {
            phase.done = report.step;
            if let Some(bar) = &phase.bar {
                bar.set_length(report.total_steps);
                bar.set_position(report.step);
                // Two lines, because one would be longer than 80 columns.
                bar.set_message(format!("{pace}\n  {losses}"));
                return;
            }
        }
        let is_due = report.step == 1
            || report.step.is_multiple_of(self.style.every_steps.max(1))
            || report.step == report.total_steps;
        if is_due {
            let StepReport { step, total_steps, epoch, .. } = report;
            self.print_line(state, &format!("step {step}/{total_steps}  epoch {epoch}  {losses}  {pace}"));
        }
    }

    fn token(&self, state: &mut State, text: &str) {
        if self.output.is_json() {
            return;
        }
        // A bar and an answer cannot share a line of the terminal.
        for phase in &mut state.phases {
            if let Some(bar) = phase.bar.take() {
                bar.finish_and_clear();
                self.bars.remove(&bar);
            }
        }
        state.answering = true;
        let result = self.output.piece(text);
        self.warn_once(state, result);
    }

    fn warn_once(&self, state: &mut State, result: crate::Result<()>) {
        if let Err(error) = result
            && !std::mem::replace(&mut state.output_failed, true)
        {
            self.print_line(state, &self.labelled("warning:", "33", &error.to_string()));
        }
    }
}

impl Observer for ProgressDisplay {
    fn on(&self, event: &Event) {
        let mut state = self.state();
        if let Some(value) = record(event) {
            let result = self.output.record(&value);
            self.warn_once(&mut state, result);
        }
        if state.answering && !matches!(event, Event::Token(_)) {
            state.answering = false;
            let result = self.output.piece("\n");
            self.warn_once(&mut state, result);
        }
        let state = &mut *state;
        match event {
            Event::Started { phase, total, unit } => self.start(state, phase, *total, unit),
            Event::Advanced { done } => self.advance(state, *done),
            Event::Finished => self.finish(state),
            Event::Step(report) => self.step(state, report),
            Event::Memory(report) => self.print_line(state, &memory_text(report)),
            Event::Validated { step, values } => {
                let values: Vec<String> = values.iter().map(|(name, value)| format!("{name} {value:.4}")).collect();
                self.print_line(state, &format!("validation after step {step}: {}", values.join(", ")));
            }
            Event::Saved { path, best } => {
                let best = if *best { " (best so far)" } else { "" };
                self.print_line(state, &format!("saved {}{best}", printable(&path.display().to_string())));
            }
            Event::Token(text) => self.token(state, text),
            Event::Record(_) => {}
            Event::Note(text) => self.print_line(state, &self.labelled("note:", "36", text)),
            Event::Warning(text) => self.print_line(state, &self.labelled("warning:", "33", text)),
        }
    }
}

impl Drop for ProgressDisplay {
    /// Removes bars and ends an open line, however the command ends.
    fn drop(&mut self) {
        let mut state = self.state();
        for bar in state.phases.drain(..).filter_map(|phase| phase.bar) {
            bar.finish_and_clear();
        }
        if std::mem::take(&mut state.answering) {
            let _ = self.output.piece("\n");
        }
    }
}

/// The JSON object of an event; `None` for events that are only displayed.
fn record(event: &Event) -> Option<Value> {
    Some(match event {
        Event::Started { .. } | Event::Advanced { .. } | Event::Finished => return None,
        Event::Record(record) => record.clone(),
        Event::Step(report) => records::step_line(report),
        Event::Memory(report) => memory_line(report),
        Event::Validated { step, values } => records::validation_line(*step, values),
        Event::Saved { path, best } => json!({ "kind": "saved", "path": path, "best": best }),
        Event::Token(text) => json!({ "kind": "token", "text": text }),
        Event::Note(text) => json!({ "kind": "note", "text": text }),
        Event::Warning(text) => json!({ "kind": "warning", "text": text }),
    })
}

fn bar_style(total: u64, unit: &str, color: bool) -> ProgressStyle {
    let bar = if color { "{bar:24.cyan/238}" } else { "{bar:24}" };
    let template = match (unit, total) {
        ("bytes", 0) => "{prefix} {spinner} {bytes} {bytes_per_sec}".to_owned(),
        ("bytes", _) => format!("{{prefix}} {bar} {{bytes}}/{{total_bytes}} {{bytes_per_sec}} ETA {{eta}}"),
        ("steps", _) => format!("{{prefix}} {bar} {{pos}}/{{len}} {{msg}}"),
        (_, 0) => "{prefix} {spinner} {pos} {msg}".to_owned(),
        (unit, _) => format!("{{prefix}} {bar} {{pos}}/{{len}} {unit} {{per_sec}} ETA {{eta}}"),
    };
    ProgressStyle::with_template(&template).expect("the template is well-formed").progress_chars("━━╌")
}

/// Text of the loss, its parts and the learning rate.
fn loss_text(report: &StepReport) -> String {
    let (total, parts): (Vec<_>, Vec<_>) = report.losses.iter().partition(|(name, _)| name == "total");
    let parts: Vec<String> = parts.iter().map(|(name, value)| format!("{name} {value:.4}")).collect();
    let loss = match (total.first(), parts.is_empty()) {
        (Some((_, total)), true) => format!("loss {total:.4}"),
        (Some((_, total)), false) => format!("loss {total:.4} ({})", parts.join(", ")),
        (None, _) => parts.join(", "),
    };
    format!("{loss}  lr {:.2e}", report.learning_rate)
}

/// Seconds of the latest steps. The first step of a process also allocates and tunes, so it does not count.
#[derive(Default)]
struct StepSeconds {
    latest: VecDeque<f64>,
    has_begun: bool,
}

impl StepSeconds {
    const KEPT: usize = 32;

    fn add(&mut self, elapsed: Duration) {
        if std::mem::replace(&mut self.has_begun, true) {
            self.latest.push_back(elapsed.as_secs_f64());
        }
        if self.latest.len() > Self::KEPT {
            self.latest.pop_front();
        }
    }

    /// Their median: a step that waits for a file or tries kernels must not change the time left. `None` at the first step.
    fn typical(&self) -> Option<f64> {
        quantile(self.latest.iter().copied().collect::<Vec<_>>().as_slice(), 0.5)
    }
}

/// Text of speed, memory and, if the time of a step is known, remaining time.
fn pace_text(report: &StepReport, step_seconds: Option<f64>) -> String {
    let left = step_seconds.map(|seconds| report.total_steps.saturating_sub(report.step) as f64 * seconds);
    let left = left.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let left = left.map_or_else(String::new, |left| format!("  ETA {}", clock(left)));
    let peak = Bytes(report.allocated_peak);
    let waited = report.data_wait_share() * 100.0;
    let waited = if waited >= 1.0 { format!("  data wait {waited:.0} %") } else { String::new() };
    format!("{:.1} images/s{waited}  peak {peak}{left}", records::images_per_s(report))
}

/// Text of memory after a profiled step, and of its peak with the largest categories.
pub fn memory_text(report: &MemoryReport) -> String {
    let MemoryReport { step, allocated, allocated_peak, reserved, resident, device_used, .. } = report;
    let [allocated, peak, reserved] = [allocated, allocated_peak, reserved].map(|bytes| Bytes(*bytes));
    let system =
        device_used.map_or_else(|| format!("process {}", Bytes(*resident)), |used| format!("GPU {}", Bytes(used)));
    let shares: Vec<_> = report.categories_at_peak.iter().map(|(name, bytes)| (*name, Bytes(*bytes))).collect();
    let shares = shares_text(&shares, 3);
    let of_peak = if shares.is_empty() { String::new() } else { format!(" ({shares})") };
    format!("memory at step {step}: tensors {allocated}, reserved {reserved}, {system}; peak {peak}{of_peak}")
}

/// The `count` largest categories, largest first.
pub fn shares_text(shares: &[(&'static str, Bytes)], count: usize) -> String {
    let mut shares: Vec<_> = shares.iter().filter(|(_, bytes)| bytes.0 > 0).collect();
    shares.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let shares: Vec<String> = shares.iter().take(count).map(|(name, bytes)| format!("{name} {bytes}")).collect();
    shares.join(", ")
}

/// A profiled step as a JSON object, `"kind": "memory"`.
fn memory_line(report: &MemoryReport) -> Value {
    let mut line = json!({ "kind": "memory" });
    add_fields(&mut line, report);
    line
}

fn advance_line(name: &str, done: u64, total: u64, unit: &str, elapsed: Duration) -> String {
    let of_total = if total == 0 { String::new() } else { format!(" of {}", amount(total, unit)) };
    let so_far = format!("{name}: {}{of_total}", amount(done, unit));
    if done == 0 {
        return format!("{so_far} after {}", clock(elapsed));
    }
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate for display")]
    let per_second =
        if rate < 10.0 && unit != "bytes" { format!("{rate:.2} {unit}") } else { amount(rate as u64, unit) };
    format!("{so_far}, {per_second}/s")
}

fn amount(count: u64, unit: &str) -> String {
    if unit == "bytes" { Bytes(count).to_string() } else { format!("{count} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::output::tests::Shared;

    fn progress(is_terminal: bool, is_json: bool) -> (ProgressDisplay, Shared, Shared) {
        let (lines, data) = (Shared::default(), Shared::default());
        let style = Style { is_terminal, color: false, every_steps: 10 };
        let output = Arc::new(DataOutput::to(Box::new(data.clone()), is_json));
        (ProgressDisplay::to(Box::new(lines.clone()), style, output), lines, data)
    }

    fn report(step: u64) -> StepReport {
        StepReport {
            step,
            total_steps: 25,
            losses: vec![("seg".into(), 0.3), ("llm".into(), 0.2), ("total".into(), 0.5)],
            learning_rate: 1e-4,
            samples: 4,
            elapsed: Duration::from_secs(20),
            allocated_peak: 3 << 29,
            ..StepReport::default()
        }
    }

    #[test]
    fn steps_are_printed_every_n_steps_and_at_the_end() {
        let (progress, lines, data) = progress(false, false);
        progress.on(&Event::Started { phase: "train".into(), total: 25, unit: "steps" });
        for step in 1..=25 {
            // the first step is slow, and so is one that tries kernels
            let elapsed = Duration::from_secs(match step {
                1 => 300,
                4 => 90,
                _ => 20,
            });
            progress.on(&Event::Step(StepReport { elapsed, ..report(step) }));
        }
        progress.on(&Event::Validated { step: 25, values: vec![("dice".into(), 0.9)] });
        progress.on(&Event::Saved { path: "runs/a/best".into(), best: true });
        progress.on(&Event::Finished);
        let text = lines.text();
        let steps: Vec<&str> = text.lines().filter(|line| line.starts_with("step ")).collect();
        let expected = "step 10/25  epoch 0  loss 0.5000 (seg 0.3000, llm 0.2000)  lr 1.00e-4  0.2 images/s  \
                        peak 1.50 GiB  ETA 5m 00s";
        assert_eq!(steps[1], expected);
        assert!(!steps[0].contains("ETA"), "{}", steps[0]);
        assert_eq!(steps.iter().map(|line| &line[5..7]).collect::<Vec<_>>(), ["1/", "10", "20", "25"]);
        assert!(text.starts_with("train: 25 steps\n"), "{text}");
        assert!(
            text.ends_with(
                "validation after step 25: dice 0.9000\nsaved runs/a/best (best so far)\ntrain: done in 0s\n"
            ),
            "{text}"
        );
        assert_eq!(data.text(), "");
    }

    #[test]
    fn data_wait_is_shown_from_one_percent() {
        let of = |seconds| pace_text(&StepReport { data_wait: Duration::from_secs_f64(seconds), ..report(3) }, None);
        assert!(of(5.0).starts_with("0.2 images/s  data wait 25 %  peak"), "{}", of(5.0));
        assert!(!of(0.1).contains("wait"));
    }

    #[test]
    fn events_are_json_lines_on_standard_output() {
        let (progress, lines, data) = progress(false, true);
        progress.on(&Event::Step(report(3)));
        progress.on(&Event::Token("upper".into()));
        progress.on(&Event::Note("new".into()));
        progress.on(&Event::Warning("odd".into()));
        let values: Vec<Value> = data.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            values.iter().map(|v| v["kind"].as_str().unwrap()).collect::<Vec<_>>(),
            ["step", "token", "note", "warning"]
        );
        assert_eq!(values[0]["losses"]["total"], json!(0.5));
        assert_eq!([1, 2, 3].map(|i| values[i]["text"].as_str().unwrap()), ["upper", "new", "odd"]);
        assert_eq!(lines.text(), "note: new\nwarning: odd\n");
    }

    #[test]
    fn output_that_cannot_be_written_gives_one_warning() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::StorageFull.into())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let lines = Shared::default();
        let style = Style { is_terminal: false, color: false, every_steps: 10 };
        let progress =
            ProgressDisplay::to(Box::new(lines.clone()), style, Arc::new(DataOutput::to(Box::new(Full), true)));
        let warning = "warning: standard output: cannot write\n";
        progress.on(&Event::Token("upper".into()));
        assert_eq!(lines.text(), warning, "at the first failure");
        progress.on(&Event::Token(" left".into()));
        assert_eq!(lines.text(), warning);
    }

    #[test]
    fn control_characters_of_notes_and_warnings_are_escaped() {
        let (progress, lines, _) = progress(false, false);
        progress.on(&Event::Warning("row `\x1b]0;owned\x07`".into()));
        progress.on(&Event::Started { phase: "copy \x1b[2J".into(), total: 0, unit: "files" });
        assert_eq!(lines.text(), "warning: row `\\u{1b}]0;owned\\u{7}`\ncopy \\u{1b}[2J\n");
    }

    #[test]
    fn an_answer_is_streamed_and_its_line_is_ended() {
        let (progress, lines, data) = progress(false, false);
        progress.on(&Event::Token("upper".into()));
        assert_eq!(data.text(), "upper", "written at once");
        progress.on(&Event::Token(" left".into()));
        progress.on(&Event::Note("mask written".into()));
        assert_eq!((data.text().as_str(), lines.text().as_str()), ("upper left\n", "note: mask written\n"));
        progress.on(&Event::Token("x".into()));
        drop(progress);
        assert_eq!(data.text(), "upper left\nx\n");
    }

    #[test]
    fn bars_accept_all_phases_and_lines_are_written_between_them() {
        let (progress, lines, _data) = progress(true, false);
        for (total, unit) in [(10, "bytes"), (0, "bytes"), (10, "steps"), (0, "files"), (10, "images")] {
            progress.on(&Event::Started { phase: "phase".into(), total, unit });
            let bar = progress.state().phases.last().unwrap().bar.clone().unwrap();
            assert_eq!((bar.prefix().as_str(), bar.length()), ("phase", Some(total)));
            progress.on(&Event::Advanced { done: 5 });
            progress.on(&Event::Step(report(5)));
        }
        progress.on(&Event::Warning("odd".into()));
        for _ in 0..6 {
            progress.on(&Event::Finished);
        }
        assert_eq!(lines.text(), "warning: odd\n");
    }

    #[test]
    fn a_profiled_step_is_one_line_with_its_largest_categories() {
        let (progress, lines, data) = progress(false, true);
        let categories =
            [("inputs", 1 << 20), ("activations", 3 << 29), ("ema", 0), ("frozen", 1 << 30), ("trainable", 9)];
        progress.on(&Event::Memory(MemoryReport {
            phase: "step".into(),
            step: 100,
            allocated: 1 << 30,
            allocated_peak: 5 << 29,
            reserved: 3 << 30,
            device_used: Some(4 << 30),
            categories_at_peak: categories.to_vec(),
            ..MemoryReport::default()
        }));
        assert_eq!(
            lines.text(),
            "memory at step 100: tensors 1.00 GiB, reserved 3.00 GiB, GPU 4.00 GiB; peak 2.50 GiB (activations \
             1.50 GiB, frozen 1.00 GiB, inputs 1.00 MiB)\n"
        );
        let line: Value = serde_json::from_str(&data.text()).unwrap();
        assert_eq!((&line["kind"], &line["allocated_peak"]), (&json!("memory"), &json!(5_u64 << 29)));
    }

    #[test]
    fn amounts_rates_and_times_are_formatted() {
        let line = advance_line("download", 3 << 29, 3 << 30, "bytes", Duration::from_secs(3));
        assert_eq!(line, "download: 1.50 GiB of 3.00 GiB, 512.00 MiB/s");
        assert_eq!(advance_line("check", 50, 0, "images", Duration::from_secs(10)), "check: 50 images, 5.00 images/s");
        let line = advance_line("check", 50, 0, "images", Duration::from_millis(500));
        assert_eq!(line, "check: 50 images, 100 images/s");
        assert_eq!([9, 250, 7500].map(|s| clock(Duration::from_secs(s))), ["9s", "4m 10s", "2h 05m"]);
    }
}
