"""image_preproc on a simulated GPU: its kernel's own source, and doubles of nvImageCodec and NVRTC."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from gpubridge.backends.image_preproc.image_files import jpeg_is_whole
from tests.host_kernel.simulated import imaging_cache, imaging_environment
from tests.image_corpus import GOOD_FILES, HOSTILE_FILES
from tests.process.device_models import running_device_server
from tests.process.imaging import ask, expected_pixels, write_image_model
from tests.process.server import write_model
from tests.process.test_device_edges import HOST

TABLE = 112
"""Bytes that tell the kernel of an image."""
JPEGS = [
    file for name, file in GOOD_FILES.items() if name.startswith("jpeg") and "cmyk" not in name
]
BATCHING = "dynamic_batching { max_queue_delay_microseconds: 200000 }"
COMMENT = b"no GPU decodes this"
REFUSED = (
    GOOD_FILES["jpeg-444"][:2]
    + b"\xff\xfe"
    + (len(COMMENT) + 2).to_bytes(2, "big")
    + COMMENT
    + GOOD_FILES["jpeg-444"][2:]
)


class Served:
    """A server with models on a GPU, and a client of it."""

    def __init__(self, device_server, parameters):
        self.device_server = device_server
        self.machine = device_server.machine
        self.server = device_server.server
        self.parameters = parameters
        self.client = triton.InferenceServerClient(self.server.http_url, concurrency=4)

    def answer(self, files, model="images"):
        return ask(self.client, files, model)

    def check(self, files, model="images"):
        expected = expected_pixels(files, self.parameters[model])
        np.testing.assert_array_equal(self.answer(files, model), expected)


@pytest.fixture(scope="module")
def served(repository):
    parameters = {
        name: write_image_model(repository, name, kind="KIND_GPU", **settings)
        for name, settings in {
            "images": {"DTYPE": "FP32"},
            "chunked": {"DECODE_BYTES": 20000, "LAYOUT": "NHWC"},
            "on_cpu": {"DECODER": "pillow", "DTYPE": "FP16", "INTERPOLATION": "bicubic"},
            "patient": {"DEVICE_DECODE_MIN_BATCH": 3},
            "batched": {"more": BATCHING},
        }.items()
    }
    parameters["batched"].pop("more", None)
    with running_device_server(repository, environment=imaging_environment()) as running:
        found = Served(running, parameters)
        with found.client:
            yield found


# Servers of one model come first: the next one that is lent with the same flags is that of the others.


def check_one(repository, kind, *, answers=2, **options):
    """Serve a model on a machine; it is right, and its log is returned."""
    parameters = write_image_model(repository, kind=kind, DTYPE="FP32")
    with (
        running_device_server(repository, **options) as running,
        triton.InferenceServerClient(running.server.http_url) as client,
    ):
        for _ in range(answers):
            np.testing.assert_array_equal(ask(client, JPEGS), expected_pixels(JPEGS, parameters))
        return running.server.log()


@pytest.mark.parametrize(
    ("missing", "faults", "said"),
    [
        ("decoder", (), "decoding with .* on the CPU .*resizing on GPU 0"),
        ("kernel", (), "images are preprocessed on the CPU: (NVRTC does not compile|cuModuleLoad)"),
        (None, [("cuModuleLoadData", 200)], "preprocessed on the CPU: cuModuleLoadData failed"),
    ],
)
def test_a_missing_library_moves_work_to_the_cpu_with_one_warning(tmp_path, missing, faults, said):
    options = {} if missing is None else {missing: False}
    # A kernel that was kept would be used.
    environment = imaging_environment(tmp_path / "cache" if missing else None, **options)
    log = check_one(tmp_path / "models", "KIND_GPU", environment=environment, faults=faults)
    assert len(re.findall(said, log)) == 1


def test_a_compiled_kernel_is_kept_for_the_next_start_if_it_can_be(tmp_path):
    kernels = imaging_cache() / "gpubridge" / "kernels"
    shutil.rmtree(kernels, ignore_errors=True)
    for number in range(2):
        check_one(tmp_path / str(number), "KIND_GPU", environment=imaging_environment())
        (kept,) = kernels.iterdir()
        assert kept.read_bytes().startswith(b"gpubridge kernel 1\n")
    shutil.rmtree(kernels)
    kernels.write_text("no directory")
    try:
        log = check_one(tmp_path / "unkept", "KIND_GPU", environment=imaging_environment())
    finally:
        kernels.unlink()
    assert "resizing on GPU 0" in log


@pytest.mark.parametrize("devices", [0, 2])
def test_the_same_configuration_runs_with_gpus_and_without(tmp_path, devices):
    write_model(tmp_path, "host", HOST, config="instance_group [{ kind: KIND_AUTO }]")
    options = {"devices": devices, "environment": imaging_environment()}
    log = check_one(tmp_path, "KIND_AUTO", answers=4, **options)
    assert log.count("resizing on GPU") == devices
    assert all(f"resizing on GPU {device}" in log for device in range(devices))
    # A model that asks for no GPU is not told that there is none.
    assert "'host'" not in "".join(line for line in log.splitlines() if "no GPU is" in line)


def test_jpegs_are_decoded_and_resized_on_the_gpu(served):
    nbytes = len(JPEGS) * 3 * 24 * 32 * 4
    served.check(JPEGS)
    with served.device_server.doing(
        "images", h2d=(TABLE * len(JPEGS), 1), d2h=(nbytes, 1), waits=1
    ):
        served.check(JPEGS)
    assert "decoding with nvimagecodec (hardware, gpu, hybrid), resizing on GPU 0" in (
        served.server.log()
    )


def test_a_batch_is_one_launch(served):
    before = len(served.machine.calls("cuLaunchKernel"))
    served.check(JPEGS)
    assert len(served.machine.calls("cuLaunchKernel")) == before + 1


def test_the_cpu_decodes_files_that_the_gpu_cannot(served):
    files = list(GOOD_FILES.values())
    for part in (files[::2], files[1::2]):
        served.check([each for file in part for each in (file, JPEGS[0])])


def test_a_jpeg_that_the_gpu_refuses_is_decoded_on_the_cpu(served):
    assert jpeg_is_whole(REFUSED)
    served.check([JPEGS[1], REFUSED, JPEGS[2]])


@pytest.mark.parametrize("model", ["chunked", "on_cpu", "patient"])
def test_models_by_their_parameters(served, model):
    for files in (JPEGS, JPEGS[:2], list(GOOD_FILES.values())):
        served.check(files, model)


def test_pixels_take_bounded_memory(served):
    """Two images at a time fit into DECODE_BYTES; one always does."""
    before = len(served.machine.calls("cuLaunchKernel"))
    served.check(JPEGS, "chunked")
    assert len(served.machine.calls("cuLaunchKernel")) == before + -(-len(JPEGS) // 2)


def test_memory_of_pixels_is_kept_for_the_next_batch(served):
    kept = {call.arguments[2] for call in served.machine.calls("cuMemPoolSetAttribute")}
    assert kept == {128 << 20, 20000}


def test_nothing_stays_on_the_gpu(served):
    served.check(JPEGS * 2)
    used = served.machine.used(0)
    for _ in range(5):
        served.check(JPEGS * 2)
    assert served.machine.used(0) == used


@pytest.mark.parametrize("name", [name for name, (_, text) in HOSTILE_FILES.items() if text])
def test_a_hostile_file_gets_its_error_and_leaves_the_others_alone(served, name):
    hostile, message = HOSTILE_FILES[name]
    with pytest.raises(InferenceServerException, match=re.escape("IMAGE[1]: ")) as caught:
        served.answer([JPEGS[0], hostile])
    assert re.search(message, str(caught.value))
    served.check([JPEGS[0]])


def test_in_a_dynamic_batch_only_the_request_with_the_bad_image_fails(served):
    bad = JPEGS[3][:200]
    served.check(JPEGS[:1], "batched")
    groups = [JPEGS[:2], [JPEGS[2], bad], [REFUSED], [bad, GOOD_FILES["png-rgb"]], JPEGS[4:7]]

    def outcome(files):
        with triton.InferenceServerClient(served.server.http_url) as client:
            try:
                return ask(client, files, "batched")
            except InferenceServerException as error:
                return str(error)

    with ThreadPoolExecutor(len(groups)) as pool:
        answers = list(pool.map(outcome, groups))
    for files, answer in zip(groups, answers, strict=True):
        if bad in files:
            assert f"IMAGE[{files.index(bad)}]: expected a whole JPEG file" in answer
        else:
            np.testing.assert_array_equal(
                answer, expected_pixels(files, served.parameters["batched"])
            )


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuMemcpyHtoDAsync"])
def test_a_call_that_fails_costs_its_own_batch(served, call):
    files = [*JPEGS[:2], GOOD_FILES["png-rgb"]]
    served.check(files)
    used = served.machine.used(0)
    before = len(served.machine.calls(call))
    served.check(files)
    # The last one: where a copy of the decoder's fails, the CPU decodes.
    served.machine.fail(call, 999, nth=len(served.machine.calls(call)) - before)
    try:
        with pytest.raises(InferenceServerException):
            served.answer(files)
    finally:
        served.machine.heal()
    for _ in range(3):
        served.check(files)
    assert served.machine.used(0) == used


@pytest.mark.parametrize(
    ("call", "code", "reason"),
    [
        (
            "cuStreamWaitEvent",
            999,
            "its pixels cannot be copied to the GPU: cuStreamWaitEvent failed",
        ),
        ("cuMemcpyHtoDAsync", 2, "no memory for its pixels: cuMemcpyHtoDAsync failed"),
    ],
)
def test_an_image_whose_pixels_do_not_get_to_the_gpu_is_told_why(served, call, code, reason):
    files = [GOOD_FILES["png-rgb"]]
    before = len(served.machine.calls(call))
    served.check(files)
    assert len(served.machine.calls(call)) > before
    served.machine.fail(call, code, nth=1)
    try:
        with pytest.raises(InferenceServerException, match=reason):
            served.answer(files)
    finally:
        served.machine.heal()
    served.check(files)


def test_without_memory_for_its_decoder_the_cpu_decodes(served):
    served.machine.fail("cuMemAlloc", 2, nth=2)
    try:
        served.check(JPEGS[:3])
    finally:
        served.machine.heal()
    served.check(JPEGS[:3])
