"""Baseline for `prsmed augment finetune`: memory of training steps of SDXL's UNet as diffusers' example scripts do them
(`train_text_to_image_lora_sdxl.py`, `train_text_to_image_sdxl.py`), with accelerate's mixed precision and random weights.
Prints one JSON line; exit code 3 if a package is missing.

    finetune_diffusers.py --size sdxl --side 1024 --method lora --rank 16 --batch 1 --accumulation 1 --steps 3
    finetune_diffusers.py --size tiny --side 64 --method full --steps 3

Latents and text embeddings are computed before the training, as in the second script, so only the UNet is in memory.
"""

import argparse
import json
import sys
import time

try:
    import accelerate
    import diffusers
    import peft
    import torch
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from diffusers.training_utils import cast_training_params

    from sdxl_diffusers import CONTEXT, SIZES, UNET
except ImportError as error:
    print(f"torch, diffusers, accelerate and peft cannot be used here: {error}", file=sys.stderr)
    raise SystemExit(3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="sdxl")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--eight-bit", action="store_true", help="AdamW of bitsandbytes")
    parser.add_argument("--fake-gpu", action="store_true", help="no cuDNN attention")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if args.fake_gpu:
        torch.backends.cuda.enable_cudnn_sdp(False)
    trainer = accelerate.Accelerator(gradient_accumulation_steps=args.accumulation, mixed_precision="bf16")
    device, sizes = trainer.device, SIZES[args.size]
    is_lora = args.method == "lora"
    torch.set_default_dtype(torch.bfloat16 if is_lora else torch.float32)
    with device:
        unet = UNet2DConditionModel(**UNET, **sizes["unet"])
    torch.set_default_dtype(torch.float32)
    unet.enable_gradient_checkpointing()
    unet.train()
    if is_lora:
        unet.requires_grad_(False)
        targets = ["to_k", "to_q", "to_v", "to_out.0"]
        unet.add_adapter(peft.LoraConfig(r=args.rank, lora_alpha=args.rank, init_lora_weights="gaussian",
                                         target_modules=targets))
        cast_training_params(unet, dtype=torch.float32)
    trained = [weight for weight in unet.parameters() if weight.requires_grad]
    if args.eight_bit:
        import bitsandbytes
        optimizer = bitsandbytes.optim.AdamW8bit(trained, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
    unet, optimizer = trainer.prepare(unet, optimizer)
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    sigmas = scheduler.alphas_cumprod.to(device)
    side, dtype = args.side // 8, torch.bfloat16
    width = sizes["unet"]["cross_attention_dim"]
    pooled_width = sum(text["projection_dim"] for text in sizes["texts"][1:])
    seconds = []
    for step in range(args.steps):
        begin = time.perf_counter()
        for _ in range(args.accumulation):
            with trainer.accumulate(unet):
                latents = torch.randn(args.batch, 4, side, side, device=device)
                noise = torch.randn_like(latents)
                times = torch.randint(0, 1000, (args.batch,), device=device)
                alpha = sigmas[times].view(-1, 1, 1, 1)
                noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * noise
                added = {"time_ids": torch.zeros(args.batch, 6, device=device),
                         "text_embeds": torch.zeros(args.batch, pooled_width, device=device, dtype=dtype)}
                context = torch.zeros(args.batch, CONTEXT, width, device=device, dtype=dtype)
                output = unet(noisy.to(dtype), times, context, added_cond_kwargs=added, return_dict=False)[0]
                loss = torch.nn.functional.mse_loss(output.float(), noise, reduction="mean")
                trainer.backward(loss)
                if trainer.sync_gradients:
                    trainer.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({
        "seconds": [round(value, 4) for value in seconds],
        "trained": sum(weight.numel() for weight in trained),
        "allocated_peak": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_peak": torch.cuda.max_memory_reserved() if cuda else None,
        "versions": {module.__name__: module.__version__ for module in (torch, diffusers, accelerate, peft)},
    }))


if __name__ == "__main__":
    main()
