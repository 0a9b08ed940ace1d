"""Checks that diffusers loads what `prsmed augment finetune` writes: every tensor is used, none is missing, and all values
are equal. The two files of a LoRA must change every weight of the UNet by the same amounts.

    generator_interop_check.py CHECKPOINT UNET_CONFIG [CHECKPOINT UNET_CONFIG ...]

Each CHECKPOINT has `unet/` (all weights), `controlnet/`, or `pytorch_lora_weights.safetensors` with `kohya_lora.safetensors`; a
LoRA is loaded into a UNet with the sizes of UNET_CONFIG, as `load_lora_weights` of a pipeline does it. Prints a line for each;
exits with code 1 and the reason if something differs. Works with diffusers 0.30 and later.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from diffusers.loaders import StableDiffusionXLLoraLoaderMixin
from safetensors.torch import load_file

try:
    from diffusers.loaders import StableDiffusionLoraLoaderMixin
except ImportError:  # its name in earlier versions
    from diffusers.loaders import LoraLoaderMixin as StableDiffusionLoraLoaderMixin


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


def loaded(path, config):
    """A UNet with the LoRA of a file, and the change of each of its weights."""
    unet = UNet2DConditionModel.from_config({**json.loads(config.read_text()), "_class_name": "UNet2DConditionModel"})
    is_sdxl = unet.config.addition_embed_type == "text_time"
    loader = StableDiffusionXLLoraLoaderMixin if is_sdxl else StableDiffusionLoraLoaderMixin

    class Pipeline(loader):
        """What `load_lora_weights` asks of a pipeline."""

        components = {}
        hf_device_map = text_encoder = text_encoder_2 = None

    pipeline = Pipeline()
    pipeline.unet = unet
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="own")
    layers = {name: module for name, module in unet.named_modules() if "own" in getattr(module, "lora_A", {})}
    return unet, {name: layer.get_delta_weight("own").detach() for name, layer in layers.items()}


def lora(folder, config):
    plain, kohya = folder / "pytorch_lora_weights.safetensors", folder / "kohya_lora.safetensors"
    unet, changes = loaded(plain, config)
    adapters = {"unet." + n.replace(".own.", "."): value for n, value in unet.state_dict().items() if "lora_" in n}
    own = load_file(plain)
    compare(own, adapters, "LoRA")
    for name, change in changes.items():
        # the file alone says by how much: the product of its matrices
        product = own[f"unet.{name}.lora_B.weight"] @ own[f"unet.{name}.lora_A.weight"]
        near(change, product, f"LoRA: {name}")
    _, others = loaded(kohya, config)
    if set(others) != set(changes):
        raise SystemExit(f"kohya LoRA: changes {sorted(set(others) ^ set(changes))[:3]} in addition or not")
    for name, change in changes.items():
        near(others[name], change, f"kohya LoRA: {name}")
    print(f"kohya LoRA: {2 * len(others)} tensors")
    names = [key for key in load_file(kohya) if key.endswith(".lora_up.weight")]
    blocks = ("down_blocks_", "mid_block_", "up_blocks_")
    original = not any(block in name for name in names for block in blocks)
    if original != (unet.config.addition_embed_type == "text_time"):
        raise SystemExit(f"kohya LoRA: {names[0]} is no name of kohya's for this model")


def near(one, other, what):
    """Refuses changes of a weight that differ by more than rounding, and one that is nothing."""
    largest = other.abs().max().item()
    if largest == 0 or (one - other).abs().max().item() > 1e-5 * largest:
        raise SystemExit(f"{what} is changed by {one.abs().max().item()}, expected {largest}")


def check(folder, config):
    print(f"== {folder}")
    if (folder / "unet").is_dir():
        network(folder / "unet", UNet2DConditionModel)
    if (folder / "controlnet").is_dir():
        network(folder / "controlnet", ControlNetModel)
    if (folder / "pytorch_lora_weights.safetensors").exists():
        lora(folder, config)


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    for pair in zip(paths[::2], paths[1::2], strict=True):
        check(*pair)
