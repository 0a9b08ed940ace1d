"""Records traces of PyTorch's CUDA caching allocator for the replay in tests/plan/recorded.rs. Needs a GPU and PyTorch.

    python scripts/record_allocator.py OUT_FOLDER

Writes one file for each workload: training steps of a transformer with changing lengths, convolutions, and random
sizes.
"""

import json
import random
import sys
from pathlib import Path

import torch


def record(work):
    """Runs `work` from an empty cache; returns its allocator events in the format of the test, and the peaks."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0, "some tensors are still alive"
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=2_000_000, context=None, stacks="python")
    work()
    torch.cuda.synchronize()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    numbers, events = {}, []
    for entry in trace:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            numbers[address] = len(numbers)
            events.append(["alloc", numbers[address], size])
        elif action == "free_completed":
            events.append(["free", numbers[address], 0])
        elif action == "segment_alloc":
            events.append(["segment", 0, size])
        elif action in ("segment_free", "oom"):
            raise SystemExit(f"the workload is too large for this GPU: {action}")
    return events, peaks


def transformer():
    layer = torch.nn.TransformerEncoderLayer(512, 8, batch_first=True).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())
    for length in (64, 192, 128, 500, 64):
        layer(torch.randn(4, length, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    del layer, optimizer


def convolutions():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3, 2, 1), torch.nn.GELU(), torch.nn.Conv2d(32, 64, 3, 2, 1)).cuda()
    for side in (256, 512, 320):
        net(torch.randn(2, 3, side, side, device="cuda")).square().mean().backward()
    del net


def sizes():
    rng, live = random.Random(0), []
    for _ in range(3000):
        if live and rng.random() < 0.48:
            live.pop(rng.randrange(len(live)))
        else:
            live.append(torch.empty(int(2 ** rng.uniform(3, 26)), device="cuda", dtype=torch.uint8))
        if sum(block.numel() for block in live) > 6 << 30:
            live.clear()


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    transformer()  # creates the library handles
    name = torch.cuda.get_device_name().replace(" ", "_")
    for work in (transformer, convolutions, sizes):
        torch._C._cuda_clearCublasWorkspaces()
        events, (allocated, reserved) = record(work)
        out = folder / f"{name}_{work.__name__}.json"
        source = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        text = json.dumps(
            {
                "source": source,
                "events": events,
                "allocated_peak": allocated,
                "reserved_peak": reserved,
            }
        )
        out.write_text(text + "\n")
        print(f"{out}: {len(events)} events, reserved {reserved}")


if __name__ == "__main__":
    main()
