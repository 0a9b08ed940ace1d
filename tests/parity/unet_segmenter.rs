//! Parity of the small U-Net segmenter with PyTorch's modules.

use crate::fixture::{BF16, Fixture, assert_finite_gradients, assert_near_in_bf16, probed, store};
use prsmed::models::unet_segmenter::{Config, UnetSegmenter};
use prsmed::tensor::store::{Role, Store};
use prsmed::tensor::{Kind, Tensor};

fn build(fixture: &Fixture) -> (Store, UnetSegmenter) {
    let given = &fixture.meta["config"];
    let number = |name: &str| given[name].as_i64().unwrap_or_else(|| panic!("config.{name}"));
    let widths = serde_json::from_value(given["widths"].clone()).expect("widths");
    let config = Config { widths, groups: number("groups"), num_words: number("num_words") };
    let store = store();
    let model = UnetSegmenter::new(&store.root(Role::Trainable), &config);
    fixture.load(&store, &[]);
    (store, model)
}

fn logits(fixture: &Fixture, prefix: &str, model: &UnetSegmenter, kind: Kind) -> Tensor {
    let [image, words, keep] = ["image", "words", "keep"].map(|name| fixture.input(&format!("{prefix}.{name}")));
    model.forward(&image, &words, &keep, kind)
}

#[test]
fn unet_segmenter_agrees() {
    let fixture = Fixture::open("unet_segmenter");
    for prefix in ["a", "b"] {
        let (store, model) = build(&fixture);
        let logits = logits(&fixture, prefix, &model, Kind::Float);
        probed(&logits, &fixture.input(&format!("{prefix}.probe"))).backward();
        let mut case = fixture.case(prefix);
        case.check("logits", &logits);
        case.check_gradients(&store, &[]);
        case.finish();
    }
}

#[test]
fn unet_segmenter_runs_in_bf16() {
    let fixture = Fixture::open("unet_segmenter");
    let (store, model) = build(&fixture);
    let [narrow, wide] = [Kind::BFloat16, Kind::Float].map(|kind| logits(&fixture, "b", &model, kind));
    probed(&narrow, &fixture.input("b.probe")).backward();
    assert_finite_gradients(&store);
    assert_near_in_bf16("unet_segmenter", &narrow, &wide, BF16);
}
