"""Tells in the log what a load waits for, while it takes long."""

from __future__ import annotations

import asyncio
import logging

from gpubridge.engine.instance_state import InstanceState
from gpubridge.engine.model import Model

__all__ = ["report_progress"]

_logger = logging.getLogger(__name__)


async def report_progress(model: Model, every: float = 5.0) -> None:
    """Log a line every so many seconds, until cancelled."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    while True:
        await asyncio.sleep(every)
        waiting = [i.name for i in model.instances if i.state is InstanceState.STARTING]
        if not waiting:
            continue
        word = "instance" if len(waiting) == 1 else "instances"
        where = "auto_complete_config" if model.config.draft else "initialize"
        _logger.info(
            "model '%s' version %d is loading for %.0f s: %s %s in %s",
            model.name,
            model.version,
            clock() - begin,
            word,
            ", ".join(waiting),
            where,
        )
