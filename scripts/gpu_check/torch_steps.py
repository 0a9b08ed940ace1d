"""Times steps of the PyTorch baseline (scripts/baseline/step_7b.py) for several batches and parts in one process, so
that the model is built once. Prints one JSON line for each.

    torch_steps.py --mode eager --case rows/llm:12x639:28 --case tokens/all:4x763:84 [--tiny] [--device cpu] [--trace]

A case is NAME/PART:ROWSxLENGTH:ANSWER. LENGTH counts the tokens of a row with those of the image, ANSWER its supervised
tokens. `published/...` runs the step as the published code does: two language model passes, logits at all positions.
`--trace` adds the time of each kernel in one more step of each `tokens/...` case.
"""

import argparse
import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402

from baseline import step_7b  # noqa: E402


def parse(text):
    name, shape, answer = text.rsplit(":", 2)
    rows, length = shape.split("x")
    variant, part = name.split("/")
    return variant, part, int(rows), int(length), int(answer)


def kernels(step, cuda):
    """The kernels of a step that take longest: name, calls, milliseconds. On the CPU, its operators."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as trace:
        step()
    time_of = lambda event: event.self_device_time_total if cuda else event.self_cpu_time_total
    events = sorted(trace.key_averages(), key=time_of, reverse=True)
    return {"kernels": [[event.key[:160], event.count, round(time_of(event) / 1e3, 4)] for event in events[:40]],
            "kernels_ms": round(sum(map(time_of, events)) / 1e3, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager")
    parser.add_argument("--case", action="append", type=parse, required=True, dest="cases")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-cudnn-attention", action="store_true", help="for the fake CUDA runtime, which has no cuDNN")
    parser.add_argument("--trace", action="store_true", help="also the time of each kernel")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    options.size, options.dropout, options.published = ("tiny" if options.tiny else "7b"), "on", False
    options.kind = torch.float32 if options.device == "cpu" else torch.bfloat16
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    if options.no_cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    model, sizes = step_7b.build(options, device)
    patches = (sizes["clip"]["image_size"] // sizes["clip"]["patch_size"]) ** 2
    if options.mode == "compile":
        step_7b.compiled(model)
    failed = False
    for variant, part, rows, length, answer in options.cases:
        options.batch, options.text_tokens, options.answer_tokens = rows, length + 1 - patches, answer
        options.published = variant == "published"
        try:
            batch = step_7b.inputs(sizes, options, device)
            found = step_7b.run(model, batch, part, options, device)
            if options.trace and variant == "tokens":
                once = argparse.Namespace(**vars(options) | {"warmup": 0, "steps": 1})
                found |= kernels(lambda: step_7b.run(model, batch, part, once, device), cuda)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(json.dumps({"kind": "torch-error", "variant": variant, "part": part,
                              "error": f"{type(error).__name__}: {' '.join(str(error).split())[-600:]}"}), flush=True)
            failed = True
            model.zero_grad(set_to_none=True)
        else:
            if cuda:
                free, total = torch.cuda.mem_get_info()
                found["device_used"] = total - free
            print(json.dumps({**found, "variant": variant}), flush=True)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
