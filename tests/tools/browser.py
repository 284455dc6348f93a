"""A real headless Chromium, driven by the W3C WebDriver protocol of Debian's chromium-driver."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 40.0  # a page may be slow on a shared machine
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
# The script returns all visible text, also that in shadow trees, which Polymer uses.
SEEN = """
const seen = node => {
  if (node.nodeType === 3) return node.textContent;
  if (node.nodeType === 1) {
    if (["STYLE", "SCRIPT", "TEMPLATE", "DOM-MODULE"].includes(node.tagName)) return "";
    const style = getComputedStyle(node);
    if (style.display === "none" || style.visibility === "hidden") return "";
  }
  const inside = [...(node.shadowRoot ? node.shadowRoot.childNodes : node.childNodes)];
  const parts = node.tagName === "SLOT" ? node.assignedNodes() : inside;
  return [...parts].map(seen).join(" ");
};
return seen(document.body).replace(/\\s+/g, " ");
"""


class Browser:
    """One browser window.

    Args:
        url: URL of the WebDriver session.
    """

    def __init__(self, url: str):
        self.url = url

    def open(self, url: str) -> None:
        ask("POST", f"{self.url}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Run a script in the page and return its result."""
        return ask("POST", f"{self.url}/execute/sync", {"script": script, "args": []})

    def text(self) -> str:
        """Return all visible text of the page."""
        return self.run(SEEN)

    def wait_for(self, *words: str) -> str:
        """Wait until the page shows all these words, and return its text."""
        return wait(self.text, lambda text: all(word in text for word in words), words)


def wait(get: Callable[[], Any], is_good: Callable[[Any], bool], what: object) -> Any:
    """Call `get` until `is_good` accepts its value, and return the value.

    Raises:
        AssertionError: After TIMEOUT_S. The message names `what` and the last value.
    """
    end_s = time.monotonic() + TIMEOUT_S
    while not is_good(value := get()):
        assert time.monotonic() < end_s, f"{what} not found in: {str(value)[:4000]}"
        time.sleep(0.1)
    return value


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a window of a browser that runs as long as the block; skip the test without one."""
    programs = [shutil.which(name) for name in ("chromedriver", "chromium")]
    if None in programs:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    port = free_port()
    with tempfile.TemporaryDirectory() as profile, serving([programs[0], f"--port={port}"], port):
        options = {"binary": programs[1], "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        driver = f"http://127.0.0.1:{port}/session"
        session = ask("POST", driver, {"capabilities": wanted})["sessionId"]
        try:
            yield Browser(f"{driver}/{session}")
        finally:
            ask("DELETE", f"{driver}/{session}", {})


@contextmanager
def tensorboard(logdir: str | Path) -> Iterator[str]:
    """Serve a log folder with a real TensorBoard on this machine, and yield its address."""
    port = free_port()
    words = ["-m", "tensorboard.main", "--logdir", str(logdir), "--host=127.0.0.1"]
    fast = ["--port", str(port), "--reload_interval=1"]
    with serving([sys.executable, *words, *fast], port):
        yield f"http://127.0.0.1:{port}/"


@contextmanager
def serving(command: list[str], port: int) -> Iterator[None]:
    """Start a program, wait until its port answers, and stop it after the block."""
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: answers(port), bool, command)
        yield
    finally:
        program.terminate()
        program.wait(10)


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def ask(method: str, url: str, body: dict[str, Any]) -> Any:
    """Send one request of the WebDriver protocol and return the value of the reply.

    Raises:
        RuntimeError: With the driver's message, if the driver reports an error.
    """
    data = None if method == "GET" else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from None
