"""A headless Chromium, driven over its debugging pipe: opens pages, runs script in them, takes pictures."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.waits import poll

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_SECONDS = 90
# The browser reads commands at descriptor 3, and writes to 4.
_AT_3_AND_4 = """
import fcntl, os, sys
pair = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(pair[0], 3)
os.dup2(pair[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """The browser; owns its process and both ends of its pipe."""

    def __init__(self, profile: str) -> None:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _AT_3_AND_4, str(theirs_in), str(theirs_out), CHROMIUM),
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"),
                *("--disable-background-networking", "--hide-scrollbars", "about:blank"),
            ],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        self._last = 0
        self.events: list[dict] = []

    def call(self, method: str, session: str | None = None, **parameters) -> dict:
        """Send a command; return its result. Events that come meanwhile are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, *, width: int = 1400, height: int = 900) -> Page:
        """Open a page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Runtime", "Log", "Page", "Network"):
            page.call(f"{domain}.enable")
        page.choose_scheme("light")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        page.call("Page.navigate", url=url)
        return page

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)


class Page:
    """One page of the browser."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session

    def call(self, method: str, **parameters) -> dict:
        """Send a command for this page; return its result."""
        return self._browser.call(method, self._session, **parameters)

    def choose_scheme(self, scheme: str) -> None:
        """Have the user prefer a ``light`` or ``dark`` page."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str):
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, what: str) -> None:
        """Wait until an expression is true in the page."""
        came = poll(lambda: self.run(script), _SECONDS)
        assert came, f"waited for {what}: {self.text()[:3000]}"

    def text(self) -> str:
        """Return the text that the page shows."""
        return self.run("document.body.innerText")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def faults(self) -> list[str]:
        """Return errors and warnings of the console so far, uncaught exceptions among them."""
        self.run("0")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            about = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(about["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                found.append(json.dumps(about["entry"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(json.dumps(about["args"]))
        return found

    def requests(self) -> set[str]:
        """Return the origins that the page has sent requests to."""
        urls = [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
        ]
        return {"/".join(url.split("/")[:3]) for url in urls if not url.startswith("data:")}

    def picture(self, *, whole: bool = False) -> bytes:
        """Return a picture of the page as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(data["data"])

    def close(self) -> None:
        """Close the page."""
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser as long as the block runs."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        made = Browser(profile)
        try:
            yield made
        finally:
            made.close()
