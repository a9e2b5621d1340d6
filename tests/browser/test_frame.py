"""The frame: one selection for all pages, token search on the server, links, no network."""

import re
from urllib.parse import parse_qs, urlparse

import psutil
import pytest
from playwright.sync_api import expect

from tests.browser.driver import settle

PAGES = ["", "router", "banks", "collapse", "live"]


def params(page) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlparse(page.url).query).items()}


def picker(page):
    """The token input, once its script listens: that is when it says whether it is expanded."""
    box = page.get_by_role("combobox", name="token")
    expect(box).to_have_attribute("aria-expanded", re.compile("true|false"))
    return box


def test_typing_finds_a_token_and_the_selection_follows_to_every_page(visit):
    page = visit("router")
    box = picker(page)
    page.keyboard.press("/")
    expect(box).to_be_focused()
    box.type("seven")
    first = page.get_by_role("option").first
    expect(first).to_contain_text("␣seven")
    expect(first).to_contain_text("decile")
    box.press("Enter")
    expect(page.locator("[data-testid=stSidebar]")).to_contain_text("␣seven")
    page.wait_for_url(re.compile(r"token=\d+"))
    chosen = params(page)["token"]
    page.get_by_role("link", name="Banks").click()
    page.wait_for_url(re.compile("banks"))
    settle(page)
    page.wait_for_url(re.compile(f"token={chosen}"))
    expect(page.locator("[data-testid=stSidebar]")).to_contain_text("␣seven")


def test_a_substring_and_an_id_are_found(visit):
    page = visit("")
    box = picker(page)
    box.type("#1000")
    expect(page.get_by_role("option")).to_have_count(1)
    box.press("Enter")
    page.wait_for_url(re.compile("token=1000"))
    box.type("zzzzqqq")
    expect(page.get_by_text("no token contains this")).to_be_visible()


def test_layer_and_bank_are_kept_in_the_link(visit):
    page = visit("router")
    sidebar = page.locator("[data-testid=stSidebar]")
    sidebar.get_by_role("radio", name="5").first.click()
    page.wait_for_url(re.compile("layer=5"))
    sidebar.get_by_role("radio", name="null").click()
    page.wait_for_url(re.compile("bank=null"))
    again = visit(page.url.split("/")[-1])
    expect(again.locator("[data-testid=stSidebar]").get_by_role("radio", name="null")).to_be_checked()


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_without_an_error_and_without_the_network(server, browser, name):
    context = browser.new_context()
    page = context.new_page()
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{server}/{name}")
    settle(page)
    expect(page.locator("h1")).to_be_visible()
    assert page.locator("[data-testid=stException], [data-testid=stAlertContentError]").count() == 0
    outside = [url for url in requests if not url.startswith((server, server.replace("http", "ws"), "data:", "blob:"))]
    assert not outside
    context.close()


def test_a_link_with_a_token_out_of_range_says_so(visit):
    page = visit("router?token=999999")
    expect(page.get_by_text("The link names token 999999, but this checkpoint has tokens 0..16383.")).to_be_visible()


def test_the_server_listens_on_this_computer_alone(server):
    port = urlparse(server).port
    listening = {c.laddr.ip for c in psutil.net_connections("inet") if c.status == "LISTEN" and c.laddr.port == port}
    assert listening == {"127.0.0.1"}


def test_the_badge_says_that_the_checks_passed_and_lists_them(visit):
    page = visit("router")
    badge = page.get_by_role("button", name="checks 5/5 · cpu float32")
    expect(badge).to_be_visible()
    assert badge.bounding_box()["x"] > page.get_by_role("heading", name="Router").bounding_box()["x"] + 300  # a corner
    badge.click()
    expect(page.get_by_text("routing rows sum to one")).to_be_visible()
    expect(page.get_by_text("the artifacts belong to this checkpoint")).to_be_visible()
