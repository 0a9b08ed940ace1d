//! Parity of Mistral with transformers' `MistralForCausalLM`: hidden states, logits, gradients, greedy generation.

use crate::fixture::{
    BF16, Fixture, assert_finite_gradients, assert_near_in_bf16, leaf, probed, relative_error, store,
};
use prsmed::models::decoder::{Config, Decoder, DecoderPass, KvCache};
use prsmed::tensor::store::{Role, Store};
use prsmed::tensor::{Kind, Tensor, dims, no_grad};

/// The parts of the fixture's scalar.
pub(crate) struct Outputs {
    pub(crate) hidden: Tensor,
    pub(crate) logits: Tensor,
    pub(crate) loss: Tensor,
}

impl Outputs {
    /// The scalar whose gradients are in the fixture.
    pub(crate) fn scalar(&self, fixture: &Fixture, prefix: &str) -> Tensor {
        let probe = |name: &str| fixture.input(&format!("{prefix}.probe_{name}"));
        probed(&self.hidden, &probe("hidden")) + probed(&self.logits, &probe("logits")) + &self.loss
    }
}

/// The embeddings of a case; a leaf with gradient if they are an input.
pub(crate) fn embeds(fixture: &Fixture, prefix: &str, model: &Decoder, kind: Kind) -> Tensor {
    let given = format!("{prefix}.inputs_embeds");
    if fixture.has_input(&given) {
        leaf(&fixture.input(&given), kind)
    } else {
        model.embed(&fixture.input(&format!("{prefix}.input_ids"))).to_kind(kind)
    }
}

pub(crate) fn keep(fixture: &Fixture, prefix: &str) -> Option<Tensor> {
    let name = format!("{prefix}.mask");
    fixture.has_input(&name).then(|| fixture.input(&name))
}

pub(crate) fn forward(fixture: &Fixture, prefix: &str, model: &Decoder, embeds: &Tensor, pass: DecoderPass) -> Outputs {
    let hidden = model.forward(embeds, keep(fixture, prefix).as_ref(), pass);
    let logits = model.logits(&hidden);
    let [_b, t, vocab] = dims(&logits);
    let labels = fixture.input(&format!("{prefix}.labels")).narrow(1, 1, t - 1).reshape([-1]);
    let next = logits.narrow(1, 0, t - 1).reshape([-1, vocab]).to_kind(Kind::Float);
    let loss = next.cross_entropy_loss(&labels, None::<&Tensor>, prsmed::tensor::Reduction::Mean, -100, 0.0);
    Outputs { hidden, logits, loss }
}

fn build(fixture: &Fixture) -> (Store, Decoder) {
    let store = store();
    let model = Decoder::new(&store.root(Role::Trainable), None, &fixture.config::<Config>(), 0, 1);
    fixture.load(&store, &[]);
    (store, model)
}

#[test]
fn mistral_agrees() {
    let fixture = Fixture::open("mistral");
    for prefix in ["a", "b", "c"] {
        let (store, model) = build(&fixture);
        let embeds = embeds(&fixture, prefix, &model, Kind::Float);
        let out = forward(&fixture, prefix, &model, &embeds, DecoderPass { train: true, checkpoint: 0 });
        out.scalar(&fixture, prefix).backward();
        let mut case = fixture.case(prefix);
        case.check("last_hidden", &out.hidden);
        case.check("logits", &out.logits);
        case.check("loss", &out.loss);
        if prefix == "c" {
            case.check("grad.inputs_embeds", &embeds.grad());
            case.check_gradients(&store, &["model.embed_tokens.weight"]);
        } else {
            case.check_gradients(&store, &[]);
            assert_eq!(generated(&fixture, prefix, &model), fixture.expected(&format!("{prefix}.generated")));
            case.compared_elsewhere("generated");
        }
        case.finish();
    }
}

/// Greedily generated ids `[1, n]`, with a cache.
fn generated(fixture: &Fixture, prefix: &str, model: &Decoder) -> Tensor {
    let [_b, length] = dims(&fixture.input(&format!("{prefix}.prompt")));
    let [_, count] = dims(&fixture.expected(&format!("{prefix}.generated")));
    let mut cache = KvCache::new(model.config(), length + count);
    let mut ids = fixture.input(&format!("{prefix}.prompt"));
    let mut out = Vec::new();
    for _ in 0..count {
        let states = model.forward_cached(&no_grad(|| model.embed(&ids)), None, &mut cache);
        ids = no_grad(|| model.logits(&states.slice(1, -1, None, 1)).argmax(-1, false));
        out.push(ids.shallow_clone());
    }
    Tensor::cat(&out, 1)
}

#[test]
fn hidden_states_with_and_without_cache_agree() {
    let fixture = Fixture::open("mistral");
    let (_store, model) = build(&fixture);
    let embeds = no_grad(|| model.embed(&fixture.input("b.input_ids").narrow(0, 0, 1)));
    let whole = no_grad(|| model.forward(&embeds, None, DecoderPass::default()));
    let [_b, t, _d] = dims(&embeds);
    let mut cache = KvCache::new(model.config(), t);
    let mut parts = vec![model.forward_cached(&embeds.narrow(1, 0, 4), None, &mut cache)];
    parts.extend((4..t).map(|i| model.forward_cached(&embeds.narrow(1, i, 1), None, &mut cache)));
    assert_eq!(cache.len(), t);
    let error = relative_error(&Tensor::cat(&parts, 1), &whole);
    assert!(error <= 1e-5, "states from the cache differ by {error:.1e}");
}

#[test]
fn padding_on_the_right_needs_no_mask() {
    let fixture = Fixture::open("mistral");
    let (_store, model) = build(&fixture);
    let (embeds, keep) = (embeds(&fixture, "b", &model, Kind::Float), keep(&fixture, "b").expect("case b is padded"));
    let masked = model.forward(&embeds, Some(&keep), DecoderPass::default());
    let plain = model.forward(&embeds, None, DecoderPass::default());
    let real = |states: &Tensor| states.masked_select(&keep.unsqueeze(2));
    let error = relative_error(&real(&plain), &real(&masked));
    assert!(error <= 1e-5, "unmasked padding changes real tokens by {error:.1e}");
    let error = relative_error(&plain, &masked);
    assert!(error > 1e-3, "the mask has no effect ({error:.1e})");
}

#[test]
fn mistral_runs_in_bf16() {
    let fixture = Fixture::open("mistral");
    for prefix in ["a", "b", "c"] {
        let (store, model) = build(&fixture);
        let run = |kind: Kind| {
            forward(&fixture, prefix, &model, &embeds(&fixture, prefix, &model, kind), DecoderPass::default())
        };
        let (narrow, wide) = (run(Kind::BFloat16), run(Kind::Float));
        assert_eq!((narrow.hidden.kind(), narrow.logits.kind()), (Kind::BFloat16, Kind::BFloat16));
        narrow.scalar(&fixture, prefix).backward();
        assert_finite_gradients(&store);
        assert_near_in_bf16("states", &narrow.hidden, &wide.hidden, BF16);
        assert_near_in_bf16("logits", &narrow.logits, &wide.logits, BF16);
    }
}
