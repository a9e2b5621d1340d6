"""Starts the real dashboard and drives it in Debian's Chromium: for browser tests, benchmarks and screenshots."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
DEMO_ARTIFACTS = ROOT / "artifacts" / "tide-8e"
SERVER_START_SECONDS = 120
CHROMIUM_FLAGS = ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def dashboard_server(*artifacts: Path) -> Iterator[str]:
    """Runs `tide-dashboard` as a process of its own and yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "dashboard", *map(str, artifacts), "--port", str(port)]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=20)


def wait_until_up(url: str, server: subprocess.Popen) -> None:
    """Returns when the server answers; raises when it has stopped or does not answer in time."""
    deadline = time.monotonic() + SERVER_START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the dashboard stopped: {server.stderr.read() if server.stderr else ''}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/_stcore/health", timeout=1) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"the dashboard did not answer within {SERVER_START_SECONDS} s")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium: $CHROMIUM, else the one on the PATH."""
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def open_page(browser: Browser, url: str, width: int = 1440, height: int = 900, dark: bool = False) -> Page:
    """A fresh session on `url`, settled."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
    page = context.new_page()
    page.goto(url)
    settle(page)
    return page


def settle(page: Page) -> None:
    """Returns when the app has run and its elements are drawn."""
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=60_000)
    page.wait_for_function("() => !document.querySelector('[data-testid=stSkeleton], [data-stale=true]')")
