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

FOUND_S = 40.0  # a page that is busy on a shared machine
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-background-networking", "--no-first-run",
    "--window-size=1500,1000", "--force-color-profile=srgb",
]  # fmt: skip
# All text that a person sees, also in what pages build of shadow trees (Polymer).
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
    """One window.   Attributes: url: of its session, as the driver knows it."""

    def __init__(self, url: str):
        self.url = url

    def open(self, url: str) -> None:
        ask("POST", f"{self.url}/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a script returns in the page."""
        return ask("POST", f"{self.url}/execute/sync", {"script": script, "args": []})

    def text(self) -> str:
        """All text of the page that is shown."""
        return self.run(SEEN)

    def wait_for(self, *words: str) -> str:
        """The text of the page, once all of these words are in it."""
        return wait(self.text, lambda text: all(word in text for word in words), words)


def wait(get: Callable[[], Any], is_good: Callable[[Any], bool], what: object) -> Any:
    """What `get` returns, once it is good; a page fills itself piece by piece."""
    end_s = time.monotonic() + FOUND_S
    while not is_good(value := get()):
        assert time.monotonic() < end_s, f"{what} not found in: {str(value)[:4000]}"
        time.sleep(0.1)
    return value


@contextmanager
def browser() -> Iterator[Browser]:
    """A window of a browser that runs as long as the block; skips the test where there is none."""
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
    """The address of a real TensorBoard on this machine alone."""
    port = free_port()
    words = ["-m", "tensorboard.main", "--logdir", str(logdir), "--host=127.0.0.1"]
    fast = ["--port", str(port), "--reload_interval=1"]
    with serving([sys.executable, *words, *fast], port):
        yield f"http://127.0.0.1:{port}/"


@contextmanager
def serving(command: list[str], port: int) -> Iterator[None]:
    """Runs a program from the moment at which its port answers."""
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: answers(port), bool, command)
        yield
    finally:
        program.terminate()
        program.wait(10)


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(method: str, url: str, body: dict[str, Any]) -> Any:
    """One request of the protocol; raises what the driver says is wrong."""
    data = None if method == "GET" else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from None
