"""Job one: explore router behaviour in a browser."""

import re

from playwright.sync_api import expect


def sidebar(page):
    return page.locator("[data-testid=stSidebar]")


def test_a_click_on_the_map_chooses_layer_and_bank(visit):
    page = visit("router?layer=0&bank=0")
    plot = page.locator(".js-plotly-plot").first
    expect(plot).to_be_visible()
    cell = plot.locator(".scatterlayer .points path").nth(3 * 9 + 5)  # drawn layer by layer from the bottom
    box = cell.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_url(re.compile(r"layer=3.*bank=5|bank=5.*layer=3"))
    expect(page.get_by_role("columnheader", name="(layer 3, bank 5) takes most")).to_be_visible()


def test_the_lists_follow_layer_and_bank_and_a_click_on_a_token_chooses_it(visit):
    page = visit("router?layer=2&bank=1")
    most = page.get_by_role("group", name="Tokens that layer 2, bank 1 takes most")
    expect(most).to_be_visible()
    button = most.get_by_role("button").nth(1)
    shown, token_id = button.inner_text(), button.get_attribute("data-token")
    button.click()
    page.wait_for_url(re.compile(rf"token={token_id}(&|$)"))
    expect(sidebar(page)).to_contain_text(shown)
    expect(page.get_by_text(f"routing of {shown}")).to_be_visible()


def test_the_null_bank_is_a_choice_like_the_others(visit):
    page = visit("router?layer=7&bank=null")
    expect(page.get_by_role("columnheader", name="(layer 7, null) takes most")).to_be_visible()


def test_a_token_that_the_text_does_not_hold_is_told_so(visit):
    page = visit("router?token=1")  # the padding token
    expect(page.locator(".annotation-text", has_text="does not occur in the text").first).to_be_visible()
