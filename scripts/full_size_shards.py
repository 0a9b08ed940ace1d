"""Writes a full-size LLaVA-Med v1.5 with random weights (7.24 B Mistral, CLIP-L tower, projector; bf16, four shards)
and a random TinySAM checkpoint.

    full_size_shards.py OUT [--tokenizer tokenizer.model] [--layers 32]

OUT gets the files of the Hub repository (shards, index, config, generation config) and `tinysam.pth`. Tensors are
copied from one random block of 64 MiB, starting at a different offset for each tensor, so memory stays far below one
shard. Norm weights are 1, norm biases 0, all others normal(0, 0.02).
"""

import argparse
import json
import shutil
import struct
from pathlib import Path

import torch
from torch_modules.tiny_vit import TinyVit

SHARD_BYTES = 5_000_000_000
HIDDEN, KV, INTERMEDIATE, VOCAB, CLIP, CLIP_MLP, CLIP_LAYERS, PATCHES = 4096, 1024, 14336, 32000, 1024, 4096, 24, 576
CONFIG = {
    "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2", "architectures": ["LlavaMistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "feature_outs": "encoder+decoder", "freeze_mm_mlp_adapter": False,
    "hidden_act": "silu",
    "hidden_size": HIDDEN, "image_aspect_ratio": "pad", "img_size": 640, "initializer_range": 0.02,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 32768, "mm_hidden_size": CLIP, "mm_projector_lr": None,
    "mm_projector_type": "mlp2x_gelu",
    "mm_use_im_patch_token": False, "mm_use_im_start_end": False, "mm_vision_select_feature": "patch",
    "mm_vision_select_layer": -2,
    "mm_vision_tower": "openai/clip-vit-large-patch14-336", "model_type": "llava_mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "proj_vis_to_txt_tokens": False, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "segtok_posembed": "sincos", "sliding_window": None, "tie_word_embeddings": False,
    "tokenizer_model_max_length": 2048,
    "tokenizer_padding_side": "right", "torch_dtype": "bfloat16", "transformers_version": "4.36.2",
    "tune_mm_mlp_adapter": False,
    "tune_vision_tokenizer": "none", "use_cache": True, "use_mm_proj": True, "vision_backbone": "convnextlarge",
    "vision_tokenizer_lr": None, "vocab_size": VOCAB,
}


def language_tensors(layers):
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name, rows in (("q", HIDDEN), ("k", KV), ("v", KV), ("o", HIDDEN)):
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, HIDDEN)
        yield f"{layer}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def vision_tensors():
    root = "model.vision_tower.vision_tower.vision_model"
    yield f"{root}.embeddings.class_embedding", (CLIP,)
    yield f"{root}.embeddings.patch_embedding.weight", (CLIP, 3, 14, 14)
    yield f"{root}.embeddings.position_embedding.weight", (PATCHES + 1, CLIP)
    linears = {f"self_attn.{n}_proj": (CLIP, CLIP) for n in ("k", "v", "q", "out")}
    linears |= {"mlp.fc1": (CLIP_MLP, CLIP), "mlp.fc2": (CLIP, CLIP_MLP)}
    names = [f"encoder.layers.{i}.layer_norm{n}" for i in range(CLIP_LAYERS) for n in (1, 2)]
    for name in ["pre_layrnorm", *names, "post_layernorm"]:
        yield f"{root}.{name}.weight", (CLIP,)
        yield f"{root}.{name}.bias", (CLIP,)
    for i in range(CLIP_LAYERS):
        for name, shape in linears.items():
            yield f"{root}.encoder.layers.{i}.{name}.weight", shape
            yield f"{root}.encoder.layers.{i}.{name}.bias", shape[:1]
    for index, inputs in ((0, CLIP), (2, HIDDEN)):
        yield f"model.mm_projector.{index}.weight", (HIDDEN, inputs)
        yield f"model.mm_projector.{index}.bias", (HIDDEN,)


def shards(tensors):
    """Fills shards greedily up to `SHARD_BYTES`, like the published ones; `lm_head` has its own shard, the last."""
    groups, used = [[]], 0
    for name, shape in tensors:
        size = 2 * torch.Size(shape).numel()
        if groups[-1] and (used + size > SHARD_BYTES or name == "lm_head.weight"):
            groups.append([])
            used = 0
        groups[-1].append((name, shape, size))
        used += size
    return groups


class RandomBlock:
    """64 MiB of normally distributed bf16 values; each tensor starts at a different offset."""

    def __init__(self, seed):
        rng = torch.Generator().manual_seed(seed)
        values = (torch.randn(1 << 25, generator=rng) * 0.02).bfloat16()
        self.bytes = memoryview(values.view(torch.uint8).numpy())
        self.offset = 0

    def pieces(self, size):
        self.offset = (self.offset + 2 * 7_654_321) % len(self.bytes)
        offset = self.offset
        while size:
            piece = self.bytes[offset : offset + size]
            yield piece
            size -= len(piece)
            offset = 0


def is_norm(name):
    return "norm" in name.rsplit(".", 2)[-2]


