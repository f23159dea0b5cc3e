"""Drives a headless Chromium over its DevTools protocol, through pipes: clicks, keys, files, sizes, what is seen."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
_KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    " ": (32, " "),
    "ArrowRight": (39, ""),
    "ArrowLeft": (37, ""),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
}


class Tab:
    """One page of the browser."""

    def __init__(self, sending: int, receiving: int) -> None:
        self._out, self._in = sending, receiving
        self._buffer = b""
        self._sent = 0
        self._session: str | None = None
        self.logged: list[str] = []  # what the page wrote to the console, and what it was refused
        self.urls: list[str] = []  # all that it fetched
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.send(f"{domain}.enable")

    def send(self, method: str, timeout: float = 30.0, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            told = self._receive(end, method)
            if told.get("id") == self._sent:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told.get("result", {})
            self._note(told)

    def _receive(self, end: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"no answer to {waiting_for}")
            read = os.read(self._in, 1 << 20)
            if not read:
                raise RuntimeError("the browser is gone")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.consoleAPICalled":
            self.logged.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif event["method"] == "Runtime.exceptionThrown":
            self.logged.append(json.dumps(params["exceptionDetails"])[:500])
        elif event["method"] == "Log.entryAdded":
            self.logged.append(params["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    def js(self, expression: str) -> Any:
        """Evaluate an expression in the page; a promise is awaited."""
        told = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {json.dumps(told['exceptionDetails'])[:600]}")
        return told["result"].get("value")

    def wait(self, condition: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.js(condition):
                return value
            time.sleep(0.03)
        seen = self.js("document.body.innerText")
        raise TimeoutError(f"{condition} did not come true; logged {self.logged}; the page says:\n{seen[:1500]}")

    def open(self, url: str) -> None:
        """Open an address, and wait until the page's script is ready."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def look(self, width: int, height: int = 900, dark: bool = False, language: str = "en-US") -> None:
        """Set the window's size, the colours that are preferred, and the language."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        agent = self.js("navigator.userAgent")
        self.send("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage=language)

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key."""
        code, text = _KEYS[key]
        common: dict[str, Any] = {"key": key, "code": "Space" if key == " " else key, "modifiers": 8 if shift else 0}
        common["windowsVirtualKeyCode"] = code
        if text:
            common["text"] = text
        self.send("Input.dispatchKeyEvent", type="keyDown", **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.send("Input.insertText", text=text)

    def choose_file(self, selector: str, path: Path) -> None:
        """Choose a file in a file field."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def picture(self, path: Path, whole: bool = True) -> None:
        """Save what is seen, or the whole page, as PNG."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


def network(tab: Tab, latency: float = 0.0, offline: bool = False) -> None:
    """Slow the network down by some milliseconds, or cut it."""
    speed = {"downloadThroughput": -1, "uploadThroughput": -1}
    tab.send("Network.emulateNetworkConditions", offline=offline, latency=latency, **speed)


def click(tab: Tab, name: str) -> None:
    """Click an element, by its id."""
    tab.js(f"document.getElementById('{name}').click()")


def write(tab: Tab, name: str, text: str) -> None:
    """Replace what stands in a field, by its id."""
    tab.js(f"(() => {{ const f = document.getElementById('{name}'); f.focus(); f.select(); }})()")
    tab.type(text)


def choose(tab: Tab, name: str, value: str) -> None:
    """Choose a value of a select, by its id."""
    tab.js(
        f"(() => {{ const f = document.getElementById('{name}'); f.value = {json.dumps(value)};"
        " f.dispatchEvent(new Event('change')); })()"
    )


def texts(tab: Tab, selector: str) -> list[str]:
    """Return what the elements of a selector say."""
    return tab.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((n) => n.innerText ?? n.textContent)")


def shown(tab: Tab, name: str) -> str:
    """Return what an element says; nothing where it is not shown."""
    return tab.js(
        f"(() => {{ const n = document.getElementById('{name}'); return n.checkVisibility() ? n.innerText : ''; }})()"
    )


def overflows(tab: Tab) -> list[str]:
    """Return what is wider than the window."""
    return tab.js(
        "document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll('body *')]"
        ".filter((n) => n.getBoundingClientRect().right > innerWidth + 1).map((n) => `${n.tagName}#${n.id}`)"
        ".concat('the page')"
    )


@contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """Start Chromium with its profile in a folder, and stop it with all its processes."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The protocol wants descriptors 3 and 4; the shell puts the pipes there.
    script = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Tab(to_write, from_read)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_write)
        os.close(from_read)
