//! Each flag and each setting changes an output or a plan, or is refused: `walk.txt` has a line for each.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{Ran, path, phantoms, prsmed, run, trained, tree};

const TABLE: &str = include_str!("walk.txt");
/// Files that repeat the settings of a command.
const RECORDS: [&str; 13] = [
    "config.toml",
    "model.json",
    "trainer.json",
    "checksums.json",
    "base.json",
    "adapter_config.json",
    "report.html",
    "settings.json",
    "export.json",
    "augment.json",
    "finetune.json",
    "tfevents",
    "manifest.jsonl",
];
/// Refusals of words that are wrong in themselves.
const MISSPELT: [&str; 8] = [
    "unknown variant",
    "invalid type",
    "invalid value",
    "there is no such setting",
    "unexpected argument",
    "cannot be used multiple",
    "cannot be used with",
    "required arguments",
];

/// A line of the table.
struct Row {
    name: &'static str,
    /// A base, `test` or `needs`.
    base: &'static str,
    words: &'static str,
}

fn rows() -> Vec<Row> {
    let lines =
        TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with(['#', ' ']) && !line.starts_with("base "));
    let row = |line: &'static str| {
        let mut parts = line.splitn(3, '|').map(str::trim);
        let mut part = || parts.next().unwrap_or_else(|| panic!("not NAME | BASE | WORDS: {line}"));
        Row { name: part(), base: part(), words: part() }
    };
    lines.map(row).collect()
}

fn bases() -> HashMap<&'static str, &'static str> {
    let bases = TABLE.lines().filter_map(|line| line.strip_prefix("base ")?.split_once(" = "));
    bases.collect()
}

fn reference(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference").join(name)).unwrap()
}

/// The settings, and the flags as `COMMAND --FLAG`, of the reference.
fn declared() -> BTreeSet<String> {
    let (settings, commands) = (reference("settings.md"), reference("commands.md"));
    let mut names: BTreeSet<String> = settings
        .lines()
        .filter_map(|line| Some(line.strip_prefix("### `")?.trim_end_matches('`').to_owned()))
        .collect();
    let (mut command, mut is_example) = (String::new(), false);
    for line in commands.lines() {
        if let Some((marks, title)) = line.split_once(" prsmed").filter(|(marks, _)| marks.starts_with('#')) {
            assert!(marks.chars().all(|mark| mark == '#'));
            title.trim().clone_into(&mut command);
            is_example = false;
        }
        is_example |= line.starts_with("Example");
        let indented = line.strip_prefix("      ").or_else(|| line.strip_prefix("  -").and_then(|line| line.get(3..)));
        let Some(flag) = indented.filter(|rest| rest.starts_with("--") && !is_example) else { continue };
        let end = flag[2..].find(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).map_or(flag.len(), |end| end + 2);
        if !["--json", "--quiet", "--help", "--version"].contains(&&flag[..end]) {
            names.insert(format!("{command} {}", &flag[..end]));
        }
    }
    assert!(names.len() > 330, "{}: the files have another form", names.len());
    names
}

#[test]
fn every_flag_and_setting_has_a_line() {
    let rows = rows();
    let named: BTreeSet<String> = rows.iter().map(|row| row.name.to_owned()).collect();
    assert_eq!(named.len(), rows.len(), "two lines for one name");
    let declared = declared();
    let missing: Vec<_> = declared.difference(&named).collect();
    let unknown: Vec<_> = named.difference(&declared).collect();
    assert!(
        missing.is_empty() && unknown.is_empty(),
        "without a line in walk.txt: {missing:#?}; unknown: {unknown:#?}"
    );
    let bases = bases();
    for row in &rows {
        let is_known = ["test", "needs"].contains(&row.base) || bases.contains_key(row.base);
        assert!(is_known && !row.words.is_empty(), "{}: {}", row.name, row.base);
        let mentions =
            row.words.contains(row.name.rsplit(' ').next().unwrap()) || ["test", "needs"].contains(&row.base);
        assert!(mentions, "{}: {}", row.name, row.words);
    }
}

#[test]
fn tests_of_flags_and_settings_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = String::new();
    for place in ["src", "tests"] {
        let is_source = |name: &String| Path::new(name).extension().is_some_and(|ending| ending == "rs");
        let files = tree(&root.join(place)).into_iter().filter(|(name, _)| is_source(name));
        for (_, bytes) in files {
            sources += &String::from_utf8(bytes).unwrap();
        }
    }
    let is_missing = |row: &&Row| row.base == "test" && !sources.contains(&format!("fn {}(", row.words));
    let missing: Vec<String> =
        rows().iter().filter(is_missing).map(|row| format!("{}: {}", row.name, row.words)).collect();
    assert!(missing.is_empty(), "tests that do not exist: {missing:#?}");
}

/// The first file of a folder.
fn first(folder: &Path) -> String {
    folder.join(tree(folder).keys().next().unwrap()).display().to_string()
}

/// Replaces the places of a command, and divides it into words.
fn words(text: &str, out: &Path) -> Vec<String> {
    let images = phantoms().join("brain_MRI/train_images");
    let places = [
        ("{data}", phantoms().display().to_string()),
        ("{out}", out.display().to_string()),
        ("{run}", trained().0.display().to_string()),
        ("{image}", first(&images)),
        ("{images}", images.display().to_string()),
        ("{masks}", phantoms().join("brain_MRI/train_masks").display().to_string()),
        ("{file}", out.join("file").display().to_string()),
    ];
    let place =
        |word: &str| places.iter().fold(word.replace('~', " "), |word, (name, value)| word.replace(name, value));
    text.split(' ').map(place).collect()
}

