"""PRS-Med segmenter for 3D Slicer: sends the open volume to a running `prsmed serve` and shows the segmentation.

Installation: Edit > Application Settings > Modules > Additional module paths: add the folder of this file, restart
Slicer. The module is in the category Segmentation.

This file has not been run in Slicer itself. Its tests replace the calls of Slicer by a shim and use a real server.

Research software, not a medical device: do not use it for diagnosis or treatment.
"""

import http.client
import json
import os
import queue
import socket
import tempfile
import threading
import unittest
from urllib.parse import quote, urlsplit

import ctk
import qt
import slicer
from slicer.ScriptedLoadableModule import (
    ScriptedLoadableModule,
    ScriptedLoadableModuleLogic,
    ScriptedLoadableModuleTest,
    ScriptedLoadableModuleWidget,
)

NOTICE = "Research software, not a medical device."
# seconds without a byte of the server, which sends a sign of life every 5 s
SILENCE = 60
# seconds between two looks at the events of the server and of the user
INTERVAL = 0.05


class PrsmedSegmenter(ScriptedLoadableModule):
    """The entry in the list of modules."""

    def __init__(self, parent):
        ScriptedLoadableModule.__init__(self, parent)
        self.parent.title = "PRS-Med Segmenter"
        self.parent.categories = ["Segmentation"]
        self.parent.dependencies = []
        self.parent.contributors = ["The prsmed authors"]
        self.parent.helpText = (
            "Sends a volume to a running <code>prsmed serve</code>, asks a question about all slices, and loads the "
            "mask as a segmentation. " + NOTICE
        )
        self.parent.acknowledgementText = ""


class PrsmedError(Exception):
    """A failure with what to do about it."""

    def __init__(self, error, hint=""):
        super().__init__(f"{error}\n{hint}" if hint else error)
        self.error = error
        self.hint = hint


class PrsmedCancelled(Exception):
    """The user cancelled the question."""


class PrsmedClient:
    """Requests to a server. `cancel` may be called from another thread; it ends the running request."""

    def __init__(self, address, token=""):
        url = urlsplit(address if "//" in address else "http://" + address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise PrsmedError(f"`{address}` is not an address", "use for example http://127.0.0.1:8080")
        self.url = url
        self.token = token
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._socket = None

    def cancel(self):
        self.cancelled.set()
        with self._lock:
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the connection has ended already

    def upload(self, content):
        """Sends the content of a file; the image as the server describes it."""
        with self._response("POST", "/api/images", content, "application/octet-stream") as response:
            return json.loads(response.read())

    def ask(self, image, question, on_event):
        """Asks a question. `on_event(name, data)` receives all events; returns the result."""
        path = f"/api/images/{image}/questions"
        with self._response("POST", path, json.dumps(question).encode(), "application/json") as response:
            for name, data in events(response):
                if name == "error":
                    raise PrsmedError(data.get("error", "the server failed"), data.get("hint", ""))
                on_event(name, data)
                if name == "result":
                    return data
        raise PrsmedError("the connection ended before the result", "check that `prsmed serve` runs, then try again")

    def mask(self, image, question):
        """The mask of a question as a compressed NIfTI file."""
        with self._response("GET", f"/api/images/{image}/mask.nii.gz?question={quote(question, safe='')}") as response:
            return response.read()

    def remove(self, image):
        """Removes an image from the memory of the server, also after `cancel`."""
        last = PrsmedClient(self.url.geturl(), self.token)
        with last._response("DELETE", f"/api/images/{image}"):
            pass

    def _response(self, method, path, body=None, content_type=None):
        return _Response(self, method, path, body, content_type)

    def _connect(self):
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.url.hostname, self.url.port, timeout=SILENCE)
        connection.connect()
        with self._lock:
            self._socket = connection.sock
        if self.cancelled.is_set():
            connection.close()
            raise PrsmedCancelled()
        return connection


