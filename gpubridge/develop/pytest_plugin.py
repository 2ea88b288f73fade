"""Fixtures of pytest: a model in the process of the test, and servers. Imports nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gpubridge.develop.child_server import Server
    from gpubridge.develop.in_process import InProcessModel

_END_SECONDS = 60.0
"""Until then a model has to end after its test: a run of tests shall end, whatever a model waits for."""


@pytest.fixture
def gpubridge_model() -> Iterator[Callable[..., InProcessModel]]:
    """Load a model in this process: ``gpubridge_model(path)``; see `InProcessModel`."""
    from gpubridge.develop.in_process import InProcessModel  # noqa: PLC0415  (where it is used)

    with ExitStack() as stack:

        def load(*args: Any, **options: Any) -> InProcessModel:
            model = InProcessModel(*args, **options)
            stack.callback(lambda: model.close(_END_SECONDS))
            return model

        yield load


@pytest.fixture
def gpubridge_server() -> Iterator[Callable[..., Server]]:
    """Start a server for one test: ``gpubridge_server(models, **settings)``; see `Server`."""
    from gpubridge.develop.child_server import Server  # noqa: PLC0415  (where it is used)

    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Server(*args, **options))


__all__: list[Any] = ["gpubridge_model", "gpubridge_server"]
