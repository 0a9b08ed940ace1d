"""Drives `scripts/slicer/PrsmedSegmenter.py` against a running server. The calls of Slicer are replaced by a shim.

    slicer_module.py ADDRESS TOKEN VOLUME LONG_VOLUME

VOLUME and LONG_VOLUME are NIfTI files; the second has so many slices that it can be cancelled.
"""

import importlib.util
import shutil
import sys
import time
import types
import urllib.request
from pathlib import Path
from unittest.mock import MagicMock

import nibabel
import numpy


class VolumeNode:
    """A volume that Slicer has loaded from a file."""

    def __init__(self, path):
        self.path = path

    def GetName(self):
        return "scan"

    def GetTransformNodeID(self):
        return "transform-1"


class SegmentationNode:
    """What Slicer makes of a label map."""

    def __init__(self, path):
        image = nibabel.load(path)
        self.values = numpy.asarray(image.dataobj)
        self.affine = image.affine
        self.segments = [MagicMock() for _ in set(self.values.flat) - {0}]
        self.segmentation = MagicMock()
        self.segmentation.GetNumberOfSegments.side_effect = lambda: len(self.segments)
        self.segmentation.GetNthSegment.side_effect = lambda index: self.segments[index]
        self.calls = {}

    def GetSegmentation(self):
        return self.segmentation

    def __getattr__(self, name):
        if name[0].isupper():
            return lambda *args: self.calls.__setitem__(name, args)
        raise AttributeError(name)


class Base:
    """Base classes of a scripted module."""

    def __init__(self, parent=None):
        self.parent = parent
        self.layout = MagicMock()

    def setup(self):
        pass


