"""Checks that Python libraries can load a prsmed run folder: the adapter with peft, the other parts in PyTorch, with
all tensors used.

    interop_check.py RUN        (RUN = a folder with `lora_adapter/`, or one with `last/` or `best/` inside)

Prints a summary line if everything loads strictly and the forward pass of each part is finite; else prints the reason
and exits with code 1.
"""

import json
import math
import os
import sys
import tomllib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # peft would look up the base model's vocabulary on the hub

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from torch_modules.mask_decoder import MaskDecoder
from torch_modules.tiny_vit import TinyVit
from transformers import MistralConfig, MistralForCausalLM

REAL_LOAD_LIMIT = 1_000_000_000  # larger language models are checked by names and shapes, on the meta device
CLASSIFIER = ("norm_head.", "head.")  # in TinySAM's checkpoints, unused


class Mismatch(Exception):
    """A difference between the run folder and what the Python libraries expect."""


def require(condition, message):
    if not condition:
        raise Mismatch(message)


def run_folder(path):
    for folder in (path, path / "last", path / "best"):
        if (folder / "lora_adapter").is_dir():
            return folder
    raise Mismatch(f"no `lora_adapter` in {path}, {path}/last or {path}/best")


def language_model(folder, device):
    base = json.loads((folder / "base.json").read_text())
    dropped = ("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path")
    config = MistralConfig(**{k: v for k, v in base.items() if k not in dropped})
    with torch.device(device):
        return config, MistralForCausalLM(config).eval()


def check_adapter(folder):
    """Checks that the file has exactly the tensors of the adapter: names and shapes, and for small models also values
    after loading."""
    tensors = load_file(folder / "lora_adapter/adapter_model.safetensors")
    language = {k: v for k, v in tensors.items() if "vision_tower" not in k}
    config, model = language_model(folder, "meta")
    small = sum(p.numel() for p in model.parameters()) < REAL_LOAD_LIMIT
    if small:
        model = PeftModel.from_pretrained(language_model(folder, "cpu")[1], folder / "lora_adapter").eval()
    else:
        with torch.device("meta"):
            model = get_peft_model(model, LoraConfig.from_pretrained(folder / "lora_adapter"))
    want = get_peft_model_state_dict(model)
    shapes = lambda d: {k: tuple(v.shape) for k, v in d.items()}
    wrong = dict(shapes(want).items() ^ shapes(language).items())
    require(not wrong, f"adapter differs from what peft builds at {sorted(wrong)[:5]} ({len(wrong)} in all)")
    require(all(v.isfinite().all() for v in tensors.values()), "the adapter holds values that are not finite")
    if small:
        off = [k for k, v in want.items() if not torch.equal(v.float(), language[k].float())]
        require(not off, f"peft did not load the file's values of {off[:5]}")
        with torch.no_grad():
            logits = model(input_ids=torch.arange(1, 9)[None] % config.vocab_size).logits
        require(logits.isfinite().all(), "logits with the adapter are not finite")
    return len(tensors), config.hidden_size, "loaded" if small else "checked by shape"


def strict(module, tensors, name):
    result = module.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()},
                                    strict=False)
    missing = [k for k in result.missing_keys if not k.endswith("num_batches_tracked")]
    require(not missing and not result.unexpected_keys,
            f"{name}: missing {missing[:5]}, unexpected {result.unexpected_keys[:5]}")
    require(all(v.isfinite().all() for v in tensors.values()), f"{name} holds values that are not finite")
    return module.eval()


def image_encoder(folder):
    """TinyViT with sizes derived from the tensors (heads and windows from the bias tables)."""
    tensors = {k.removeprefix("image_encoder."): v for k, v in load_file(folder / "image_encoder.safetensors").items()}
    tensors = {k: v for k, v in tensors.items() if not k.startswith(CLASSIFIER)}
    depth = lambda stage: len({k.split(".")[3] for k in tensors if k.startswith(f"layers.{stage}.blocks.")})
    tables = [tensors[f"layers.{i}.blocks.0.attn.attention_biases"].shape for i in (1, 2, 3)]
    dims = [tensors["patch_embed.seq.2.c.weight"].shape[0],
            *(tensors[f"layers.{i}.downsample.conv3.c.weight"].shape[0] for i in range(3))]
    model = TinyVit(dims, [depth(i) for i in range(4)], [1, *(t[0] for t in tables)],
                    [7, *(math.isqrt(t[1]) for t in tables)],
                    tensors["neck.0.weight"].shape[0])
    return strict(model, tensors, "image_encoder.safetensors"), len(tensors)


def mask_decoder(folder):
    tensors = load_file(folder / "mask_decoder.safetensors")
    hidden, prompt = tensors["prompt_projection.0.weight"].shape
    dim, ff = tensors["norm1.weight"].shape[0], tensors["encoder_layer.linear1.weight"].shape[0]
    heads = [math.gcd(dim, 8), math.gcd(dim, 16)]  # not visible in the shapes
    version = "v5" if "image_norm.weight" in tensors else "v6"
    model = MaskDecoder(version, prompt, dim, hidden, heads, ff)
    return strict(model, tensors, "mask_decoder.safetensors"), len(tensors), prompt


def class_head(folder):
    tensors = load_file(folder / "cls.safetensors")
    classes, dim = tensors["2.weight"].shape
    return strict(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, classes)), tensors,
                  "cls.safetensors"), classes


@torch.no_grad()
def check(folder):
    tomllib.loads((folder / "config.toml").read_text())
    adapter, hidden, how = check_adapter(folder)
    encoder, encoder_tensors = image_encoder(folder)
    decoder, decoder_tensors, prompt = mask_decoder(folder)
    cls, classes = class_head(folder)
    require(prompt == hidden, f"the decoder reads {prompt} wide states, the language model makes {hidden}")
    embedding = encoder(torch.randn(1, 3, 128, 128))
    mask, scores = decoder(embedding, torch.randn(1, 5, prompt)), cls(embedding)
    require(mask.isfinite().all() and scores.isfinite().all(),
            "a forward through encoder, decoder and class head is not finite")
    return (f"{folder}: fine; adapter {adapter} tensors ({how}), image encoder {encoder_tensors}, "
            f"mask decoder {decoder.version} {decoder_tensors}, {classes} classes")


def main():
    try:
        print(check(run_folder(Path(sys.argv[1]))))
    except (Mismatch, OSError, KeyError, ValueError, RuntimeError) as error:
        print(f"{sys.argv[1]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
