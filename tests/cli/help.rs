//! Snapshots of `--help`.

use crate::support::{done, prsmed, run};

const COMMANDS: [&[&str]; 19] = [
    &["train"],
    &["eval"],
    &["predict"],
    &["merge"],
    &["plan"],
    &["preset"],
    &["solve"],
    &["doctor"],
    &["augment"],
    &["augment", "generate"],
    &["augment", "filter"],
    &["augment", "ablation"],
    &["data", "check"],
    &["data", "prepare"],
    &["data", "compare"],
    &["data", "phantom"],
    &["data"],
    &["hub", "get"],
    &["hub", "ls"],
];

#[test]
fn every_command_has_a_summary_a_usage_line_and_an_example() {
    for command in COMMANDS {
        let text = done(prsmed().args(command).arg("--help"));
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains(&format!("Usage: prsmed {} ", command.join(" "))), "{text}");
        assert!(text.contains("Example") || command == ["data"], "no example: {text}");
        let (summary, _) = text.split_once('\n').unwrap();
        assert!(summary.len() > 10 && !summary.ends_with('.'), "{summary}");
        assert!(done(prsmed().args(command).arg("-h")).starts_with(summary));
    }
}

#[test]
fn without_a_command_the_commands_are_listed() {
    let ran = run(&mut prsmed());
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""));
    assert_eq!(ran.stderr, done(prsmed().arg("--help")));
    insta::assert_snapshot!(ran.stderr, @r"
    Train, evaluate and use PRS-Med: an image and a question give a mask and an answer

    Usage: prsmed [OPTIONS] <COMMAND>

    Commands:
      train      Train on a data root
      eval       Score trained models on a data root: masks, positions, answers
      predict    Answer a question about an image and segment the region it asks for
      serve      Serve a trained model: a page to ask about images, and the same over HTTP
      merge      Merge the LoRA adapters of a run into its language model
      plan       Predict the memory and time of a job before it runs
      preset     Find the fastest settings that fit a GPU
      solve      Find the largest value of one setting that fits a GPU, or the smallest or fewest GPUs
      calibrate  Measure this machine once, so that plans need not assume
      augment    Generate image+mask pairs with Stable Diffusion, filter them, test whether they help
      data       Check, prepare or generate data roots; compare masks of volumes
      hub        Download a model or a data set, list its files, or check the cache
      doctor     Check this machine: libtorch, GPU and driver, disk, hub
      help       Print this message or the help of the given subcommand(s)

    Options:
          --json     Write one JSON object a line on standard output instead of text
      -q, --quiet    Say nothing on standard error but errors
      -h, --help     Print help
      -V, --version  Print version
    ");
}

#[test]
fn the_help_of_train() {
    insta::assert_snapshot!(done(prsmed().args(["train", "-h"])), @r#"
    Train on a data root

    Usage: prsmed train [OPTIONS]

    Options:
          --data-root <DIR>           Data root: a folder with one folder for each modality, and
                                      `annotations/` (required)
          --annotations <DIR>         CSV file or folder of CSV files, if not in the data root
          --skip-bad-rows             Skip bad rows instead of stopping with an error; a warning names
                                      the first of them
          --extra <DIR>               Data root of synthetic training rows, for example from `prsmed
                                      augment`; may be repeated
          --allow-leak                Go on with a warning if images or patients of test rows are also
                                      in rows that train
          --synthetic-ratio <R>       Same as `--set data.synthetic_ratio=R`: synthetic rows for each
                                      real one in an epoch, or all
          --labels <LIST>             Same as `--set data.labels=LIST`: labels of masks that are
                                      foreground, for example 1,3
          --preset <NAME>             Named settings: tiny, full, cpu, gpu-24gb, ...
          --config <FILE>             TOML file whose values override the preset
          --set <KEY=VALUE>           One setting, for example `train.micro_batch=4`; may be repeated
          --out <DIR>                 Run folder [default: runs/train]
          --init <RUN>                Start from the weights of a trained run: a run folder, a
                                      checkpoint, a published folder or `hub:owner/name`
          --resume [<FROM>]           Continue from `last/` in the run folder, or from another
                                      checkpoint
          --fold <K/N>                Cross-validation: fold K of N, for example 0/5; same as `--set
                                      data.fold=K --set data.folds=N`
          --seed <N>                  Same as `--set train.seed=N`
          --precision <P>             Same as `--set train.precision=P`: fp32, bf16 or fp16
          --graph <G>                 Same as `--set train.graph=G`: auto, on or off
          --cache-vision <WHERE>      Same as `--set data.cache_vision=WHERE`: off, ram or disk
          --gpus <N>                  Use so many GPUs of this machine: starts as many processes, as
                                      `torchrun --nproc_per_node=N` does
          --no-plan                   Do not plan memory first; start even what may not fit
          --memory-limit <SIZE>       Most that tensors may take, for example 20gb; plans ignore it
          --check                     Check all that the training needs and start nothing: settings,
                                      rows, weights on this disk, memory plan
          --gpu <GPU>                 With `--check`: the GPU that will train, as in `prsmed plan --gpu`
          --print-config              Print the resolved settings as TOML and stop
          --profile-memory <every=N>  Profile the memory of the first and of every N-th step
          --json                      Write one JSON object a line on standard output instead of text
      -q, --quiet                     Say nothing on standard error but errors
      -h, --help                      Print help (see more with '--help')

    Examples:
      prsmed train --data-root data --preset tiny --out runs/a
      prsmed train --data-root data --out runs/a --resume
      prsmed train --data-root data --extra made --synthetic-ratio 0.5 --out runs/b
      prsmed train --data-root data --out runs/a --profile-memory every=100
      prsmed train --data-root data --preset gpu-24gb --out runs/c
      prsmed train --data-root data --check --gpu "RTX A5000"
    "#);
}

#[test]
fn the_help_of_augment() {
    insta::assert_snapshot!(done(prsmed().args(["augment", "-h"])), @r"
    Generate image+mask pairs with Stable Diffusion, filter them, test whether they help

    Usage: prsmed augment [OPTIONS] <COMMAND>

    Commands:
      finetune  Fine-tune the generator on the train rows of a data root
      generate  Generate image+mask pairs from the train rows of a data root
      filter    Filter synthetic pairs with cross-fitted segmenters
      ablation  Test whether synthetic pairs help: compare trainings with and without them
      help      Print this message or the help of the given subcommand(s)

    Options:
          --json   Write one JSON object a line on standard output instead of text
      -q, --quiet  Say nothing on standard error but errors
      -h, --help   Print help (see more with '--help')

    Examples, in order:
      prsmed augment finetune --data-root data --out runs/lora
      prsmed augment generate --data-root data --out pairs
      prsmed augment filter --data-root data --extra pairs --preset gpu-24gb
      prsmed augment ablation --data-root data --extra pairs --preset gpu-24gb
      prsmed train --data-root data --extra pairs --out runs/a
    ");
}

#[test]
fn the_version() {
    assert_eq!(done(prsmed().arg("--version")), format!("prsmed {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_error_for_a_misspelt_command_names_the_nearest_one() {
    let ran = run(prsmed().arg("trian"));
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("unrecognized subcommand 'trian'") && ran.stderr.contains("'train'"), "{}", ran.stderr);
}
