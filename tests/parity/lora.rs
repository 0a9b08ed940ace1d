//! Parity of LoRA with peft: a saved adapter, its gradients, its merged weights; and checkpointing with dropout.

use crate::fixture::{
    BF16, Fixture, assert_finite_gradients, assert_near_in_bf16, generator, load, relative_error, store,
};
use crate::mistral::{Outputs, embeds, forward};
use prsmed::models::decoder::{Config, Decoder, DecoderPass};
use prsmed::nn::{Linear, LoraConfig};
use prsmed::tensor::store::{Init, Role, Store};
use prsmed::tensor::weights::Archive;
use prsmed::tensor::{Device, Kind, Tensor, no_grad, rng};

fn adapter_config(fixture: &Fixture, dropout: f64) -> LoraConfig {
    let given = &fixture.meta["config"]["lora"];
    LoraConfig { rank: given["r"].as_i64().expect("r"), alpha: given["lora_alpha"].as_f64().expect("alpha"), dropout }
}

/// Frozen base, trainable adapters, and the model.
fn build(fixture: &Fixture, dropout: f64) -> (Store, Store, Decoder) {
    let (base, adapters) = (store(), store());
    let (scope, lora) = (adapters.root(Role::Trainable), adapter_config(fixture, dropout));
    let model = Decoder::new(&base.root(Role::Frozen), Some((&scope, &lora)), &fixture.config::<Config>(), 0, 1);
    fixture.load(&base, &[]);
    load(&adapters, &fixture.path("adapter_model.safetensors"), &[]);
    (base, adapters, model)
}

#[test]
fn lora_agrees() {
    let fixture = Fixture::open("lora");
    for prefix in ["b", "c"] {
        let (base, adapters, model) = build(&fixture, 0.0);
        let embeds = embeds(&fixture, prefix, &model, Kind::Float);
        let out = forward(&fixture, prefix, &model, &embeds, DecoderPass { train: true, checkpoint: 0 });
        out.scalar(&fixture, prefix).backward();
        let mut case = fixture.case(prefix);
        case.check("last_hidden", &out.hidden);
        case.check("logits", &out.logits);
        case.check("loss", &out.loss);
        case.check_gradients(&adapters, &[]);
        case.finish();
        base.for_each(|e| assert!(!e.tensor.grad().defined(), "frozen {} has a gradient", e.name));
    }
}

#[test]
fn an_adapted_layer_equals_its_merged_weight() {
    let fixture = Fixture::open("lora");
    let merged = Archive::open(&fixture.path("merged.safetensors")).unwrap();
    let (base, adapters, _) = build(&fixture, 0.0);
    assert_eq!(merged.names().len(), 4);
    for name in merged.names() {
        let want = merged.read(name).unwrap();
        let layer = name.strip_suffix(".weight").unwrap();
        let (weights, lora) = (store(), store());
        let size = want.size();
        let linear = Linear::no_bias(&weights.root(Role::Frozen), size[1], size[0], Init::Const(0.0))
            .with_lora(&lora.root(Role::Frozen), &adapter_config(&fixture, 0.0));
        let fill = |to: &Store, from: &Store, prefix: &str| {
            to.for_each(|e| {
                let source = from.get(&format!("{prefix}.{}", e.name)).expect("the same names in both");
                no_grad(|| e.tensor.shallow_clone().copy_(&source));
            });
        };
        fill(&weights, &base, layer);
        fill(&lora, &adapters, &format!("base_model.model.{layer}"));
        let identity = Tensor::eye(size[1], (Kind::Float, Device::Cpu));
        let error = relative_error(&no_grad(|| linear.forward(&identity, false)).transpose(0, 1), &want);
        assert!(error <= 1e-5, "{name}: differs from peft's merged weight by {error:.1e}");
    }
}

/// Hidden states and all gradients of one pass from a fixed generator state.
fn gradients(fixture: &Fixture, pass: DecoderPass) -> (Outputs, Vec<(String, Tensor)>) {
    let _generator = generator();
    let (_base, adapters, model) = build(fixture, 0.4);
    rng::seed(5);
    let embeds = embeds(fixture, "c", &model, Kind::Float);
    let out = forward(fixture, "c", &model, &embeds, pass);
    out.scalar(fixture, "c").backward();
    let mut all: Vec<_> = adapters.entries().into_iter().map(|e| (e.name, e.tensor.grad())).collect();
    all.push(("inputs_embeds".to_owned(), embeds.grad()));
    (out, all)
}

#[test]
fn checkpointing_with_dropout_is_bit_identical() {
    let fixture = Fixture::open("lora");
    let (plain, expected) = gradients(&fixture, DecoderPass { train: true, checkpoint: 0 });
    let (again, got) = gradients(&fixture, DecoderPass { train: true, checkpoint: usize::MAX });
    assert_eq!(plain.hidden, again.hidden, "states");
    assert_eq!(expected.len(), 17);
    for ((name, want), (_, got)) in expected.iter().zip(&got) {
        assert!(want.defined() && want == got, "gradient of {name}: relative error {:.1e}", relative_error(got, want));
    }
    let (still, _) = gradients(&fixture, DecoderPass { train: false, checkpoint: 0 });
    assert!(relative_error(&plain.hidden, &still.hidden) > 1e-2, "dropout was off");
}

#[test]
fn lora_runs_in_bf16() {
    let fixture = Fixture::open("lora");
    let (_base, adapters, model) = build(&fixture, 0.0);
    let run = |kind: Kind| forward(&fixture, "c", &model, &embeds(&fixture, "c", &model, kind), DecoderPass::default());
    let (narrow, wide) = (run(Kind::BFloat16), run(Kind::Float));
    narrow.scalar(&fixture, "c").backward();
    assert_finite_gradients(&adapters);
    assert_near_in_bf16("states", &narrow.hidden, &wide.hidden, BF16);
}
