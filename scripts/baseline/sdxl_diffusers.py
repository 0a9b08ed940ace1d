"""Baseline for `prsmed augment generate`: time and memory of Stable Diffusion in Hugging Face's diffusers, with random
weights. Prints one JSON line; exit code 3 if diffusers or one of its dependencies is missing.

    sdxl_diffusers.py --size sdxl --side 1024 --steps 30 --batch 4 --batches 4 --precision bf16
    sdxl_diffusers.py --size tiny --side 64 --steps 2 --batch 1 --batches 2 --precision fp32

Text to image with guidance and sliced decoding. The text encoders stay on the device, as in the pipeline
(`encoder_bytes` is their size). `prsmed augment` drops them, but also encodes its source images.
"""

import argparse
import gc
import json
import sys
import time

try:
    import diffusers
    import torch
    import transformers
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection
except ImportError as error:
    print(f"torch, diffusers and transformers cannot be used here: {error}", file=sys.stderr)
    raise SystemExit(3)

WORDS, CONTEXT = 49408, 77
UNET = dict(
    in_channels=4, out_channels=4, layers_per_block=2, use_linear_projection=True, addition_embed_type="text_time",
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
)
VAE = dict(latent_channels=4, layers_per_block=2, down_block_types=("DownEncoderBlock2D",) * 4,
           up_block_types=("UpDecoderBlock2D",) * 4)
# the two entries of `texts` are the two text encoders
SIZES = {
    "sdxl": dict(
        unet=dict(
            sample_size=128, block_out_channels=(320, 640, 1280), transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048, addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        ),
        vae=dict(sample_size=1024, block_out_channels=(128, 256, 512, 512), scaling_factor=0.13025, force_upcast=True),
        texts=[
            dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                 projection_dim=768),
            dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
                 projection_dim=1280, hidden_act="gelu"),
        ],
    ),
    "tiny": dict(
        unet=dict(
            sample_size=8, block_out_channels=(32, 64, 64), transformer_layers_per_block=1,
            attention_head_dim=(2, 4, 4), norm_num_groups=8,
            cross_attention_dim=64, addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,
        ),
        vae=dict(sample_size=64, block_out_channels=(16, 16, 32, 32), norm_num_groups=8, scaling_factor=0.13025,
                 force_upcast=True),
        texts=[dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    projection_dim=32)] * 2,
    ),
}


def networks(size):
    """The networks with the library's own initialisation, on the default device and in the default dtype."""
    sizes = SIZES[size]
    kinds = (CLIPTextModel, CLIPTextModelWithProjection)
    texts = [kind(CLIPTextConfig(vocab_size=WORDS, **text)).eval() for kind, text in zip(kinds, sizes["texts"])]
    unet = UNet2DConditionModel(**UNET, **sizes["unet"]).eval()
    return unet, AutoencoderKL(**VAE, **sizes["vae"]).eval(), texts


@torch.inference_mode()
def embed(texts, device, batch):
    """Context and pooled state of `batch` random prompts: SDXL uses the second-to-last states of both encoders."""
    ids = torch.randint(0, WORDS - 2, (batch, CONTEXT), device=device)
    outputs = [text(ids, output_hidden_states=True) for text in texts]
    return torch.cat([out.hidden_states[-2] for out in outputs], -1), outputs[1].text_embeds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="sdxl")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--whole", action="store_true", help="decode all images at once instead of one by one")
    parser.add_argument("--fake-gpu", action="store_true",
                        help="no cuDNN attention, and the scheduler's tables on the CPU: a fake GPU returns zeros")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.precision]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        unet, vae, texts = networks(args.size)
    torch.set_default_dtype(torch.float32)
    schedule = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
                                      timestep_spacing="leading")
    pipe = StableDiffusionXLPipeline(vae, texts[0], texts[1], None, None, unet, schedule, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    if not args.whole:
        vae.enable_slicing()
    if args.fake_gpu:
        torch.backends.cuda.enable_cudnn_sdp(False)
        set_timesteps = schedule.set_timesteps
        schedule.set_timesteps = lambda *words, device=None, **more: set_timesteps(*words, device="cpu", **more)
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(args.batches):
        context, pooled = embed(texts, device, args.batch)
        negative, negative_pooled = torch.zeros_like(context), torch.zeros_like(pooled)
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        pipe(
            prompt_embeds=context, pooled_prompt_embeds=pooled, negative_prompt_embeds=negative,
            negative_pooled_prompt_embeds=negative_pooled,
            height=args.side, width=args.side, num_inference_steps=args.steps, guidance_scale=5.0, output_type="np",
        )
        seconds.append(time.perf_counter() - start)
    mean = sum(seconds) / len(seconds)
    print(json.dumps({
        "seconds": mean,
        "seconds_each": [round(s, 4) for s in seconds],
        "images_per_s": args.batch / mean,
        "allocated_peak": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_peak": torch.cuda.max_memory_reserved() if cuda else None,
        "encoder_bytes": sum(p.numel() * p.element_size() for text in texts for p in text.parameters()),
        "versions": {m.__name__: m.__version__ for m in (torch, diffusers, transformers)},
    }))


if __name__ == "__main__":
    main()
