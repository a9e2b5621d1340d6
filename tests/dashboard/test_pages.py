"""Every page through Streamlit's own test runner, on real artifacts of a tiny model."""

import json
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.checkpoint import CheckpointFacts
from dashboard.components.token_table import Column, Row, table_data
from dashboard.pages import banks, collapse, router
from dashboard.pages.collapse import Choice
from dashboard.state import open_source
from precompute.pipeline import Job, run
from tide.cli import UserError

PAGES = ("overview", "router", "banks", "collapse")


def app(folder: str, page: str) -> None:
    """The app's frame around one page, without the sidebar."""
    import importlib
    from pathlib import Path

    import streamlit as st

    from dashboard.frame import guarded
    from dashboard.state import open_source, pop_notices, sync_url

    source = open_source(Path(folder))
    st.session_state["source"] = source
    sync_url(source.space)
    for notice in pop_notices():
        st.warning(notice)
    guarded(importlib.import_module(f"dashboard.pages.{page}").render)()


def show(folder: Path, page: str, **params: str) -> AppTest:
    test = AppTest.from_function(app, args=(str(folder), page), default_timeout=60)
    for name, value in params.items():
        test.query_params[name] = value
    return test.run()


def texts(test: AppTest) -> str:
    return "\n".join(element.value for element in test.markdown)


@pytest.fixture(scope="module")
def source(artifact_folder):
    return open_source(artifact_folder)


@pytest.fixture(scope="module")
def unseen(source) -> int:
    """A token id that the measured text does not hold."""
    return next(i for i in range(source.space.vocab_size) if source.artifacts.routing(i)[2] == 0)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("which", ["default", "unseen", "special", "unused", "null"])
def test_a_page_renders(artifact_folder, source, unseen, page, which):
    special, last = min(source.artifacts.special_ids), source.space.vocab_size - 1
    params = {"default": {}, "unseen": {"token": str(unseen)}, "special": {"token": str(special), "pin": str(unseen)}}
    params |= {"unused": {"token": str(last), "layer": "2", "bank": "2"}, "null": {"bank": "null"}}
    test = show(artifact_folder, page, **params[which])
    assert not test.exception
    assert not test.error
    assert not test.warning
    assert test.title[0].value == page.capitalize()


@pytest.mark.parametrize("page", PAGES)
def test_a_wrong_link_is_told_in_one_sentence_and_the_page_is_there(artifact_folder, page):
    test = show(artifact_folder, page, token="99999999", layer="1")
    assert not test.exception
    assert [warning.value for warning in test.warning] == [
        "The link names token 99999999, but this checkpoint has tokens 0..329."
    ]


@pytest.mark.parametrize(("page", "stage"), [("router", "routing"), ("banks", "neighbors"), ("collapse", "collapse")])
def test_a_missing_stage_is_told_with_the_command_that_makes_it(folder_without, page, stage):
    folder = folder_without(stage)
    test = show(folder, page)
    assert not test.exception
    assert len(test.error) == 1
    assert test.error[0].value.endswith(f"--only {stage}`.")
    assert any("Not computed yet" in caption.value for caption in show(folder, "overview").caption)


def test_banks_without_the_stage_overlap_lack_one_figure(folder_without):
    test = show(folder_without("overlap"), "banks")
    assert not test.exception
    assert [error.value.endswith("--only overlap`.") for error in test.error] == [True]
    assert "mean overlap of its neighbours" in texts(test)


def test_banks_need_no_routing(folder_without):
    test = show(folder_without("routing"), "banks")
    assert not test.exception
    assert not test.error


def test_the_overview_is_told_when_the_checkpoint_is_gone(artifact_folder, tmp_path):
    copy = tmp_path / "elsewhere" / "artifacts"
    copy.mkdir(parents=True)
    for entry in artifact_folder.iterdir():
        (copy / entry.name).symlink_to(entry)
    test = show(copy, "overview")
    assert not test.exception
    assert len(test.error) == 1
    assert "What each page answers" in texts(test)


def test_the_link_chooses_layer_and_bank(artifact_folder):
    test = show(artifact_folder, "router", layer="2", bank="1")
    assert "(layer 2, bank 1) takes most" in texts(test)
    assert "(layer 0, null) takes most" in texts(show(artifact_folder, "router", bank="null"))


def test_a_higher_n_min_empties_the_lists_but_not_the_page(artifact_folder):
    test = show(artifact_folder, "router")
    test.number_input(key="router_n_min").set_value(10**6).run()
    assert not test.exception


@pytest.mark.parametrize("length", [10, 20, 50])
def test_banks_shows_as_many_neighbours_as_asked(source, length):
    columns = banks.neighbor_columns(source, (5, 7), layer=0, bank=1, length=length)
    assert [column.title for column in columns[::2]] == ["embedding", "bank 0", "bank 1", "bank 2"]
    assert all(len(column.rows) == length for column in columns)
    assert [i for i, column in enumerate(columns) if column.chosen] == [4]
    assert [column.joined for column in columns] == [False, True] * 4
    assert {len(column.notes) for column in columns} == {3}
    ids, _ = source.artifacts.neighbors(7, 2, k=length)
    assert [row.token_id for row in columns[-1].rows] == list(ids)


