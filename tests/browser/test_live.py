"""Job three: toggle layer memory injection live, with real clicks on the real demo model."""

import json
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

    page.get_by_role("button", name="As trained").click()
    expect(measures).to_contain_text("0.0000 nats")
    expect(page.get_by_role("button", name="all banks in layer 0: on")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("button", name="all banks in layer 0: off")).to_be_visible()
    expect(measures).not_to_contain_text("0.0000 nats")


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


def test_a_preset_and_a_control_in_one_click_each_and_the_link_says_them(visit):
    page = visit("live")
    page.get_by_text("only layer 0", exact=True).click()
    expect(page.get_by_role("button", name="all banks in layer 0: on")).to_be_visible()
    expect(page.get_by_role("button", name="all banks in layer 5: off")).to_be_visible()
    page.wait_for_url(re.compile(r"off=1_2_3_4_5_6_7"))
    page.get_by_role("button", name="More").click()
    page.get_by_role("combobox", name="what is off injects").click()
    page.get_by_role("option", name="a random direction").click()
    page.wait_for_url(re.compile(r"off=1%7Erandom0_|off=1~random0_"))
    expect(page.locator(".tide-measures")).not_to_contain_text("0.0000 nats")


def test_the_switches_are_ranked_beside_their_random_control(visit):
    page = visit("live")
    page.get_by_role("button", name="Rank them").click()
    expect(page.get_by_text("The 20 switches that matter most")).to_be_visible(timeout=60_000)
    expect(page.get_by_text("control: a random direction of the same length")).to_be_visible()
    expect(page.get_by_text(re.compile("After .*France␣is, target"))).to_be_visible()  # what it is an answer to
    page.get_by_role("radio", name="␣capital", exact=True).click()
    page.get_by_role("button", name="Rank them").click()
    expect(page.get_by_text(re.compile("After .*The␣capital, target"))).to_be_visible(timeout=60_000)


def test_two_texts_are_written_side_by_side_and_can_be_stopped(visit):
    page = visit("live?off=0")
    page.get_by_role("button", name="Write", exact=True).click()
    texts = page.locator(".tide-writing")
    expect(texts.nth(0)).to_contain_text(re.compile(r"40 tokens"), timeout=60_000)
    expect(texts.nth(1)).to_contain_text(re.compile(r"40 tokens"))
    expect(texts.nth(1)).to_contain_text("apart from token")
    page.get_by_role("spinbutton", name="tokens").fill("200")
    page.get_by_role("button", name="Write", exact=True).click()
    expect(texts.nth(0)).to_contain_text(re.compile(r"\b[5-9] tokens|\b[1-9]\d tokens"))
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Write", exact=True)).to_be_visible()
    expect(texts.nth(0)).not_to_contain_text("200 tokens")


def test_the_results_can_be_taken_home(visit):
    page = visit("live?off=0")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="JSON").click()
    results = json.loads(waiting.value.path().read_text())
    assert results["switches"] == "0"
    assert results["kl_nats"] > 0
    assert len(results["surprisal_nats"]["switched"]) == len(results["token_ids"]) - 1
    assert len(results["attribution_logits"]["as trained"]) == 8
