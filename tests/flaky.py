"""Runs a listed flaky test once more after a failure, and says so; refuses to run past the date of a listing.

This is a plugin of pytest. `flaky.txt`, beside it, has the list and says what is in it.
"""

from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

__all__ = ["Listing", "expired", "parse"]

_LIST = Path(__file__).with_name("flaky.txt")
_LISTED = pytest.StashKey()
_PROPERTY = "flaky"


@dataclass(frozen=True)
class Listing:
    """A test that is known to fail now and then."""

    test: str
    owner: str
    reason: str
    until: date


def parse(text: str) -> dict[str, Listing]:
    """Return the listings of a list by their tests.

    Raises
    ------
    ValueError
        A line has not four parts, an empty one, or no date.
    """
    found = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 4 or not all(parts):
            raise ValueError(f"expected TEST | OWNER | REASON | YYYY-MM-DD, got {line!r}")
        found[parts[0]] = Listing(*parts[:3], date.fromisoformat(parts[3]))
    return found


def expired(listings: dict[str, Listing], today: date) -> list[Listing]:
    """Return the listings whose date is over."""
    return [listing for listing in listings.values() if listing.until < today]


def pytest_configure(config):
    """Read the list; end the run where a listing is past its date."""
    try:
        listings = parse(_LIST.read_text())
    except ValueError as error:
        raise pytest.UsageError(f"{_LIST}: {error}") from error
    for listing in expired(listings, datetime.now(tz=timezone.utc).date()):
        raise pytest.UsageError(
            f"{_LIST}: {listing.test} was to be steady by {listing.until}: {listing.reason} "
            f"(owner: {listing.owner}); mend it, or decide anew and change the date"
        )
    config.stash[_LISTED] = listings


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Run a listed test, and once more where it fails; leave others to pytest."""
    listings = item.config.stash[_LISTED]
    listing = listings.get(item.nodeid) or listings.get(item.nodeid.partition("[")[0])
    if listing is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if any(report.failed for report in reports):
        # Its fixtures are made anew.
        item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        said = f"{item.nodeid}: {listing.reason} (owner: {listing.owner}, until {listing.until})"
        reports[0].user_properties.append((_PROPERTY, said))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter):
    """Name the tests that were run again."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    said = {
        value
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _PROPERTY
    }
    if said:
        terminalreporter.section("flaky tests that failed and were run once more")
        for text in sorted(said):
            terminalreporter.line(text)
