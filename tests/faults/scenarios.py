"""Commands whose files are tested for accidents, and the program that runs them with `layer.c`."""

import hashlib
import http.server
import json
import os
import re
import subprocess
import threading
import urllib.parse
from pathlib import Path

from disk import Content, read_trace, write_tree

# Names of temporary files, also those of other libraries.
LEFT = re.compile(r"prsmed-tmp-|prsmed-previous$|prsmed-previous/|(^|/)\.tmp|\.incomplete$")
PANIC = re.compile(r"panicked|stack backtrace|internal error")
FOREIGN = {"thesis.txt": b"thesis", ".out.prsmed-previous.mine": None, ".out.prsmed-previous.mine/checksums.json": b"{}"}
LIMIT_S = 120


class Failed(Exception):
    """A requirement that is not met."""


def require(condition, reason):
    if not condition:
        raise Failed(reason)


class Program:
    """Runs the binary with the fault layer."""

    def __init__(self, binary, work, no_sync):
        self.binary, self.work, self.no_sync = binary, work, no_sync
        self.box, self.trace, self.layer = work / "box", work / "trace", work / "layer.so"
        (work / "tmp").mkdir(exist_ok=True)
        source = Path(__file__).parent / "layer.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", self.layer, source], check=True)
        keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "HOME") if name in os.environ}
        self.environment = keep | {"OMP_NUM_THREADS": "1", "TMPDIR": str(work / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
        self.environment |= {"HF_HOME": str(self.box / "hf"), "XDG_CACHE_HOME": str(self.box / "cache")}

    def plain(self, *arguments):
        """Runs a command without the layer, to make inputs."""
        result = self.start(arguments, self.environment)
        if result.returncode:
            raise RuntimeError(f"{' '.join(map(str, arguments))}: {result.stderr}")

    def run(self, arguments, environment, **faults):
        """Runs a command with the layer; returns the result and its trace."""
        self.trace.unlink(missing_ok=True)
        allowed = [self.box, self.work / "tmp", "/dev", "/proc"]
        layer = {"LD_PRELOAD": self.layer, "FAULT_ROOTS": self.box, "FAULT_TRACE": self.trace}
        layer |= {"FAULT_JAIL": ":".join(map(str, allowed)), "FAULT_NO_SYNC": int(self.no_sync)}
        layer |= {f"FAULT_{name.upper()}": value for name, value in faults.items()}
        layer = {name: str(value) for name, value in layer.items()}
        result = self.start(arguments, self.environment | environment | layer)
        return result, read_trace(self.trace)

    def start(self, arguments, environment):
        command = [self.binary, *map(str, arguments)]
        return subprocess.run(command, env=environment, cwd=self.work, capture_output=True, text=True, timeout=LIMIT_S,
                              stdin=subprocess.DEVNULL, errors="replace")


def check_run(result, calls):
    """Requirements of every run: no signal, no panic, no change outside of the box."""
    require(result.returncode >= 0, f"ended by signal {-result.returncode}")
    panic = PANIC.search(result.stderr)
    require(not panic, f"panic: {result.stderr[-600:]}")
    violations = [str(call) for call in calls if call.violation]
    require(not violations, f"changes outside of the output folder: {violations}")


class Scenario:
    """A command and what it must leave. All of its files are in the folder `box`, its output is `box/out`."""

    environment = {}
    # Texts of errors of the continuing command that are legitimate if the result is complete.
    complete_before = None

    def __init__(self, program):
        self.program, self.box, self.inputs = program, program.box, program.work / "inputs"
        self.out = self.box / "out"
        self.seen = {}

    def prepare(self):
        """Makes the inputs, and returns the content of the box before the command."""
        return dict(FOREIGN)

    def comparable(self, tree):
        """What of the finished box must equal the undisturbed run."""
        return {path: content for path, content in tree.items() if not LEFT.search(path)}

    def complete(self, tree):
        """Checks what is published in a box and returns how much of it there is: a list of numbers."""
        return [0]


class Train(Scenario):
    """A training with checkpoints, validation and `best/`."""

    def prepare(self):
        data = self.inputs / "data"
        if not data.exists():
            self.program.plain("data", "phantom", data, "--count", 8, "--image-size", 64, "--seed", 3)
        sets = ["model.image_size=64", "train.micro_batch=2", "train.checkpoint_every_steps=2", "train.max_steps=4",
                "data.max_val_rows=2", "train.epochs=100"]
        arguments = ["train", "--preset", "tiny", "--no-plan", "--data-root", data, "--out", self.out]
        self.command = arguments + [part for each in sets for part in ("--set", each)]
        self.again = [*self.command, "--resume"]
        return FOREIGN | {"out": None, "out/notes.txt": b"notes", "out/last.previous": None,
                          "out/last.previous/thesis.txt": b"thesis"}

    def comparable(self, tree):
        kept = super().comparable(tree)
        for path in list(kept):
            if "events.out.tfevents" in path:
                del kept[path]
            elif path.endswith(".prsmed.lock"):
                kept[path] = b""
            elif path.endswith("report.html"):
                # it has times and rates
                kept[path] = str(kept[path].rstrip().endswith(b"</html>"))
            elif path.endswith("metrics.jsonl"):
                lines = [json.loads(line) for line in kept[path].splitlines()]
                kept[path] = str([(line["kind"], line["step"], line.get("losses"), line.get("values")) for line in lines])
        return kept

    def complete(self, tree):
        return [self.steps(tree, name) for name in ("last", "best")]

    def steps(self, tree, name):
        """Steps of the checkpoint that a reader of `name` gets, whose files are checked."""
        folder = next((f for f in (f"out/{name}", f"out/.{name}.prsmed-previous") if f in tree), None)
        if folder is None:
            return 0
        sums = tree.get(f"{folder}/checksums.json")
        require(sums, f"`{folder}` has no checksums")
        for file, sum in json.loads(sums)["files"].items():
            content = tree.get(f"{folder}/{file}")
            require(content is not None and sha256(content) == sum["sha256"],
                    f"`{folder}/{file}` is missing or damaged")
        return json.loads(tree[f"{folder}/trainer.json"])["step"]


def sha256(content):
    return (content if isinstance(content, Content) else Content(content)).sum().hex()


class Generate(Scenario):
    """Generation of image+mask pairs."""

    def prepare(self):
        data = self.inputs / "data"
        if not data.exists():
            self.program.plain("data", "phantom", data, "--count", 8, "--image-size", 64, "--seed", 3)
        sets = ["augment.image_size=64", "augment.steps=2"]
        arguments = ["augment", "generate", "--preset", "tiny", "--data-root", data, "--out", self.out, "--limit", 3]
        self.command = self.again = arguments + [part for each in sets for part in ("--set", each)]
        return FOREIGN | {"out": None, "out/notes.txt": b"notes"}

    def comparable(self, tree):
        return super().comparable(tree) | {"out/.prsmed.lock": b""}

    def complete(self, tree):
        lines = tree.get("out/manifest.jsonl", b"").split(b"\n")[:-1]
        complete = 0
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                # only the line that was written last may be damaged, and the next run removes it
                require(line is lines[-1], "a line of the journal is damaged")
                continue
            below = f"out/{record['class']}/train_"
            names = [f"{below}images/{record['name']}.png", f"{below}masks/{record['name']}.png"]
            if not record["accepted"]:
                below = f"out/rejected/{record['class']}/{record['name']}"
                names = [f"{below}.png", f"{below}_mask.png"]
            for name in names:
                require(tree.get(name, b"").endswith(b"IEND\xaeB`\x82"), f"`{name}` is in the journal and not complete")
            complete += 1
        return [complete]


class Get(Scenario):
    """Downloads from a hub on loopback."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    files = {"config.json": b'{"a": 1}', "README.md": b"text\n" * 20, "sub/model.safetensors": bytes(range(256)) * 600}

    def prepare(self):
        self.command = self.again = ["hub", "get", "hub:owner/name"]
        self.out = self.box / "hf"
        self.environment = serve(hub_of(self.files, self.commit))
        return dict(FOREIGN)

    def complete(self, tree):
        blobs = [path for path in tree if "/blobs/" in path and not path.endswith(".incomplete")]
        for path in blobs:
            require(path.rsplit("/", 1)[1] == etag_of(tree[path]), f"`{path}` has another content")
        for path in (path for path in tree if "/refs/" in path and not LEFT.search(path)):
            require(tree[path] in (None, self.commit.encode()), f"`{path}` is not a commit")
        return [len(blobs)]


def etag_of(content):
    """SHA-256 of a large file; Git's SHA-1 of a small one, as the hub gives it."""
    if len(content) > 100_000:
        return sha256(content)
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def serve(handler):
    """Starts a server on loopback; returns the environment of a command that uses it as hub."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}


def hub_of(files, commit, answer={}):
    """Request handler of a hub with the repository `owner/name`. `answer` replaces its headers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, status, headers, body):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            path = self.path.split("?")[0]
            if path.startswith("/api/models/owner/name"):
                siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
                body = json.dumps({"id": "owner/name", "sha": commit, "siblings": siblings}).encode()
                return self.answer(200, {"Content-Type": "application/json"}, body)
            name = urllib.parse.unquote(path).removeprefix(f"/owner/name/resolve/{commit}/")
            if name not in files:
                return self.answer(404, {}, b"")
            body = files[name]
            etag, header_commit = answer.get("etag", etag_of(body)), answer.get("header_commit", commit)
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": header_commit, "Accept-Ranges": "bytes"}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if not wanted:
                return self.answer(200, headers, body)
            first, last = int(wanted[1]), min(int(wanted[2] or len(body) - 1), len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            return self.answer(206 if first < len(body) else 416, headers, body[first : last + 1])

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    return Handler


class Merge(Scenario):
    """A merge of adapters into the base."""

    complete_before = "` exists"

    def prepare(self):
        run = self.inputs / "run"
        if not run.exists():
            train = Train(self.program)
            write_tree(self.box, train.prepare())
            self.program.plain(*[run if part == train.out else part for part in train.command])
        self.command = self.again = ["merge", run, self.out]
        return dict(FOREIGN)

    def complete(self, tree):
        inside = {path: content for path, content in tree.items() if path.startswith("out/")}
        if inside and "merged" in self.seen:
            require(inside == self.seen["merged"], "`out` exists and is not complete")
        return [int("out" in tree)]


SCENARIOS = {"train": Train, "generate": Generate, "hub": Get, "merge": Merge}
