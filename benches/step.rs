//! Time and memory of one training step or prediction, as one JSON line; the twin of `scripts/baseline/prsmed_torch.py`.
//!
//! ```text
//! cargo bench --profile dev --bench step -- train-step --sizes scripts/baseline/mid.json --steps 3 --warmup 1 --dropout on
//! cargo bench --profile dev --bench step -- predict --sizes scripts/baseline/mid.json --new-tokens 8
//! ```
//! `scripts/bench` pairs the two in one run. `--parts` adds the time of each part's forward pass.

use prsmed::models::llava::IMAGE_TOKEN;
use prsmed::models::prsmed::{BuildOptions, Config, PrsMed};
use prsmed::models::{clip, mask_decoder, mistral, tiny_vit};
use prsmed::nn::{BatchStatistics, LoraConfig, Quantization};
use prsmed::segment::Semantics;
use prsmed::segment::layout::Layout;
use prsmed::segment::step::{self, Inputs, Pass};
use prsmed::tensor::store::Role;
use prsmed::tensor::{Device, Kind, Tensor, ledger, no_grad, rng, set_num_threads};
use prsmed::trainer::optimizer::AdamW;
use prsmed::trainer::{Parameter, TrainConfig};
use serde_json::{Value, json};
use std::time::Instant;

struct Options {
    command: String,
    sizes: Value,
    steps: usize,
    warmup: usize,
    kind: Kind,
    dropout: bool,
    semantics: Semantics,
    checkpoint: bool,
    new_tokens: usize,
    batch: Option<i64>,
    parts: bool,
}

fn parse() -> Options {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1)).cloned();
    let number = |name: &str, default: usize| value(name).map_or(default, |v| v.parse().expect("a number"));
    let path = value("--sizes").unwrap_or_else(|| "scripts/baseline/tiny.json".into());
    let sizes = serde_json::from_str(&std::fs::read_to_string(&path).expect("the sizes file")).expect("JSON");
    set_num_threads(i32::try_from(number("--threads", 2)).expect("a few threads"));
    Options {
        command: args.first().cloned().unwrap_or_else(|| "train-step".into()),
        sizes,
        steps: number("--steps", 3),
        warmup: number("--warmup", 1),
        kind: if value("--precision").as_deref() == Some("bf16") { Kind::BFloat16 } else { Kind::Float },
        dropout: value("--dropout").is_none_or(|v| v == "on"),
        semantics: if value("--semantics").as_deref() == Some("reference") {
            Semantics::Reference
        } else {
            Semantics::Corrected
        },
        checkpoint: args.iter().any(|a| a == "--checkpoint"),
        new_tokens: number("--new-tokens", 8),
        batch: value("--batch").map(|v| v.parse().expect("a number")),
        parts: args.iter().any(|a| a == "--parts"),
    }
}

fn config(options: &Options) -> Config {
    let sizes = &options.sizes;
    let clip: clip::Config = serde_json::from_value(sizes["clip"].clone()).expect("clip sizes");
    let llm: mistral::Config = serde_json::from_value(sizes["llm"].clone()).expect("llm sizes");
    let mut encoder = sizes["tiny_vit"].clone();
    let published = mask_decoder::Config::published();
    let decoder = &sizes["decoder"];
    let size = |key: &str, default: i64| decoder[key].as_i64().unwrap_or(default);
    let image_dim = size("image_dim", published.image_dim);
    encoder["out_dim"] = image_dim.into();
    let dropout = if options.dropout { 0.1 } else { 0.0 };
    let decoder = mask_decoder::Config {
        prompt_dim: llm.hidden_size,
        image_dim,
        hidden_dim: size("hidden_dim", published.hidden_dim),
        feed_forward_dim: size("encoder_ff_dim", published.feed_forward_dim),
        dropout,
        attention_dropout: options.semantics.drops_attention(),
        ..published
    };
    let encoder: tiny_vit::Config = serde_json::from_value(encoder).expect("encoder sizes");
    Config { clip, llm, lora: LoraConfig { rank: 16, alpha: 16.0, dropout }, encoder, decoder, num_classes: 6 }
}

/// Ids of a text and where its answer begins.
fn text(options: &Options) -> (Vec<i64>, usize) {
    let tokens = options.sizes["text_tokens"].as_i64().expect("text_tokens");
    let text = (0..tokens).map(|i| if i == 1 { IMAGE_TOKEN } else { 3 + i % 500 }).collect();
    (text, usize::try_from(tokens * 2 / 3).expect("small"))
}

fn inputs(options: &Options, config: &Config) -> Inputs {
    let batch = options.batch.or(options.sizes["batch"].as_i64()).unwrap_or(1);
    let side = options.sizes["sam_image_size"].as_i64().expect("sam_image_size");
    let (text, answer) = text(options);
    let c = config.clip.image_size;
    let rows = usize::try_from(batch).expect("small");
    let (texts, answers, groups) = (vec![text; rows], vec![answer; rows], vec![1; rows]);
    Inputs {
        layout: Layout::new(texts, &answers, &groups, options.semantics, config.clip.num_patches()),
        sight: Tensor::randint(256, [batch, 3, c, c], (Kind::Uint8, Device::Cpu)).into(),
        sam_image: Tensor::randint(256, [batch, 3, side, side], (Kind::Uint8, Device::Cpu)),
        mask: Tensor::rand([batch, 1, side, side], (Kind::Float, Device::Cpu)).gt(0.7).to_kind(Kind::Uint8) * 255,
        class_label: Tensor::zeros([batch], (Kind::Int64, Device::Cpu)),
    }
}

