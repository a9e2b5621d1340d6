"""One dashboard server on the real demo artifacts, and one Chromium, for all browser tests."""

import pytest
from playwright.sync_api import expect

from tests.browser.driver import DEMO_ARTIFACTS, chromium, dashboard_server, open_page

expect.set_options(timeout=20_000)  # milliseconds; a busy machine is no failure


@pytest.fixture(scope="session")
def server():
    assert DEMO_ARTIFACTS.is_dir(), "the demo artifacts are missing; `make artifacts` builds them"
    with dashboard_server(DEMO_ARTIFACTS) as url:
        yield url


@pytest.fixture(scope="session")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def visit(server, browser):
    """`visit("router?token=5")` opens a page in a session of its own."""
    contexts = []

    def go(path: str, **kwargs):
        page = open_page(browser, f"{server}/{path}", **kwargs)
        contexts.append(page.context)
        return page

    yield go
    for context in contexts:
        context.close()
