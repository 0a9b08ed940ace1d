//! Memory that one language model layer keeps for its backward pass, compared with the same layer composed of
//! libtorch's operators.

use super::operands::{BF16, FP32, leaf, zeros};
use super::*;
use prsmed::models::base::llava_med;
use prsmed::models::decoder::{AttentionPattern, Config, Decoder, DecoderPass, PackedAttention};
use prsmed::models::prsmed::{BuildOptions, PrsMed};
use prsmed::nn::LoraConfig;
use prsmed::nn::attention::{merge_heads, split_heads};
use prsmed::tensor::functions::{Segments, packed_bias};
use prsmed::tensor::store::{Role, Store, StoreOptions};
use prsmed::tensor::{Kind, Tensor};

const LORA: LoraConfig = LoraConfig { rank: 16, alpha: 32.0, dropout: 0.05 };
const TOKENS: i64 = 625;

fn narrow() -> Config {
    Config {
        hidden_size: 1024,
        intermediate_size: 3584,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        vocab_size: 8,
        ..llava_med::sizes().llm
    }
}

/// Growth of live bytes by `forward`, including its result.
fn kept(forward: impl FnOnce() -> Tensor) -> i64 {
    let before = ledger::usage().allocated.0.cast_signed();
    let ys = forward();
    let kept = ledger::usage().allocated.0.cast_signed() - before;
    drop(ys);
    kept
}

fn of_layers(config: &Config, layers: i64, kind: Kind) -> (Store, Decoder) {
    let store = || Store::new(StoreOptions { device: META, frozen_kind: kind, initialise: false });
    let (base, adapters) = (store(), store());
    let config = Config { num_hidden_layers: layers, ..config.clone() };
    let model = Decoder::new(&base.root(Role::Frozen), Some((&adapters.root(Role::Trainable), &LORA)), &config, 0, 1);
    (adapters, model)
}

/// Arrangement of texts in a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Texts {
    One,
    Padded,
    Packed,
}

/// Bytes kept by one layer of this crate whose input needs a gradient: two layers minus one.
fn fused(config: &Config, kind: Kind, texts: Texts) -> i64 {
    let numbers = zeros(&[1, TOKENS], Kind::Int64, META);
    let keep = zeros(&[1, TOKENS], Kind::Bool, META);
    // two questions of 20 tokens
    let keys = || zeros(&[2 * TOKENS - 40], Kind::Int64, META);
    let segments = Segments {
        from: keys(),
        to: keys(),
        starts: [0; 2].map(|_| zeros(&[5], Kind::Int, META)),
        lengths: vec![[TOKENS - 40, TOKENS - 40], [20, TOKENS - 20], [20, TOKENS - 20], [0, 0]],
    };
    let positions = (texts == Texts::Packed).then_some(&numbers);
    let pattern = match texts {
        Texts::One => AttentionPattern::Causal,
        Texts::Padded => AttentionPattern::Padded(&keep),
        Texts::Packed => AttentionPattern::Packed { blocks: &numbers, segments: &segments },
    };
    let [one, two] = [1, 2].map(|layers| {
        let (_adapters, model) = of_layers(config, layers, kind);
        let xs = leaf(&[1, TOKENS, config.hidden_size], kind, META);
        kept(|| model.forward_with(&xs, pattern, positions, DecoderPass { train: true, checkpoint: 0 }))
    });
    two - one
}

/// The layer composed of libtorch's operators.
struct Composed {
    norm: Tensor,
    square: Tensor,
    key: Tensor,
    gate: Tensor,
    down: Tensor,
    a: Tensor,
    b: [Tensor; 2],
    tables: [Tensor; 2],
    mask: Option<Tensor>,
    config: Config,
}

impl Composed {
    fn new(config: &Config, kind: Kind, texts: Texts) -> Self {
        let (d, wide) = (config.hidden_size, config.intermediate_size);
        let kv = config.num_key_value_heads * config.head_dim();
        let frozen = |size: &[i64]| zeros(size, kind, META);
        Self {
            norm: frozen(&[d]),
            square: frozen(&[d, d]),
            key: frozen(&[kv, d]),
            gate: frozen(&[wide, d]),
            down: frozen(&[d, wide]),
            a: leaf(&[LORA.rank, d], FP32, META),
            b: [d, kv].map(|out| leaf(&[out, LORA.rank], FP32, META)),
            tables: [0; 2].map(|_| zeros(&[TOKENS, config.head_dim()], FP32, META)),
            mask: match texts {
                Texts::One => None,
                Texts::Padded => Some(zeros(&[1, 1, TOKENS, TOKENS], Kind::Bool, META)),
                Texts::Packed => Some(packed_bias(&zeros(&[1, TOKENS], Kind::Int64, META), kind)),
            },
            config: config.clone(),
        }
    }

    fn normed(&self, xs: &Tensor) -> Tensor {
        let cast = |xs: &Tensor, kind| if xs.kind() == kind { xs.shallow_clone() } else { xs.to_kind(kind) };
        let wide = cast(xs, FP32);
        let variance = wide.square().mean_dim([-1].as_slice(), true, FP32);
        cast(&(wide * (variance + 1e-5).rsqrt()), xs.kind()) * &self.norm
    }

    fn adapted(&self, xs: &Tensor, weight: &Tensor, b: &Tensor) -> Tensor {
        let linear = |xs: &Tensor, weight: &Tensor| xs.linear(weight, None::<&Tensor>);
        let low = linear(&xs.dropout(LORA.dropout, true), &self.a.to_kind(xs.kind())) * 2.0;
        linear(xs, weight) + linear(&low, &b.to_kind(xs.kind()))
    }

