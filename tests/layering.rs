//! Modules and crates import those of lower levels only, by the level table in `src/lib.rs`, and files do not import
//! each other in cycles.
//!
//! A folder of `src` with a `Cargo.toml` is a crate: `src/data` is `prsmed-data`. Paths here begin with the folder in
//! both cases, so that `crate::data::manifest` and `prsmed_data::manifest` are `data::manifest`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Files that import each other, each with the reason. A file with its own tests does not count.
const ALLOWED_CYCLES: [(&[&str], &str); 8] = [
    (&["augment::ablation", "augment::ablation::report"], "a report states the settings of its ablation"),
    (
        &["augment::inpaint_mask", "augment::inpaint_mask::decoy", "augment::inpaint_mask::distance"],
        "the parts of a mask use its pixel helpers",
    ),
    (
        &["data::table::annotation", "data::table::held_out", "data::table::manifest"],
        "rows and the files that they are read from",
    ),
    (&["data::features", "data::features::disk"], "the cache and its file"),
    (&["data::text", "data::text::sentencepiece", "data::text::train"], "a tokenizer and its formats"),
    (&["hub", "hub::download", "hub::files"], "a repository and its files"),
    (
        &[
            "tensor",
            "tensor::guard",
            "tensor::ledger",
            "tensor::memory",
            "tensor::meta",
            "tensor::module_path",
            "tensor::native",
        ],
        "the native layer reports failed allocations to the ledger that it counts for",
    ),
    (
        &[
            "tensor::weights",
            "tensor::weights::pickle",
            "tensor::weights::pth",
            "tensor::weights::quantized",
            "tensor::weights::safetensors",
        ],
        "an archive and its file formats",
    ),
];

fn levels() -> BTreeMap<String, u32> {
    let lib = fs::read_to_string("src/lib.rs").expect("src/lib.rs");
    lib.lines()
        .filter_map(|line| line.strip_prefix("//! | "))
        .filter_map(|row| row.split_once(" | "))
        .filter_map(|(level, modules)| Some((level.trim().parse::<u32>().ok()?, modules)))
        .flat_map(|(level, modules)| {
            modules.split('`').skip(1).step_by(2).map(move |m| (m.to_owned(), level)).collect::<Vec<_>>()
        })
        .collect()
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("source folder") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    files
}

/// Folders of `src` that are crates of their own.
static CRATES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let folders = fs::read_dir("src").expect("src").map(|entry| entry.expect("entry").path());
    let crates = folders.filter(|folder| folder.join("Cargo.toml").is_file());
    crates.map(|folder| folder.file_name().expect("name").to_string_lossy().into_owned()).collect()
});

/// The words that paths from the root of a crate begin with.
static ROOTS: LazyLock<Vec<String>> =
    LazyLock::new(|| CRATES.iter().map(|name| format!("prsmed_{name}")).chain(["crate".to_owned()]).collect());

/// `path`, which begins with a word of [`ROOTS`], in a file of `module`, from the folder `src` on.
fn from_src(module: &[String], path: &[String]) -> Vec<String> {
    let folder = match path[0].strip_prefix("prsmed_") {
        Some(name) => Some(name.to_owned()),
        None => module.first().filter(|name| CRATES.contains(name)).cloned(),
    };
    folder.into_iter().chain(path[1..].iter().cloned()).collect()
}

/// Path of a file's module: `segment::task`; empty for `src/lib.rs`.
fn module_path(file: &Path) -> Vec<String> {
    let inside = file.strip_prefix("src").expect("inside src").with_extension("");
    let mut parts: Vec<String> = inside.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod" || last == "lib") {
        parts.pop();
    }
    parts
}

fn top_module(file: &Path) -> String {
    module_path(file).into_iter().next().unwrap_or_else(|| "lib".to_owned())
}

/// The code of a file without comments and without the tests at its end.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).expect("source file");
    let tests = ["#[cfg(test)]\nmod tests", "#[cfg(test)]\npub(super) mod tests", "#[cfg(test)]\n#[path"];
    let end = tests.iter().filter_map(|tests| text.find(tests)).min().unwrap_or(text.len());
    let lines = text[..end].lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.filter(|line| !line.contains("pub(in crate")).collect::<Vec<_>>().join("\n")
}

/// The paths of an import tree: `a::{b, c::d}` gives `a::b` and `a::c::d`.
fn expanded(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some((prefix, group)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        return vec![path.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()];
    };
    let prefix: Vec<String> =
        prefix.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect();
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in group.trim_end().trim_end_matches('}').chars().chain([',']) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().expect("one part").push(c);
    }
    // a nested group lost its closing brace to the trimming
    let parts = parts.into_iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| expanded(&part)).map(|path| [prefix.clone(), path].concat()).collect()
}

