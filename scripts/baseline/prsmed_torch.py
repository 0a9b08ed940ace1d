"""PyTorch baseline: time and memory of one PRS-Med training step or prediction as in the published code. Prints one
JSON line.

    prsmed_torch.py train-step --sizes mid.toml --steps 3 --warmup 1 --precision fp32 --passes 2 --dropout on
    prsmed_torch.py train-step --sizes mid.toml --questions 3
    prsmed_torch.py predict --sizes mid.toml --new-tokens 8

The published code also has unused LoRA adapters on CLIP, and its `train.py` runs with anomaly detection. Both are left
out here, which favours this baseline.
"""

import argparse
import contextlib
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from baseline.sizes import load as load_sizes  # noqa: E402
from torch_modules.prsmed import PrsMed, losses, random_batch  # noqa: E402


def autocast(precision):
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def train_step(model, optimizer, batch, options):
    rows = len(batch["mask"])
    at_once = options.rows_at_once or rows
    for first in range(0, rows, at_once):
        part = {name: value[first:first + at_once] for name, value in batch.items()}
        with autocast(options.precision):
            outputs = model(part, options.passes)
        values = losses(outputs, part)
        (values["loss.total"] * len(part["mask"]) / rows).backward()
        del outputs
    torch.nn.utils.clip_grad_norm_(model.trained(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {k: v.item() for k, v in values.items()}


def measure(work, options):
    """Seconds and CPU seconds (all threads) of each repeat after the warm-up, and the result of the last one."""
    seconds, processor, last = [], [], None
    for i in range(options.warmup + options.steps):
        start, used = time.perf_counter(), time.process_time()
        last = work()
        if i >= options.warmup:
            seconds.append(round(time.perf_counter() - start, 4))
            processor.append(round(time.process_time() - used, 4))
    return seconds, processor, last


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train-step", "predict"])
    parser.add_argument("--sizes", type=Path, required=True,
                        help="TOML file with the sizes of the model, see tiny.toml")
    parser.add_argument("--steps", type=int, default=3, help="timed repeats")
    parser.add_argument("--warmup", type=int, default=1, help="untimed repeats before them")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32",
                        help="bf16 = autocast over fp32 weights")
    parser.add_argument("--passes", type=int, choices=[1, 2], default=2,
                        help="language model passes of a training step; the published code does 2")
    parser.add_argument("--dropout", choices=["on", "off"], default="on", help="LoRA 0.1 and decoder 0.1, or none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="images of a step")
    parser.add_argument("--questions", type=int, default=1,
                        help="questions about each image, in rows that repeat the image")
    parser.add_argument("--rows-at-once", type=int, default=0,
                        help="rows of a forward and backward pass; 0 = all, as published")
    parser.add_argument("--text-tokens", type=int, default=50, help="ids of a text, including the image placeholder")
    parser.add_argument("--limit-gib", type=float, help="memory limit of this process")
    return parser.parse_args()


def main():
    options = parse()
    sizes = load_sizes(options.sizes)
    if options.limit_gib:
        resource.setrlimit(resource.RLIMIT_DATA, (int(options.limit_gib * 2**30),) * 2)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rss_before = psutil.Process().memory_info().rss
    model, batch = PrsMed(sizes, dropout=options.dropout == "on"), random_batch(sizes, options.batch, options.questions,
                                                                                options.text_tokens)
    rss_model = psutil.Process().memory_info().rss
    if options.command == "train-step":
        model.train()
        optimizer = torch.optim.AdamW(model.trained(), lr=1e-4, eps=1e-6, weight_decay=1e-5)
        seconds, processor, values = measure(lambda: train_step(model, optimizer, batch, options), options)
    else:
        model.eval()

        def work():
            with autocast(options.precision):
                answer, mask = model.predict(batch, options.new_tokens)
            return {"new_tokens": answer.shape[1], "mask_mean": mask.float().mean().item()}

        seconds, processor, values = measure(work, options)
    result = {
        "command": options.command, "sizes": options.sizes.stem, "batch": options.batch, "questions": options.questions,
        "rows_at_once": options.rows_at_once,
        "samples": options.batch * options.questions, "precision": options.precision,
        "passes": options.passes, "dropout": options.dropout, "threads": options.threads, "torch": torch.__version__,
        "seconds": seconds, "median_seconds": round(statistics.median(seconds), 4), "processor_seconds": processor,
        "rss_before_model_bytes": rss_before, "rss_with_model_bytes": rss_model,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "trained_parameters": sum(p.numel() for p in model.trained()),
        "parameters": sum(p.numel() for p in model.parameters()), **values,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