def write_shard(path, tensors, block):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, size in tensors:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, _, size in tensors:
            if is_norm(name):
                file.write((b"\x80\x3f" if name.endswith("weight") else b"\0\0") * (size // 2))
            else:
                file.writelines(block.pieces(size))


def write_llava(out, layers, seed):
    tensors = [*language_tensors(layers), *vision_tensors(), ("lm_head.weight", (VOCAB, HIDDEN))]
    groups, block, shard_of, total = shards(tensors), RandomBlock(seed), {}, 0
    for i, group in enumerate(groups, 1):
        name = f"model-{i:05}-of-{len(groups):05}.safetensors"
        write_shard(out / name, group, block)
        shard_of |= {key: name for key, _, _ in group}
        total += sum(size for _, _, size in group)
        print(f"{name}: {len(group)} tensors, {(out / name).stat().st_size / 1e9:.2f} GB", flush=True)
    write_json(out / "model.safetensors.index.json",
               {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))})
    write_json(out / "config.json", {**CONFIG, "num_hidden_layers": layers})
    write_json(out / "generation_config.json",
               {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.36.2"})
    return len(tensors), total


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def affine(name, outputs, *inputs):
    return {f"{name}.weight": (outputs, *inputs), f"{name}.bias": (outputs,)}


def sam_prompt_encoder():
    shapes = {"pe_layer.positional_encoding_gaussian_matrix": (2, 128)}
    shapes |= {f"point_embeddings.{i}.weight": (1, 256) for i in range(4)} | {"not_a_point_embed.weight": (1, 256)}
    for index, shape in ((0, (4, 1, 2, 2)), (1, (4,)), (3, (16, 4, 2, 2)), (4, (16,)), (6, (256, 16, 1, 1))):
        shapes |= affine(f"mask_downscaling.{index}", *shape)
    return shapes | {"no_mask_embed.weight": (1, 256)}


def sam_attention(name, width):
    shapes = {}
    for part in ("q", "k", "v"):
        shapes |= affine(f"{name}.{part}_proj", width, 256)
    return shapes | affine(f"{name}.out_proj", 256, width)


def sam_mlp(name, outputs):
    return affine(f"{name}.layers.0", 256, 256) | affine(f"{name}.layers.1", 256, 256) | affine(f"{name}.layers.2",
                                                                                                outputs, 256)


def sam_mask_decoder():
    shapes = {}
    for i in range(2):
        layer = f"transformer.layers.{i}"
        shapes |= sam_attention(f"{layer}.self_attn", 256) | sam_attention(f"{layer}.cross_attn_token_to_image", 128)
        shapes |= sam_attention(f"{layer}.cross_attn_image_to_token", 128)
        shapes |= affine(f"{layer}.mlp.lin1", 2048, 256) | affine(f"{layer}.mlp.lin2", 256, 2048)
        for n in range(1, 5):
            shapes |= affine(f"{layer}.norm{n}", 256)
    shapes |= sam_attention("transformer.final_attn_token_to_image", 128) | affine("transformer.norm_final_attn", 256)
    shapes |= {"iou_token.weight": (1, 256), "mask_tokens.weight": (4, 256)}
    shapes |= {"output_upscaling.0.weight": (256, 64, 2, 2),
               "output_upscaling.0.bias": (64,)} | affine("output_upscaling.1", 64)
    shapes |= {"output_upscaling.3.weight": (64, 32, 2, 2), "output_upscaling.3.bias": (32,)}
    for i in range(4):
        shapes |= sam_mlp(f"output_hypernetworks_mlps.{i}", 32)
    return shapes | sam_mlp("iou_prediction_head", 4)


def write_tinysam(path, seed):
    """The 439 tensors of TinySAM's `vit_t`, including the unused classifier."""
    torch.manual_seed(seed)
    encoder = TinyVit([64, 128, 160, 320], [2, 2, 6, 2], [2, 4, 5, 10], [7, 7, 14, 7]).state_dict()
    encoder |= {k: 0.02 * torch.randn_like(v) for k, v in encoder.items() if k.endswith("attention_biases")}
    encoder |= {"norm_head.weight": torch.ones(320), "norm_head.bias": torch.zeros(320)}
    encoder |= {"head.weight": 0.02 * torch.randn(1000, 320), "head.bias": torch.zeros(1000)}
    state = {f"image_encoder.{k}": v for k, v in encoder.items()}
    for part, shapes in (("prompt_encoder", sam_prompt_encoder()), ("mask_decoder", sam_mask_decoder())):
        state |= {f"{part}.{k}": 0.02 * torch.randn(s) for k, s in shapes.items()}
    assert (len(state), len(encoder)) == (439,
                                          302), f"{len(state)} tensors, {len(encoder)} of them in the image encoder"
    torch.save(state, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.model (or tokenizer.json) to copy into OUT")
    parser.add_argument("--layers", type=int, default=32, help="number of language model layers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    count, total = write_llava(options.out, options.layers, options.seed)
    write_tinysam(options.out / "tinysam.pth", options.seed)
    if options.tokenizer:
        shutil.copyfile(options.tokenizer, options.out / options.tokenizer.name)
    print(f"{count} tensors, {total / 1e9:.2f} GB, and tinysam.pth in {options.out}")


if __name__ == "__main__":
    main()
