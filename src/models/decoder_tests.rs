use super::*;
use crate::nn::Quantization;
use crate::tensor::store::{Role, Store, StoreOptions};
use crate::tensor::{Device, rng};

const OPTIONS: (Kind, Device) = (Kind::Float, Device::Cpu);
const TOKENS: i64 = 7;

fn config(variant: Variant) -> Config {
    Config {
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        vocab_size: 11,
        rope_theta: 100.0,
        rms_norm_eps: 1e-6,
        initializer_range: 0.4,
        variant,
    }
}

/// A decoder whose biases and norms differ from their initial values.
fn built(config: &Config, quantization: Quantization) -> (Store, Decoder) {
    let (store, _adapters, model) = adapted(config, quantization, None);
    (store, model)
}

/// The same with the store of its adapters.
fn adapted(config: &Config, quantization: Quantization, lora: Option<LoraConfig>) -> (Store, Store, Decoder) {
    let new = || Store::new(StoreOptions { device: Device::Cpu, frozen_kind: Kind::Float, initialise: true });
    let (store, adapters) = (new(), new());
    rng::seed(5);
    let (base, root) = (store.root(Role::Frozen).quantized(quantization, true), adapters.root(Role::Trainable));
    let model = Decoder::new(&base, lora.as_ref().map(|lora| (&root, lora)), config, 0, 1);
    for entry in store.entries().iter().filter(|entry| entry.tensor.dim() == 1 && entry.tensor.kind() == Kind::Float) {
        no_grad(|| entry.tensor.shallow_clone().copy_(&(Tensor::randn(entry.tensor.size(), OPTIONS) * 0.3 + 0.2)));
    }
    (store, adapters, model)
}

/// Positions of the axes time, height and width: a text of two tokens, an image of 2 x 2 tokens, a token.
const POSITIONS: [[i64; 7]; 3] = [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]];

/// A decoder by its definition, one sequence, without shared code.
struct Reference<'a> {
    config: &'a Config,
    weight: &'a dyn Fn(&str) -> Option<Tensor>,
    positions: [[i64; 7]; 3],
}

