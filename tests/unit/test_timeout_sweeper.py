"""The one timer of all connections: it comes again, whatever happens to those it looks at."""

import asyncio

import pytest

from gpubridge.frontend.timeouts import TimeoutSweeper
from tests.waits import timers, until


class Connection:
    def __init__(self, fails=False):
        self.checks = []
        self.fails = fails

    def check(self, now):
        self.checks.append(now)
        if self.fails:
            raise RuntimeError("planted")


async def looks(connections, times):
    """Wait until each was looked at so often."""
    await until(lambda: min(len(each.checks) for each in connections) >= times)


@pytest.mark.parametrize("count", [1, 64, 200])
def test_all_are_looked_at_again_and_again(count):
    async def watch():
        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what))
        sweeper = TimeoutSweeper([0, 0.08, 5])
        groups = [{Connection() for _ in range(count)}, {Connection(fails=True)}, [Connection()]]
        for group in groups:
            sweeper.add(group)
        everyone = [each for group in groups for each in group]
        await looks(everyone, 3)
        late = Connection()
        groups[0].add(late)
        await looks([late], 1)
        sweeper.close()
        assert not timers()
        return errors

    errors = asyncio.run(watch())
    assert {str(error["exception"]) for error in errors} == {"planted"}
