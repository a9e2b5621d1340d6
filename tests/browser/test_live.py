"""Job three: toggle layer memory injection live, with real clicks on the real demo model."""

import re

from playwright.sync_api import expect

TRAINED, SWITCHED = ".tide-table >> nth=0", ".tide-table >> nth=1"


def test_a_whole_layer_goes_off_with_one_click_and_the_prediction_changes(visit):
    page = visit("live")
    measures = page.locator(".tide-measures")
    expect(measures).to_contain_text("0.0000 nats")
    trained = page.locator(TRAINED).inner_text()
    page.get_by_role("button", name="all banks in layer 0: on").click()
    expect(page.get_by_role("button", name="all banks in layer 0: off")).to_be_visible()
    expect(page.get_by_role("button", name="bank 3 in layer 0: off")).to_be_visible()
    expect(measures).not_to_contain_text("0.0000 nats")
    expect(page.locator(SWITCHED)).to_contain_text(re.compile("[▲▼]"))
    assert page.locator(TRAINED).inner_text() == trained  # nothing on the left moves
    assert re.search(r"cpu float32 .* ms", measures.inner_text())

    page.get_by_role("button", name="Switch all on").click()
    expect(measures).to_contain_text("0.0000 nats")
    expect(page.get_by_role("button", name="all banks in layer 0: on")).to_be_visible()


def test_single_banks_switch_and_the_link_restores_them(visit):
    page = visit("live")
    page.get_by_role("button", name="bank 2 in layer 1: on").click()
    page.get_by_role("button", name="bank 5 in layer 4: on").click()
    expect(page.locator(".tide-measures")).not_to_contain_text("0.0000 nats")
    page.wait_for_url(re.compile(r"off=1\.2_4\.5"))
    measured = page.locator(".tide-measures b").inner_text()

    again = visit(page.url.split("/")[-1])
    expect(again.get_by_role("button", name="bank 2 in layer 1: off")).to_be_visible()
    expect(again.get_by_role("button", name="bank 5 in layer 4: off")).to_be_visible()
    expect(again.locator(".tide-measures b")).to_have_text(measured)


def test_a_new_prompt_and_another_target_position(visit):
    page = visit("live")
    box = page.get_by_role("textbox", name="prompt")
    box.fill("It is a truth universally acknowledged, that a single man")
    box.press("Enter")
    chips = page.get_by_role("radio").filter(has_text="␣truth")
    expect(chips).to_be_visible()
    first = page.locator(TRAINED).inner_text()
    chips.click()
    expect(chips).to_have_attribute("aria-checked", "true")
    expect(page.locator(TRAINED)).not_to_have_text(first)


def test_an_empty_prompt_and_one_beyond_the_context_are_told_in_one_sentence(visit):
    page = visit("live")
    box = page.get_by_role("textbox", name="prompt")
    box.fill("")
    box.press("Enter")
    expect(page.get_by_text("The prompt is empty; type some text.")).to_be_visible()
    box.fill("very " * 400)
    box.press("Enter")
    expect(page.get_by_text(re.compile("the model reads at most 256; shorten it"))).to_be_visible()
    box.fill("and it works again")
    box.press("Enter")
    expect(page.locator(TRAINED)).to_be_visible()
    assert "Traceback" not in page.content()


def test_switches_of_another_model_in_a_link_are_told_in_one_sentence(visit):
    page = visit("live?off=77")
    expect(page.get_by_text("names layer 77, but the model has layers 0..7")).to_be_visible()


def test_tokens_are_never_read_as_markup(visit):
    page = visit("live?prompt=" + "%3Cimg%20src%3Dx%20onerror%3D%22window.pwned%3D1%22%3E%20%3Cb%3E*x*%3C/b%3E")
    expect(page.get_by_role("radio").filter(has_text="<").first).to_be_visible()
    assert page.evaluate("window.pwned") is None
