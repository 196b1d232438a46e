"""A headless Chromium for tests and benchmarks of pages, over its own protocol; no library between.

`GEO_SOKOBAN_CHROMIUM` names the program; without it the usual names and places are looked for. Run as a script, it
fails where there is none: `make chromium` installs one.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from glob import glob
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "headless_shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PLACES = (  # outside PATH: of Debian where PATH is short, of macOS, of Playwright
    "/usr/bin/chromium*",
    "/Applications/*Chrom*.app/Contents/MacOS/*Chrom*",
    "~/.cache/ms-playwright/chromium*/chrom*/*shell",
    "~/.cache/ms-playwright/chromium*/chrom*/chrome",
)
PATIENCE = 20.0  # seconds


class PageError(AssertionError):
    """A script of the page failed, or the page did not come to a state in time."""


def find_chromium() -> str | None:
    """The program; None where there is none."""
    named = os.environ.get("GEO_SOKOBAN_CHROMIUM")
    on_path = (found for name in NAMES if (found := shutil.which(name)))
    found_at = (path for place in PLACES for path in sorted(glob(os.path.expanduser(place))))
    elsewhere = (path for path in found_at if os.access(path, os.X_OK))
    return named or next(on_path, None) or next(elsewhere, None)


class Page:
    """A browser with one page; keys, clicks and waits go through it as those of a person do.

    Commands go through one pipe, answers and events come through another.

    Attributes:
        errors: what scripts have thrown and the console has said of errors, in order.
    """

    def __init__(self, program: str, profile: str) -> None:
        self.errors: list[str] = []
        self._count = 0
        self._rest = b""
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        words = [
            program,
            "--headless",
            "--no-sandbox",  # the tests may run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing is reached, whatever a page asks for
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # The browser reads from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: dict[str, Any] = {}
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params or {}, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (found := self._read(method)).get("id") != self._count:
            self._note(found)
        if "error" in found:
            raise PageError(f"{method}: {found['error']}")
        result: dict[str, Any] = found["result"]
        return result

    def open(self, address: str, *, until: str = "true") -> None:
        """Open an address in a new document, and wait as `wait` does."""
        self.send("Page.navigate", {"url": "about:blank"})
        self.send("Page.navigate", {"url": address})
        self.wait(until)

    def follow(self, route: str, *, until: str = "true") -> None:
        """Go to another route of the document that is open, such as `#/episode?id=…`, and wait as `wait` does."""
        self.run(f"location.hash = {json.dumps(route)}")
        self.wait(until)

    def run(self, expression: str) -> Any:
        """Value of an expression; of a promise what it brings."""
        result = self.send("Runtime.evaluate", {"expression": expression, "awaitPromise": True, "returnByValue": True})
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise PageError(f"{expression}: {details.get('exception', {}).get('description') or details['text']}")
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE) -> Any:
        """Value of an expression as soon as it is true.

        Raises:
            PageError: it is not in time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.run(f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()")
            if found:
                return found
            time.sleep(0.02)
        raise PageError(f"not in {seconds:g} s: {expression}. The page says {self.text()[:500]!r}; {self.errors}")

    def text(self, selector: str = "body") -> str:
        """Text of an element, as a reader sees it; empty where there is none."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        """Texts of all elements of a kind."""
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.innerText)")
        return found

    def click(self, selector: str, *, until: str = "true") -> None:
        """Click on an element, and wait as `wait` does."""
        self.wait(f"document.querySelector({json.dumps(selector)}) !== null")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.wait(until)

    def press(self, *keys: str, until: str = "true") -> None:
        """Press keys, one after the other, such as `j` or `ArrowRight`, and wait as `wait` does."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"Enter": {"text": "\r"}}.get(key, {})
            self.send("Input.dispatchKeyEvent", {"type": "keyDown", "key": key, **text})
            self.send("Input.dispatchKeyEvent", {"type": "keyUp", "key": key})
        self.wait(until)

    def look(self, width: int, height: int = 900, *, dark: bool = False, scale: float = 1) -> None:
        """Set the size of the window and the colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", {"features": [scheme]})

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save what is to be seen as a PNG; whole: all of the page."""
        found = self.send("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(found["data"]))

    def _read(self, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not wait([self._from], 60.0):
                raise PageError(f"{method}: no answer of the browser")
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise PageError(f"{method}: the browser has ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":  # of Mithril's, too
            self.errors.append(" ".join(str(one.get("description", one.get("value"))) for one in params["args"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]["text"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._to)  # which ends it
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._from)


@contextmanager
def open_page() -> Iterator[Page]:
    """A page of a browser of its own; skips where there is none, but fails in continuous integration."""
    program = find_chromium()
    if program is None:
        message = f"no Chromium ({', '.join(NAMES)}); `make chromium` installs one, GEO_SOKOBAN_CHROMIUM names another"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, closing(Page(program, profile)) as page:
        yield page


if __name__ == "__main__":
    if find_chromium() is None:
        sys.exit(f"no Chromium: {', '.join(NAMES)}")
