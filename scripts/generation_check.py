"""Measures time and memory of image generation: `prsmed augment generate` with random weights against its plan and
against diffusers. Needs only Python's standard library; without diffusers the table says that it was not measured.

    python3 scripts/generation_check.py OUT            SDXL, 1024 pixels, 30 steps, bf16, on a GPU
    python3 scripts/generation_check.py --dry OUT      tests the script at tiny sizes on the CPU; measures nothing

PRSMED names the binary (default: target/gpu/prsmed, else target/release/prsmed, else target/debug/prsmed). Writes
OUT/generation.jsonl and OUT/generation.md, a table for benches/RESULTS.md.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the first of four batches includes the search for kernels, for both programs
BATCHES = 4
FULL = dict(size="sdxl", preset="augment", side=1024, steps=30, precision="bf16", sizes=(1, 4))
DRY = dict(size="tiny", preset="tiny", side=64, steps=2, precision="fp32", sizes=(1, 2))


class Driver:
    """Peak of GPU memory in use as the driver shows it, minus that before, in bytes.

    Without a GPU, callers use the peak of resident memory."""

    QUERY = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]

    def __init__(self):
        self.has_gpu = shutil.which("nvidia-smi") is not None and subprocess.run(self.QUERY,
                                                                                 capture_output=True).returncode == 0

    @classmethod
    def none(cls):
        """A driver that measures no GPU."""
        driver = cls.__new__(cls)
        driver.has_gpu = False
        return driver

    def __enter__(self):
        self.peak = 0
        if self.has_gpu:
            self.before = int(subprocess.check_output(self.QUERY, text=True))
            self.poll = subprocess.Popen([*self.QUERY, "--loop-ms=20"], stdout=subprocess.PIPE, text=True)
            self.reader = threading.Thread(target=self.read)
            self.reader.start()
        return self

    def read(self):
        for line in self.poll.stdout:
            if line.strip().isdigit():
                self.peak = max(self.peak, (int(line) - self.before) << 20)

    def __exit__(self, *_):
        if self.has_gpu:
            self.poll.terminate()
            self.reader.join()
            self.poll.wait()


def measured(driver, command, environment=None):
    """Runs `command`; returns exit code, stdout, stderr, and the peak of device memory."""
    with driver:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=environment) as process:
            err = []
            reader = threading.Thread(target=lambda: err.append(process.stderr.read()))
            reader.start()
            out = process.stdout.read()
            reader.join()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, out, err[0], driver.peak if driver.has_gpu else usage.ru_maxrss * 1024


def records(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def find_binary():
    """The binary, and an environment in which it finds libtorch: its own, or that of this machine's PyTorch."""
    places = [os.environ["PRSMED"]] if "PRSMED" in os.environ else [f"target/{folder}/prsmed"
                                                                    for folder in ("gpu", "release", "debug")]
    binary = next((str(ROOT / place) for place in places if os.access(ROOT / place, os.X_OK)), None)
    if binary is None:
        raise SystemExit(f"no binary at {' or '.join(places)}: build first (cargo build), or name one in PRSMED")
    environment = dict(os.environ)
    starts = lambda: subprocess.run([binary, "--version"], env=environment, capture_output=True, text=True)
    if (first := starts()).returncode != 0:
        code = "import pathlib, torch; print(pathlib.Path(torch.__file__).parent / 'lib')"
        library = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [library, environment.get("LD_LIBRARY_PATH")]))
        if starts().returncode != 0:
            raise SystemExit(f"{binary} does not start: {first.stderr.strip()}")
        print(f"{binary} uses the libtorch in {library}", file=sys.stderr)
    return binary, environment


def numbers_of(plan):
    peaks = {key: plan[key] for key in ("allocated_peak", "reserved_peak", "device_peak")}
    return {**peaks, "seconds": (plan["time"] or {}).get("seconds")}