/// What a command said and wrote, in small parts by name.
type Seen = BTreeMap<String, Vec<u8>>;

fn observe(out: &Path, command: &str, more: &str) -> (Ran, Seen) {
    let _ = fs::remove_dir_all(out);
    if command.contains("{file}") || more.contains("{file}") {
        fs::create_dir_all(out).unwrap();
    }
    let all = words(command, out).into_iter().chain(words(more, out)).filter(|word| !word.is_empty());
    let ran = run(prsmed().args(all).env("HF_HUB_OFFLINE", "1"));
    let mut seen = Seen::new();
    add_text(&mut seen, "stdout", &ran.stdout);
    let files = if out.is_dir() { tree(out) } else { BTreeMap::new() };
    for (name, bytes) in files {
        if RECORDS.iter().any(|record| name.contains(record)) {
            continue;
        }
        match String::from_utf8(bytes) {
            Ok(text) => add_text(&mut seen, &name, &text),
            Err(binary) => drop(seen.insert(name, binary.into_bytes())),
        }
    }
    (ran, seen)
}

/// Adds each value of JSON lines, or each line.
///
/// JSON lines are counted by their kind: on a slow machine there is a note or a line of progress more, and it must not
/// move the lines after it.
fn add_text(seen: &mut Seen, name: &str, text: &str) {
    let mut counts: HashMap<String, usize> = HashMap::new();
    for line in text.lines() {
        let value = serde_json::from_str::<Value>(line).ok();
        let kind = value.as_ref().and_then(|value| value["kind"].as_str()).unwrap_or_default().to_owned();
        let count = counts.entry(kind.clone()).or_default();
        let name = format!("{name}:{kind}{count}");
        *count += 1;
        match value {
            Some(value) => add_value(seen, &name, &value),
            None => drop(seen.insert(name, line.as_bytes().to_vec())),
        }
    }
}

#[test]
fn a_note_more_moves_no_other_line() {
    let seen_in = |text: &str| {
        let mut seen = Seen::new();
        add_text(&mut seen, "stdout", text);
        seen
    };
    let answer = "{\"kind\":\"preset\",\"fits\":true}";
    let late = seen_in(&format!("{{\"kind\":\"note\",\"text\":\"searching\"}}\n{answer}"));
    assert!(seen_in(answer).iter().all(|(name, value)| late.get(name) == Some(value)), "{late:?}");
}

fn add_value(seen: &mut Seen, name: &str, value: &Value) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                add_value(seen, &format!("{name}/{key}"), value);
            }
        }
        Value::Array(all) => {
            for (i, value) in all.iter().enumerate() {
                add_value(seen, &format!("{name}/{i}"), value);
            }
        }
        other => drop(seen.insert(name.to_owned(), other.to_string().into_bytes())),
    }
}

/// Runs the lines whose base is in `wanted`, and lists those without effect.
fn walk(name: &str, wanted: impl Fn(&str) -> bool) {
    let (bases, out) = (bases(), path(name));
    let mut known: HashMap<&str, (Seen, BTreeSet<String>)> = HashMap::new();
    let mut idle = Vec::new();
    let rows = rows();
    let rows: Vec<&Row> = rows.iter().filter(|row| bases.contains_key(row.base) && wanted(row.base)).collect();
    assert!(!rows.is_empty());
    for row in rows {
        let command = bases[row.base];
        let (same, names) = known.entry(row.base).or_insert_with(|| {
            let (ran, first) = observe(&out, command, "");
            assert_eq!(ran.code, Some(0), "{}: {}", row.base, ran.stderr);
            // times and dates differ between two calls
            let (_, second) = observe(&out, command, "");
            let names = first.keys().chain(second.keys()).cloned().collect();
            (first.into_iter().filter(|(name, value)| second.get(name) == Some(value)).collect(), names)
        });
        let (ran, seen) = observe(&out, command, row.words);
        let name = row.name.rsplit(' ').next().unwrap();
        let is_named =
            ran.stderr.contains(name) || ran.stderr.contains(&name.trim_start_matches('-').replace('-', "_"));
        let is_changed = || {
            same.iter().any(|(name, value)| seen.get(name) != Some(value))
                || seen.keys().any(|name| !names.contains(name))
        };
        match ran.code {
            Some(2) if is_named && !MISSPELT.iter().any(|words| ran.stderr.contains(words)) => {}
            Some(0 | 1) if is_changed() => {}
            code => idle.push(format!("{} ({}): {code:?} {}", row.name, row.words, ran.stderr)),
        }
    }
    assert!(idle.is_empty(), "without effect:\n{}", idle.join("\n"));
}

#[test]
fn each_setting_of_a_training_changes_it() {
    walk("walk-train", |base| ["train", "epochs", "frozen"].contains(&base));
}

#[test]
fn each_setting_and_flag_of_a_plan_changes_it() {
    walk("walk-plan", |base| {
        base.contains("plan")
            || base.contains("gpu")
            || ["ranks", "frozen-ranks", "preset", "preset-text"].contains(&base)
    });
}

#[test]
fn each_setting_and_flag_of_the_generator_changes_it() {
    walk("walk-pairs", |base| ["pairs", "sampled", "contrast", "prior"].contains(&base) || base.starts_with("tune"));
}

#[test]
fn each_flag_of_a_model_and_of_data_changes_an_output() {
    let of = [
        "checked", "shown", "plain", "eval", "predict", "painted", "many", "merge", "phantom", "small", "few", "check",
        "prepare",
    ];
    walk("walk-model", |base| of.contains(&base));
}
