"""Job two: compare bank neighbourhoods for a chosen token."""

import re

from playwright.sync_api import expect


def columns(page):
    return page.get_by_role("group", name=re.compile("eighbours"))


def test_neighbours_stand_in_a_column_for_the_embedding_and_for_every_bank(visit):
    page = visit("banks")
    expect(columns(page).locator("table")).to_have_count(9)
    for title in ["embedding", *(f"bank {bank}" for bank in range(8))]:
        expect(columns(page).locator("th.title", has_text=title).first).to_be_attached()
    expect(columns(page).locator("table").first.get_by_role("button")).to_have_count(10)


def test_a_number_word_has_number_words_beside_it_in_the_banks(visit):
    page = visit("banks")  # the default token is ␣three
    expect(page.locator("[data-testid=stSidebar]")).to_contain_text("␣three")
    expect(columns(page).locator("table")).to_have_count(9)
    numbers = {"␣two", "␣four", "␣five", "␣six", "␣seven", "␣eight"}
    for bank in range(8):
        shown = columns(page).locator("table").nth(bank + 1).get_by_role("button").all_inner_texts()
        assert len(numbers & set(shown)) >= 2, (bank, shown)


def test_a_click_on_a_neighbour_chooses_it_and_the_link_restores_it(visit):
    page = visit("banks")
    neighbour = columns(page).locator("table").nth(3).get_by_role("button").first
    shown, token_id = neighbour.inner_text(), neighbour.get_attribute("data-token")
    neighbour.click()
    page.wait_for_url(re.compile(rf"token={token_id}(&|$)"))
    expect(page.locator("[data-testid=stSidebar]")).to_contain_text(shown)
    again = visit(page.url.split("/")[-1])
    expect(again.locator("[data-testid=stSidebar]")).to_contain_text(shown)


def test_shared_neighbours_light_up_together(visit):
    page = visit("banks")
    shared = columns(page).locator("button.shared").first
    token_id = shared.get_attribute("data-token")
    shared.hover()
    lit = columns(page).locator("button.lit")
    expect(lit).to_have_count(columns(page).locator(f'button[data-token="{token_id}"]').count())
    assert lit.count() >= 2


def test_a_pinned_token_stands_beside_the_chosen_one(visit):
    page = visit("banks")
    page.get_by_role("button", name="pin", exact=True).click()
    page.wait_for_url(re.compile("pin="))
    columns(page).locator("table").first.get_by_role("button").first.click()
    expect(columns(page).locator("table")).to_have_count(18)
    page.get_by_role("button", name="unpin").click()
    expect(columns(page).locator("table")).to_have_count(9)
