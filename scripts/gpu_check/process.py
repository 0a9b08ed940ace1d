"""Starts programs with a time limit and reads GPU memory while they run. Needs only Python's standard library."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUERY = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits", "--id=0"]
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Driver:
    """Peak of GPU memory in use as the driver shows it, minus that before, in bytes.

    Reads NVML every 10 ms; without NVML it calls nvidia-smi again and again."""

    def __init__(self):
        self.nvml = self.handle = None
        self.peak = 0
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0:
                self.nvml, self.handle = nvml, handle
        except (OSError, AttributeError):
            pass
        has_command = shutil.which("nvidia-smi") is not None
        self.has_gpu = self.nvml is not None or (has_command
                                                 and subprocess.run(QUERY, capture_output=True).returncode == 0)

    @classmethod
    def none(cls):
        """A driver that measures no GPU."""
        driver = cls.__new__(cls)
        driver.has_gpu, driver.peak = False, 0
        return driver

    def memory(self):
        """Bytes in use on the first GPU, and all that it has."""
        if self.nvml is None:
            numbers = subprocess.check_output(QUERY, text=True).split(",")
            return tuple(int(number) << 20 for number in numbers)
        memory = NvmlMemory()
        if self.nvml.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory)) != 0:
            raise OSError("NVML does not show the memory of the GPU")
        return memory.used, memory.total

    def used(self):
        return self.memory()[0]

    def name(self):
        """The name of the first GPU."""
        if self.nvml is None:
            return subprocess.check_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"],
                                           text=True).strip()
        name = ctypes.create_string_buffer(96)
        if self.nvml.nvmlDeviceGetName(self.handle, name, 96) != 0:
            raise OSError("NVML does not show the name of the GPU")
        return name.value.decode()

    def __enter__(self):
        self.peak = 0
        if self.has_gpu:
            self.before = self.used()
            self.ends = threading.Event()
            self.reader = threading.Thread(target=self.read, daemon=True)
            self.reader.start()
        return self

    def read(self):
        while not self.ends.wait(0.01):
            self.peak = max(self.peak, self.used() - self.before)

    def __exit__(self, *_):
        if self.has_gpu:
            self.ends.set()
            self.reader.join()


@dataclass
class Ran:
    """Result of a program. `code` is 124 if the time limit ended it."""

    code: int
    out: str
    err: str
    driver_peak: int | None
    resident_peak: int
    seconds: float
    records: list = field(default_factory=list)

    @property
    def memory_peak(self):
        """Peak of GPU memory; without a GPU, of resident memory."""
        return self.resident_peak if self.driver_peak is None else self.driver_peak

    def error(self):
        """The reason of a failure: the exit code and the last lines of standard error."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        reason = "time limit reached" if self.code == 124 else f"exit code {self.code}"
        return f"{reason} after {self.seconds:.0f} s: " + " / ".join(lines[-6:])[-900:]


def end_with_parent():
    """Runs in the child: the kernel ends it when this program ends, also by SIGKILL."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run(command, environment=None, seconds=None, driver=None, on_record=None):
    """Runs `command` for at most `seconds`; calls `on_record` with each JSON line as soon as it is printed."""
    driver = driver or Driver.none()
    start = time.monotonic()
    records_found, out, err = [], [], []
    with driver:
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   stdin=subprocess.DEVNULL, text=True, errors="replace", env=environment, cwd=ROOT,
                                   start_new_session=True, preexec_fn=end_with_parent)
        is_late = threading.Event()

        def stop():
            is_late.set()
            end_group(process)

        timer = threading.Timer(max(seconds, 0.1), stop) if seconds is not None else None
        if timer:
            timer.daemon = True
            timer.start()
        reader = threading.Thread(target=lambda: err.append(process.stderr.read()), daemon=True)
        reader.start()
        try:
            for line in process.stdout:
                out.append(line)
                for record in records(line):
                    records_found.append(record)
                    if on_record:
                        on_record(record)
            reader.join()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            end_group(process)
            process.wait()
            raise
        finally:
            if timer:
                timer.cancel()
            process.stdout.close()
    code = 124 if is_late.is_set() else process.returncode
    peak = driver.peak if driver.has_gpu else None
    return Ran(code, "".join(out), err[0] if err else "", peak, usage.ru_maxrss * 1024, time.monotonic() - start, records_found)


def end_group(process):
    """Ends a program and everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def records(text):
    """The JSON objects of a text that has one for each line."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                pass
    return found


def torch_library():
    """Folder of libtorch in this Python, or `None`. Does not import torch."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent / "lib" if spec and spec.origin else None


def find_binary():
    """The binary, and an environment in which it finds libtorch: its own, or that of this machine's PyTorch."""
    folders = ("gpu", "release", "debug")
    places = [os.environ["PRSMED"]] if "PRSMED" in os.environ else [f"target/{folder}/prsmed" for folder in folders]
    binary = next((str(ROOT / place) for place in places if os.access(ROOT / place, os.X_OK)), None)
    if binary is None:
        raise SystemExit(f"no binary at {' or '.join(places)}: build first (cargo build), or name one in PRSMED")
    environment = dict(os.environ)
    starts = lambda: subprocess.run([binary, "--version"], env=environment, capture_output=True, text=True)
    if (first := starts()).returncode != 0:
        library = torch_library()
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(library or ""),
                                                                environment.get("LD_LIBRARY_PATH")]))
        if (second := starts()).returncode != 0:
            raise SystemExit(f"{binary} does not start: {first.stderr.strip()} {second.stderr.strip()}")
        print(f"{binary} uses the libtorch in {library}", file=sys.stderr)
    return binary, environment
