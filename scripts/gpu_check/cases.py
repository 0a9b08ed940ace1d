"""All measurements, in their order. Each is a case with a name, a time limit and its own result line."""

import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import generation_check as generation

from . import cuda_tests
from .ballast import ballast
from .process import ROOT, Driver, find_binary, run, torch_library

QUESTIONS = 3
# images of a step; PyTorch's step with the same samples needs about 90 GB for four and 53 GB for two
IMAGES, IMAGES_BELOW_100_GB = 4, 2
# ids of a question with its answer, as in scripts/bench-fake-gpu
TEXT, ANSWER = 64, 28
# the full model at published sizes
FULL = ["train.accumulation=1", "train.precision=bf16", "train.checkpointing=none", "train.checkpoint_encoder=none"]
TINY = ["train.accumulation=1", "model.train_base=false", "train.precision=bf16"]
TINY_CPU = ["train.accumulation=1", "model.image_size=64", "train.precision=fp32"]
SHIPPED = ["train.fused_kernels=auto", "train.graph=off"]
PLAIN = ["train.fused_kernels=off", "train.graph=off"]
# settings that should make a step faster, and settings that save memory and cost time
FASTER = ["train.graph=on", "train.fused_kernels=on", "train.fused_kernels=on train.graph=on"]
SMALLER = ["train.checkpointing=full", "model.quantization=nf4", "train.optimizer=adamw8bit"]
FINETUNES = {
    "lora": ["finetune.method=lora"],
    "full": ["finetune.method=full", "train.optimizer=adamw8bit", "train.clip_norm=0", "train.step_in_backward=true"],
    "offload": ["finetune.method=full", "train.precision=bf16", "train.offload_weights=true"],
    "control": ["finetune.mode=mask_to_image", "train.optimizer=adamw8bit"],
}
GPUS_FIRST, GPUS_SECOND = (24,), (80, 8, 12, 16, 40, 48, 141)
# seconds of the two calls that a first GPU gets, and those of them in which `run` unpacks and checks
CALLS, START = {"1": 470, "2": 200}, 15

# prints versions of Python packages and the GPU that PyTorch finds
MACHINE = """
import importlib.metadata as metadata, json, torch
names = ("torch", "triton", "transformers", "peft", "diffusers", "accelerate", "numpy", "pillow")
version = lambda name: next((found.version for found in metadata.distributions(name=name)), None)
found = {"python": {name: version(name) for name in names}, "cuda": torch.version.cuda, "gpu": None}
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    found |= {"gpu": gpu.name, "total": gpu.total_memory, "cudnn": torch.backends.cudnn.version()}
print(json.dumps(found))
"""


class Failed(Exception):
    """A case failed; the text gives the reason."""


class Stop(Exception):
    """Every later line would be worthless; the text gives the reason."""


class Skipped(Exception):
    """This machine or this program lacks something that a case needs."""


@dataclass
class Case:
    """`work(wanted)` measures the named results that are still missing; one process may measure several."""

    group: str
    names: list
    seconds: float
    work: object


