"""The Live page through Streamlit's own test runner, on a tiny random model."""

import re

from tests.dashboard.test_pages import show


def html(test) -> str:
    return "\n".join(element.proto.body for element in test.get("html"))


def test_nothing_is_switched_at_first_and_both_tables_are_equal(artifact_folder):
    test = show(artifact_folder, "live")
    assert not test.exception
    assert not test.error
    assert "next token, as trained" in html(test)
    assert "<b>0.0000 nats</b>" in html(test)


def test_the_link_restores_prompt_switches_and_target(artifact_folder):
    test = show(artifact_folder, "live", prompt="The old captain paints", off="0_2.1", at="2")
    assert not test.error
    assert test.text_input[0].value == "The old captain paints"
    kl = float(re.search(r"<b>([\d.]+) nats", html(test))[1])
    assert kl > 0
    other = show(artifact_folder, "live", prompt="The old captain paints", off="0_2.1", at="1")
    assert html(other) != html(test)


def test_an_empty_prompt_is_told_in_one_sentence(artifact_folder):
    test = show(artifact_folder, "live", prompt="")
    assert [error.value for error in test.error] == ["The prompt is empty; type some text."]
    assert not test.exception


def test_a_new_prompt_is_kept_and_run(artifact_folder):
    test = show(artifact_folder, "live")
    before = html(test)
    test.text_input[0].set_value("My neighbour counts the stars").run()
    assert html(test) != before
    assert test.session_state["live_prompt"] == "My neighbour counts the stars"


def test_a_target_is_chosen_and_a_late_text_of_the_browser_is_none(artifact_folder):
    """While the page is drawn anew the browser still sends the option that it shows, which may be gone."""
    test = show(artifact_folder, "live")
    (choice,) = [box for box in test.selectbox if box.label == "explain the logit of"]
    choice.options.append("gone")  # for the test's own browser
    choice.set_value("gone").run()
    assert not test.exception
    assert test.session_state["live_target"] is None
    (choice,) = [box for box in test.selectbox if box.label == "explain the logit of"]
    choice.select_index(2).run()
    assert isinstance(test.session_state["live_target"], int)


def test_every_question_has_a_choice_of_its_own(artifact_folder):
    """So that what the browser sends of one is never taken for the answer to another."""
    keys = set()
    for at in ("1", "2", "3"):
        test = show(artifact_folder, "live", prompt="The old captain paints", at=at)
        keys |= {box.key for box in test.selectbox if box.label == "explain the logit of"}
    assert len(keys) == 3


def test_wrong_switches_in_a_link_are_told_and_the_page_is_there(artifact_folder):
    for text, message in (("9", "names layer 9"), ("x", "is no switch"), ("0.7", "names bank 7 in layer 0")):
        test = show(artifact_folder, "live", off=text)
        assert message in test.error[0].value
        assert "next token, as trained" in html(test)