    fn rotated(&self, xs: &Tensor) -> Tensor {
        let half = self.config.head_dim() / 2;
        let turned = Tensor::cat(&[&xs.narrow(3, half, half).neg(), &xs.narrow(3, 0, half)], 3);
        let [cos, sin] = self.tables.each_ref().map(|table| table.to_kind(xs.kind()));
        xs * cos + turned * sin
    }

    /// CUDA's kernels accept grouped queries in half precision without a mask; otherwise keys and values are repeated.
    fn attended(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        let (mask, causal) = (self.mask.as_ref(), self.mask.is_none());
        if !meta::runs_as_cuda(q) || (mask.is_none() && q.kind() != FP32) {
            return Tensor::scaled_dot_product_attention(q, k, v, mask, 0.0, causal, None, true);
        }
        let (heads, groups) = (self.config.num_attention_heads, self.config.num_key_value_heads);
        let size = [1, groups, heads / groups, TOKENS, self.config.head_dim()];
        let [k, v] = [k, v].map(|xs| xs.unsqueeze(2).expand(size, false).reshape(q.size()));
        Tensor::scaled_dot_product_attention(q, &k, &v, mask, 0.0, causal, None, false)
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let (heads, groups) = (self.config.num_attention_heads, self.config.num_key_value_heads);
        let normed = self.normed(xs);
        let q = split_heads(&self.adapted(&normed, &self.square, &self.b[0]), heads);
        let [k, v] = [0; 2].map(|_| split_heads(&self.adapted(&normed, &self.key, &self.b[1]), groups));
        let attended = self.attended(&self.rotated(&q), &self.rotated(&k), &v);
        let xs = xs + self.adapted(&merge_heads(&attended), &self.square, &self.b[0]);
        let linear = |xs: &Tensor, weight: &Tensor| xs.linear(weight, None::<&Tensor>);
        let normed = self.normed(&xs);
        let gated = linear(&normed, &self.gate).silu() * linear(&normed, &self.gate);
        &xs + linear(&gated, &self.down)
    }
}

fn composed(config: &Config, kind: Kind, texts: Texts) -> i64 {
    let layers = [0; 2].map(|_| Composed::new(config, kind, texts));
    let [one, two] = [1, 2].map(|count| {
        let xs = leaf(&[1, TOKENS, config.hidden_size], kind, META);
        kept(|| {
            let ys = layers[..count].iter().fold(xs.shallow_clone(), |xs, layer| layer.forward(&xs));
            layers[0].normed(&ys)
        })
    });
    two - one
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn a_layer_keeps_at_most_three_fifths_of_the_composed_layer() {
    let _alone = ready();
    let full = llava_med::sizes().llm;
    for (config, target, kind, texts) in [
        (narrow(), PlanTarget::Cpu, FP32, Texts::One),
        (narrow(), PlanTarget::Cpu, BF16, Texts::One),
        (narrow(), PlanTarget::Cuda, BF16, Texts::One),
        (full.clone(), PlanTarget::Cuda, BF16, Texts::One),
        (full.clone(), PlanTarget::Cuda, BF16, Texts::Packed),
        (full.clone(), PlanTarget::Cuda, BF16, Texts::Padded),
        (full.clone(), PlanTarget::Cuda, FP32, Texts::One),
        (full.clone(), PlanTarget::Cuda, FP32, Texts::Packed),
        (full, PlanTarget::Cuda, FP32, Texts::Padded),
    ] {
        let _target = meta::enter_target(target);
        let (fused, composed) = (fused(&config, kind, texts), composed(&config, kind, texts));
        let part = fused as f64 / composed as f64;
        let what = format!("{} wide, {target:?}, {kind:?}, {texts:?}", config.hidden_size);
        println!("{what}: {fused} of {composed} bytes, {:.1} %", 100.0 * part);
        assert!(fused > 0 && part <= 0.60, "{what}: {fused} of {composed} bytes");
    }
}

#[test]
fn no_activations_are_kept_before_the_first_trained_tensor() {
    let _alone = ready();
    let config = narrow();
    let (_adapters, model) = of_layers(&config, 1, BF16);
    let size = [1, TOKENS, config.hidden_size];
    let (leaf, frozen) = (leaf(&size, BF16, META), zeros(&size, BF16, META));
    let pass = DecoderPass { train: true, checkpoint: 0 };
    // only the statistics of the first norm, fp32 per row (the test itself holds the input)
    assert_eq!(kept(|| model.forward(&leaf, None, pass)) - kept(|| model.forward(&frozen, None, pass)), 4 * TOKENS);
    let output = size.iter().product::<i64>() * 2;
    assert_eq!(kept(|| no_grad(|| model.forward(&leaf, None, DecoderPass::default()))), output);
}

#[test]
fn a_frozen_vision_tower_keeps_no_activations() {
    let _alone = ready();
    for train_base in [false, true] {
        let config = config_of("tiny", &format!("model.train_base={train_base}"));
        let sizes = setup::planned_sizes(&config.model, &config.configs, config.lora, 6).unwrap();
        let options = BuildOptions {
            device: META,
            stored: BF16,
            compute: BF16,
            initialise: false,
            train_base,
            loads_base: true,
            host_layers: 0,
            host_vision: false,
            packed_attention: PackedAttention::Auto,
            ranks: 1,
            reads_layers: true,
            quantization: prsmed::nn::Quantization::None,
        };
        let model = PrsMed::new(&sizes, options);
        let side = sizes.tower.image_size();
        let image = zeros(&[2, 3, side, side], FP32, META);
        let tokens = 2 * sizes.tower.max_tokens() * sizes.llm.hidden_size * 2;
        let kept = kept(|| model.image_tokens(&image));
        assert!(if train_base { kept > 2 * tokens } else { kept == tokens }, "{train_base}: {kept} {tokens}");
    }
}
