//! No output of any command replaces an input.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{copy_into, folder, phantoms, prsmed, run, trained, tree};

/// A command with all its inputs: the name of each and its file.
struct Case {
    command: &'static str,
    inputs: &'static [(&'static str, &'static str)],
    outputs: &'static [&'static str],
    /// Words that name no files.
    rest: &'static [&'static str],
}

const ROWS: [(&str, &str); 2] = [("--data-root", "data"), ("--annotations", "data/annotations")];

const CASES: [Case; 17] = [
    Case {
        command: "predict",
        inputs: &[("RUN", "run"), ("--image", "scans/a.png"), ("--mask-in", "labels/a.png")],
        outputs: &["--mask-out", "--overlay-out"],
        rest: &["--question", "Where is it?"],
    },
    Case {
        command: "predict",
        inputs: &[
            ("RUN", "run"),
            ("--image", "scans/a.png"),
            ("--ensemble", "second"),
            ("--base", "base"),
            ("--vision-tower", "tower"),
        ],
        outputs: &["--mask-out", "--overlay-out", "--probabilities", "--record-out", "--out"],
        rest: &["--question", "Where is it?"],
    },
    Case {
        command: "predict",
        inputs: &[("RUN", "run"), ("--images", "scans")],
        outputs: &["--out"],
        rest: &["--question", "Where is it?"],
    },
    Case {
        command: "predict",
        inputs: &[("RUN", "run"), ("--images", "table.csv")],
        outputs: &["--out"],
        rest: &["--question", "Where is it?"],
    },
    Case {
        command: "train",
        inputs: &[
            ROWS[0],
            ROWS[1],
            ("--extra", "pairs"),
            ("--config", "settings.toml"),
            ("--init", "run"),
            ("--set", "model.base=base"),
        ],
        outputs: &["--out"],
        rest: &[],
    },
    Case {
        command: "eval",
        inputs: &[("RUN", "run"), ROWS[0], ROWS[1], ("--base", "base"), ("--vision-tower", "tower")],
        outputs: &["--out"],
        rest: &[],
    },
    Case {
        command: "merge",
        inputs: &[("RUN", "run"), ("--base", "base"), ("--vision-tower", "tower")],
        outputs: &["OUT"],
        rest: &[],
    },
    Case {
        command: "plan",
        inputs: &[ROWS[0], ("--config", "settings.toml"), ("--set", "model.base=base")],
        outputs: &["--timeline"],
        rest: &[],
    },
    Case {
        command: "augment finetune",
        inputs: &[ROWS[0], ROWS[1], ("--config", "settings.toml"), ("--model", "base"), ("--set", "model.vae=tower")],
        outputs: &["--out"],
        rest: &[],
    },
    Case {
        command: "augment generate",
        inputs: &[
            ROWS[0],
            ROWS[1],
            ("--config", "settings.toml"),
            ("--model", "base"),
            ("--lora", "lora.safetensors=0.5"),
            ("--set", "augment.controlnet=second"),
        ],
        outputs: &["--out"],
        rest: &[],
    },
    // `--extra` is rewritten by design
    Case {
        command: "augment filter",
        inputs: &[ROWS[0], ROWS[1], ("--config", "settings.toml"), ("--set", "model.base=base")],
        outputs: &["--extra"],
        rest: &[],
    },
    Case {
        command: "augment filter",
        inputs: &[ROWS[0], ROWS[1], ("--config", "settings.toml"), ("--set", "model.base=base")],
        outputs: &["--filter-models"],
        rest: &["--extra", "pairs"],
    },
    Case {
        command: "augment ablation",
        inputs: &[
            ROWS[0],
            ROWS[1],
            ("--extra", "pairs"),
            ("--external", "external"),
            ("--config", "settings.toml"),
            ("--set", "model.base=base"),
        ],
        outputs: &["--out"],
        rest: &[],
    },
    Case {
        command: "data prepare",
        inputs: &[
            ("--images", "scans"),
            ("--masks", "labels"),
            ("--patients", "table.csv"),
            ("--templates", "settings.toml"),
        ],
        outputs: &["--out"],
        rest: &["--modality", "ct"],
    },
    Case {
        command: "data prepare",
        inputs: &[("--pairs", "table.csv")],
        outputs: &["--out"],
        rest: &["--modality", "ct"],
    },
    Case {
        command: "data check",
        inputs: &[
            ("DIR", "data"),
            ("--annotations", "data/annotations"),
            ("--extra", "pairs"),
            ("--config", "settings.toml"),
            ("--set", "model.base=base"),
        ],
        outputs: &["--html"],
        rest: &[],
    },
    Case { command: "data scan", inputs: &[("DIR", "scans")], outputs: &["--out"], rest: &[] },
];

