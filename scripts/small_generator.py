#!/usr/bin/env python3
"""Writes a small Stable Diffusion in diffusers' layout for fine-tuning on a CPU: an autoencoder (four pixels a latent)
that is trained for a few minutes on the images of a data root, and a text encoder and a UNet with random weights.

    scripts/small_generator.py DATA OUT [--side 128] [--steps 400]
    prsmed augment finetune --data-root DATA --model OUT --method full --set finetune.image_size=128 ...

Needs diffusers and transformers (scripts/requirements-diffusion.txt).
"""

import argparse
import random
import sys
import time
from pathlib import Path

import numpy
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel

sys.path.insert(0, str(Path(__file__).resolve().parent / "fixtures"))
from pipelines import tokenizer  # noqa: E402

WIDTHS = (16, 32, 32)


def images(root, side):
    """The images of the split `train`, scaled and padded to squares, `[n, 3, S, S]` in -1..=1."""
    found = []
    for path in sorted(path for path in Path(root).rglob("train_images/*") if path.suffix in (".png", ".jpg", ".jpeg")):
        image = Image.open(path).convert("RGB")
        image.thumbnail((side, side))
        square = Image.new("RGB", (side, side))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        found.append(torch.from_numpy(numpy.asarray(square).copy()))
    if not found:
        raise SystemExit(f"{root} has no folder train_images with images")
    return torch.stack(found).permute(0, 3, 1, 2).float() / 127.5 - 1


def autoencoder(pixels, steps):
    vae = AutoencoderKL(block_out_channels=WIDTHS, down_block_types=("DownEncoderBlock2D",) * 3,
                        up_block_types=("UpDecoderBlock2D",) * 3, layers_per_block=1, norm_num_groups=8,
                        latent_channels=4, sample_size=pixels.shape[-1])
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    start = time.monotonic()
    for step in range(steps):
        batch = pixels[torch.randint(len(pixels), (4,))]
        posterior = vae.encode(batch).latent_dist
        output = vae.decode(posterior.sample()).sample
        loss = (output - batch).abs().mean() + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - start:.0f} s", flush=True)
    with torch.no_grad():
        deviation = vae.encode(pixels[:64]).latent_dist.mean.std().item()
    vae.register_to_config(scaling_factor=1 / deviation)
    return vae


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    pixels = images(options.data, options.side)
    print(f"{len(pixels)} images")
    vae = autoencoder(pixels, options.steps)
    tokens, vocabulary = tokenizer(options.out / "tokenizer", "<|endoftext|>")
    text = CLIPTextModel(CLIPTextConfig(vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                        num_attention_heads=4, eos_token_id=2, bos_token_id=0, pad_token_id=1))
    unet = UNet2DConditionModel(
        sample_size=options.side // 4, in_channels=4, out_channels=4, block_out_channels=(64, 96, 128),
        layers_per_block=1, norm_num_groups=8, cross_attention_dim=64, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"))
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
                              clip_sample=False, set_alpha_to_one=False)
    pipe = StableDiffusionPipeline(vae=vae, text_encoder=text, tokenizer=tokens, unet=unet, scheduler=scheduler,
                                   safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    pipe.save_pretrained(options.out)
    print("weights of the UNet:", sum(p.numel() for p in unet.parameters()))


if __name__ == "__main__":
    main()