class _Response:
    """A response that succeeded. Its connection ends with the `with` block."""

    def __init__(self, client, method, path, body, content_type):
        self.client = client
        self.request = (method, path, body, content_type)
        self.connection = None

    def __enter__(self):
        method, path, body, content_type = self.request
        headers = {"Content-Type": content_type} if content_type else {}
        if self.client.token:
            headers["Authorization"] = f"Bearer {self.client.token}"
        try:
            self.connection = self.client._connect()
            self.connection.request(method, self.client.url.path.rstrip("/") + path, body, headers)
            response = self.connection.getresponse()
            if response.status >= 400:
                raise _failure(response)
            return response
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind, error, trace):
        if self.connection is not None:
            self.connection.close()
        if isinstance(error, (OSError, http.client.HTTPException)):
            if self.client.cancelled.is_set():
                raise PrsmedCancelled() from error
            hint = "check the address, and that `prsmed serve` runs"
            raise PrsmedError(f"the server does not answer: {error}", hint) from error


def _failure(response):
    try:
        content = json.loads(response.read())
        return PrsmedError(content["error"], content["hint"])
    except (ValueError, KeyError, TypeError):
        return PrsmedError(f"the server answered with status {response.status}", "is it `prsmed serve`?")


def events(lines):
    """Name and data of server-sent events."""
    name, data = "message", ""
    for line in lines:
        line = line.decode("utf-8").rstrip("\r\n")
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data += line[5:].strip()
        elif not line and data:
            yield name, json.loads(data)
            name, data = "message", ""


class PrsmedJob:
    """Upload, question and download in a thread, so that the window of Slicer stays alive."""

    def __init__(self, client, content, question):
        self.client = client
        self.events = queue.Queue()
        self.thread = threading.Thread(target=self._run, args=(content, question), daemon=True)
        self.thread.start()

    def _run(self, content, question):
        image = None
        try:
            self.events.put(("uploading", {}))
            image = self.client.upload(content)["id"]
            result = self.client.ask(image, question, lambda name, data: self.events.put((name, data)))
            mask = self.client.mask(image, question["question"])
            self.events.put(("done", {"result": result, "mask": mask}))
        except BaseException as error:
            if self.client.cancelled.is_set():
                error = PrsmedCancelled()
            self.events.put(("failed", {"error": error}))
        finally:
            if image is not None:
                try:
                    self.client.remove(image)
                except Exception:
                    pass  # the server removes images itself after a while


