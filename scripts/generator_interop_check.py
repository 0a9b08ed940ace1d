"""Checks that diffusers loads what `prsmed augment finetune` writes: every tensor is used, none is missing, and all values
are equal.

    generator_interop_check.py CHECKPOINT UNET_CONFIG [CHECKPOINT UNET_CONFIG ...]

Each CHECKPOINT has `unet/` (all weights), `controlnet/`, or `pytorch_lora_weights.safetensors` with `kohya_lora.safetensors`; a
LoRA is loaded into a UNet with the sizes of UNET_CONFIG. Prints a line for each; exits with code 1 and the reason if something differs.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from diffusers.loaders import StableDiffusionLoraLoaderMixin, StableDiffusionXLLoraLoaderMixin
from safetensors import safe_open
from safetensors.torch import load_file


def compare(own, theirs, what):
    """Refuses names that differ and values that are not equal."""
    missing, more = sorted(set(own) - set(theirs)), sorted(set(theirs) - set(own))
    if missing or more:
        raise SystemExit(f"{what}: diffusers lacks {missing[:3]} and has {more[:3]} in addition")
    differing = [name for name in own if not torch.equal(own[name].float(), theirs[name].detach().float().cpu())]
    if differing:
        raise SystemExit(f"{what}: other values: {differing[:3]}")
    print(f"{what}: {len(own)} tensors")


def network(folder, kind):
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    if any(info.values()):
        raise SystemExit(f"{folder}: {info}")
    compare(load_file(folder / "diffusion_pytorch_model.safetensors"), model.state_dict(), str(folder.name))


def new_unet(config):
    return UNet2DConditionModel.from_config({**json.loads(config.read_text()), "_class_name": "UNet2DConditionModel"})


def adapters(unet):
    return {"unet." + name.replace(".own.", "."): value for name, value in unet.state_dict().items() if "lora_" in name}


def lora(path, config):
    unet, own = new_unet(config), load_file(path)
    unet.load_lora_adapter(own, prefix="unet", adapter_name="own")
    compare(own, adapters(unet), "LoRA")


def kohya(path, plain, config):
    """kohya's names give the same adapters with the same scale."""
    unet, own = new_unet(config), load_file(plain)
    is_sdxl = unet.config.addition_embed_type == "text_time"
    loader = StableDiffusionXLLoraLoaderMixin if is_sdxl else StableDiffusionLoraLoaderMixin
    state, alphas = loader.lora_state_dict(str(path), unet_config=unet.config)[:2]
    loader.load_lora_into_unet(state, alphas, unet, adapter_name="own")
    compare(own, adapters(unet), "kohya LoRA")
    with safe_open(plain, "pt") as file:
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
    scale = settings["unet.lora_alpha"] / settings["unet.r"]
    scales = {module.scaling["own"] for module in unet.modules() if "own" in getattr(module, "scaling", {})}
    if scales != {scale}:
        raise SystemExit(f"kohya LoRA: scales {scales}, expected {scale}")
    names = [key for key in load_file(path) if key.endswith(".lora_up.weight")]
    blocks = ("down_blocks_", "mid_block_", "up_blocks_")
    original = not any(block in name for name in names for block in blocks)
    if original != is_sdxl:
        raise SystemExit(f"kohya LoRA: {names[0]} is no name of kohya's for this model")


def check(folder, config):
    print(f"== {folder}")
    if (folder / "unet").is_dir():
        network(folder / "unet", UNet2DConditionModel)
    if (folder / "controlnet").is_dir():
        network(folder / "controlnet", ControlNetModel)
    if (folder / "pytorch_lora_weights.safetensors").exists():
        lora(folder / "pytorch_lora_weights.safetensors", config)
        kohya(folder / "kohya_lora.safetensors", folder / "pytorch_lora_weights.safetensors", config)


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    for pair in zip(paths[::2], paths[1::2], strict=True):
        check(*pair)
