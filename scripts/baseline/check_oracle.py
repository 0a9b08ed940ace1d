"""Checks that the PyTorch baseline is the published model: it must reproduce a recorded training step of the published
code.

    check_oracle.py ORACLE_FOLDER

Compares hidden states, image embedding, logits, losses and the gradients of all four trained parts by relative L2
distance. Exit code 1 if one of them is over its tolerance.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from baseline.sizes import load as load_sizes  # noqa: E402
from torch_modules.prsmed import PrsMed, losses  # noqa: E402

TOLERANCE = {"llm_last_hidden": 2e-5, "image_embedding": 5e-5, "mask_logits": 1e-4, "class_logits": 1e-5, "loss": 1e-5,
             "grad.lora_adapter": 1e-4, "grad.cls": 1e-5, "grad.image_encoder": 5e-3, "grad.mask_decoder": 5e-3}


def sizes(oracle):
    llm = json.loads((oracle / "base/llava-med-v1.5-mistral-7b/config.json").read_text())
    names = ("hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size "
             "rope_theta rms_norm_eps sliding_window max_position_embeddings tie_word_embeddings").split()
    clip = json.loads((oracle / "base/clip-vit-large-patch14-336/config.json").read_text())["vision_config"]
    real = load_sizes(Path(__file__).parent / "mid.toml")
    return {"clip": clip, "llm": {k: llm[k] for k in names}, "tiny_vit": real["tiny_vit"]}


def load(model, oracle):
    """Loads all parts strictly. Tensors that the model does not use (unused adapters, classifier) are dropped by name.
    """
    base = {}
    for shard in sorted((oracle / "base/llava-med-v1.5-mistral-7b").glob("*.safetensors")):
        base |= {k: v.float() for k, v in load_file(shard).items()}
    clip = {}
    for shard in (oracle / "base/clip-vit-large-patch14-336").glob("*.safetensors"):
        clip |= {k: v.float() for k, v in load_file(shard).items() if k.startswith("vision_model.")
                 and "position_ids" not in k}
    model.vision_tower.load_state_dict(clip)
    model.mm_projector.load_state_dict({k.split("mm_projector.")[1]: v for k, v in base.items() if "mm_projector" in k})
    adapter = {k: v.float() for k, v in load_file(oracle / "run/lora_adapter/adapter_model.safetensors").items()
               if "vision_tower" not in k}
    inner = {f"base_model.model.{k}": v for k, v in base.items() if "vision_tower" not in k and "mm_projector" not in k}
    inner = {k.replace("_proj.weight", "_proj.base_layer.weight") if "self_attn" in k else k: v
             for k, v in inner.items()}
    inner |= {k.replace(".weight", ".default.weight"): v for k, v in adapter.items()}
    model.llm.load_state_dict(inner)
    pth = lambda name: torch.load(oracle / "run" / name, weights_only=True)
    encoder = {k.removeprefix("image_encoder."): v
               for k, v in pth("image_encoder.pth").items() if k.startswith("image_encoder.")}
    model.image_encoder.load_state_dict({k: v.float()
                                         for k, v in encoder.items() if not k.startswith(("head.", "norm_head."))})
    model.mask_decoder.load_state_dict({k: v.float() for k, v in pth("mask_decoder.pth").items()})
    model.cls.load_state_dict({k: v.float() for k, v in pth("cls.pth").items()})


def gradients(model):
    parts = {"lora_adapter": model.llm, "image_encoder": model.image_encoder, "mask_decoder": model.mask_decoder,
             "cls": model.cls}
    for part, module in parts.items():
        prefix = "image_encoder." if part == "image_encoder" else ""
        for name, value in module.named_parameters():
            if value.grad is not None:
                yield f"grad.{part}/{prefix}{name.replace('.default.', '.')}", value.grad


def main():
    oracle = Path(sys.argv[1])
    torch.set_num_threads(2)
    model = PrsMed(sizes(oracle), dropout=False).train()
    load(model, oracle)
    batch = load_file(oracle / "inputs.safetensors")
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1,
                                                                                                               1)
    batch["sam_image"] = (batch["sam_image_u8"].float() / 255 - mean) / std
    batch["mask"], batch["text_mask"] = batch["mask_u8"].float() / 255, batch["text_mask"].bool()
    outputs = model(batch, passes=1)
    got = {**outputs, **losses(outputs, batch)}
    got["loss.total"].backward()
    got |= dict(gradients(model))
    worst, compared = {}, 0
    for name, want in load_file(oracle / "expected.safetensors").items():
        name, _, stride = name.partition("@stride:")
        if name not in got:
            continue
        value = got[name].detach().double().flatten()[:: int(stride or 1)]
        error = ((value - want.double().flatten()).norm() / want.double().norm().clamp_min(1e-30)).item()
        group = next(g for g in TOLERANCE if name.startswith(g))
        worst[group] = max(worst.get(group, (0.0, "")), (error, name))
        compared += 1
    bad = {g: e for g, e in worst.items() if e[0] > TOLERANCE[g]}
    for group, (error, name) in worst.items():
        print(f"{group:20} largest error {error:.1e}, tolerance {TOLERANCE[group]:.0e}  {name}")
    print(f"{compared} tensors compared, {len(bad)} of {len(worst)} groups over their tolerance")
    return 1 if bad or len(worst) < len(TOLERANCE) else 0


if __name__ == "__main__":
    sys.exit(main())