class PrsmedSegmenterLogic(ScriptedLoadableModuleLogic):
    """Everything but the widgets. It can be used from Slicer's Python console too."""

    def __init__(self):
        ScriptedLoadableModuleLogic.__init__(self)
        self.client = None

    def segment(self, volume_node, address, question, token="", options=None, window=None, on_progress=None):
        """Asks a question about all slices of a volume.

        `options` are those of `volume` in the server's openapi.json: axis, slices, every, cleanup. `on_progress(text,
        done, total)` is called while the server works; `total` is 0 as long as it is not known.

        Returns the segmentation node, or `None` if nothing was found, and the result of the server.
        """
        if volume_node is None:
            raise PrsmedError("no volume is chosen", "load a volume first")
        if not question.strip():
            raise PrsmedError("the question is empty", "ask for example: Where is the lesion?")
        on_progress = on_progress or (lambda text, done, total: None)
        self.client = PrsmedClient(address, token)
        asked = {"question": question.strip(), "volume": options or {}}
        if window:
            asked["window"] = window
        try:
            with tempfile.TemporaryDirectory() as folder:
                on_progress("saving the volume", 0, 0)
                job = PrsmedJob(self.client, self._content(volume_node, folder), asked)
                done = self._wait(job, on_progress)
                if done["result"]["volume_ml"] <= 0:
                    return None, done["result"]
                on_progress("loading the segmentation", 0, 0)
                path = os.path.join(folder, "mask.nii.gz")
                with open(path, "wb") as file:
                    file.write(done["mask"])
                return self._load(path, volume_node, asked["question"]), done["result"]
        finally:
            self.client = None

    def cancel(self):
        """Ends the running question. The server stops within one slice."""
        if self.client is not None:
            self.client.cancel()

    def _content(self, volume_node, folder):
        path = os.path.join(folder, "volume.nii.gz")
        # voxels and geometry, without the DICOM header
        if not slicer.util.exportNode(volume_node, path):
            raise PrsmedError("the volume cannot be saved as NIfTI", "choose a scalar volume")
        with open(path, "rb") as file:
            return file.read()

    def _wait(self, job, on_progress):
        """Passes events on, and lets Slicer handle its own, until the job ends."""
        while True:
            slicer.app.processEvents()
            try:
                name, data = job.events.get(timeout=INTERVAL)
            except queue.Empty:
                continue
            if name == "failed":
                raise data["error"]
            if name == "done":
                return data
            if name == "uploading":
                on_progress("sending the volume", 0, 0)
            elif name == "queued" and data["ahead"] > 0:
                on_progress(f"waiting: {data['ahead']} before this question", 0, 0)
            elif name == "progress":
                on_progress(f"{data['done']} of {data['total']} slices", data["done"], data["total"])

    def _load(self, path, volume_node, question):
        node = slicer.util.loadSegmentation(path)
        node.SetName(f"{volume_node.GetName()}: {question}")
        node.SetReferenceImageGeometryParameterFromVolumeNode(volume_node)
        # the file is in the coordinates of the volume, without the transform above it
        node.SetAndObserveTransformNodeID(volume_node.GetTransformNodeID())
        segmentation = node.GetSegmentation()
        if segmentation.GetNumberOfSegments() > 0:
            segmentation.GetNthSegment(0).SetName(question)
        node.CreateDefaultDisplayNodes()
        node.CreateClosedSurfaceRepresentation()
        return node


