"""``gpubridge top``: what a server's models do, in a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpubridge.cli.top_source import StatusSource, Trust, read_headers
from gpubridge.cli.top_tables import Table, plain, shown, tables
from gpubridge.errors import BridgeError, unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_READS = 20
_WAIT_SECONDS = 0.1

USAGE = "[URL] [--once] [--interval SECONDS] [--header NAME:VALUE]"
DESCRIPTION = (
    "Show a server's models and instances: requests a second, quantiles of durations, batch sizes, where "
    "the time goes, restarts, slower paths and the last errors, until Ctrl-C. Rates are those of the "
    "last interval. Of a server without gpubridge's status, such as Triton, it shows what the statistics have. "
    "The live view needs the package rich: pip install 'gpubridge[top]'."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "address",
        nargs="?",
        metavar="URL",
        help="the server's HTTP or metrics address (default: http://127.0.0.1:8000)",
    )
    add("--url", default="http://127.0.0.1:8000", help="the same")
    add("--once", action="store_true", help="print the figures of one interval as plain text")
    add(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="time between two readings",
    )
    add(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="a header of requests, for restricted endpoints; may be given several times",
    )
    add("--cacert", metavar="FILE", help="certificates of the authorities that signed the server's")
    add(
        "--cert",
        metavar="FILE",
        help="a certificate of this client, for a server that asks for one",
    )
    add("--key", metavar="FILE", help="the private key of --cert, unless that file has it")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, got {text}")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Show the figures until Ctrl-C, or once; return the exit code."""
    trust = Trust(options.cacert, options.cert, options.key)
    source = StatusSource(options.address or options.url, read_headers(options.header), trust)
    try:
        if not options.once:
            _watch(source, options.interval)
            return 0
        before = source.read()
        sys.stdout.write(plain(tables(before, _after(source, before, options.interval))))
        if source.note:
            sys.stderr.write(f"{source.url}: {source.note}\n")
    except KeyboardInterrupt:
        pass
    finally:
        source.close()
    return 0


def _after(source: StatusSource, before: Mapping[str, Any], interval: float) -> dict[str, Any]:
    """Return the next document after an interval: a server makes one a second."""
    time.sleep(interval)
    for _ in range(_MOST_READS):
        now = source.read()
        if now.get("time") != before.get("time"):
            break
        time.sleep(_WAIT_SECONDS)
    return now


def _watch(source: StatusSource, interval: float) -> None:
    try:
        from rich.live import Live  # noqa: PLC0415  (an extra)
    except ImportError:
        raise unavailable(
            "the package rich is missing: pip install 'gpubridge[top]'; --once needs none"
        ) from None
    before = now = source.read()
    failure = ""
    with Live(_view(source, before, now, failure), auto_refresh=False, screen=True) as live:
        while True:
            try:
                before, now, failure = now, _after(source, now, interval), ""
            except BridgeError as error:
                # It may be starting again.
                failure = error.message
            live.update(_view(source, before, now, failure), refresh=True)


def _view(
    source: StatusSource, before: Mapping[str, Any], now: Mapping[str, Any], failure: str
) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415  (an extra)
    from rich.text import Text  # noqa: PLC0415

    server = now["server"]
    about = f"{server.get('name')} {server.get('version')} at {source.url}"
    notes = [Text(shown(f"{about}, {time.strftime('%H:%M:%S')}"), style="bold")]
    notes += [Text(shown(text), style="red") for text in (failure, source.note) if text]
    made = tables(before, now, by_rate=True)
    return Group(*notes, *(_drawn(table) for table in made if table.rows))


def _drawn(table: Table) -> RenderableType:
    from rich import box, table as drawing  # noqa: PLC0415  (an extra)
    from rich.text import Text  # noqa: PLC0415

    drawn = drawing.Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1, 0, 0))
    for i, title in enumerate(table.header):
        drawn.add_column(title, justify="left" if i < table.texts else "right", no_wrap=True)
    for row in table.rows:
        # As text: names may look like markup.
        drawn.add_row(*map(Text, row))
    return drawn