def test_a_shared_neighbour_has_one_tint_everywhere_and_others_none():
    columns = [Column("a", [Row(1, "x"), Row(2, "y")]), Column("b", [Row(2, "y"), Row(3, "z")])]
    data = table_data(columns, "label", width=10)
    tints = [(row["id"], row["tint"]) for column in data["columns"] for row in column["rows"]]
    assert tints == [(1, None), (2, 0), (2, 0), (3, None)]
    assert "in 2 columns" in data["columns"][0]["rows"][1]["title"]


def test_the_table_is_sent_as_plain_text():
    data = table_data([Column("t", [Row(1, "<img src=x onerror=alert(1)>`$*_⏎")])], "label", width=40)
    row = json.loads(json.dumps(data))["columns"][0]["rows"][0]
    assert row["text"] == "<img src=x onerror=alert(1)>`$*_⏎"
    script = (Path(banks.__file__).parents[1] / "components" / "token_table.js").read_text(encoding="utf-8")
    assert "innerHTML" not in script


# --- The Collapse page's choice ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(source):
    return source.artifacts.collapse_pairs()


def test_a_link_restores_the_choice(artifact_folder, pairs):
    row = pairs.iloc[1]
    params = {"category": row["category"], "pair": row["pair"]}
    assert Choice.from_params(params, pairs) == (Choice(**params), None)
    assert Choice(**params).to_params() == params
    test = show(artifact_folder, "collapse", **params)
    assert not test.exception
    assert [box.value for box in test.selectbox] == [row["category"], row["pair"]]
    assert test.query_params["pair"] in (row["pair"], [row["pair"]])


def test_a_pair_alone_brings_its_category(pairs):
    choice, problem = Choice.from_params({"pair": pairs["pair"].iloc[-1]}, pairs)
    assert choice.category == pairs["category"].iloc[-1]
    assert problem is None


@pytest.mark.parametrize("params", [{"category": "<b>no</b>"}, {"pair": "no / such"}])
def test_a_wrong_choice_is_told_in_one_sentence(artifact_folder, pairs, params):
    choice, problem = Choice.from_params(params, pairs)
    assert choice == Choice()
    assert problem is not None
    test = show(artifact_folder, "collapse", **params)
    assert not test.exception
    assert len(test.warning) == 1
    assert "<b>" not in test.warning[0].value


def test_without_a_base_model_the_page_says_how_to_add_one(artifact_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    templates = artifact_folder.parent / "study.json"
    text = (artifact_folder.parent / "text.txt",)
    run(Job(artifact_folder.parent / "tide", out, templates, text, show_progress=False), ["frequency", "collapse"])
    test = show(out, "collapse")
    assert not test.exception
    assert "--base BASE_CHECKPOINT" in test.info[0].value


def test_another_category_is_written_into_the_link_and_forgets_the_pair(artifact_folder, pairs):
    first = pairs.iloc[0]
    test = show(artifact_folder, "collapse", category=first["category"], pair=first["pair"])
    test.selectbox(key="collapse_category").select("places").run()
    assert not test.exception
    assert test.query_params["category"] in ("places", ["places"])
    assert "pair" not in test.query_params


# --- Sentences come from the numbers -----------------------------------------------------------------------------


def null_weights(rare: float, common: float, sd: float = 0.1, n: int = 100):
    mean = np.array([rare] * 3 + [0.5] * 4 + [common] * 3)
    return mean, np.full(10, sd), np.full(10, n)


@pytest.mark.parametrize(
    ("rare", "common", "verdict"), [(0.2, 0.6, "more than"), (0.6, 0.2, "less than"), (0.4, 0.401, "as much as")]
)
def test_the_router_says_who_takes_more_memory(rare, common, verdict):
    text = router.summary("␣x", 1, np.array([0.1, 0.7, 0.2]), 9, null_weights(rare, common))
    assert f"rare tokens take **{verdict}** common ones" in text
    assert "most to **bank 1** (.700), null gets .200" in text


def test_the_router_claims_nothing_without_numbers():
    assert router.summary("␣x", 0, np.full(3, np.nan), 0, null_weights(0.2, 0.4, n=0)) == ""
    assert router.summary("␣x", 0, np.full(3, 1 / 3), 4, null_weights(0.2, 0.4, n=0), n_min=5) == ""


def test_collapse_counts_only_layers_beyond_the_interval():
    import pandas as pd

    layers = pd.DataFrame({"layer": [0, 1, 2, 3], "difference": [9.0, 1.0, -1.0, 0.1], "half_width": 0.5, "n": 50})
    table = pd.concat([layers.assign(metric=metric) for metric in ("l2", "normalized_l2", "cosine_distance")])
    text = collapse.summary(table, num_layers=3)
    assert "after **1** by L2 distance, **1** by normalised L2 distance" in text
    assert "(closer after 1, 1, 1)" in text
    assert "+0.100 ± 0.500" in text
    assert "nothing can be said" in collapse.summary(table.assign(n=1), num_layers=3)


# --- What a checkpoint says about itself -------------------------------------------------------------------------


def test_checkpoint_facts_add_up(source):
    folder = source.artifacts.checkpoint
    facts = CheckpointFacts.read(folder)
    header = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert facts.config.num_memory_blocks == header["num_memory_blocks"] == 3
    assert facts.dtypes == ("F32",)
    assert (facts.parts["bytes"] == 4 * facts.parts["parameters"]).all()
    assert facts.trained_tokens is None


def test_a_checkpoint_that_is_not_there_is_told_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        CheckpointFacts.read(tmp_path)