/// Commands whose files are inputs only, or that have outputs only.
const OTHERS: [&str; 9] =
    ["serve", "preset", "solve", "calibrate", "data compare", "data phantom", "hub get", "hub ls", "hub verify"];

/// Value names of flags that name files or folders.
const FILES: [&str; 13] =
    ["FILE", "DIR", "PATH", "RUN", "OUT", "CSV", "WHERE", "MODEL", "FROM", "MASKS", "LABELS", "SPEC", "KEY=VALUE"];

/// Flags with such a value name that name no files, and `--resume`, whose folder is continued by design.
const NO_FILES: [(&str, &str); 4] = [
    ("train", "--cache-vision"),
    ("augment filter", "--threshold"),
    ("train", "--resume"),
    ("augment finetune", "--resume"),
];

/// The arguments of all commands that name files, from the reference, which another test compares with the program.
fn arguments() -> BTreeMap<String, Vec<String>> {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/commands.md");
    let mut found = BTreeMap::<String, Vec<String>>::new();
    let mut command = String::new();
    for line in fs::read_to_string(reference).unwrap().lines() {
        if let Some(name) = line.trim_start_matches('#').strip_prefix(" prsmed ").filter(|_| line.starts_with('#')) {
            name.clone_into(&mut command);
        }
        let line = line.trim_start();
        let Some((flag, value)) = line.split_once('<') else { continue };
        let value = value.split_once('>').map_or("", |(value, _)| value);
        let is_argument =
            flag.is_empty() || (flag.starts_with("--") && !flag.trim_end_matches(['[', ' ']).contains(' '));
        if is_argument && value.split('|').any(|name| FILES.contains(&name)) && !command.is_empty() {
            let name = flag.trim_end_matches([' ', '[']);
            found.entry(command.clone()).or_default().push(if name.is_empty() { value } else { name }.to_owned());
        }
    }
    found
}

#[test]
fn the_reference_has_a_case_for_every_argument_that_names_files() {
    let arguments = arguments();
    assert!(arguments.values().flatten().count() > 70, "{arguments:?}");
    for (command, names) in arguments.iter().filter(|(command, _)| !OTHERS.contains(&command.as_str())) {
        for name in names.iter().filter(|name| !NO_FILES.contains(&(command.as_str(), name.as_str()))) {
            let is_tried = CASES.iter().filter(|case| case.command == command).any(|case| {
                case.outputs.contains(&name.as_str()) || case.inputs.iter().any(|(input, _)| input == name)
            });
            assert!(
                is_tried,
                "`prsmed {command}`: add `{name}` to the inputs or outputs of a case in tests/cli/outputs.rs"
            );
        }
    }
}

/// Inputs of every kind in a folder of their own.
fn inputs(name: &str) -> PathBuf {
    let home = folder(name);
    copy_into(phantoms(), &home.join("data"));
    let image = fs::read_dir(home.join("data/abdomen_CT/train_images")).unwrap().next().unwrap().unwrap().path();
    for name in ["scans/a.png", "labels/a.png"] {
        fs::create_dir_all(home.join(name).parent().unwrap()).unwrap();
        fs::copy(&image, home.join(name)).unwrap();
    }
    for name in ["pairs", "external"] {
        copy_into(&home.join("data/annotations"), &home.join(name).join("annotations"));
    }
    for name in ["run", "second"] {
        copy_into(&trained().0.join("best"), &home.join(name).join("best"));
        fs::copy(trained().0.join("config.toml"), home.join(name).join("config.toml")).unwrap();
    }
    for name in ["base/model.safetensors", "tower/model.safetensors", "lora.safetensors", "settings.toml"] {
        fs::create_dir_all(home.join(name).parent().unwrap()).unwrap();
        fs::write(home.join(name), "").unwrap();
    }
    fs::write(home.join("table.csv"), "image,file,patient\nscans/a.png,a.png,P1\n").unwrap();
    home
}

/// Moves the files of a folder to `store`, and leaves links to them.
fn link(home: &Path, name: &str) {
    for file in tree(&home.join(name)).keys() {
        let [from, to] = ["", "store"].map(|place| home.join(place).join(name).join(file));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::rename(&from, &to).unwrap();
        std::os::unix::fs::symlink(to, from).unwrap();
    }
}