fn train_config() -> TrainConfig {
    let sources = prsmed::config::Sources { preset: Some("full".into()), ..Default::default() };
    sources.resolve().expect("an embedded preset").config.train
}

fn parameters(model: &PrsMed) -> Vec<Parameter> {
    let parts = model.stores().parts();
    let all = parts.iter().flat_map(|(file, store)| store.entries().into_iter().map(move |e| (*file, e)));
    all.filter(|(_, e)| e.role == Role::Trainable)
        .map(|(file, e)| Parameter { name: format!("{file}/{}", e.name), tensor: e.tensor })
        .collect()
}

fn time(mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn parts(model: &PrsMed, inputs: &Inputs, options: &Options) -> Value {
    let mut tokens = None;
    let clip = time(|| tokens = Some(model.image_tokens(&inputs.sight.prepare(model))));
    let tokens = tokens.expect("just made");
    let pass = pass(options);
    let ids = Tensor::from_slice(&[3_i64]);
    let mut xs = Tensor::cat(&[&tokens, &model.llm().embed(&ids).expand([tokens.size()[0], 50, -1], false)], 1);
    let llm = time(|| xs = model.llm().forward(&xs, None, pass.llm));
    let llm_backward = time(|| xs.sum(Kind::Float).backward());
    let mut embedding = None;
    let encoder = time(|| embedding = Some(model.embed_image(&inputs.sam_image, pass.encoder)));
    let embedding = embedding.expect("just made");
    let encoder_backward = time(|| embedding.sum(Kind::Float).backward());
    let (embedding, states) = (embedding.detach().set_requires_grad(true), xs.detach());
    let mut logits = None;
    let decoder = time(|| logits = Some(model.mask_logits(&embedding, &states, None, true)));
    let logits = logits.expect("just made");
    let mut loss = None;
    let mask_loss = time(|| {
        loss = Some(prsmed::segment::loss::structure(&logits, &inputs.target(logits.device()), options.semantics))
    });
    let decoder_backward = time(|| loss.as_ref().expect("just made").backward());
    json!({ "clip": clip, "llm": llm, "llm_backward": llm_backward, "encoder": encoder,
        "encoder_backward": encoder_backward, "decoder": decoder, "mask_loss": mask_loss,
        "decoder_and_loss_backward": decoder_backward })
}

fn pass(options: &Options) -> Pass {
    Pass {
        llm: mistral::Pass { train: true, checkpoint: if options.checkpoint { usize::MAX } else { 0 } },
        encoder: tiny_vit::Pass { statistics: BatchStatistics::Running, checkpoint: options.checkpoint },
        decoder_dropout: true,
    }
}

fn peak_rss() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn main() {
    let options = parse();
    ledger::install();
    rng::seed(0);
    let rss_before_model = peak_rss();
    let config = config(&options);
    let model = PrsMed::new(
        &config,
        BuildOptions {
            device: Device::Cpu,
            stored: options.kind,
            compute: options.kind,
            initialise: true,
            train_base: false,
            quantization: Quantization::None,
            loads_base: false,
        },
    );
    let inputs = inputs(&options, &config);
    let mut optimizer = AdamW::new(parameters(&model), &train_config());
    let mut seconds = Vec::new();
    for i in 0..options.warmup + options.steps {
        let elapsed = time(|| match options.command.as_str() {
            "train-step" => {
                let inputs = inputs.to_device(&model, inputs.weight());
                let outputs = step::forward(&model, &inputs, pass(&options));
                let losses = step::losses(&model, &inputs, &outputs);
                (losses.mask + losses.text + losses.class * 0.5).backward();
                let gradients = optimizer.measure(1.0).expect("a norm");
                optimizer.step(1e-4, &gradients).expect("a step");
            }
            _ => no_grad(|| predict(&model, &inputs, &options)),
        });
        if i >= options.warmup {
            seconds.push(elapsed);
        }
    }
    let mut sorted = seconds.clone();
    sorted.sort_by(f64::total_cmp);
    let parts = if options.parts { parts(&model, &inputs, &options) } else { Value::Null };
    let line = json!({
        "command": options.command, "seconds": seconds, "median_seconds": sorted[sorted.len() / 2],
        "peak_rss_bytes": peak_rss(), "rss_before_model_bytes": rss_before_model,
        "allocated_peak": ledger::usage().allocated_peak, "parts": parts,
    });
    #[expect(clippy::print_stdout, reason = "a benchmark's result")]
    {
        println!("{line}");
    }
}

/// The prompt once, for the mask and the first answer token, then one token after the other.
fn predict(model: &PrsMed, inputs: &Inputs, options: &Options) {
    let new_tokens = options.new_tokens;
    let (text, answer) = text(options);
    let layout =
        Layout::new(vec![text[..answer].to_vec()], &[answer], &[1], options.semantics, model.num_image_tokens());
    let places = layout.to_device(Device::Cpu);
    let embeds = step::embeds(model, &inputs.sight.prepare(model).narrow(0, 0, 1), &places);
    let length = embeds.size()[1];
    let capacity = length + i64::try_from(new_tokens).expect("small");
    let mut cache = mistral::KvCache::new(model.llm().config(), capacity);
    let states = model.llm().forward_cached(&embeds, &mut cache);
    let embedding = model.embed_image(&inputs.sam_image.narrow(0, 0, 1), PrsMed::evaluation_pass());
    let _mask = model.mask_logits(&embedding, &states, None, false).sigmoid();
    let mut state = states.narrow(1, length - 1, 1);
    for i in 0..new_tokens {
        let next = model.llm().logits(&state).argmax(-1, false);
        if i + 1 < new_tokens {
            state = model.llm().forward_cached(&model.llm().embed(&next), &mut cache);
        }
    }
}