class PrsmedSegmenterWidget(ScriptedLoadableModuleWidget):
    """Address, token, volume, question, options, progress."""

    def setup(self):
        ScriptedLoadableModuleWidget.setup(self)
        self.logic = PrsmedSegmenterLogic()
        self.is_running = False
        self._setup_server()
        self._setup_question()
        self._setup_run()
        self.layout.addStretch(1)

    def cleanup(self):
        self.logic.cancel()

    def _section(self, title):
        box = ctk.ctkCollapsibleButton()
        box.text = title
        self.layout.addWidget(box)
        return qt.QFormLayout(box)

    def _setup_server(self):
        form = self._section("Server")
        self.address = qt.QLineEdit()
        self.address.text = qt.QSettings().value("PrsmedSegmenter/address", "http://127.0.0.1:8080")
        form.addRow("Address:", self.address)
        # not kept: it is a secret
        self.token = qt.QLineEdit()
        self.token.echoMode = qt.QLineEdit.Password
        self.token.toolTip = "Needed if the server was started with --token"
        form.addRow("Token:", self.token)

    def _setup_question(self):
        form = self._section("Question about all slices")
        self.volume = slicer.qMRMLNodeComboBox()
        self.volume.nodeTypes = ["vtkMRMLScalarVolumeNode"]
        self.volume.addEnabled = False
        self.volume.removeEnabled = False
        self.volume.noneEnabled = False
        self.volume.setMRMLScene(slicer.mrmlScene)
        form.addRow("Volume:", self.volume)
        self.question = qt.QLineEdit()
        self.question.placeholderText = "Where is the lesion?"
        form.addRow("Question:", self.question)
        self.axis = qt.QComboBox()
        self.axis.addItems(["as the model", "axial", "coronal", "sagittal"])
        form.addRow("Direction of the slices:", self.axis)
        self.window = qt.QLineEdit()
        self.window.placeholderText = "as the model"
        self.window.toolTip = "Name (soft-tissue, lung, brain, bone), WIDTH/LEVEL, LOW..HIGH, or percentiles p0.5-p99.5"
        form.addRow("Intensity window:", self.window)
        self.every = qt.QSpinBox()
        self.every.minimum = 1
        self.every.maximum = 1000
        form.addRow("Every N-th slice:", self.every)
        self.gaps = qt.QSpinBox()
        self.gaps.maximum = 1000
        form.addRow("Fill gaps of up to N slices:", self.gaps)
        self.min_volume = qt.QDoubleSpinBox()
        self.min_volume.maximum = 1e6
        self.min_volume.suffix = " ml"
        form.addRow("Remove parts below:", self.min_volume)
        self.largest = qt.QCheckBox()
        form.addRow("Largest part only:", self.largest)

    def _setup_run(self):
        self.run_button = qt.QPushButton("Segment")
        self.run_button.clicked.connect(self.on_run)
        self.cancel_button = qt.QPushButton("Cancel")
        self.cancel_button.enabled = False
        self.cancel_button.clicked.connect(self.on_cancel)
        self.progress = qt.QProgressBar()
        self.progress.visible = False
        self.status = qt.QLabel(NOTICE)
        self.status.wordWrap = True
        for widget in (self.run_button, self.cancel_button, self.progress, self.status):
            self.layout.addWidget(widget)

    def options(self):
        """The options of the server from the widgets."""
        options = {
            "every": int(self.every.value),
            "cleanup": {
                "fill_gaps": int(self.gaps.value),
                "min_volume_ml": float(self.min_volume.value),
                "largest_component": bool(self.largest.checked),
            },
        }
        if self.axis.currentText != "as the model":
            options["axis"] = self.axis.currentText
        return options

    def on_run(self):
        # the button stays responsive while a question runs
        if self.is_running:
            return
        self._set_running(True)
        qt.QSettings().setValue("PrsmedSegmenter/address", self.address.text)
        try:
            node, result = self.logic.segment(
                self.volume.currentNode(),
                self.address.text,
                self.question.text,
                token=self.token.text,
                options=self.options(),
                window=self.window.text.strip() or None,
                on_progress=self.on_progress,
            )
            self.status.text = summary(node is not None, result)
        except PrsmedCancelled:
            self.status.text = "Cancelled."
        except PrsmedError as error:
            self.status.text = ""
            slicer.util.errorDisplay(str(error))
        finally:
            self._set_running(False)

    def on_cancel(self):
        self.logic.cancel()

    def on_progress(self, text, done, total):
        self.status.text = text
        # a maximum of 0 is a bar without an end
        self.progress.maximum = total
        self.progress.value = done

    def _set_running(self, is_running):
        self.is_running = is_running
        self.run_button.enabled = not is_running
        self.cancel_button.enabled = is_running
        self.progress.visible = is_running


def summary(is_found, result):
    """One sentence about a result."""
    slices = f"{result['num_found']} of {result['num_slices']} slices"
    if not is_found:
        return f"Nothing to show: the mask is empty. The target was found in {slices}. {NOTICE}"
    return f"{result['volume_ml']:.2f} ml, found in {slices}. {NOTICE}"


class PrsmedSegmenterTest(ScriptedLoadableModuleTest):
    """Tests that need no server, for "Reload and Test" in Slicer's developer mode."""

    def runTest(self):
        case = unittest.TestCase()
        lines = [b": alive\n", b"event: progress\n", b'data: {"done": 1, "total": 2}\n', b"\n"]
        case.assertEqual(list(events(lines)), [("progress", {"done": 1, "total": 2})])
        case.assertEqual(PrsmedClient("127.0.0.1:8080").url.port, 8080)
        with case.assertRaises(PrsmedError):
            PrsmedClient("file:///etc/passwd")
        result = {"num_found": 1, "num_slices": 3, "volume_ml": 2.0}
        case.assertTrue(summary(True, result).startswith("2.00 ml, found in 1 of 3 slices"))
