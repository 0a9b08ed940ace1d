"""Seconds and memory of making pictures: `prsmed augment generate` with random weights against its plan, and diffusers beside it. Needs
only Python's own library; diffusers is used when this Python has it, and the table says so when not.

    python3 scripts/generation_check.py OUT            SDXL, 1024 pixels, 30 steps, bf16, on a card
    python3 scripts/generation_check.py --dry OUT      the same path at tiny sizes on the CPU: numbers mean nothing

PRSMED names the binary (default: target/gpu/prsmed, else target/release/prsmed, else target/debug/prsmed). Writes OUT/generation.jsonl and a table,
OUT/generation.md, for benches/RESULTS.md.
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
# with four batches the first one's search for kernels is a quarter of the mean; diffusers is counted the same way
BATCHES = 4
FULL = dict(size="sdxl", preset="augment", side=1024, steps=30, precision="bf16", sizes=(1, 4))
DRY = dict(size="tiny", preset="tiny", side=64, steps=2, precision="fp32", sizes=(1, 2))


class Driver:
    """The most that the driver shows above what it showed before, in bytes; without a card the peak of resident memory is used."""

    QUERY = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]

    def __init__(self):
        self.has_card = shutil.which("nvidia-smi") is not None and subprocess.run(self.QUERY, capture_output=True).returncode == 0

    @classmethod
    def none(cls):
        """Looks at no card."""
        driver = cls.__new__(cls)
        driver.has_card = False
        return driver

    def __enter__(self):
        self.peak = 0
        if self.has_card:
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
        if self.has_card:
            self.poll.terminate()
            self.reader.join()
            self.poll.wait()


def measured(driver, command, environment=None):
    """Runs `command`: exit code, stdout, stderr, and the device's peak."""
    with driver:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
            err = []
            reader = threading.Thread(target=lambda: err.append(process.stderr.read()))
            reader.start()
            out = process.stdout.read()
            reader.join()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, out, err[0], driver.peak if driver.has_card else usage.ru_maxrss * 1024


def records(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def find_binary():
    """The binary, and the environment in which it finds a libtorch: its own, or this machine's PyTorch."""
    places = [os.environ["PRSMED"]] if "PRSMED" in os.environ else [f"target/{folder}/prsmed" for folder in ("gpu", "release", "debug")]
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
        print(f"{binary} runs on the libtorch in {library}", file=sys.stderr)
    return binary, environment


def numbers_of(plan):
    peaks = {key: plan[key] for key in ("allocated_peak", "reserved_peak", "device_peak")}
    return {**peaks, "seconds": (plan["time"] or {}).get("seconds")}


def ours(case, batch, out, binary, environment, driver, batches):
    folder = out / f"made-{batch}"
    shutil.rmtree(folder, ignore_errors=True)
    sets = {
        "batch": batch, "image_size": case["side"], "steps": case["steps"], "strength": 1, "precision": case["precision"], "decode": "sliced",
        "per_image": 1, "preview_every": 0,
    }
    settings = ["--preset", case["preset"]]
    settings += [word for key, value in {"model": f"random:{case['size']}", **sets}.items() for word in ("--set", f"augment.{key}={value}")]
    code, text, err, _ = measured(Driver(), [binary, "--json", "plan", "--task", "augment", "--gpu", "auto", *settings], environment)
    plans = [record for record in records(text) if record.get("kind") == "plan"]
    if code not in (0, 1) or not plans:
        raise SystemExit(f"`plan` failed:\n{err}")
    plan = plans[0]
    row = {"who": "prsmed", "batch": batch, "planned": numbers_of(plan)}
    if not plan["fits"]:
        return {**row, "failed": "does not fit, by its plan"}
    command = [binary, "--json", "augment", "generate", "--data-root", str(out / "phantoms"), "--out", str(folder), *settings]
    code, text, err, peak = measured(driver, [*command, "--limit", str(batches * batch), "--no-filter"], environment)
    results = [record for record in records(text) if record.get("kind") == "result"]
    if code != 0 or not results:
        return {**row, "failed": f"exit code {code}: {err.strip()[-500:]}"}
    summary, memory = results[0]["summary"], results[0]["memory"]
    if (summary["made_now"], summary["batch"]) != (batches * batch, batch):
        return {**row, "failed": f"made {summary['made_now']} pictures in batches of {summary['batch']}: out of memory, or too few phantoms"}
    # of exactly this job: it knows how many texts there are
    row["planned"] = numbers_of(memory["planned"])
    return {**row, "seconds": batch / summary["images_per_s"], "allocated_peak": memory["measured"], "device_peak": peak}


def theirs(case, batch, driver, batches):
    command = [sys.executable, str(ROOT / "scripts/baseline/sdxl_diffusers.py"), "--size", case["size"], "--precision", case["precision"]]
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
    """What benches/RESULTS.md takes."""
    machine = platform.processor() or platform.machine()
    if driver.has_card:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        machine = subprocess.check_output(query, text=True).strip()
    versions = next((row["versions"] for row in rows if "versions" in row), None)
    told = ", ".join(f"{name} {version}" for name, version in versions.items()) if versions else "diffusers not measured"
    what = f"random:{case['size']}, {case['side']} pixels, {case['steps']} steps, guidance, {case['precision']}, sliced decoding"
    seen = "driver" if driver.has_card else "resident (no card)"
    lines = [
        f"{what}; mean of {batches} batches, the first included. {machine}; {told}; {datetime.date.today()}. GiB:",
        "",
        f"| who | batch | s a batch | planned s | tensors | planned | {seen} | planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        planned = row.get("planned", {})
        if "failed" in row:
            told = row["failed"].replace("\n", " ").replace("|", "/")
            lines.append(f"| {row['who']} | {row['batch']} | {told} | | | | | {gib(planned.get('device_peak'))} |")
            continue
        guess = planned.get("seconds")
        numbers = [f"{row['seconds']:.2f}", "-" if guess is None else f"{guess:.2f}", gib(row["allocated_peak"]), gib(planned.get("allocated_peak"))]
        numbers += [gib(row["device_peak"]), gib(planned.get("device_peak"))]
        lines.append(f"| {row['who']} | {row['batch']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--batches", type=int, default=BATCHES, help="of each size")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    case = DRY if args.dry else FULL
    if args.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    driver = Driver()
    if args.dry:
        driver.has_card = False
    elif not driver.has_card:
        raise SystemExit("nvidia-smi shows no card: `--dry` runs the same path on the CPU")
    binary, environment = find_binary()
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = args.batches * max(case["sizes"])
    # three of four phantoms or more are train pictures
    phantoms = [binary, "--quiet", "data", "phantom", str(args.out / "phantoms"), "--count", str(2 * pictures), "--image-size", "128"]
    shutil.rmtree(args.out / "phantoms", ignore_errors=True)
    subprocess.run(phantoms, check=True, env=environment, stdout=subprocess.DEVNULL)
    rows = []
    with (args.out / "generation.jsonl").open("w") as lines:
        for batch in case["sizes"]:
            for row in (ours(case, batch, args.out, binary, environment, driver, args.batches), theirs(case, batch, driver, args.batches)):
                rows.append(row)
                print(json.dumps(row), file=lines, flush=True)
    text = table(rows, case, driver, args.batches)
    (args.out / "generation.md").write_text(text + "\n")
    print(text)
    broken = [row for row in rows if "failed" in row and not row["failed"].startswith("NOT MEASURED")]
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