class Machine:
    """Program, environment and sizes of all cases."""

    def __init__(self, results, log, dry, tiny):
        self.results, self.log, self.dry = results, log, dry
        self.binary, self.environment = find_binary()
        self.driver = Driver.none() if dry else Driver()
        fake = Path(os.environ.get("PRSMED_FAKE_CUDA", ROOT / "target/tmp/fake_cuda"))
        has_fake = all((fake / name).exists() for name in ("libcuda.so.1", "libwithoutcudnn.so", "kernels"))
        self.fake = fake if dry and has_fake else None
        self.tiny = dry and (tiny or self.fake is None)
        self.device = "cuda" if self.fake or not dry else "cpu"
        self.cpu_environment = self.environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if self.fake:
            library = f"{self.fake}:{self.environment.get('LD_LIBRARY_PATH') or torch_library()}"
            preload = f"{self.fake / 'libcuda.so.1'} {self.fake / 'libwithoutcudnn.so'}"
            self.environment |= {
                "LD_PRELOAD": preload, "LD_LIBRARY_PATH": library,
                "FAKE_CUDA_MIB": os.environ.get("FAKE_CUDA_MIB", "143771"), "FAKE_CUDA_CAPABILITY": "90",
                "OMP_NUM_THREADS": "1",
                "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
            }
        elif dry:
            self.environment = self.cpu_environment
        if not dry:
            self.environment.setdefault("PRSMED_CACHE", str(ROOT / "target/gpu-cache"))
        self.where = "GPU" if not dry else "fake CUDA runtime" if self.fake else "CPU"
        self.deadline = None
        self.closing, self.holding = contextlib.ExitStack(), contextlib.ExitStack()
        if self.fake:
            # a calibration writes to the cache, and plans read it
            if "PRSMED_CACHE" not in os.environ:
                self.environment["PRSMED_CACHE"] = self.closing.enter_context(tempfile.TemporaryDirectory())
            kernels = Path(self.environment["PRSMED_CACHE"]) / "kernels"
            if not kernels.exists():
                shutil.copytree(self.fake / "kernels", kernels)
                kernels.chmod(0o700)
        self.hold = None
        self.gpu_name = self.driver.name() if self.driver.has_gpu else None
        self.gpu_bytes = int(self.environment.get("FAKE_CUDA_MIB", 0)) << 20
        if self.driver.has_gpu:
            self.gpu_bytes = self.driver.memory()[1]
        self.images = 2 if self.tiny else IMAGES if self.gpu_bytes >= 100e9 else IMAGES_BELOW_100_GB

    def is_done(self, name):
        """True if a case need not run. The cache that has the reading of `calibrate` may be lost between two calls."""
        readings = Path(self.environment.get("PRSMED_CACHE", "")) / "readings"
        is_lost = name == "calibrate" and self.device == "cuda" and not readings.exists()
        is_ok = self.results.latest().get(name, {}).get("state") == "ok"
        return self.results.is_done(name) and not (is_lost and is_ok)

    # --- running programs

    def left(self):
        return self.deadline - time.monotonic()

    def run(self, command, driver=False, environment=None, on_record=None):
        """Runs a command until the deadline of its case, and logs it."""
        environment = environment or self.environment
        ran = run(command, environment, self.left(), self.driver if driver else None, on_record)
        self.log.write(f"$ {' '.join(map(str, command))}\n{ran.out[-50_000:]}{ran.err[-50_000:]}"
                       f"[exit code {ran.code}, {ran.seconds:.1f} s]\n\n")
        self.log.flush()
        return ran

    def prsmed(self, *words, **how):
        return self.program(self.binary, ["--json", "--quiet", *words], **how)

    def program(self, program, words, may_fail=False, **how):
        ran = self.run([program, *words], **how)
        if not may_fail and (ran.code != 0 or not ran.records):
            raise Failed(ran.error())
        return ran

    def bench(self, words, sets, text=True, steps=6, warmup=3, preset=None, **how):
        if preset is None:
            preset = "tiny" if self.tiny else "full"
            sets = [*(FULL if not self.tiny else TINY if self.device == "cuda" else TINY_CPU), *sets]
        if self.dry:
            steps, warmup = 2, 1
        words = [*words, *(word for pair in sets for word in ("--set", pair))]
        if text and not self.tiny:
            words += ["--text-tokens", TEXT, "--answer-tokens", ANSWER]
        return self.step_program("--preset", preset, "--device", self.device, "--steps", steps, "--warmup", warmup, *words,
                                 **how)

    def step_program(self, *words, **how):
        """The program of benches/step: beside `prsmed`, or where cargo puts it."""
        folder = Path(self.binary).parent
        places = [path for place in (folder, folder / "deps") for path in place.glob("step-*")]
        found = [path for path in places if os.access(path, os.X_OK) and not path.suffix]
        if not found:
            raise Failed(f"no program step-* in {folder}: `cargo build --bench step` makes it, and scripts/gpu-bundle packs it")
        return self.program(max(found, key=lambda path: path.stat().st_mtime), words, **how)

    # --- the cases

    def doctor(self, wanted):
        """What the program itself says of this machine. Without an open CUDA side nothing else is worth its time."""
        ran = self.prsmed("doctor", may_fail=True)
        if not ran.records:
            raise Stop(ran.error())
        found = ran.records[-1]
        if self.device == "cuda" and (found["cuda_side"] != "open" or found["training_device"] != "gpu"):
            # a fake GPU computes nothing, so no product is right there
            if found["cuda_side"] != "open" or not self.fake:
                raise Stop(f"CUDA side: {found['cuda_side']}; training on: {found['training_device']}; "
                           f"{found['no_gpu_reason'] or 'a product on the GPU is wrong'}")
        self.add(wanted[0], record=found)

    def machine(self, _):
        version = self.run([self.binary, "--version"]).out.strip()
        code = MACHINE
        ran = self.run([sys.executable, "-c", code])
        found = ran.records[-1] if ran.records else {"error": ran.error()}
        if self.driver.has_gpu:
            query = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
            ran = self.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"])
            found["nvidia_smi"] = ran.out.strip()
        self.add("machine", prsmed=version, **found)

    def smoke(self, wanted):
        """Custom kernels and CUDA graphs in a tiny model; the program's notes say what is off."""
        sets = TINY if self.device == "cuda" else TINY_CPU
        switches = {"smoke/kernels": ["train.fused_kernels=on"], "smoke/graph": ["train.graph=on"]}
        for name in wanted:
            more = switches[name]
            ran = self.step_program("--preset", "tiny", "--device", self.device, "--steps", 2, "--warmup", 1,
                                    *(word for pair in [*sets, *more] for word in ("--set", pair)))
            record = ran.records[-1]
            said = [line for line in ran.err.splitlines() if line.startswith(("warning", "note"))]
            self.add(name, setting=more[0], median_seconds=record["median_seconds"], messages=said,
                     is_off=any(": off" in line or " are off" in line for line in said))

    def calibrate(self, _):
        ran = self.prsmed("calibrate", may_fail=True)
        if "unrecognized subcommand" in ran.err:
            raise Skipped("this program has no command `calibrate`")
        found = [record for record in ran.records if record.get("kind") == "calibration"]
        if ran.code != 0 or not found:
            if self.where != "GPU" and ran.code != 124:
                raise Skipped(f"needs a GPU ({ran.error()})")
            raise Failed(ran.error())
        if self.where == "GPU" and self.gpu_name not in json.dumps(found[-1]["identity"]):
            raise Failed(f"it measured {found[-1]['identity']['name']}, not {self.gpu_name}")
        self.add("calibrate", record=found[-1])

    def products(self, wanted):
        """Rates of matrix products in bf16 and FP8. What was measured before the time limit counts."""
        words = ["--device", "cpu", "--tiny"] if self.dry else []
        ran = self.run([sys.executable, ROOT / "scripts/gpu_check/gemm.py", *words],
                       environment=self.cpu_environment if self.dry else None)
        records = [record for record in ran.records if record.get("kind") == "gemm"]
        if not records or ran.code not in (0, 124):
            raise Failed(ran.error())
        self.add(wanted[0], products=records, is_complete=ran.code == 0)

    def step(self, wanted):
        """The packed step of the full model: three questions about each image in one sequence."""
        for name in wanted:
            _, variant, part = name.split("/")
            images = int(variant.removeprefix("images")) if variant.startswith("images") else self.images
            if images > 6 and self.gpu_bytes < 100e9 and not self.tiny:
                self.results.add(name, "skipped", error="needs about 75 GB", where=self.where)
                continue
            questions = 1 if variant == "rows" else QUESTIONS
            if variant == "rows":
                images *= QUESTIONS
            if part == "llm" and self.tiny and self.device == "cpu":
                words = ["--part", part]
            else:
                words = ["--part", part, "--measure-peak", *(["--parts"] if part == "all" else [])]
            sets = [*(PLAIN if variant == "plain" else SHIPPED), f"train.micro_batch={images}",
                    f"data.questions_per_image={questions}"]
            ran = self.bench(words, sets, driver=True)
            record = ran.records[-1]
            record.pop("config", None)
            self.add(name, driver_peak=ran.driver_peak, sets=sets, images=images, **record)

    def torch_shapes(self):
        """Rows with the same samples (one question each, the image repeated), and rows with the same tokens."""
        record = self.results.latest().get("step/shipped/all", {})
        images = self.images
        packed = record["tokens"] // images if record.get("tokens") else (200 if self.tiny else 763)
        answer = 17 if self.tiny else ANSWER
        rows = f"{images * QUESTIONS}x{100 if self.tiny else 576 + TEXT - 1}:{answer}"
        return {"rows": rows, "published": rows, "tokens": f"{images}x{packed}:{answer * QUESTIONS}"}

    def torch(self, wanted):
        """PyTorch's steps; every record of the process becomes a line at once."""
        shapes = self.torch_shapes()
        mode = wanted[0].split("/")[1]
        cases = [f"{'/'.join(name.split('/')[2:])}:{shapes[name.split('/')[2]]}" for name in wanted]
        command = [sys.executable, ROOT / "scripts/gpu_check/torch_steps.py", "--mode", mode,
                   *(["--trace"] if mode == "eager" else [])]
        for case in cases:
            command += ["--case", case]
        environment = self.environment
        if self.dry:
            # Triton cannot load its kernels under the fake runtime, and compiling for the CPU takes minutes
            environment = environment | {"TORCHDYNAMO_DISABLE": "1"}
            command += ["--device", self.device, "--steps", 1, "--warmup", 1, *(["--tiny"] if self.tiny else []),
                        *(["--no-cudnn-attention"] if self.fake else [])]

        def keep(record):
            name = f"torch/{mode}/{record.get('variant')}/{record.get('part')}"
            if record.get("kind") == "torch":
                peak, self.driver.peak = self.driver.peak, 0
                samples = record["batch"] * (QUESTIONS if record["variant"] == "tokens" else 1)
                self.add(name, samples=samples, driver_peak=peak if self.driver.has_gpu else None, **record)
            elif record.get("kind") == "torch-error":
                self.results.add(name, "failed", error=record["error"], where=self.where)

        ran = self.run(command, driver=True, environment=environment, on_record=keep)
        if ran.code == 3:
            raise Skipped(ran.err.strip().splitlines()[-1] if ran.err.strip() else "packages are missing")
        if ran.code != 0:
            raise Failed(ran.error())

    def switch(self, setting):
        def work(wanted):
            rounds = 1 if self.dry else 2
            ran = self.bench(["--compare", setting, "--rounds", rounds],
                             [*PLAIN, f"train.micro_batch={self.images}", f"data.questions_per_image={QUESTIONS}"])
            record = ran.records[-1]
            notes = [note for measured in record["with"] for note in measured.get("notes", [])]
            notes += [line for line in ran.err.splitlines() if line.startswith("warning")]
            kept = {key: record[key] for key in ("change", "time_ratio", "peak_ratio", "time_ratios", "peak_ratios")}
            seconds = {key: [measured["seconds"] for measured in record[key]] for key in ("without", "with")}
            memory = {key: [measured["memory"] for measured in record[key]] for key in ("without", "with")}
            self.add(wanted[0], **kept, seconds=seconds, memory=memory, notes=sorted(set(notes)),
                     is_off=any(": off" in note for note in notes))

        return work

    def leave_free(self, count):
        """Leaves `count` bytes of the GPU free; the process that occupies the rest is kept for the next preset."""
        if self.device != "cuda":
            return None
        if self.hold is None:
            self.hold = self.holding.enter_context(ballast(self.environment, self.log))
        return self.hold(count)

    def release(self):
        """Ends the process that occupies GPU memory."""
        self.holding.close()
        self.hold = None

    def gpu(self, size):
        def work(wanted):
            preset = "tiny" if self.tiny else f"gpu-{size}gb"
            # a plan that does not fit has the exit code 1
            ran = self.prsmed("plan", "--preset", preset, "--gpu", f"{size}gb" if self.device == "cuda" else "cpu",
                              may_fail=True)
            if not ran.records:
                raise Failed(ran.error())
            budget = ran.records[-1]["budget"]["bytes"]
            left = self.leave_free(budget)
            if left is not None and left < budget - (256 << 20):
                raise Skipped(f"this GPU has {left >> 20} MiB free, the preset needs {budget >> 20} MiB")
            environment = self.environment
            if self.fake:
                # the process that occupies memory has a fake GPU of its own
                environment = environment | {"FAKE_CUDA_MIB": str(budget >> 20)}
            sets = [] if self.tiny else ["train.accumulation=2"]
            ran = self.bench([], sets, text=False, steps=3, warmup=2, preset=preset, may_fail=True, driver=True,
                             environment=environment)
            if ran.code != 0 or not ran.records:
                reason = "out of memory: " if "memory" in ran.err and "fit" not in ran.err else ""
                raise Failed(reason + ran.error())
            record = ran.records[-1]
            record.pop("config", None)
            terms = record["planned"]["terms"]
            others = sum(term["bytes"] for term in terms if term["name"] == "display and other processes")
            self.add(wanted[0], preset=preset, gpu=f"{size} GB", budget=budget, left_free=left,
                     driver_peak=ran.driver_peak, planned_device=record["planned"]["device_peak"] - others, **record)

        return work

    def generate(self, who, index):
        def work(wanted):
            case = generation.DRY if self.dry else generation.FULL
            batch, batches = case["sizes"][index], 1 if self.dry else 2
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder)
                if who == "prsmed":
                    generation.make_phantoms(out / "phantoms", batches * max(case["sizes"]), self.binary,
                                             self.environment)
                    row = generation.run_prsmed(case, batch, out, self.binary, self.environment, self.driver, batches,
                                                self.left())
                else:
                    # the fake CUDA runtime has no cuDNN, which diffusers uses
                    environment = self.cpu_environment if self.dry else self.environment
                    row = generation.run_diffusers(case, batch, self.driver, batches, environment, self.left())
            failed = row.pop("failed", None)
            if failed and failed.startswith("NOT MEASURED"):
                raise Skipped(failed)
            if failed:
                raise Failed(failed)
            self.add(wanted[0], size=case["size"], side=case["side"], steps=case["steps"], batches=batches, **row)

        return work

    def finetune(self, wanted):
        """One step of a fine-tuning of SDXL at 1024 pixels with random weights: memory and seconds of every phase, and
        the errors of the plan."""
        for name in wanted:
            sets = [*FINETUNES[name.split("/")[1]], "train.micro_batch=1", "train.accumulation=1"]
            if not self.tiny:
                sets += ["finetune.model=random:sdxl", "train.precision=bf16"]
            ran = self.prsmed("plan", "--task", "finetune", "--preset", "tiny" if self.tiny else "lora-sdxl", "--measure",
                              *(word for pair in sets for word in ("--set", pair)), driver=True, may_fail=True)
            if not ran.records or "measured" not in ran.records[-1]:
                raise Failed(ran.error())
            record = ran.records[-1]
            self.add(name, sets=sets, driver_peak=ran.driver_peak, measured=record["measured"], fits=record["fits"],
                     planned={key: record[key] for key in ("allocated_peak", "reserved_peak", "device_peak", "time")})

    def training(self, wanted):
        """Training steps on data with the loader, at the small sizes of the preset tiny."""
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "data"
            ran = self.run([self.binary, "--quiet", "data", "phantom", data, "--count", 60])
            if ran.code != 0:
                raise Failed(ran.error())
            ran = self.step_program("--preset", "tiny", "--device", self.device, "--data-root", data, "--steps",
                                    2 if self.dry else 20, "--warmup", 1 if self.dry else 5, driver=True)
        record = ran.records[-1]
        record.pop("config", None)
        self.add(wanted[0], driver_peak=ran.driver_peak, **record)

    def together(self, wanted):
        """Training steps of the preset tiny on one GPU and on all of this machine, over NCCL."""
        count = 2
        if not self.dry:
            count = len(self.run(["nvidia-smi", "--list-gpus"]).out.strip().splitlines())
            if count < 2:
                raise Skipped("one GPU; the unit tests use NCCL with one process")
        sets = ["train.micro_batch=1", f"train.accumulation={count}", "train.max_steps=8", "train.learning_rate=1e-5",
                "train.validate_every_epochs=0", "train.precision=fp32", "train.graph=off", "model.train_base=false"]
        ways = {"one": (1, []), "all": (count, []), "zero": (count, ["train.zero_stage=2"]),
                "divided": (count, ["train.zero_stage=2", "model.divide_layers=true"])}
        with tempfile.TemporaryDirectory() as folder:
            data, losses, seconds = Path(folder) / "data", {}, {}
            ran = self.run([self.binary, "--quiet", "data", "phantom", data, "--count", 60])
            if ran.code != 0:
                raise Failed(ran.error())
            for name, (gpus, more) in ways.items():
                out = Path(folder) / name
                words = (word for pair in [*sets, *more] for word in ("--set", pair))
                ran = self.prsmed("train", "--preset", "tiny", "--data-root", data, "--out", out, "--no-plan", "--gpus",
                                  gpus, *words)
                steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
                losses[name] = [step["losses"]["total"] for step in steps if step["kind"] == "step"]
                seconds[name] = ran.records[-1]["train_seconds"]
        far = {name: max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses[name], losses["one"]))
               for name in ways if name != "one"}
        # a fake GPU computes nothing
        if not self.dry and max(far.values()) > 1e-4:
            raise Failed(f"losses differ from those of one GPU by {far}")
        self.add(wanted[0], gpus=count, losses_differ_by=far, seconds=seconds)

    def test_program(self, kind, only="", but=""):
        """Tests that need CUDA: those with the text `only` in their names, and not `but`. On the fake CUDA runtime each runs
        in a process of its own, and may end at a comparison of values (`cuda_tests.ON_FAKE`). On the CPU they are listed."""

        def work(wanted):
            folder = Path(self.binary).parent
            found = [path for path in sorted(folder.glob(f"{kind}-*")) if os.access(path, os.X_OK) and not path.suffix]
            if not found:
                raise Skipped(f"no program {kind}-* in {folder}: scripts/gpu-bundle collects them")
            tests = cuda_tests.of_listing(self.run([found[-1], "--ignored", "--list"]).out, kind)
            tests = [test for test in tests if only in test and not (but and but in test)]
            if self.fake:
                self.on_fake(wanted[0], found[-1], tests)
                return
            words = ["--list"] if self.dry else ["--nocapture", "--test-threads", 1]
            ran = self.run([found[-1], "--ignored", "--exact", *tests, *words])
            lines = [line for line in ran.out.splitlines() if line.startswith("test ") or line.endswith(": test")]
            more = {"tests": lines[-60:], "records": [r for r in ran.records if r.get("kind") in ("phase", "kernel")]}
            if ran.code != 0:
                self.results.add(wanted[0], "failed", error=ran.error(), where=self.where, **more)
            else:
                self.add(wanted[0], **more)

        return work

    def on_fake(self, name, program, tests):
        """Runs tests on the fake CUDA runtime, which computes nothing."""
        ended = {}
        for test in tests:
            ran = self.run([program, "--ignored", "--exact", test, "--nocapture", "--test-threads", 1])
            ended[test.rpartition("::")[2]] = "passed" if ran.code == 0 else cuda_tests.end_on_fake(ran.code, ran.out + ran.err)
        wrong = {test: end for test, end in ended.items() if not cuda_tests.is_right_on_fake(test, end)}
        if wrong:
            self.results.add(name, "failed", error=json.dumps(wrong), where=self.where, tests=ended, records=[])
        else:
            self.add(name, tests=ended, records=[])

    def recordings(self, wanted):
        """Traces of PyTorch's caching allocator for tests/plan/recorded, as one archive."""
        if self.device != "cuda":
            raise Skipped("needs a GPU or the fake CUDA runtime")
        with tempfile.TemporaryDirectory() as folder:
            ran = self.run([sys.executable, ROOT / "scripts/record_allocator.py", folder])
            if ran.code != 0:
                raise Failed(ran.error())
            with tarfile.open(self.results.path.parent / "recorded.tar.xz", "w:xz") as archive:
                for path in sorted(Path(folder).glob("*.json")):
                    archive.add(path, path.name)
        self.add(wanted[0], lines=ran.out.splitlines())

    def add(self, case, **more):
        # fields of a record may have the names of a line
        for name in ("case", "state", "time", "where"):
            if name in more:
                more[f"record_{name}"] = more.pop(name)
        self.results.add(case, "ok", where=self.where, gpu_name=self.gpu_name, **more)

    # --- all of them

    def calls(self):
        """The cases of each call, the most important first. Tests of correctness come before times: if one fails, the
        times mean nothing. The limits of the first two calls and their starts add up to at most `CALLS`."""

        def case(group, seconds, work, *names):
            return Case(group, list(names), seconds, work)

        def torch(seconds, *names):
            return case("torch", seconds, self.torch, *(f"torch/{name}" for name in names))

        def switches(settings, seconds=30):
            return [case("switches", seconds, self.switch(setting), f"switch/{setting.replace(' ', '+')}")
                    for setting in settings]

        def gpus(sizes):
            return [case("gpus", 38, self.gpu(size), f"gpu/{size}") for size in sizes]

        def finetunes(names):
            return [case("finetune", 45, self.finetune, f"finetune/{name}") for name in names]

        first = [
            case("doctor", 10, self.doctor, "doctor"),
            case("machine", 15, self.machine, "machine"),
            case("smoke", 30, self.smoke, "smoke/kernels", "smoke/graph"),
            case("tests", 35, self.test_program("unit"), "test/unit"),
            case("tests", 30, self.test_program("training"), "test/training"),
            case("step", 45, self.step, "step/shipped/all"),
            case("step", 30, self.step, "step/shipped/llm"),
            torch(90, "eager/rows/all", "eager/tokens/all", "eager/rows/llm", "eager/tokens/llm"),
            *gpus(GPUS_FIRST),
            *finetunes(["lora"]),
            case("tests", 40, self.test_program("plan", only="of_jobs"), "test/jobs"),
            # after the steps: they compare the plan of a new user, who has no reading
            case("calibrate", 40, self.calibrate, "calibrate"),
        ]
        second = [
            *switches(FASTER),
            case("step", 28, self.step, "step/images12/all"),
            *switches(["model.packed_attention=mask"]),
            case("products", 25, self.products, "products"),
        ]
        rest = [
            case("calibrate", 60, self.calibrate, "calibrate"),
            torch(150, "compile/rows/llm", "compile/tokens/llm"),
            case("tests", 100, self.test_program("plan", but="of_jobs"), "test/plan"),
            *switches(["data.cache_vision=ram"]),
            case("step", 38, self.step, "step/plain/all"),
            *[case("step", 28, self.step, f"step/images{count}/all") for count in (1, 3, 6)],
            *gpus(GPUS_SECOND),
            *finetunes(name for name in FINETUNES if name != "lora"),
            *[case("generation", 45, self.generate(who, index), f"generation/{who}/{index}")
              for index in (0, 1) for who in ("prsmed", "diffusers")],
            case("training", 40, self.training, "training"),
            case("together", 60, self.together, "together"),
            case("recordings", 40, self.recordings, "recordings"),
            case("step", 60, self.step, "step/rows/all"),
            torch(60, "eager/published/all"),
            *switches(SMALLER),
            torch(200, "compile/rows/all"),
        ]
        return {"1": first, "2": second, "rest": rest}
