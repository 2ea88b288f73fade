"""The benchmark of images on a GPU: what figures say, what a page shows, and a dry run on a simulated one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import gpu_images as images
from benchmarks.gpu_image_report import ON_DEVICE, GpuImageReport, GpuImageRow
from benchmarks.image_load import Figures, ImageRequests
from gpubridge.cuda_ipc import DeviceInfo
from gpubridge.errors import BridgeError
from tests.host_kernel.simulated import imaging_environment
from tests.photos import PHOTOS
from tests.simcuda.machine import lawful_machine, running_machine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def report(*rows):
    return GpuImageReport(
        started="2026-01-01T00:00:00+00:00",
        commit="abc",
        device="Some GPU",
        versions={"gpubridge": "1.0"},
        machine={"cpu": "A CPU", "cores": 2, "kernel": "6.1"},
        seconds=3.0,
        rows=rows,
    )


def row(batch, served, limit=1000.0):
    return GpuImageRow(batch, limit, None, {ON_DEVICE: Figures(served, 1500.0, 2500.0, 10.0)})


def test_the_rest_of_the_limit_counts_from_32_on():
    found = report(row(8, 100.0), row(32, 899.0), row(128, 900.0))
    assert found.complaints == ["batch 32: 0.90 of the limit, expected 0.9"]
    assert found.rows[2].share == 0.9


def test_missing_figures_are_reported():
    missing = GpuImageRow(32, 1000.0, notes=["pixels over HTTP: it failed"])
    assert report(missing).complaints == ["batch 32: pixels over HTTP: it failed"]
    assert missing.share is None


def test_the_page_and_the_document_have_the_figures():
    found = report(row(32, 950.0))
    assert "| 32 | 1,000 | – | 950 / 1.5 / 2.5 | – | – | – | 0.95 |" in found.page()
    (entry,) = json.loads(json.dumps(found.as_document()))["rows"]
    assert entry["served"][ON_DEVICE]["p99_us"] == 2500.0


def test_pixels_may_be_wanted_in_a_region():
    (body, _) = ImageRequests.of([b"first", b"second"], 1, "there").bodies
    assert b'{"shared_memory_region": "there", "shared_memory_byte_size": 602112}' in body


def bench(environment, folder, *flags):
    """Run it with three small photographs on one connection: a simulated GPU takes long for each image."""
    photos = folder / "photos"
    photos.mkdir()
    # One in colours, one in grey, one that is to be turned.
    for photo in PHOTOS[:3]:
        image = Image.open(photo)
        image.thumbnail((160, 160))
        image.save(photos / photo.name, exif=image.getexif())
    code = (
        "import pathlib, sys, benchmarks.gpu_images as images\n"
        f"images._PHOTOS, images._CONNECTIONS = pathlib.Path({str(photos)!r}), 1\n"
        "sys.exit(images.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--batches=1", "--seconds=0.01"]
    return subprocess.run(
        [*command, *flags, "--output", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_what_was_measured_before_a_failure_is_written(tmp_path, monkeypatch):
    def serve(_, __, rows, *___):
        rows[0].served[ON_DEVICE] = Figures(9.0, 1.0, 2.0, 3.0)
        yield
        raise BridgeError("the next server does not start")

    device = DeviceInfo(0, "GPU-1", "Some GPU", 1 << 30)
    for name, value in (
        ("first_device", (device, "13.0")),
        ("bare_rate", 10.0),
        ("_torchvision", None),
    ):
        monkeypatch.setattr(images, name, lambda *_, value=value: value)
    monkeypatch.setattr(images, "_serve", serve)
    assert images.main(["--batches=1", "--output", str(tmp_path)]) == 2
    (row,) = json.loads((tmp_path / "gpu_images_some_gpu.json").read_text())["rows"]
    assert (row["limit_images_per_second"], row["share_of_limit"]) == (10.0, 0.9)


@pytest.mark.nightly
def test_a_dry_run_on_the_simulated_driver(tmp_path):
    """The pixels that are served are compared with those of the limit; figures mean nothing."""
    with lawful_machine() as machine:
        machine.set_devices(1)
        machine.set_memory(4 << 30)
        environment = {**machine.environment(), **imaging_environment(tmp_path / "cache")}
        done = bench(environment, tmp_path)
    (page,) = tmp_path.glob("gpu_images_simulated*.json")
    document = json.loads(page.read_text())
    (entry,) = document["rows"]
    assert entry["limit_images_per_second"] > 0, done.stderr
    assert len(entry["served"]) == 4
    assert entry["torchvision_images_per_second"] is None
    assert document["complaints"] == []


def test_rows_without_time_are_reported(tmp_path):
    with lawful_machine() as machine:
        machine.set_devices(1)
        machine.set_memory(4 << 30)
        environment = {**machine.environment(), **imaging_environment(tmp_path / "cache")}
        done = bench(environment, tmp_path, "--budget=0")
    assert done.returncode == 1, done.stderr
    (page,) = tmp_path.glob("gpu_images_simulated*.json")
    document = json.loads(page.read_text())
    assert len(document["complaints"]) == 5
    assert "batch 1: the limit: no time left" in document["complaints"]


def test_without_a_kernel_there_is_no_limit(tmp_path):
    """The backend itself would go on, on the CPU."""
    with running_machine() as machine:
        machine.set_devices(1)
        machine.set_memory(4 << 30)
        without = imaging_environment(tmp_path / "cache", kernel=False)
        done = bench({**machine.environment(), **without}, tmp_path)
    assert done.returncode == 2
    assert "the limit needs nvImageCodec and NVRTC" in done.stderr
    assert list(tmp_path.glob("*.json")) == []


def test_without_a_gpu_the_exit_status_says_so(tmp_path):
    with running_machine() as machine:
        machine.set_devices(0)
        done = bench(dict(machine.environment()), tmp_path)
    assert done.returncode == 2
    assert "no GPU can be used" in done.stderr
