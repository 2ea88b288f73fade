"""Fixtures of pytest: a model in the process of the test, and servers. Imports nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gpubridge.develop.child_server import Server
    from gpubridge.develop.in_process import InProcessModel


@pytest.fixture
def gpubridge_model() -> Iterator[Callable[..., InProcessModel]]:
    """Load a model in this process: ``gpubridge_model(path)``; see `InProcessModel`."""
    from gpubridge.develop.in_process import InProcessModel  # noqa: PLC0415  (where it is used)

    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(InProcessModel(*args, **options))


@pytest.fixture
def gpubridge_server() -> Iterator[Callable[..., Server]]:
    """Start a server for one test: ``gpubridge_server(models, **settings)``; see `Server`."""
    from gpubridge.develop.child_server import Server  # noqa: PLC0415  (where it is used)

    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Server(*args, **options))


__all__: list[Any] = ["gpubridge_model", "gpubridge_server"]