impl Reference<'_> {
    fn get(&self, name: &str) -> Tensor {
        (self.weight)(name).unwrap_or_else(|| panic!("no `{name}`"))
    }

    fn linear(&self, name: &str, xs: &Tensor) -> Tensor {
        let ys = xs.matmul(&self.get(&format!("{name}.weight")).tr());
        (self.weight)(&format!("{name}.bias")).map_or_else(|| ys.shallow_clone(), |bias| &ys + bias)
    }

    fn norm(&self, name: &str, xs: &Tensor) -> Tensor {
        let weight = self.get(&format!("{name}.weight"));
        let factor = if self.config.variant.norm == RmsFactor::Weight { weight } else { weight + 1.0 };
        xs / (xs.square().mean_dim([-1].as_slice(), true, Kind::Float) + self.config.rms_norm_eps).sqrt() * factor
    }

    fn angle(&self, token: usize, at: i64, local: bool) -> f64 {
        let variant = &self.config.variant;
        let theta = if local { variant.local.unwrap().rope_theta } else { self.config.rope_theta };
        let mut frequency = theta.powf(-2.0 * at as f64 / self.config.head_dim() as f64);
        match variant.rope_scaling.filter(|_| !local) {
            None => {}
            Some(Scaling::Linear { factor }) => frequency /= factor,
            Some(Scaling::Llama3 { factor, low, high, original }) => {
                let turns = original * frequency / std::f64::consts::TAU;
                if turns < low {
                    frequency /= factor;
                } else if turns <= high {
                    let smooth = (turns - low) / (high - low);
                    frequency = (1.0 - smooth) * frequency / factor + smooth * frequency;
                }
            }
        }
        let axis = match variant.rope_sections {
            None => 0,
            Some(Sections { interleaved: true, sizes }) => {
                let axes = [(0, 0), (1, 1), (2, 2)];
                let found = axes.into_iter().rfind(|&(axis, i)| at % 3 == axis && at < 3 * sizes[i]);
                found.map_or(0, |(_, i)| i)
            }
            Some(Sections { sizes: [first, second, _], .. }) => {
                usize::from(at >= first) + usize::from(at >= first + second)
            }
        };
        self.positions[axis][token] as f64 * frequency
    }

    /// `xs [t, h, d]` with each head turned.
    fn rotated(&self, xs: &Tensor, local: bool) -> Tensor {
        let half = self.config.head_dim() / 2;
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f64> =
                (0..7).flat_map(|token| (0..half).map(move |at| f(self.angle(token, at, local)))).collect();
            Tensor::from_slice(&values).to_kind(Kind::Float).view([7, 1, half])
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let [a, b]: [Tensor; 2] = xs.chunk(2, -1).try_into().unwrap();
        Tensor::cat(&[&a * &cos - &b * &sin, &b * &cos + &a * &sin], -1)
    }

    fn attention(&self, name: &str, xs: &Tensor, local: bool) -> Tensor {
        let (heads, groups, d) =
            (self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim());
        let part = |part: &str, heads: i64| {
            let ys = self.linear(&format!("{name}.{part}_proj"), xs).view([7, heads, d]);
            let ys = if self.config.variant.qk_norm && part != "v" {
                self.norm(&format!("{name}.{part}_norm"), &ys)
            } else {
                ys
            };
            if part == "v" { ys } else { self.rotated(&ys, local) }
        };
        let [q, k, v] = [part("q", heads), part("k", groups), part("v", groups)];
        let [k, v] = [k, v].map(|ys| ys.repeat_interleave_self_int(heads / groups, 1, None));
        let window = if local { self.config.variant.local.unwrap().window } else { TOKENS };
        let hidden: Vec<f32> = (0..TOKENS * TOKENS)
            .map(|i| if (0..window).contains(&(i / TOKENS - i % TOKENS)) { 0.0 } else { f32::NEG_INFINITY })
            .collect();
        let [q, k, v] = [q, k, v].map(|ys| ys.transpose(0, 1));
        let scores = q.matmul(&k.transpose(1, 2)) / (d as f64).sqrt() + Tensor::from_slice(&hidden).view([7, 7]);
        let mixed = scores.softmax(-1, Kind::Float).matmul(&v).transpose(0, 1).reshape([7, heads * d]);
        self.linear(&format!("{name}.o_proj"), &mixed)
    }

    fn states(&self, embeds: &Tensor) -> Tensor {
        let variant = &self.config.variant;
        let mut xs = embeds.get(0);
        for layer in 0..3 {
            let local = variant.local.is_some_and(|local| (layer + 1) % local.period != 0);
            let name = |name: &str| format!("model.layers.{layer}.{name}");
            let mut ys = self.attention(&name("self_attn"), &self.norm(&name("input_layernorm"), &xs), local);
            let mut before_mlp = "post_attention_layernorm";
            if variant.branch_norms {
                ys = self.norm(&name("post_attention_layernorm"), &ys);
                before_mlp = "pre_feedforward_layernorm";
            }
            xs = xs.g_add(&ys);
            let ys = self.norm(&name(before_mlp), &xs);
            let gate = self.linear(&name("mlp.gate_proj"), &ys);
            let gate = if variant.activation == GateActivation::Silu { gate.silu() } else { gate.gelu("tanh") };
            let mut ys = self.linear(&name("mlp.down_proj"), &(gate * self.linear(&name("mlp.up_proj"), &ys)));
            if variant.branch_norms {
                ys = self.norm(&name("post_feedforward_layernorm"), &ys);
            }
            xs = xs.g_add(&ys);
        }
        self.norm("model.norm", &xs)
    }
}

fn assert_near(ours: &Tensor, theirs: &Tensor, what: &str) {
    let error = (ours - theirs).norm().double_value(&[]) / theirs.norm().double_value(&[]);
    assert!(error < 2e-5, "{what}: relative error {error:.1e}");
}

