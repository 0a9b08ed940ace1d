"""Rates of matrix products at the sizes of the language model's layers, in bf16 and FP8: prints one JSON line for each.

    gemm.py [--device cpu] [--tiny]

`forward` is x W^T with W [out, in] as it is stored, `backward` is g W. An FP8 product needs both matrices along the
summed dimension, so `backward` reads a transposed copy of W. Scales of `tensor` are one number for each matrix, those of
`row` one for each token and each output.
"""

import argparse
import json
import time

import torch

# [out, in] of Mistral 7B: q and o, k and v, gate and up, down, head
WEIGHTS = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (32000, 4096))
# tokens of one image with three questions, of three images at real and at planned lengths, of nine
ROWS = (1150, 2181, 3450, 10350)
FP8, COPIES, SECONDS = torch.float8_e4m3fn, 4, 0.02


def seconds_of(work, device):
    """Median seconds of one call; each call takes another copy of the weights, as in a model."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for copy in range(COPIES):
        work(copy)
    wait()
    measured, start = [], time.perf_counter()
    while len(measured) < 3 or time.perf_counter() - start < SECONDS:
        began = time.perf_counter()
        for copy in range(COPIES):
            work(copy)
        wait()
        measured.append((time.perf_counter() - began) / COPIES)
    return sorted(measured)[len(measured) // 2]


def products(rows, out, inner, device):
    """Kinds of products `[rows, inner] [inner, out]`, by name. The right matrix is stored as `[out, inner]`."""
    left = torch.randn(rows, inner, device=device).bfloat16()
    right = [torch.randn(out, inner, device=device).bfloat16() for _ in range(COPIES)]
    yield "bf16", lambda copy: left @ right[copy].t()
    codes, small = [matrix.to(FP8) for matrix in right], left.to(FP8)
    one = torch.ones((), device=device)
    scales = {"tensor": (one, one), "row": (one.expand(rows, 1).contiguous(), one.expand(1, out).contiguous())}
    for name, (of_left, of_right) in scales.items():
        for fast in (True, False):
            yield f"fp8 {name}{'' if fast else ', exact sums'}", lambda copy: torch._scaled_mm(
                small, codes[copy].t(), of_left, of_right, out_dtype=torch.bfloat16, use_fast_accum=fast)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small matrices, to test the script")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    for out, inner in WEIGHTS[:2] if options.tiny else WEIGHTS:
        out, inner = (out // 32, inner // 32) if options.tiny else (out, inner)
        for rows in ROWS[:1] if options.tiny else ROWS:
            for way, sizes in (("forward", (rows, out, inner)), ("backward", (rows, inner, out))):
                for kind, work in products(*sizes, device):
                    record = {"kind": "gemm", "way": way, "weight": [out, inner], "rows": rows, "what": kind}
                    try:
                        seconds = seconds_of(work, device)
                        record |= {"seconds": seconds, "tflops": 2e-12 * rows * out * inner / seconds}
                    except RuntimeError as error:
                        record["error"] = " ".join(str(error).split())[:200]
                    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
