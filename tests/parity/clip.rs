//! Parity of CLIP's vision tower with transformers' `CLIPVisionModel`.

use crate::fixture::{BF16, Fixture, assert_finite_gradients, assert_near_in_bf16, leaf, probed, store};
use prsmed::models::clip::{ClipVision, Config};
use prsmed::tensor::Kind;
use prsmed::tensor::store::{Role, Store};

fn build(fixture: &Fixture) -> (Store, ClipVision) {
    let (store, config) = (store(), fixture.config::<Config>());
    let model = ClipVision::new(&store.root(Role::Trainable), &config, false);
    let last = format!("vision_model.encoder.layers.{}.", config.num_hidden_layers - 1);
    // LLaVA uses the second to last layer, so neither the last layer nor the norm is built
    fixture.load(&store, &[&last, "vision_model.post_layernorm."]);
    (store, model)
}

fn agrees(name: &str) {
    let fixture = Fixture::open(name);
    for prefix in ["a", "b"] {
        let (store, model) = build(&fixture);
        let image = leaf(&fixture.input(&format!("{prefix}.image")), Kind::Float);
        let tokens = model.forward(&image);
        probed(&tokens, &fixture.input(&format!("{prefix}.probe"))).backward();
        let mut case = fixture.case(prefix);
        case.check("patch_tokens", &tokens);
        case.check("grad.input", &image.grad());
        case.check_gradients(&store, &[]);
        case.finish();
    }
}

#[test]
fn clip_at_28_pixels_agrees() {
    agrees("clip_28");
}

#[test]
fn clip_at_42_pixels_agrees() {
    agrees("clip_42");
}

#[test]
fn clip_runs_in_bf16() {
    let fixture = Fixture::open("clip_42");
    let (store, model) = build(&fixture);
    let image = fixture.input("b.image");
    let tokens = model.forward(&leaf(&image, Kind::BFloat16));
    assert_eq!(tokens.kind(), Kind::BFloat16);
    probed(&tokens, &fixture.input("b.probe")).backward();
    assert_finite_gradients(&store);
    assert_near_in_bf16("patch tokens", &tokens, &model.forward(&image), BF16);
}
