"""Machines for the tests of the simulated driver itself: on some of them rules are to be broken."""

from collections.abc import Iterator

import pytest

from tests.simcuda.machine import Machine, lawful_machine, running_machine
from tests.simcuda.processes import Worker, running_worker


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine on which no rule is broken."""
    with lawful_machine() as machine:
        yield machine


@pytest.fixture
def careless() -> Iterator[Machine]:
    """A machine on which rules are broken."""
    with running_machine() as machine:
        yield machine
        assert machine.violations() != []


@pytest.fixture
def either(request: pytest.FixtureRequest) -> Machine:
    """The machine of the test."""
    name = "careless" if "careless" in request.fixturenames else "machine"
    machine: Machine = request.getfixturevalue(name)
    return machine


@pytest.fixture
def worker(either: Machine) -> Iterator[Worker]:
    """A process on the machine of the test."""
    with running_worker(either) as worker:
        yield worker


one = worker
two = worker
