//! Parity of the mask decoder v5 and v6 with PyTorch's attention, encoder layer and instance norm.

use crate::fixture::{BF16, Fixture, assert_finite_gradients, assert_near_in_bf16, leaf, probed, store};
use prsmed::models::mask_decoder::{Config, MaskDecoder, enlarge};
use prsmed::tensor::store::{Role, Store};
use prsmed::tensor::{Kind, Tensor};

fn build(fixture: &Fixture) -> (Store, MaskDecoder) {
    let given = &fixture.meta["config"];
    let number = |name: &str| given[name].as_i64().unwrap_or_else(|| panic!("config.{name}"));
    let heads = |i: usize| given["heads"][i].as_i64().expect("heads");
    let config = Config {
        version: serde_json::from_value(given["version"].clone()).expect("a version"),
        prompt_dim: number("prompt_dim"),
        image_dim: number("image_dim"),
        hidden_dim: number("hidden_dim"),
        cross_heads: heads(0),
        self_heads: heads(1),
        feed_forward_dim: number("encoder_ff_dim"),
        dropout: given["dropout"].as_f64().expect("dropout"),
        attention_dropout: true,
        positions: false,
        initial_bias: 1.0,
    };
    let store = store();
    let model = MaskDecoder::new(&store.root(Role::Trainable), &config);
    fixture.load(&store, &[]);
    (store, model)
}

/// Enlarged logits of a case.
fn logits(fixture: &Fixture, prefix: &str, model: &MaskDecoder, image: &Tensor, prompt: &Tensor) -> Tensor {
    let name = format!("{prefix}.prompt_keep");
    let keep = fixture.has_input(&name).then(|| fixture.input(&name));
    assert_eq!(keep.is_some(), prefix == "b");
    let [_b, _c, h, w] = image.size()[..] else { panic!("four dimensions") };
    enlarge(&model.forward(image, prompt, keep.as_ref(), true), [16 * h, 16 * w])
}

fn agrees(version: &str) {
    let fixture = Fixture::open(&format!("mask_decoder_{version}"));
    for prefix in ["a", "b"] {
        let (store, model) = build(&fixture);
        let [image, prompt] = ["image", "prompt"].map(|n| leaf(&fixture.input(&format!("{prefix}.{n}")), Kind::Float));
        let logits = logits(&fixture, prefix, &model, &image, &prompt);
        probed(&logits, &fixture.input(&format!("{prefix}.probe"))).backward();
        let mut case = fixture.case(prefix);
        case.check("logits", &logits);
        case.check("grad.input", &image.grad());
        case.check("grad.prompt", &prompt.grad());
        // published, but not used
        case.check_gradients(&store, &["ffn.norm1.weight", "ffn.norm1.bias"]);
        case.finish();
    }
}

#[test]
fn mask_decoder_v5_agrees() {
    agrees("v5");
}

#[test]
fn mask_decoder_v6_agrees() {
    agrees("v6");
}

#[test]
fn mask_decoder_runs_in_bf16() {
    for version in ["v5", "v6"] {
        let fixture = Fixture::open(&format!("mask_decoder_{version}"));
        let (store, model) = build(&fixture);
        let run = |kind: Kind| {
            let [image, prompt] = ["image", "prompt"].map(|n| leaf(&fixture.input(&format!("b.{n}")), kind));
            logits(&fixture, "b", &model, &image, &prompt)
        };
        let (narrow, wide) = (run(Kind::BFloat16), run(Kind::Float));
        probed(&narrow, &fixture.input("b.probe")).backward();
        assert_finite_gradients(&store);
        assert_near_in_bf16(version, &narrow, &wide, BF16);
    }
}
