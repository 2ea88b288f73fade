"""Fixtures shared by the tests of several packages."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from gpubridge.pb_utils import host
from gpubridge.tensor import dlpack, native
from tests.simcuda.machine import Machine, lawful_machine
from tests.simcuda.processes import Worker
from tests.unit.cuda_workers import device_worker, stub_device_worker
from tests.unit.device_doubles import Memory


@pytest.fixture(params=["native", "python"])
def dlpack_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test of DLPack twice: with the compiled module, and as if there were none."""
    if request.param == "python":
        monkeypatch.setattr(dlpack, "native", lambda: None)
    elif native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    return request.param


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Device memory of the stub that this process is."""
    memory = Memory()
    host.attach(host.Host("/models/m/1", print, device=memory))
    yield memory
    host.detach()


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A simulated machine with GPUs, on which no rule of the driver is broken."""
    with lawful_machine() as machine:
        yield machine


@pytest.fixture
def device_process(machine: Machine) -> Iterator[Worker]:
    """A process on the machine that has the context of a GPU."""
    with device_worker(machine) as worker:
        yield worker


@pytest.fixture
def worker(request: pytest.FixtureRequest, device_process: Worker) -> Worker:
    """The process, once it has executed ``START`` of the test's module."""
    device_process.do(request.module.START)
    return device_process


@pytest.fixture
def stub_device_process(machine: Machine) -> Iterator[Worker]:
    """A process on the machine that has a GPU as a stub has it."""
    with stub_device_worker(machine) as worker:
        yield worker


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