/// Every difference alone, and those of the families that have several.
fn variants() -> Vec<Variant> {
    let plain = Variant::default;
    let local = Some(Local { window: 3, period: 2, rope_theta: 10.0 });
    let chunks = Some(Sections { sizes: [2, 3, 3], interleaved: false });
    vec![
        plain(),
        Variant { qkv_bias: true, ..plain() },
        Variant { head_dim: Some(6), ..plain() },
        Variant { qk_norm: true, ..plain() },
        Variant { norm: RmsFactor::OnePlusWeight, ..plain() },
        Variant { branch_norms: true, ..plain() },
        Variant { activation: GateActivation::GeluTanh, ..plain() },
        Variant { rope_scaling: Some(Scaling::Linear { factor: 8.0 }), ..plain() },
        Variant {
            head_dim: Some(16),
            rope_scaling: Some(Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 40.0 }),
            ..plain()
        },
        Variant { local, ..plain() },
        // Qwen2.5-VL, Qwen3-VL, Gemma 3
        Variant { head_dim: Some(16), qkv_bias: true, rope_sections: chunks, tied_head: true, ..plain() },
        Variant {
            head_dim: Some(16),
            qk_norm: true,
            rope_sections: Some(Sections { sizes: [4, 2, 2], interleaved: true }),
            ..plain()
        },
        Variant {
            head_dim: Some(8),
            qk_norm: true,
            norm: RmsFactor::OnePlusWeight,
            branch_norms: true,
            activation: GateActivation::GeluTanh,
            rope_scaling: Some(Scaling::Linear { factor: 8.0 }),
            local,
            tied_head: true,
            scaled_embedding: true,
            ..plain()
        },
    ]
}

#[test]
fn every_difference_is_computed_as_it_is_defined() {
    let _lock = rng::TEST_LOCK.lock();
    let ids = Tensor::from_slice(&[1_i64, 4, 2, 9, 3, 10, 5]).view([1, TOKENS]);
    let mut seen: Vec<Tensor> = Vec::new();
    for variant in variants() {
        let config = config(variant.clone());
        config.check_variant().unwrap();
        let (store, model) = built(&config, Quantization::None);
        let embedding = store.get("model.embed_tokens.weight").unwrap();
        let embeds = model.embed(&ids);
        let factor = if variant.scaled_embedding { 4.0 } else { 1.0 };
        assert_near(&embeds, &(embedding.index_select(0, &ids.get(0)) * factor).unsqueeze(0), "embedding");
        let positions = match variant.rope_sections {
            Some(_) => POSITIONS,
            None => [[0, 1, 2, 3, 4, 5, 6]; 3],
        };
        let given = variant.rope_sections.map(|_| Tensor::from_slice(&positions.concat()).view([3, 1, TOKENS]));
        let what = format!("{variant:?}");
        let expected = Reference { config: &config, weight: &|name| store.get(name), positions }.states(&embeds);
        let whole = model.forward_with(&embeds, AttentionPattern::Causal, given.as_ref(), DecoderPass::default());
        assert_near(&whole.get(0), &expected, &what);
        assert!(seen.iter().all(|other| !other.allclose(&whole, 1e-3, 1e-3, false)), "{what} has no effect");

        // a prompt of six tokens, whose image may have fewer positions than tokens, and one more token
        let mut cache = KvCache::new(&config, TOKENS).with_shift(if given.is_some() { -2 } else { 0 });
        let first = given.as_ref().map(|given| given.narrow(2, 0, 6));
        let mut cached = vec![model.forward_cached(&embeds.narrow(1, 0, 6), first.as_ref(), &mut cache)];
        cached.push(model.forward_cached(&embeds.narrow(1, 6, 1), None, &mut cache));
        assert_near(&Tensor::cat(&cached, 1).get(0), &expected, &format!("{what} from the cache"));

        let head = if variant.tied_head { embedding } else { store.get("lm_head.weight").unwrap() };
        assert_eq!(store.get("lm_head.weight").is_some(), !variant.tied_head);
        assert_near(&model.logits(&whole), &whole.matmul(&head.tr()), "logits");
        seen.push(whole);
    }
}

