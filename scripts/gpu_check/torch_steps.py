"""Times steps of the PyTorch baseline (scripts/baseline/step_7b.py) for several batches and parts in one process, so
that the model is built once. Prints one JSON line for each.

    torch_steps.py --mode eager --case rows/llm:12x639:28 --case tokens/all:4x763:84 [--tiny] [--device cpu]

A case is NAME/PART:ROWSxLENGTH:ANSWER. LENGTH counts the tokens of a row with those of the image, ANSWER its supervised
tokens. `published/...` runs the step as the published code does: two language model passes, logits at all positions.
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager")
    parser.add_argument("--case", action="append", type=parse, required=True, dest="cases")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-cudnn-attention", action="store_true", help="for the fake CUDA runtime, which has no cuDNN")
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
            found = step_7b.run(model, step_7b.inputs(sizes, options, device), part, options, device)
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
