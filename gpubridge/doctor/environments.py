"""Checks of models' own Python environments: which compiled module their processes get."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpubridge.config import PythonBackendSettings
from gpubridge.doctor.findings import Finding
from gpubridge.engine.environments.interpreter import Unusable, inspect, load_failure
from gpubridge.engine.environments.provider import environment_at, stub_variables
from gpubridge.engine.environments.stub_modules import StubModules
from gpubridge.engine.load_threads import LoadThreads
from gpubridge.errors import BridgeError
from gpubridge.tensor.native import import_failure


def environment_findings(roots: Sequence[Path]) -> list[Finding]:
    """Check environments; nothing is built."""
    return [asyncio.run(_check(root.absolute())) for root in roots]


async def _check(root: Path) -> Finding:
    subject = f"environment {root}"
    if (missing := import_failure()) is not None:
        return Finding(subject, works=False, detail=f"the server's module is absent: {missing}")
    variables = stub_variables(os.environ, clean=False)
    try:
        environment = environment_at(root, root, variables)
        interpreter = await inspect(environment.python, environment.variables)
    except (BridgeError, Unusable) as error:
        return Finding(subject, works=False, detail=str(error))
    settings = PythonBackendSettings()
    modules = StubModules(None, LoadThreads(), settings.module_build_seconds)
    loads = partial(load_failure, environment.python, environment.variables)
    found = await modules.find(interpreter, loads)
    if found.startswith("/"):
        detail = f"{interpreter}, compiled module {found}"
        return Finding(subject, works=True, detail=detail)
    plan = modules.plan(interpreter)
    if isinstance(plan, str):
        return Finding(
            subject, works=False, detail=f"{interpreter}, in pure Python, slower: {plan}"
        )
    detail = (
        f"{interpreter}, compiled module to be built with {' '.join(plan.recipe.compiler)} when a model first "
        f"needs it, which waits for up to {settings.module_build_seconds:g} s"
    )
    return Finding(subject, works=True, detail=detail)
