//! What a search for settings has found, in words.

use crate::config::{RunConfig, Settings as _};
use crate::nn::Quantization;
use crate::plan::search::{FoundPlans, MUCH_FASTER, PlannedSettings, Tried, value_of};
use crate::plan::time;
use crate::segment::setup::BatchNorm;
use crate::segment::task::CacheVision;
use crate::setting::{ResultsEffect, Searched, Setting};
use crate::trainer::FirstLayers;
use crate::units::{Bytes, counted};
use serde_json::{Map, Value, json};

/// The message if nothing fits: what is needed, and what would help.
pub fn nothing_fits(found: &FoundPlans, device: &str) -> String {
    let least = found.smallest.as_ref().map_or_else(String::new, |smallest| {
        let accumulation = value_of(&smallest.sets, "train.accumulation").and_then(|count| count.parse().ok());
        let accumulation = accumulation.unwrap_or(1);
        format!(
            "; the smallest settings need {} of {} ({})",
            smallest.plan.device_peak,
            smallest.plan.budget.bytes,
            described(smallest, (smallest.batch.micro_batch, accumulation), 1)
        )
    });
    format!(
        "no settings fit {device} with 3 % of its memory kept free{least}\nshorter texts, smaller images or a lower \
         LoRA rank need less memory; `prsmed solve --for gpu` names the smallest GPU that fits"
    )
}

/// The setting of the vision feature cache.
pub(super) const CACHE: &str = "data.cache_vision";
/// The setting of CUDA graphs.
pub(super) const GRAPH: &str = "train.graph";
/// The setting of custom CUDA kernels.
pub(super) const KERNELS: &str = "train.fused_kernels";

/// Names of settings in the record of a candidate.
const NAMES: [(&str, &str); 16] = [
    ("image_size", "model.image_size"),
    ("questions", "data.questions_per_image"),
    ("micro_batch", "train.micro_batch"),
    ("accumulation", "train.accumulation"),
    ("cache_features", CACHE),
    ("use_graphs", GRAPH),
    ("custom_kernels", KERNELS),
    ("step_in_backward", "train.step_in_backward"),
    ("checkpointing", "train.checkpointing"),
    ("checkpoint_encoder", "train.checkpoint_encoder"),
    ("checkpoint_decoder", "train.checkpoint_decoder"),
    ("stream_layers", "model.stream_layers"),
    ("stream_vision", "model.stream_vision"),
    ("offload_optimizer", "train.offload_optimizer"),
    ("quantization", "model.quantization"),
    ("optimizer", "train.optimizer"),
];

/// The settings of a candidate as JSON. Whether a cache, CUDA graphs or custom kernels are used is true or false.
pub fn choice(candidate: &PlannedSettings) -> Value {
    let value = |key: &str| {
        let value = value_of(&candidate.sets, key);
        match key {
            CACHE => json!(value.is_some_and(|value| value != "off")),
            GRAPH | KERNELS => json!(value.is_some()),
            _ => value.map_or(Value::Null, |text| serde_json::from_str(text).unwrap_or_else(|_| text.into())),
        }
    };
    NAMES.iter().map(|(name, key)| ((*name).to_owned(), value(key))).collect::<Map<_, _>>().into()
}

/// A candidate as JSON.
pub fn record(candidate: &PlannedSettings) -> Value {
    json!({ "choice": choice(candidate), "plan": candidate.plan, "tried": candidate.tried })
}