/// All paths of `code` that begin with a word of `roots`: imports in full, others up to their last `::`.
fn paths(code: &str, roots: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut rest = String::new();
    for statement in code.split_inclusive(';') {
        let words = statement.trim_start();
        let import = statement.rfind("use ").filter(|at| {
            let before = statement[..*at].trim_end();
            before.is_empty() || before.ends_with(['}', '{', ')', ']', '\n']) || before.ends_with("pub")
        });
        match import {
            Some(at) if !words.contains('=') => {
                found.extend(expanded(statement[at + 4..].trim_end_matches(';')));
                rest.push_str(&statement[..at]);
            }
            _ => rest.push_str(statement),
        }
    }
    found.retain(|path| path.first().is_some_and(|first| roots.contains(first)));
    for root in roots {
        for (at, _) in rest.match_indices(&format!("{root}::")) {
            if rest[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let path = rest[at..].chars().take_while(|c| c.is_alphanumeric() || *c == '_' || *c == ':');
            let path: Vec<String> = path.collect::<String>().split("::").map(str::to_owned).collect();
            found.push(path.into_iter().filter(|part| !part.is_empty()).collect());
        }
    }
    found
}

/// True for a file that has only tests: they may use crates of higher levels.
fn is_test(file: &Path) -> bool {
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    name.ends_with("tests") || name == "fixture" || file.components().any(|part| part.as_os_str() == "tests")
}

#[test]
fn import_trees_are_expanded() {
    let expect = |tree: &str, want: &[&str]| {
        assert_eq!(expanded(tree).iter().map(|path| path.join("::")).collect::<Vec<_>>(), want, "{tree}");
    };
    expect("crate::a::B", &["crate::a::B"]);
    expect("crate::{a, b::{self, C as D}, e::F}", &["crate::a", "crate::b::self", "crate::b::C", "crate::e::F"]);
    expect("super::a::{B, c::{D, E}}", &["super::a::B", "super::a::c::D", "super::a::c::E"]);
    let code = "use crate::{\n    a,\n    b::C,\n};\nfn f() { crate::d::e(1); }";
    assert_eq!(
        paths(code, &["crate".to_owned()]).iter().map(|path| path[1].as_str()).collect::<Vec<_>>(),
        ["a", "b", "d"]
    );
}

#[test]
fn every_module_has_a_level() {
    let levels = levels();
    let mut seen = 0;
    for file in rust_files(Path::new("src")) {
        let module = top_module(&file);
        if ["lib", "main", "engine"].contains(&module.as_str()) {
            continue;
        }
        assert!(levels.contains_key(&module), "`{module}` is missing from the level table in src/lib.rs");
        seen += 1;
    }
    assert!(seen > 10, "only {seen} source files were found");
}

#[test]
fn modules_import_lower_levels_only() {
    let levels = levels();
    let mut wrong = Vec::new();
    for file in rust_files(Path::new("src")).into_iter().filter(|file| !is_test(file)) {
        let module = top_module(&file);
        let Some(&own) = levels.get(&module) else { continue };
        for path in paths(&code(&file), &ROOTS) {
            let path = from_src(&module_path(&file), &path);
            let Some(name) = path.first() else { continue };
            if *name != module && levels.get(name).is_some_and(|&level| level >= own) {
                wrong.push(format!("{}: `{module}` imports `{name}`", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "upward or sideways imports:\n{}", wrong.join("\n"));
}

#[test]
fn only_tensor_names_tch() {
    for file in rust_files(Path::new("src")) {
        if top_module(&file) != "tensor" {
            assert!(paths(&code(&file), &["tch".to_owned()]).is_empty(), "{} names tch directly", file.display());
        }
    }
}

/// A kind of part, with words that only the files of `models` (its implementations and its registry) should need.
const KINDS: [(&str, &[&str]); 2] = [
    ("a language model", &["mistral", "Mistral"]),
    ("a vision tower", &["models::clip", " clip::", "ClipVision", "\"clip\"", "clip-vit"]),
];
/// Files outside of `models` that may know a kind: examples of commands, the name of a part in `model.json`.
const MOST_FILES: usize = 3;

#[test]
fn few_files_outside_of_models_know_a_kind() {
    for (kind, words) in KINDS {
        let files =
            rust_files(Path::new("src")).into_iter().filter(|file| !is_test(file) && top_module(file) != "models");
        let knows = |file: &PathBuf| {
            let code = code(file);
            // the fields of an optimizer's gradients are no tower
            words.iter().any(|word| code.contains(word)) && top_module(file) != "trainer"
        };
        let found: Vec<PathBuf> = files.filter(knows).collect();
        assert!(found.len() <= MOST_FILES, "{kind} is known by {found:?}");
        assert!(!found.is_empty(), "the words for {kind} are outdated");
    }
}

#[test]
fn crates_in_folders_do_not_need_libtorch() {
    assert!(CRATES.len() >= 4, "only {:?} were found", *CRATES);
    for name in CRATES.iter().filter(|name| !["tensor", "trainer"].contains(&name.as_str())) {
        let manifest = fs::read_to_string(format!("src/{name}/Cargo.toml")).expect("manifest");
        let dependencies = manifest.lines().filter_map(|line| line.split(['.', ' ', '=']).next());
        let with_libtorch = ["tch", "torch-sys", "prsmed", "prsmed-engine", "prsmed-tensor", "prsmed-trainer"];
        let heavy = dependencies.filter(|name| with_libtorch.contains(name));
        assert_eq!(heavy.collect::<Vec<_>>(), [""; 0], "src/{name}/Cargo.toml");
    }
}

/// The import tree of a statement `pub use ..` or `pub(..) use ..`.
fn reexport(statement: &str) -> Option<&str> {
    let (before, tree) = statement.split_once(" use ")?;
    let before = before.trim_end();
    (before.ends_with("pub") || (before.ends_with(')') && before.contains("pub("))).then_some(tree)
}

fn without_self(path: Vec<String>) -> Vec<String> {
    path.into_iter().filter(|part| part != "self").collect()
}

/// The source files by module path, and what each of them re-exports.
struct Crate {
    files: BTreeMap<Vec<String>, PathBuf>,
    reexports: BTreeMap<(Vec<String>, String), Vec<String>>,
}

impl Crate {
    fn read() -> Self {
        let is_other = |file: &PathBuf| is_test(file) || file.file_stem().is_some_and(|name| name == "main");
        let files = rust_files(Path::new("src")).into_iter().filter(|file| !is_other(file));
        let mut this =
            Self { files: files.map(|file| (module_path(&file), file)).collect(), reexports: BTreeMap::new() };
        let modules: Vec<_> = this.files.iter().map(|(module, file)| (module.clone(), code(file))).collect();
        for (module, code) in modules {
            for statement in code.split(';').filter_map(reexport) {
                for path in expanded(statement) {
                    if let (Some(target), Some(name)) = (this.absolute(&module, &path), path.last()) {
                        this.reexports.insert((module.clone(), name.clone()), target);
                    }
                }
            }
        }
        this
    }

    fn children(&self, module: &[String]) -> Vec<&str> {
        let of = |path: &&Vec<String>| path.len() == module.len() + 1 && path.starts_with(module);
        self.files.keys().filter(of).filter_map(|path| path.last()).map(String::as_str).collect()
    }

    /// A path in `module` from the root of the crate on.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Vec<String>> {
        let mut base = module.to_vec();
        let mut rest = path;
        match path.first()?.as_str() {
            _ if ROOTS.contains(&path[0]) => return Some(without_self(from_src(module, path))),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|part| part == "super") {
                    base.pop()?;
                    rest = &rest[1..];
                }
            }
            child if self.children(module).contains(&child) => {}
            _ => return None,
        }
        base.extend(rest.iter().cloned());
        Some(without_self(base))
    }

    /// The module whose file defines what an absolute path names.
    fn definition(&self, path: &[String]) -> Vec<String> {
        let known = (0..=path.len()).rev().find(|&length| self.files.contains_key(&path[..length])).unwrap_or(0);
        let module = path[..known].to_vec();
        let next = path.get(known).and_then(|name| self.reexports.get(&(module.clone(), name.clone())));
        match next {
            Some(target) if *target != path => {
                self.definition(&[target.as_slice(), path.get(known + 1..).unwrap_or_default()].concat())
            }
            _ => module,
        }
    }

    /// The modules whose items the file of `module` uses.
    fn imports(&self, module: &[String]) -> BTreeSet<Vec<String>> {
        let code = code(&self.files[module]);
        // re-exports lead on, they use nothing
        let code: String = code.split_inclusive(';').filter(|part| reexport(part).is_none()).collect();
        let local = ["self", "super"].into_iter().chain(self.children(module)).map(str::to_owned);
        let roots: Vec<String> = ROOTS.iter().cloned().chain(local).collect();
        let absolute = paths(&code, &roots).into_iter().filter_map(|path| self.absolute(module, &path));
        let used = absolute.map(|path| self.definition(&path));
        used.filter(|used| !used.is_empty() && used != module && self.files.contains_key(used)).collect()
    }
}

/// Groups of modules that reach each other.
fn cycles(edges: &BTreeMap<Vec<String>, BTreeSet<Vec<String>>>) -> Vec<BTreeSet<String>> {
    let reached = |from: &Vec<String>| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(module) = open.pop() {
            for next in &edges[module] {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<_, _> = edges.keys().map(|module| (module, reached(module))).collect();
    let mut groups = BTreeSet::new();
    for (module, others) in &reached {
        let group = others.iter().filter(|other| reached[other].contains(*module));
        let group: BTreeSet<String> = group.map(|module| module.join("::")).collect();
        if group.len() > 1 {
            groups.insert(group);
        }
    }
    groups.into_iter().collect()
}

#[test]
fn files_do_not_import_each_other_in_cycles() {
    let source = Crate::read();
    let edges: BTreeMap<_, _> = source.files.keys().map(|module| (module.clone(), source.imports(module))).collect();
    assert!(edges.values().map(BTreeSet::len).sum::<usize>() > 300, "imports were not found");
    let allowed = |group: &BTreeSet<String>| {
        ALLOWED_CYCLES.iter().any(|(files, _)| group.iter().all(|file| files.contains(&file.as_str())))
    };
    let found: Vec<BTreeSet<String>> = cycles(&edges).into_iter().filter(|group| !allowed(group)).collect();
    let shown = found.iter().map(|group| {
        let arrows = edges.iter().filter(|(module, _)| group.contains(&module.join("::"))).map(|(module, used)| {
            let used = used.iter().map(|used| used.join("::")).filter(|used| group.contains(used));
            format!("    {} -> {}", module.join("::"), used.collect::<Vec<_>>().join(", "))
        });
        arrows.collect::<Vec<_>>().join("\n")
    });
    assert!(found.is_empty(), "files that import each other:\n{}", shown.collect::<Vec<_>>().join("\n\n"));
}

/// Files outside of `base::files` that write or rename files themselves, each with the reason.
const WRITERS: [(&str, &str); 5] = [
    ("src/augment/export.rs", "moves the masks of an earlier version to their new name"),
    ("src/data/phantom/mod.rs", "a new folder, complete when its last file is there"),
    ("src/front/many.rs", "appends to a journal"),
    ("src/hub/cache.rs", "the layout and the locks of the Hub's own cache"),
    ("src/tensor/build.rs", "a build script, which writes to its own folder"),
];

/// `base::files` writes a new file beside the old one, flushes it and renames it, so that a crash leaves one of both.
#[test]
fn files_are_written_by_the_module_for_files() {
    let own = ["fs::write(", "fs::rename(", "File::create(", "OpenOptions::new()"];
    let mut writers = BTreeSet::new();
    for file in rust_files(Path::new("src")).into_iter().filter(|file| !is_test(file)) {
        let code = code(&file).replace("EventFile::create(", "").replace("NewFile::create(", "");
        if !file.starts_with("src/base/files") && own.iter().any(|call| code.contains(call)) {
            writers.insert(file.display().to_string());
        }
    }
    let allowed = WRITERS.iter().map(|(file, _)| (*file).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(writers, allowed, "use `prsmed_base::files`, or name the file and its reason in WRITERS");
}

/// Words by which a file outside of `src/models` knows a family: modules, and beginnings of types.
const FAMILIES: [(&str, &[&str], &[&str]); 4] = [
    ("language model", &["mistral"], &["Mistral"]),
    ("vision tower", &["clip"], &["Clip"]),
    ("image encoder", &["tiny_vit", "vit_t"], &["TinyVi"]),
    ("mask head", &["mask_decoder"], &["MaskDecoder"]),
];

/// Another base, tower, encoder or head must not need a change of files that use all of them alike.
#[test]
fn families_are_known_to_models_and_to_few_files_else() {
    let files =
        rust_files(Path::new("src")).into_iter().filter(|file| !is_test(file) && !file.starts_with("src/models"));
    let codes: Vec<(PathBuf, String)> = files.map(|file| (file.clone(), code(&file))).collect();
    for (kind, modules, types) in FAMILIES {
        let names = |word: &str| {
            let follows =
                |start: &&str| word.strip_prefix(*start).is_some_and(|rest| !rest.starts_with(char::is_lowercase));
            modules.contains(&word) || types.iter().any(follows)
        };
        let words = |code: &str| code.split(|c: char| !c.is_alphanumeric() && c != '_').any(names);
        let found: Vec<_> = codes.iter().filter(|(_, code)| words(code)).map(|(file, _)| file).collect();
        assert!(found.len() <= 3, "a {kind} is named by {found:?}");
    }
}
