"""GPU baseline: time and memory of one training step of the full model in PyTorch, transformers and peft, at the
published sizes with random weights. Prints one JSON line for each variant.

    step_7b.py --mode eager --batch 8 --text-tokens 192 --answer-tokens 168
    step_7b.py --size tiny --device cpu --mode compile --steps 1        tests the script; the numbers mean nothing

`llm`: only Mistral with LoRA (rank 16 on q, k, v, o), with zeros for the image. `all`: with CLIP, TinyViT and decoder
from scripts/torch_modules. The baseline is written to be fast: one language model pass, logits at supervised positions
only, frozen weights in bf16, trained weights in fp32 under autocast, scaled-dot-product attention, frozen batch norms,
fused AdamW. `compile` applies torch.compile to each layer of the language model and of CLIP and to the image encoder.
"""

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from baseline.sizes import load as load_sizes  # noqa: E402

try:
    import peft  # noqa: F401
    import transformers

    from torch_modules.losses import structure_loss
    from torch_modules.prsmed import PrsMed, losses
except ImportError as error:
    print(f"transformers and peft cannot be used here: {error}", file=sys.stderr)
    raise SystemExit(3)

PUBLISHED_LLM = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None,
    "max_position_embeddings": 32768,
}


def build(options, device):
    """The model on `device`: frozen parts in the compute dtype, trained parts in fp32."""
    folder = Path(__file__).parent
    sizes = load_sizes(folder / ("mid.toml" if options.size == "7b" else "tiny.toml"))
    if options.size == "7b":
        sizes["llm"] = PUBLISHED_LLM
    torch.set_default_dtype(options.kind)
    with device:
        model = PrsMed(sizes, dropout=options.dropout == "on")
    torch.set_default_dtype(torch.float32)
    for part in (model.image_encoder, model.mask_decoder, model.cls):
        part.float()
    for parameter in model.trained():
        parameter.data = parameter.data.float()
    model.train()
    for module in model.image_encoder.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model, sizes


def quantized(model):
    """Replaces the frozen matrices of the language model's layers by 4-bit ones of bitsandbytes."""
    import bitsandbytes

    for name, layer in list(model.llm.get_base_model().model.layers.named_modules()):
        if type(layer) is not torch.nn.Linear or "lora_" in name:
            continue
        codes = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, device="meta",
                                           compute_dtype=layer.weight.dtype, quant_type="nf4")
        codes.weight = bitsandbytes.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4",
                                                  module=codes).to(layer.weight.device)
        parent, _, own = name.rpartition(".")
        setattr(model.llm.get_base_model().model.layers.get_submodule(parent), own, codes)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compiled(model):
    """Compiles layer by layer, because all layers of a kind share one compilation."""
    inner = model.llm.get_base_model()
    for layer in inner.model.layers:
        layer.compile()
    tower = model.vision_tower
    for layer in getattr(tower, "vision_model", tower).encoder.layers:
        layer.compile()
    model.image_encoder.compile()


def inputs(sizes, options, device):
    """Inputs as in `benches/step`: equal texts with the image placeholder as second token, and empty images."""
    b, n, side, clip = options.batch, options.text_tokens, sizes["sam_image_size"], sizes["clip"]["image_size"]
    return {
        "ids": torch.arange(n, device=device).remainder(297).add(3).expand(b, n),
        "clip": torch.zeros(b, 3, clip, clip, device=device),
        "sam": torch.zeros(b, 3, side, side, device=device),
        "mask": torch.zeros(b, 1, side, side, device=device),
        "label": torch.zeros(b, dtype=torch.long, device=device),
        "patches": (clip // sizes["clip"]["patch_size"]) ** 2,
    }


def language_states(model, batch, image, options):
    """States after the final norm, and the text loss over the answers."""
    inner = model.llm.get_base_model()
    text = inner.get_input_embeddings()(batch["ids"])
    embeds = torch.cat([text[:, :1], image.to(text.dtype), text[:, 2:]], 1)
    states = inner.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
    answer = options.answer_tokens
    logits = inner.lm_head(states[:, -answer - 1 : -1]).float()
    labels = batch["ids"][:, -answer:]
    return states, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def published_loss(model, batch, options):
    """Two language model passes with logits at every position, which the decoder reads all."""
    keep = torch.ones_like(batch["ids"], dtype=torch.bool)
    whole = {"text_ids": batch["ids"].clone(), "text_mask": keep, "clip_image": batch["clip"], "sam_image": batch["sam"],
             "mask": batch["mask"], "class_label": batch["label"]}
    return losses(model(whole, passes=2), whole)["loss.total"]


def loss_of(model, batch, part, options):
    if options.published:
        return published_loss(model, batch, options)
    width = model.llm.get_base_model().config.hidden_size
    if part == "llm":
        image = torch.zeros(options.batch, batch["patches"], width, device=batch["ids"].device)
        return language_states(model, batch, image, options)[1]
    with torch.no_grad():
        features = model.vision_tower(batch["clip"], output_hidden_states=True).hidden_states[-2][:, 1:]
        image = model.mm_projector(features)
    states, text = language_states(model, batch, image, options)
    embedding = model.image_encoder(batch["sam"])
    prompt = states[:, : states.shape[1] - options.answer_tokens]
    mask = structure_loss(model.mask_decoder(embedding, prompt).float(), batch["mask"], "corrected")
    return text + mask + 0.5 * torch.nn.functional.cross_entropy(model.cls(embedding).float(), batch["label"])


def run(model, batch, part, options, device):
    cuda = device.type == "cuda"
    trained = [p for name, p in model.named_parameters() if p.requires_grad
               and (part == "all" or name.startswith("llm."))]
    optimizer = torch.optim.AdamW(trained, lr=0.0, eps=1e-6, weight_decay=1e-5, fused=True)
    seconds = []
    for i in range(options.warmup + options.steps):
        if cuda:
            torch.cuda.synchronize()
            if i == options.warmup:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.kind == torch.bfloat16):
            loss = loss_of(model, batch, part, options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        if cuda:
            torch.cuda.synchronize()
        if i >= options.warmup:
            seconds.append(time.perf_counter() - start)
    tokens = options.batch * (options.text_tokens - 1 + batch["patches"])
    return {
        "kind": "torch", "mode": options.mode, "part": part, "batch": options.batch, "tokens": tokens, "loss": value,
        "seconds": [round(s, 5) for s in seconds], "median_seconds": statistics.median(seconds),
        "allocated_peak": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_peak": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("7b", "tiny"), default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager")
    parser.add_argument("--parts", default="llm,all")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--text-tokens", type=int, default=192)
    parser.add_argument("--answer-tokens", type=int, default=168)
    parser.add_argument("--dropout", choices=("on", "off"), default="on")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--gradient-checkpointing", action="store_true",
                        help="of transformers, for the layers of the language model")
    parser.add_argument("--published", action="store_true",
                        help="as the published code computes: two language model passes, logits at all positions")
    parser.add_argument("--nf4", action="store_true", help="frozen matrices of the language model in bitsandbytes' NF4")
    parser.add_argument("--no-cudnn-attention", action="store_true", help="for the fake CUDA runtime, which has no cuDNN")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    options.kind = torch.bfloat16 if options.precision == "bf16" else torch.float32
    device = torch.device(options.device)
    torch.manual_seed(0)
    model, sizes = build(options, device)
    if options.nf4:
        quantized(model)
    if options.gradient_checkpointing:
        model.llm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.no_cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    batch = inputs(sizes, options, device)
    if options.mode == "compile":
        compiled(model)
    for part in options.parts.split(","):
        print(json.dumps(run(model, batch, part, options, device)), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