/// A candidate in one line, without its memory. `batch` are the micro-batch and the accumulation of a step, which `ranks`
/// processes divide.
pub fn described(candidate: &PlannedSettings, (micro_batch, accumulation): (usize, usize), ranks: usize) -> String {
    const CHECKPOINTING: &str = "checkpointing of ";
    let value = |key: &str| value_of(&candidate.sets, key).unwrap_or_default();
    let words = |is_meant: &dyn Fn(&Setting) -> bool| {
        let settings = RunConfig::default().searched_settings(is_meant);
        settings.into_iter().filter_map(|(key, searched)| words(searched, value(key))).collect::<Vec<_>>()
    };
    let mut parts = words(&|setting| setting.results != ResultsEffect::Changes);
    let checkpointed: Vec<String> = parts.extract_if(.., |part| part.starts_with(CHECKPOINTING)).collect();
    let checkpointed: Vec<&str> = checkpointed.iter().map(|part| &part[CHECKPOINTING.len()..]).collect();
    let checkpointing = match checkpointed.as_slice() {
        [] => "no checkpointing".to_owned(),
        parts => format!("{CHECKPOINTING}{}", parts.join(", ")),
    };
    parts.insert(0, checkpointing);
    parts.extend((value(CACHE) != "off").then(|| "vision feature cache".to_owned()));
    parts.extend(candidate.captures.then(|| "CUDA graphs".to_owned()));
    parts.extend(words(&|setting| setting.results == ResultsEffect::Changes));
    let time = candidate.step_seconds().map_or_else(String::new, |s| format!("{} a step: ", time::text(s)));
    let batch = match ranks {
        0 | 1 => format!("micro-batch {micro_batch} x {accumulation}"),
        _ => format!("{accumulation} micro-batches of {} over {ranks} GPUs", counted(micro_batch, "image")),
    };
    let questions = value("data.questions_per_image").parse().unwrap_or(1);
    format!(
        "{time}{batch} with {} per image, {}, {} pixels",
        counted(questions, "question"),
        parts.join(", "),
        value("model.image_size"),
    )
}

/// The description of a value that the search chose; `None` for the first one, which saves nothing.
fn words(searched: Searched, value: &str) -> Option<String> {
    let of = |value: &str| searched.values.iter().find(|(known, _)| *known == value);
    let (layers, (_, text)) = match of(value) {
        Some(known) => ("all layers".to_owned(), known),
        None => (format!("{value} layers"), searched.values.last()?),
    };
    (!text.is_empty()).then(|| text.replace("{}", &layers))
}

/// What the search changed, if the user should know: `chosen` are the settings `config` with the choice of `best`.
pub fn notes(config: &RunConfig, best: &PlannedSettings, chosen: &RunConfig, ranks: usize) -> Vec<String> {
    let mut notes = compromise_notes(config, chosen);
    let saves = |tried: &Tried| format!("`{}` saves {:.1} % of a step's time", tried.what, tried.saves_frac * 100.0);
    notes.extend(best.tried.iter().filter(|tried| tried.is_used).map(saves));
    notes.extend(changed_notes(config, chosen));
    let (wanted, now) = (config.model.image_size, chosen.model.image_size);
    if now < wanted {
        notes.push(format!("nothing fits with images of {wanted} pixels: using {now}, which makes masks coarser"));
    }
    if config.model.batch_norm == BatchNorm::Batch && best.batch.micro_batch != config.train.micro_batch {
        let note = "`model.batch_norm=batch` computes statistics per micro-batch, whose size changed: results change";
        notes.push(note.to_owned());
    }
    let questions = (best.batch.samples, chosen.data.questions_per_image);
    notes.extend(fewer_questions(config.data.questions_per_image, questions, ranks));
    notes
}

/// A note if fewer questions share an image than the `packed` ones that the settings allow; the chosen settings have so
/// many samples in a step and questions per image. It names batches that `ranks` GPUs divide evenly.
fn fewer_questions(packed: usize, (samples, questions): (usize, usize), ranks: usize) -> Option<String> {
    (packed > 1 && !samples.is_multiple_of(packed)).then(|| {
        let even = packed * ranks.max(1);
        let (below, above) = (samples / even * even, samples.next_multiple_of(even));
        let near = if below == 0 { above.to_string() } else { format!("{below} or {above}") };
        format!(
            "using {questions} questions per image, because {packed} do not divide the effective batch of {samples}; \
             the argument `effective_batch` {near} allows {packed}, which is faster"
        )
    })
}

/// Notes about changes of the arithmetic between `config` and `chosen`.
pub fn compromise_notes(config: &RunConfig, chosen: &RunConfig) -> Vec<String> {
    let mut notes = Vec::new();
    if chosen.model.quantization != config.model.quantization {
        let scales = if chosen.model.quantization == Quantization::Nf4Double { ", with 8-bit scales" } else { "" };
        notes.push(format!(
            "frozen layers of the language model use 4 bits{scales}: nothing fits otherwise, or only with frozen layers in \
             host memory and steps that take more than {MUCH_FASTER} times as long"
        ));
    }
    if chosen.train.optimizer != config.train.optimizer {
        notes.push("the optimizer state uses 8 bits: nothing else fits, or only much slower settings".to_owned());
    }
    notes
}

