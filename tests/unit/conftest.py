"""Fixtures shared by the tests of several packages."""

import asyncio
import inspect
from contextlib import AsyncExitStack, _AsyncGeneratorContextManager

import pytest

from gpubridge.pb_utils import host
from gpubridge.tensor import dlpack, native
from tests.fuzz.fake_stub import FakeStub
from tests.simcuda.machine import lawful_machine
from tests.unit.cuda_workers import device_worker, stub_device_worker
from tests.unit.device_doubles import Memory


@pytest.fixture(params=["native", "python"])
def dlpack_engine(request, monkeypatch):
    """Run a test of DLPack twice: with the compiled module, and as if there were none."""
    if request.param == "python":
        monkeypatch.setattr(dlpack, "native", lambda: None)
    elif native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    return request.param


@pytest.fixture
def fake_stub():
    """What the server has of a stub; the test is its process."""
    made = FakeStub()
    yield made
    made.close()


@pytest.fixture
def memory():
    """Device memory of the stub that this process is."""
    memory = Memory()
    host.attach(host.Host("/models/m/1", print, device=memory))
    yield memory
    host.detach()


@pytest.fixture
def machine():
    """A simulated machine with GPUs, on which no rule of the driver is broken."""
    with lawful_machine() as machine:
        yield machine


@pytest.fixture
def device_process(machine):
    """A process on the machine that has the context of a GPU."""
    with device_worker(machine) as worker:
        yield worker


@pytest.fixture
def worker(request, device_process):
    """The process, once it has executed ``START`` of the test's module."""
    device_process.do(request.module.START)
    return device_process


@pytest.fixture
def stub_device_process(machine):
    """A process on the machine that has a GPU as a stub has it."""
    with stub_device_worker(machine) as worker:
        yield worker


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine function on an event loop of its own.

    It enters fixtures that are asynchronous context managers there, and gives the test what they yield.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run():
        async with AsyncExitStack() as stack:
            given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            for name, value in given.items():
                if isinstance(value, _AsyncGeneratorContextManager):
                    given[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**given)

    asyncio.run(run())
    return True
