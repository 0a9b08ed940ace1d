"""A process that occupies GPU memory, to simulate a smaller GPU."""

import contextlib
import subprocess
import sys

from .process import end_with_parent

HOLD = """
import sys
import torch
BLOCK = 128 << 20
blocks = []
for line in sys.stdin:
    wanted = int(line)
    free = lambda: torch.cuda.mem_get_info()[0]
    while blocks and free() < wanted:
        blocks.pop()
        torch.cuda.empty_cache()
    while free() >= wanted + BLOCK:
        blocks.append(torch.empty(BLOCK, dtype=torch.uint8, device="cuda"))
    print(free(), flush=True)
"""


class BallastError(Exception):
    """The process that occupies memory ended."""


@contextlib.contextmanager
def ballast(environment, log):
    """Gives a function `hold(free)` that leaves `free` bytes of the GPU and returns how many are really free."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                               text=True, env=environment, preexec_fn=end_with_parent)

    def hold(free):
        try:
            process.stdin.write(f"{free}\n")
            process.stdin.flush()
        except OSError as error:
            raise BallastError(f"the process that occupies memory ended: {error}") from error
        answer = process.stdout.readline().strip()
        if not answer:
            raise BallastError("the process that occupies memory ended")
        return int(answer)

    try:
        yield hold
    finally:
        process.kill()
        process.wait()