/// What a compromise would save that the search did not make.
pub fn not_made(found: &FoundPlans) -> Option<String> {
    let (chosen, faster) = (found.fitting.first()?, found.a_little_faster.as_ref()?);
    let [before, quantization] = [chosen, faster].map(|candidate| value_of(&candidate.sets, "model.quantization"));
    let is_worth_saying = before == Some("none") && quantization != before;
    let seconds = faster.step_seconds().filter(|seconds| chosen.step_seconds().is_some_and(|chosen| *seconds < chosen));
    let seconds = seconds.filter(|_| is_worth_saying)?;
    Some(format!(
        "{} a step with frozen layers in 4 bits, which rounds their weights: the setting `model.quantization={}`",
        time::text(seconds),
        quantization.unwrap_or_default()
    ))
}

/// Notes about settings that the search changed.
fn changed_notes(before: &RunConfig, now: &RunConfig) -> Vec<String> {
    let is_cached = now.data.cache_vision == CacheVision::Disk && before.data.cache_vision == CacheVision::Off;
    let streams = now.model.stream_layers != FirstLayers::None && before.model.stream_layers == FirstLayers::None;
    let [stepped, steps] = [before, now].map(|config| config.train.step_in_backward);
    let notes = [
        is_cached.then(|| {
            let most = Bytes((now.data.cache_vision_mib as u64) << 20);
            format!(
                "`data.cache_vision=disk`: the first epoch computes the vision features, later epochs read them from the \
                 cache folder, which takes at most {most} (about {} images)",
                now.images_kept()
            )
        }),
        streams.then(|| {
            "`model.stream_layers`: each step copies frozen layers from host memory, which must have room for them".into()
        }),
        (stepped && !steps)
            .then(|| format!("`train.step_in_backward` is off: a step has {} micro-batches", now.train.accumulation)),
        (steps && !stepped)
            .then(|| "`train.step_in_backward=true`: each parameter is updated in the backward pass".into()),
    ];
    notes.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The preset `tiny` with a frozen base, without clipping, and with these settings.
    fn config(sets: &[&str]) -> RunConfig {
        let frozen = ["model.train_base=false", "train.clip_norm=0"];
        RunConfig::preset_with("tiny", &[&frozen[..], sets].concat()).unwrap()
    }

    /// Asserts that a change gives one note, which begins with `start`.
    fn assert_noted(before: &RunConfig, now: &RunConfig, start: &str) {
        let notes = changed_notes(before, now);
        assert!(notes.len() == 1 && notes[0].starts_with(start), "{start}: {notes:?}");
    }

    #[test]
    fn fewer_questions_come_with_batches_that_all_gpus_divide() {
        let note = |samples: usize, ranks: usize| fewer_questions(3, (samples, 1), ranks);
        assert_eq!(note(9, 1), None, "three questions divide it");
        assert!(note(8, 1).unwrap().contains("argument `effective_batch` 6 or 9 allows 3"));
        assert!(note(8, 8).unwrap().contains("argument `effective_batch` 24 allows 3"));
        assert!(note(32, 8).unwrap().contains("argument `effective_batch` 24 or 48 allows 3"));
    }

    #[test]
    fn settings_that_the_search_changed_are_named() {
        let [off, ram, disk] = ["off", "ram", "disk"].map(|cache| config(&[&format!("data.cache_vision={cache}")]));
        assert_noted(&off, &disk, "`data.cache_vision=disk`: the first epoch computes the vision features");
        for (before, now) in [(&off, &off), (&off, &ram), (&ram, &disk), (&disk, &disk), (&disk, &off)] {
            assert_eq!(changed_notes(before, now), [""; 0]);
        }
        let at_once = config(&["train.step_in_backward=true"]);
        assert_noted(&off, &at_once, "`train.step_in_backward=true`: each parameter is updated in the backward pass");
        assert_noted(&at_once, &config(&["train.accumulation=4"]), "`train.step_in_backward` is off: a step has 4 ");
    }
}