def run_prsmed(case, batch, out, binary, environment, driver, batches):
    folder = out / f"made-{batch}"
    shutil.rmtree(folder, ignore_errors=True)
    sets = {
        "batch": batch, "image_size": case["side"], "steps": case["steps"], "strength": 1,
        "precision": case["precision"], "decode": "sliced",
        "per_image": 1, "preview_every": 0,
    }
    settings = ["--preset", case["preset"]]
    settings += [word for key, value in {"model": f"random:{case['size']}", **sets}.items()
                 for word in ("--set", f"augment.{key}={value}")]
    code, text, err, _ = measured(Driver(), [binary, "--json", "plan", "--task", "augment", "--gpu", "auto", *settings],
                                  environment)
    plans = [record for record in records(text) if record.get("kind") == "plan"]
    if code not in (0, 1) or not plans:
        raise SystemExit(f"`plan` failed:\n{err}")
    plan = plans[0]
    row = {"who": "prsmed", "batch": batch, "planned": numbers_of(plan)}
    if not plan["fits"]:
        return {**row, "failed": "does not fit, according to its plan"}
    command = [binary, "--json", "augment", "generate", "--data-root", str(out / "phantoms"), "--out", str(folder),
               *settings]
    code, text, err, peak = measured(driver, [*command, "--limit", str(batches * batch), "--no-filter"], environment)
    results = [record for record in records(text) if record.get("kind") == "result"]
    if code != 0 or not results:
        return {**row, "failed": f"exit code {code}: {err.strip()[-500:]}"}
    summary, memory = results[0]["summary"], results[0]["memory"]
    if (summary["made_now"], summary["batch"]) != (batches * batch, batch):
        made = f"made {summary['made_now']} images in batches of {summary['batch']}"
        return {**row, "failed": f"{made}: out of memory, or too few phantoms"}
    # the job's own plan, which knows the number of prompts
    row["planned"] = numbers_of(memory["planned"])
    return {**row, "seconds": batch / summary["images_per_s"], "allocated_peak": memory["measured"],
            "device_peak": peak}


def run_diffusers(case, batch, driver, batches):
    command = [sys.executable, str(ROOT / "scripts/baseline/sdxl_diffusers.py"), "--size", case["size"], "--precision",
               case["precision"]]
    for key, value in {"side": case["side"], "steps": case["steps"], "batch": batch, "batches": batches}.items():
        command += [f"--{key}", str(value)]
    code, text, err, peak = measured(driver, command)
    row = {"who": "diffusers", "batch": batch}
    if code == 3:
        return {**row, "failed": f"NOT MEASURED: {err.strip().splitlines()[-1]} ({sys.executable})"}
    if code != 0 or not records(text):
        return {**row, "failed": f"exit code {code}: {err.strip()[-500:]}"}
    return {**row, **records(text)[0], "device_peak": peak}


def gib(count):
    return "-" if count is None else f"{count / 2**30:.2f}"


def table(rows, case, driver, batches):
    """A Markdown table for benches/RESULTS.md."""
    machine = platform.processor() or platform.machine()
    if driver.has_gpu:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        machine = subprocess.check_output(query, text=True).strip()
    versions = next((row["versions"] for row in rows if "versions" in row), None)
    shown = "diffusers not measured"
    if versions:
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    what = f"random:{case['size']}, {case['side']} pixels, {case['steps']} steps, guidance, {case['precision']}"
    seen = "driver" if driver.has_gpu else "resident (no GPU)"
    lines = [
        f"{what}, sliced decoding; mean of {batches} batches, the first included. {machine}; {shown}; "
        f"{datetime.date.today()}. GiB:",
        "",
        f"| who | batch | s per batch | planned s | tensors | planned | {seen} | planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        planned = row.get("planned", {})
        if "failed" in row:
            reason = row["failed"].replace("\n", " ").replace("|", "/")
            lines.append(f"| {row['who']} | {row['batch']} | {reason} | | | | | {gib(planned.get('device_peak'))} |")
            continue
        predicted = planned.get("seconds")
        numbers = [f"{row['seconds']:.2f}", "-" if predicted is None else f"{predicted:.2f}",
                   gib(row["allocated_peak"]), gib(planned.get("allocated_peak"))]
        numbers += [gib(row["device_peak"]), gib(planned.get("device_peak"))]
        lines.append(f"| {row['who']} | {row['batch']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, to test the script")
    parser.add_argument("--batches", type=int, default=BATCHES, help="number of batches of each size")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    case = DRY if args.dry else FULL
    if args.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    driver = Driver()
    if args.dry:
        driver.has_gpu = False
    elif not driver.has_gpu:
        raise SystemExit("nvidia-smi shows no GPU: `--dry` runs the same path on the CPU")
    binary, environment = find_binary()
    args.out.mkdir(parents=True, exist_ok=True)
    num_images = args.batches * max(case["sizes"])
    # at least three of four phantoms are train images
    phantoms = [binary, "--quiet", "data", "phantom", str(args.out / "phantoms"), "--count", str(2 * num_images),
                "--image-size", "128"]
    shutil.rmtree(args.out / "phantoms", ignore_errors=True)
    subprocess.run(phantoms, check=True, env=environment, stdout=subprocess.DEVNULL)
    rows = []
    with (args.out / "generation.jsonl").open("w") as lines:
        for batch in case["sizes"]:
            for row in (run_prsmed(case, batch, args.out, binary, environment, driver, args.batches),
                        run_diffusers(case, batch, driver, args.batches)):
                rows.append(row)
                print(json.dumps(row), file=lines, flush=True)
    text = table(rows, case, driver, args.batches)
    (args.out / "generation.md").write_text(text + "\n")
    print(text)
    broken = [row for row in rows if "failed" in row and not row["failed"].startswith("NOT MEASURED")]
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
