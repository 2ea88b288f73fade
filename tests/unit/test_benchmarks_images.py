"""The benchmark of images: what figures say, what a page shows, what is sent, and a dry run."""

import json
from pathlib import Path

import pytest

from benchmarks.image_load import Figures, ImageRequests
from benchmarks.image_models import write_repository
from benchmarks.image_rows import BACKEND, OURS_PILLOW, TRITON, ImageReport, ImageRow
from benchmarks.images import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def row(backend, triton, *, instances=1, batch=8, connections=8):
    sides = {BACKEND: backend, OURS_PILLOW: [100.0] * len(backend), TRITON: triton}
    rounds = {
        side: [Figures(images, 2000.0, 9000.0, 3000.0) for images in taken]
        for side, taken in sides.items()
        if taken
    }
    return ImageRow(instances, batch, connections, rounds)


def report(*rows, scaling=()):
    return ImageReport(
        started="2026-01-01T00:00:00+00:00",
        commit="abc",
        machine={
            "cpu": "A CPU", "cores": 2, "memory_gib": 8.0, "kernel": "6.1", "load_average": 0.1,
        },
        versions={"gpubridge": "1.0"},
        settings={"seconds": 3.0, "rounds": 3},
        steps={"decode": 1.5, "resize": 1.6, "normalise": 0.5},
        rows=rows,
        scaling=list(scaling),
    )  # fmt: skip


def test_a_ratio_is_the_median_of_the_rounds_and_needs_both_sides():
    found = row([200.0, 400.0, 300.0], [100.0, 100.0, 100.0])
    assert found.ratio(BACKEND, TRITON) == 3.0
    assert row([200.0], []).ratio(BACKEND, TRITON) is None
    assert report(row([200.0], [])).complaints == []


def test_less_than_the_bars_is_told():
    found = report(row([149.0], [100.0], instances=2, batch=4), scaling=[1.7, 1.9, 1.75])
    assert found.complaints == [
        "2 instances, batch 4: 1.49 times Triton's images/s, expected 1.5",
        "two instances: 1.75 times one instance's images/s, expected 1.8",
    ]
    assert report(row([150.0], [100.0]), scaling=[1.8]).complaints == []
    assert report(row([140.0], [100.0], connections=1)).complaints == []


def test_the_page_and_the_document_have_the_figures():
    found = report(row([300.0], [100.0]), scaling=[1.9])
    cell = "300 / 2.0 / 9.0 / 3.0"
    assert f"| 1 | 8 | 8 | {cell} | 100 / 2.0" in found.page()
    assert "| 3.00 | 3.00 |" in found.page()
    assert "round by round: 1.90." in found.page()
    (entry,) = json.loads(json.dumps(found.as_document()))["rows"]
    assert entry["times_triton"] == 3.0
    assert entry["rounds"][BACKEND][0]["server_cpu_us_per_image"] == 3000.0


def test_every_request_has_its_own_photographs_and_all_are_sent():
    requests = ImageRequests.of([b"first", b"second", b"third"], 2)
    assert len(requests.bodies) == 3
    bodies = [body.partition(b"\r\n\r\n")[2] for body in requests.bodies]
    assert bodies[2].endswith(b"\x05\0\0\0third\x05\0\0\0first")
    for body in requests.bodies:
        head, _, sent = body.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(sent)}".encode() in head
        assert b'"shape": [2, 1]' in sent


def test_both_makes_have_the_same_tensors(tmp_path):
    texts = [
        (write_repository(tmp_path, 2, make=make) / "images" / "config.pbtxt").read_text()
        for make in ("pillow", "backend")
    ]
    python, backend = (text.split("parameters")[0] for text in texts)
    assert python.replace('"python"', '"image_preproc"') == backend
    assert "count: 2" in backend
    assert (tmp_path / "images" / "1").is_dir()
    assert not (tmp_path / "images" / "1" / "model.py").exists()


@pytest.mark.nightly
@pytest.mark.extra
def test_a_dry_run_without_a_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("GPUBRIDGE_PEER", raising=False)
    pytest.importorskip("matplotlib")
    code = main(
        ["--output", str(tmp_path), "--batches=2", "--instances=1", "--seconds=0.2", "--rounds=1"]
    )
    document = json.loads((tmp_path / "images.json").read_text())
    alone, entry = document["rows"]
    assert (alone["batch"], alone["connections"]) == (1, 1)
    assert (entry["batch"], entry["connections"]) == (2, 4)
    assert set(entry["rounds"]) == {BACKEND, OURS_PILLOW}
    assert entry["rounds"][BACKEND][0]["images_per_second"] > 0
    assert entry["times_triton"] is None
    assert len(document["two_instances_over_one"]) == 1
    assert code == bool(document["complaints"])
    assert "| 1 | 2 | 4 | " in (tmp_path / "images.md").read_text()
    assert (tmp_path / "images.png").read_bytes().startswith(b"\x89PNG")
    assert "| – |" in capsys.readouterr().out


@pytest.mark.nightly
def test_pixels_that_are_not_pillow_s_end_the_run(tmp_path, monkeypatch, capsys):
    def other(folder, instances, *, make, **parameters):
        wrong = {} if make == "pillow" else {"RESIZE_SHORTER_SIDE": "300"}
        return write_repository(folder, instances, make=make, **parameters, **wrong)

    monkeypatch.delenv("GPUBRIDGE_PEER", raising=False)
    monkeypatch.setattr("benchmarks.images.write_repository", other)
    assert main(["--output", str(tmp_path), "--batches=1", "--instances=1", "--rounds=1"]) == 2
    assert "pixels differ from Pillow's by" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_pillow_model_runs_where_triton_runs_it():
    """It may not import anything of this repository."""
    text = (ROOT / "benchmarks" / "models" / "images" / "pillow" / "1" / "model.py").read_text()
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imports == [
        "import io",
        "import numpy as np",
        "import triton_python_backend_utils as pb_utils",
        "from PIL import Image, ImageOps",
    ]