#[test]
fn every_output_of_every_command_is_refused_where_links_of_an_input_lead() {
    let home = inputs("outputs-behind-links");
    let folders = ["data", "pairs", "external", "run", "second", "base", "tower", "scans", "labels"];
    for name in folders {
        link(&home, name);
    }
    let store = home.join("store");
    let before = tree(&store);
    let files = ["--mask-out", "--overlay-out", "--probabilities", "--record-out", "--timeline", "--html"];
    // folders of which parts are written, which these links do not lead to
    let parts = [
        ("train", "--out"),
        ("augment finetune", "--out"),
        ("augment filter", "--extra"),
        ("data prepare", "--out"),
        ("data scan", "--out"),
    ];
    let mut tried = 0;
    for Case { command, inputs, outputs, rest } in &CASES {
        for output in outputs.iter().filter(|output| !parts.contains(&(command, output))) {
            let values = inputs.iter().map(|(_, input)| input.rsplit('=').next().unwrap());
            for folder in values.filter(|value| folders.contains(value)) {
                let first = before.keys().find(|file| Path::new(file).starts_with(folder)).unwrap();
                let is_file = files.contains(output)
                    || (*command == "predict" && inputs.iter().all(|(name, _)| *name != "--images"));
                let place = store.join(if is_file { first.as_str() } else { folder });
                let mut program = prsmed();
                program.current_dir(&home).args(command.split(' '));
                for (name, input) in *inputs {
                    program.args(name.starts_with('-').then_some(name)).arg(input);
                }
                program.args(*rest).args(output.starts_with('-').then_some(output)).arg(&place);
                if *output != "--out" && outputs.contains(&"--out") {
                    program.args(["--out", "new"]);
                }
                let ran = run(&mut program);
                let all = format!("{command} {output} {}: {}", place.display(), ran.stderr);
                assert!(ran.code == Some(2) && ran.stderr.contains(&format!("`{output}`: `")), "{all}");
                tried += 1;
            }
            assert!(tree(&store) == before, "`prsmed {command}` with `{output}` has changed a file");
        }
    }
    assert!(tried > 40, "{tried}");
}

#[test]
fn every_output_of_every_command_is_refused_on_each_input() {
    let home = inputs("outputs-of-commands");
    let before = tree(&home);
    let mut tried = 0;
    for Case { command, inputs, outputs, rest } in &CASES {
        for output in *outputs {
            for (name, input) in *inputs {
                let file =
                    input.rsplit_once('=').map_or(*input, |(key, value)| if *name == "--set" { value } else { key });
                let mut program = prsmed();
                program.current_dir(&home).args(command.split(' '));
                for (name, input) in *inputs {
                    program.args(name.starts_with('-').then_some(name)).arg(input);
                }
                program.args(*rest).args(output.starts_with('-').then_some(output)).arg(file);
                // other outputs that the command needs
                program.args(
                    outputs
                        .iter()
                        .filter(|other| *other != output && **other == "--out")
                        .flat_map(|_| ["--out", "new"]),
                );
                let ran = run(&mut program);
                let all = format!("{command} {output} {file}: {}", ran.stderr);
                assert_eq!(ran.code, Some(2), "{all}");
                assert!(ran.stderr.contains(&format!("`{output}`: `{file}` ")), "{all}");
                tried += 1;
            }
            assert!(tree(&home) == before, "`prsmed {command}` with `{output}` has changed a file");
        }
    }
    assert!(tried > 70, "{tried}");
}

#[test]
fn outputs_of_one_name_and_run_folders_are_refused() {
    let home = inputs("outputs-of-one-name");
    let before = tree(&home);
    for (words, expected) in [
        ("predict run --image scans/a.png --question Where? --mask-out m.png --overlay-out ./m.png", "`--overlay-out`"),
        ("data phantom run", "`OUT`: `run` is a run folder"),
        ("data phantom base", "`OUT`: `base` has weights of a model"),
        ("train --data-root data --out base", "`--out`: `base` has weights of a model"),
        (
            "predict run --images table.csv --question Where? --out scans",
            "contains `scans/a.png`, an image of `--images`",
        ),
    ] {
        let ran = run(prsmed().current_dir(&home).args(words.split(' ')));
        assert!(ran.code == Some(2) && ran.stderr.contains(expected), "{words}: {}", ran.stderr);
    }
    assert!(tree(&home) == before);
}