#[test]
fn packed_texts_of_local_layers_equal_texts_alone() {
    let _lock = rng::TEST_LOCK.lock();
    let config =
        config(Variant { local: Some(Local { window: 3, period: 2, rope_theta: 10.0 }), ..Variant::default() });
    let model = built(&config, Quantization::None).1.with_packed_attention(PackedAttention::Mask);
    let list = |values: &[i64]| Tensor::from_slice(values).view([1, -1]);
    // a prefix of four tokens, and questions of two and three
    let (blocks, positions) = (list(&[0, 0, 0, 0, 1, 1, 2, 2, 2]), list(&[0, 1, 2, 3, 4, 5, 4, 5, 6]));
    let segments = Segments { from: list(&[0]), to: list(&[0]), starts: [list(&[0]), list(&[0])], lengths: Vec::new() };
    let pattern = AttentionPattern::Packed { blocks: &blocks, segments: &segments };
    let embeds = model.embed(&list(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
    let packed = model.forward_with(&embeds, pattern, Some(&positions), DecoderPass::default());
    let states = |ids: &[i64]| model.forward(&model.embed(&list(ids)), None, DecoderPass::default());
    assert_near(&packed.narrow(1, 0, 6), &states(&[1, 2, 3, 4, 5, 6]), "the first question");
    assert_near(&packed.narrow(1, 6, 3), &states(&[1, 2, 3, 4, 7, 8, 9]).narrow(1, 4, 3), "the second question");
}

#[test]
fn quantized_projections_have_their_biases_and_adapters() {
    let _lock = rng::TEST_LOCK.lock();
    let config = config(Variant { qkv_bias: true, ..Variant::default() });
    let lora = LoraConfig { rank: 2, alpha: 4.0, dropout: 0.0 };
    let (store, adapters, model) = adapted(&config, Quantization::Nf4, Some(lora));
    for entry in adapters.entries() {
        no_grad(|| entry.tensor.shallow_clone().copy_(&(Tensor::randn(entry.tensor.size(), OPTIONS) * 0.3)));
    }
    let matrices = store.quantized();
    let dense = |name: &str| {
        let matrix = matrices.iter().find(|(key, _)| key == name);
        let weight = matrix.map(|(_, matrix)| matrix.dequantize(Kind::Float)).or_else(|| store.get(name))?;
        let factor = |part: &str| {
            let layer = name.strip_suffix(".weight")?;
            adapters.get(&format!("base_model.model.{layer}.lora_{part}.weight"))
        };
        Some(match (factor("A"), factor("B")) {
            (Some(a), Some(b)) => weight + b.matmul(&a) * 2.0,
            _ => weight,
        })
    };
    let embeds = model.embed(&Tensor::arange(TOKENS, (Kind::Int64, Device::Cpu)).view([1, TOKENS]));
    let reference = Reference { config: &config, weight: &dense, positions: [[0, 1, 2, 3, 4, 5, 6]; 3] };
    assert_near(&model.forward(&embeds, None, DecoderPass::default()).get(0), &reference.states(&embeds), "NF4");
}

#[test]
fn sizes_of_mistral_are_written_as_before_and_impossible_differences_are_refused() {
    let json = serde_json::to_value(config(Variant::default())).unwrap();
    assert!(json.get("variant").is_none() && json.as_object().unwrap().len() == 9, "{json}");
    assert_eq!(serde_json::from_value::<Config>(json).unwrap(), config(Variant::default()));
    let sections = |sizes| Some(Sections { sizes, interleaved: false });
    for (variant, field) in [
        (Variant { head_dim: Some(7), ..Variant::default() }, "head_dim"),
        (Variant { rope_sections: sections([1, 1, 1]), ..Variant::default() }, "rope_sections"),
        (Variant { local: Some(Local { window: 0, period: 1, rope_theta: 1.0 }), ..Variant::default() }, "local"),
    ] {
        assert_eq!(config(variant).check_variant().unwrap_err().0, field);
    }
}
