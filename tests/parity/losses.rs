//! Parity of the losses of both semantics with PyTorch: values and gradients of the logits.

use crate::fixture::{Fixture, leaf};
use prsmed::segment::{Semantics, loss};
use prsmed::tensor::autograd::linear_cross_entropy;
use prsmed::tensor::{Kind, Tensor};

fn check(prefix: &str) {
    let fixture = Fixture::open("losses");
    let mut case = fixture.case(prefix);
    let input = |name: &str| fixture.input(&format!("{prefix}.{name}"));
    for (name, semantics) in [("reference", Semantics::Reference), ("corrected", Semantics::Corrected)] {
        let logits = leaf(&input("mask_logits"), Kind::Float);
        let samples = logits.size()[0];
        let value = loss::structure(&logits, &input("mask"), semantics, None) / samples;
        value.backward();
        case.check(&format!("{name}.loss"), &value);
        case.check(&format!("{name}.grad.mask_logits"), &logits.grad());
        // the fixture contains its two parts for information; their sum is compared
        case.compared_elsewhere(&format!("{name}.bce"));
        case.compared_elsewhere(&format!("{name}.weighted_iou"));
    }
    let logits = leaf(&input("text_logits"), Kind::Float);
    let [b, t, vocab] = prsmed::tensor::dims(&logits);
    // a state predicts the token after it
    let labels = input("labels").narrow(1, 1, t - 1).reshape([-1]);
    let tokens = labels.ne(-100).sum(Kind::Int64).int64_value(&[]);
    // an identity head makes the logits its rows
    let head = Tensor::eye(vocab, (Kind::Float, prsmed::tensor::Device::Cpu));
    let rows = logits.narrow(1, 0, t - 1).reshape([b * (t - 1), vocab]);
    let value = linear_cross_entropy(&rows, &head, &labels, 3) / tokens;
    value.backward();
    case.check("text.loss", &value);
    case.check("grad.text_logits", &logits.grad());

    let logits = leaf(&input("class_logits"), Kind::Float);
    let value: Tensor = loss::class(&logits, &input("class_label")) / b;
    value.backward();
    case.check("class.loss", &value);
    case.check("grad.class_logits", &logits.grad());
    case.finish();
}

#[test]
fn square_maps_with_an_empty_and_a_soft_mask_agree() {
    check("a");
}

#[test]
fn rectangular_maps_agree() {
    check("b");
}
