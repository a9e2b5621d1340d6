"""Several artifact folders in one dashboard, one of them without its checkpoint."""

import re
import shutil

import pytest
from playwright.sync_api import expect

from tests.browser.driver import DEMO_ARTIFACTS, dashboard_server, open_page


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory):
    lonely = tmp_path_factory.mktemp("artifacts") / "lonely"
    shutil.copytree(DEMO_ARTIFACTS, lonely)  # the checkpoint is found from the folder, so this one has lost it
    with dashboard_server(DEMO_ARTIFACTS, lonely) as url:
        yield url


def test_the_link_names_the_folder_and_the_selection_stays_when_it_changes(two_folders, browser):
    page = open_page(browser, f"{two_folders}/router?artifacts=lonely&token=1000&layer=2")
    sidebar = page.locator("[data-testid=stSidebar]")
    expect(sidebar.get_by_role("combobox", name="artifacts")).to_have_value("lonely")
    expect(sidebar).to_contain_text("id 1000")
    sidebar.get_by_role("combobox", name="artifacts").click()
    page.get_by_role("option", name="tide-8e").click()
    page.wait_for_url(lambda url: "lonely" not in url)
    expect(sidebar).to_contain_text("id 1000")
    page.wait_for_url(re.compile("token=1000"))


def test_live_says_in_one_sentence_that_the_checkpoint_is_gone(two_folders, browser):
    page = open_page(browser, f"{two_folders}/live?artifacts=lonely")
    expect(page.get_by_text(re.compile("There is no checkpoint folder"))).to_be_visible()
    assert "Traceback" not in page.content()