def module():
    """The module, imported with the shim."""
    slicer = types.ModuleType("slicer")
    slicer.util = MagicMock()
    slicer.util.exportNode.side_effect = lambda node, path: bool(shutil.copy(node.path, path))
    slicer.util.loadSegmentation.side_effect = SegmentationNode
    slicer.app = MagicMock()
    slicer.mrmlScene = MagicMock()
    slicer.qMRMLNodeComboBox = MagicMock
    base = types.ModuleType("slicer.ScriptedLoadableModule")
    for name in ("", "Logic", "Test", "Widget"):
        setattr(base, "ScriptedLoadableModule" + name, type("ScriptedLoadableModule" + name, (Base,), {}))
    qt = MagicMock()
    for name in ("QLineEdit", "QComboBox", "QSpinBox", "QDoubleSpinBox", "QCheckBox", "QPushButton", "QProgressBar", "QLabel"):
        # each call makes a widget of its own
        setattr(qt, name, MagicMock(side_effect=lambda *args: MagicMock()))
    sys.modules.update({"slicer": slicer, "slicer.ScriptedLoadableModule": base, "qt": qt, "ctk": MagicMock()})
    path = Path(__file__).resolve().parents[2] / "scripts/slicer/PrsmedSegmenter.py"
    spec = importlib.util.spec_from_file_location("PrsmedSegmenter", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded, slicer


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def metric(address, token, name):
    request = urllib.request.Request(f"{address}metrics", headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    lines = opener.open(request).read().decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


def no_image_stays(address, token):
    """The module removes a volume beside the answer, so it may be there for a moment."""
    begin = time.monotonic()
    while metric(address, token, "prsmed_images") != 0:
        assert time.monotonic() - begin < 5, "the volume is removed from the server"
        time.sleep(0.01)


def check_segmentation(loaded, address, token, volume):
    seen = []
    node, result = loaded.PrsmedSegmenterLogic().segment(
        VolumeNode(volume),
        address,
        " Where is the lesion? ",
        token=token,
        options={"axis": "axial", "cleanup": {"largest_component": True}},
        window="p0-p100",
        on_progress=lambda *progress: seen.append(progress),
    )
    source = nibabel.load(volume)
    assert node.values.shape == source.shape and numpy.allclose(node.affine, source.affine, atol=1e-5)
    assert set(node.values.flat) == {0, 1}, set(node.values.flat)
    voxel_ml = abs(numpy.linalg.det(source.affine[:3, :3])) / 1000
    assert abs(node.values.sum() * voxel_ml - result["volume_ml"]) < 1e-6, result
    assert result["settings"]["window"] == "p0-p100" and result["settings"]["cleanup"]["largest_component"]
    total = result["num_slices"]
    counts = [done for text, done, of in seen if of == total]
    assert counts == list(range(total + 1)), seen
    assert node.calls["SetName"] == ("scan: Where is the lesion?",)
    assert node.calls["SetAndObserveTransformNodeID"] == ("transform-1",)
    node.segments[0].SetName.assert_called_once_with("Where is the lesion?")


def check_cancel(loaded, address, token, volume):
    logic = loaded.PrsmedSegmenterLogic()

    def on_progress(text, done, total):
        if done == 2:
            logic.cancel()

    ask = lambda: logic.segment(VolumeNode(volume), address, "Where?", token=token, on_progress=on_progress)
    fails(loaded.PrsmedCancelled, ask)
    begin = time.monotonic()
    while metric(address, token, 'prsmed_questions_total{outcome="left"}') != 1:
        assert time.monotonic() - begin < 1, "the server stops within a second"
        time.sleep(0.01)
    no_image_stays(address, token)


def check_errors(loaded, slicer, address, token, volume):
    logic = loaded.PrsmedSegmenterLogic()
    ask = lambda **more: logic.segment(**{"volume_node": VolumeNode(volume), "address": address, "question": "Where?", "token": token, **more})
    error = fails(loaded.PrsmedError, lambda: ask(token="wrong-token-wrong-token"))
    assert error.error == "the token is wrong" and "Authorization" in error.hint, error
    error = fails(loaded.PrsmedError, lambda: ask(options={"axis": "diagonal"}))
    assert "unknown variant `diagonal`" in error.error, error
    error = fails(loaded.PrsmedError, lambda: ask(window="file"))
    assert "the file has none" in error.error, error
    assert "does not answer" in fails(loaded.PrsmedError, lambda: ask(address="127.0.0.1:1")).error
    assert "not an address" in fails(loaded.PrsmedError, lambda: ask(address="ftp://host")).error
    assert "empty" in fails(loaded.PrsmedError, lambda: ask(question=" ")).error
    assert "no volume" in fails(loaded.PrsmedError, lambda: ask(volume_node=None)).error
    slicer.util.exportNode.side_effect = lambda node, path: False
    assert "cannot be saved" in fails(loaded.PrsmedError, ask).error
    slicer.util.exportNode.side_effect = lambda node, path: bool(shutil.copy(node.path, path))


def check_widget(loaded, slicer, address, token, volume):
    widget = loaded.PrsmedSegmenterWidget()
    widget.setup()
    widget.volume.currentNode.return_value = VolumeNode(volume)
    widget.address.text, widget.token.text, widget.question.text = address, token, "Where is the lesion?"
    widget.window.text, widget.axis.currentText = "", "coronal"
    widget.every.value, widget.gaps.value, widget.min_volume.value, widget.largest.checked = 2, 1, 0.0, False
    widget.on_run()
    assert "ml, found in" in widget.status.text or "Nothing to show" in widget.status.text, widget.status.text
    assert widget.run_button.enabled is True and widget.cancel_button.enabled is False
    slicer.util.errorDisplay.assert_not_called()
    widget.question.text = ""
    widget.on_run()
    (text,), _ = slicer.util.errorDisplay.call_args
    assert text.startswith("the question is empty\nask for example"), text
    widget.cleanup()


def main():
    address, token, volume, long_volume = sys.argv[1:]
    loaded, slicer = module()
    check_segmentation(loaded, address, token, volume)
    check_cancel(loaded, address, token, long_volume)
    check_errors(loaded, slicer, address, token, volume)
    check_widget(loaded, slicer, address, token, volume)
    loaded.PrsmedSegmenter(MagicMock())
    loaded.PrsmedSegmenterTest().runTest()
    no_image_stays(address, token)
    print("ok")


main()
