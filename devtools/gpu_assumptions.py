"""What gpubridge assumes of a driver and a GPU, and which result of the lane shows whether it holds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["ASSUMPTIONS", "Assumption", "command_of"]


class Assumption(NamedTuple):
    """One line of the page.

    ``shown_by``: results that show it, as ``check NAME`` (of `tests/gpu/first_page.py`), ``test
    FILE::NAME`` (the beginning of a test's name will do; ``last FILE::NAME`` for one that is marked so), ``part NAME``
    and ``verdict of zero-copy``; empty where nothing of the lane does.
    """

    text: str
    shown_by: tuple[str, ...] = ()


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"test {name}" for name in names)


def _last(name: str) -> tuple[str, ...]:
    return (f"last {name}",)


def command_of(shown_by: str) -> str:
    """Return the command that shows it."""
    kind, name = shown_by.split(" ", 1)
    if kind in ("test", "last"):
        file, _, test = name.partition("::")
        return f"./dev gpu {'last' if kind == 'last' else 'tests'} -k {test or Path(file).stem}"
    part = {"check": "assumptions", "part": name, "verdict": "first"}[kind]
    return f"./dev gpu {part}"


_FRAMEWORKS = "test_frameworks.py::"
_FAILURES = "test_failures.py::"

ASSUMPTIONS = {
    "Device ordering": (
        Assumption("memory crosses processes by a legacy handle", ("check memory",)),
        Assumption("memory crosses processes by a VMM file descriptor", ("check memory_fds",)),
        Assumption("streams wait for events of other processes", ("check events",)),
        Assumption(
            "who waits for a killed process goes on when its event is recorded again, not before",
            (
                "check lost_events",
                *_last("test_device_memory.py::test_waiters_for_a_killed_producer"),
                *_last(f"{_FAILURES}test_a_consumer_of_a_stub_that_dies"),
            ),
        ),
        Assumption(
            "64 IPC events for each arena that a process has open",
            _tests("test_edges.py::test_many_requests_at_once"),
        ),
        Assumption("shared host memory can be pinned", ("check pinning",)),
        Assumption(
            "GPUs reach each other's memory",
            ("check peers", *_tests("test_edges.py::test_an_edge_to_another_gpu")),
        ),
        Assumption(
            "a UUID names the same GPU in each process",
            _tests("test_probe.py::", "test_network.py::test_two_instances_and_every_gpu"),
        ),
        Assumption(
            "functions of the driver have the names and forms that are used", ("part probe",)
        ),
        Assumption(
            "the driver runs code of NVRTC's and nvImageCodec's release",
            _tests(
                "test_image_preproc.py::test_levels", "test_image_preproc.py::test_photographs_by"
            ),
        ),
        Assumption(
            "memory of the server outlives a stub that is killed",
            _tests(
                f"{_FAILURES}test_a_stub_that_is_killed",
                f"{_FAILURES}test_a_client_s_memory_outlives",
            ),
        ),
        Assumption(
            "a fatal error ends its own process only, and shows as one",
            _last(f"{_FAILURES}test_a_fault_of_a_kernel"),
        ),
        Assumption(
            "PyTorch and CuPy use the primary context",
            _tests(f"{_FRAMEWORKS}test_there_and_back"),
        ),
        Assumption(
            "PyTorch and CuPy name their streams, and order nothing where they are given -1",
            _tests(
                f"{_FRAMEWORKS}test_work_of_a_side_stream",
                f"{_FRAMEWORKS}test_a_side_stream",
                f"{_FRAMEWORKS}test_a_capsule_waits",
                f"{_FRAMEWORKS}test_writes_of_a_side_stream",
            ),
        ),
        Assumption(
            "captures are not spoilt by threads in mode relaxed; an event that one took is recorded anew"
        ),
        Assumption(
            "a stub killed amid a kernel loses its events as one killed amid a host function does"
        ),
        Assumption(
            "cuCtxRecordEvent comes after the work of streams without a known owner, destroyed ones too"
        ),
        Assumption(
            "once a lost GPU has said 999 a query of the legacy stream fails, too, and in no other case"
        ),
        Assumption(
            "answers wait for no other request's kernel where the device maps many streams to few queues"
        ),
        Assumption("hundreds of IPC events in a process are below any limit"),
        Assumption("waits that sleep end 30 to 60 µs later than those that spin"),
    ),
    "Device memory": (
        Assumption("device paths put nothing on PCIe beyond commands", ("verdict of zero-copy",)),
        Assumption(
            "tensors cross processes with the copies of the budgets",
            _tests("test_network.py::", "test_edges.py::", "test_client_regions.py::"),
        ),
        Assumption(
            "tritonclient's regions are opened, small ones in one block of 2 MiB, too",
            _tests("test_tritonclient_regions.py::", "test_client_regions.py::test_tensors_at"),
        ),
        Assumption(
            "PyTorch and CuPy allocate in device_arena()",
            _tests(
                f"{_FRAMEWORKS}test_results_are_made_in_the_arena",
                f"{_FRAMEWORKS}test_pytorch_asks_for_more",
            ),
        ),
        Assumption(
            "PyTorch and CuPy take pointers of VMM memory",
            _tests("test_memory_handles.py::test_libraries_allocate"),
        ),
        Assumption(
            "memory comes back when nobody has it open",
            _last("test_memory_handles.py::test_memory_comes_back"),
        ),
        Assumption(
            "inputs larger than the arena go up by way of pinned pieces",
            _tests("test_network.py::test_tensors_larger"),
        ),
        Assumption("uploads run beside execute", _tests("test_overlap.py::test_an_upload_is_done")),
        Assumption(
            "the chroma of the hardware's decoder is within 1.5 levels of the mean",
            _tests("test_image_preproc.py::test_photographs_by"),
        ),
        Assumption(
            "nvImageCodec's images are complete on the stream that it is given",
            _tests("test_image_preproc.py::test_photographs", "test_photo_labels.py::"),
        ),
        Assumption("request.output is as fast for 1 GiB as for 1 MiB", ("part bench",)),
        Assumption(
            "the image kernel reaches half of a copy's rate, and Pillow's values", ("part kernel",)
        ),
        Assumption("photographs become tensors without a host copy, at a rate", ("part images",)),
        Assumption("a copy from another GPU to VMM memory goes directly once that one has access"),
        Assumption(
            "device_arena() under expandable_segments:True says where tensors are not made there"
        ),
        Assumption(
            "PCIe's counters count bytes, and nvidia-smi dmon writes a line a second",
            ("part zero-copy",),
        ),
        Assumption(
            "no process reads or writes where it must not, by compute-sanitizer",
            ("part sanitizer",),
        ),
    ),
}
"""By the page of docs/explanation that says what depends on it."""
