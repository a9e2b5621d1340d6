import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from precompute import Artifacts
from precompute.identity_probe import probe_words
from precompute.pipeline import run
from precompute.stages.collapse import (
    Category,
    category_states,
    context_spread,
    distance_table,
    distances,
    fill,
    pair_table,
    probe_table,
    read_study,
    word_states,
)
from tests.conftest import tiny_model
from tide.checkpoint import load_checkpoint
from tide.cli import UserError

STUDY_FILE = Path(__file__).parents[2] / "assets" / "templates" / "collapse.json"
STUDY = [
    Category("a", (("fox", "captain"), ("child", "neighbourhood")), ("The {} sings.", "An old and red {} at night.")),
    Category("b", (("3", "21"),), ("We saw {} boats in the harbour.",)),
]


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer))


def reference(model, tokenizer, template, word):
    """Hidden states [L+1, d] at the word's last token: tokens up to and with the word, without padding or offsets."""
    before = tokenizer(template.split("{}")[0] + word)["input_ids"]
    whole = tokenizer(template.replace("{}", word))["input_ids"]
    assert whole[: len(before)] == before
    return model.trace(torch.tensor([whole])).hidden[0, len(before) - 1].double()


@pytest.mark.parametrize("category", STUDY)
def test_distances_are_those_of_single_sentences(model, tokenizer, category):
    table = distance_table(category_states(model, tokenizer, category), category, "tide")
    assert len(table) == len(category.pairs) * len(category.templates) * 4
    for row in table.itertuples():
        assert (row.category, row.model) == (category.name, "tide")
        word_a, word_b = row.pair.split(" / ")
        template = category.templates[row.template]
        a, b = (reference(model, tokenizer, template, w)[row.layer] for w in (word_a, word_b))
        assert row.l2 == pytest.approx((a - b).norm().item(), rel=1e-3)
        assert row.normalized_l2 == pytest.approx((a / a.norm() - b / b.norm()).norm().item(), rel=1e-3)
        assert row.cosine_distance == pytest.approx(1 - torch.cosine_similarity(a, b, dim=0).item(), abs=1e-4)


def test_relative_distance_is_over_the_spread_between_sentences(model, tokenizer):
    category = STUDY[0]
    table = distance_table(category_states(model, tokenizer, category), category, "tide")
    for row in table.itertuples():
        first, second = (
            [reference(model, tokenizer, template, word)[row.layer] for template in category.templates]
            for word in row.pair.split(" / ")
        )
        spread = ((first[0] - first[1]).norm() + (second[0] - second[1]).norm()).item() / 2
        if row.layer == 0:  # the embedding is the same in every sentence
            assert np.isnan(row.relative_l2)
        else:
            assert row.relative_l2 == pytest.approx(row.l2 / spread, rel=1e-3)


def test_spread_is_a_mean_over_all_two_templates():
    states = torch.randn(2, 4, 3, 5)
    twos = [(i, j) for i in range(4) for j in range(i)]
    expected = torch.stack([(states[:, i] - states[:, j]).norm(dim=-1) for i, j in twos]).mean(dim=0)
    np.testing.assert_allclose(context_spread(states), expected, rtol=1e-5)
    assert np.isnan(context_spread(states[:, :1])).all()


def test_one_template_has_no_relative_distance_and_no_probe(model, tokenizer):
    category = STUDY[1]
    states = category_states(model, tokenizer, category)
    assert distance_table(states, category, "tide")["relative_l2"].isna().all()
    probe = probe_table(states, category, "tide")
    assert probe[["pair_accuracy", "d_prime", "identity_accuracy"]].isna().all(axis=None)
    assert (probe["sentences"] == 0).all()


def test_a_word_of_two_pairs_is_one_word():
    category = Category("a", (("3", "5"), ("7", "3")), ("We saw {} boats.",))
    assert category.words == ("3", "5", "7")
    assert category.pair_numbers.tolist() == [[0, 1], [2, 0]]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_batches_equal_one_by_one(model, tokenizer, batch_size):
    sentences = [fill(t, w, tokenizer) for c in STUDY for t in c.templates for pair in c.pairs for w in pair]
    alone = torch.cat([word_states(model, [s]) for s in sentences])
    torch.testing.assert_close(word_states(model, sentences, batch_size), alone, atol=1e-5, rtol=1e-5)


def test_the_word_is_read_at_its_last_token(tokenizer):
    sentence = fill("The old {} sings.", "neighbourhood", tokenizer)
    assert sentence.word_tokens > 1
    decoded = [tokenizer.decode([i]) for i in sentence.ids]
    word = decoded[sentence.position - sentence.word_tokens + 1 : sentence.position + 1]
    assert "".join(word).strip() == "neighbourhood"


def test_the_same_word_has_no_distance(model, tokenizer):
    category = Category("a", (("fox", "fox"),), ("A {} sings.",))
    table = distance_table(category_states(model, tokenizer, category), category, "tide")
    assert np.abs(table[["l2", "normalized_l2", "cosine_distance"]].to_numpy()).max() < 1e-3


def test_normalised_distances_do_not_depend_on_scale():
    a, b = torch.randn(5, 8), torch.randn(5, 8)
    plain, scaled = distances(a, b), distances(a * 7, b * 7)
    np.testing.assert_allclose(scaled["l2"], plain["l2"] * 7, rtol=1e-5)
    np.testing.assert_allclose(scaled["normalized_l2"], plain["normalized_l2"], rtol=1e-5)
    np.testing.assert_allclose(plain["normalized_l2"] ** 2, 2 * plain["cosine_distance"], rtol=1e-5)


def test_the_pairs_say_how_many_tokens_their_words_have(tokenizer):
    table = pair_table(STUDY, tokenizer)
    assert table["pair"].tolist() == ["fox / captain", "child / neighbourhood", "3 / 21"]
    assert table["tokens_a"].tolist()[2] == 1
    assert table["tokens_b"].tolist()[1] > 1


def test_the_study_of_the_project():
    study = read_study(STUDY_FILE)
    assert [c.name for c in study] == ["grammatical homophones", "numeric identity", "rare domain terms"]
    for category in study:
        assert len(set(category.pairs)) == len(category.pairs) >= 20
        assert len(set(category.templates)) == len(category.templates) >= 5
        words = [w for pair in category.pairs for w in pair]
        assert len(set(words)) == len(words)
        for template in category.templates:
            before, after = template.split("{}")
            assert len(before.split()) >= 2
            assert len(after.split()) >= 3
            assert template.isascii()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "has not the form"),
        ("[]", "has not the form"),
        (json.dumps({"categories": [{"name": "a", "pairs": [["x"]], "templates": ["a {} b"]}]}), "has not the form"),
        (json.dumps({"categories": [{"name": "a", "pairs": [["x", "y"]], "templates": ["no slot"]}]}), "exactly one"),
        (json.dumps({"categories": [{"name": "a", "pairs": [], "templates": ["a {} b"]}]}), "without pairs"),
    ],
)
def test_a_wrong_study_is_refused_in_a_sentence(tmp_path, content, match):
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(UserError, match=match):
        read_study(tmp_path / "study.json")


def test_a_missing_study_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_study(tmp_path / "study.json")


@pytest.fixture(scope="module")
def made(job, tmp_path_factory):
    """The stage as the pipeline makes it."""
    out = tmp_path_factory.mktemp("collapse")
    assert run(replace(job, out=out), ["collapse"]) == ["collapse"]
    return Artifacts.open(out)


def test_the_relative_distance_of_the_pipeline(made):
    rows = made.frame("collapse")
    assert set(made.collapse()["metric"]) == {"l2", "normalized_l2", "cosine_distance"}
    for row in made.collapse("people", metrics=["relative_l2"]).itertuples():
        of = rows[(rows["category"] == "people") & (rows["model"] == row.model) & (rows["layer"] == row.layer)]
        assert row.n == (0 if row.layer == 0 else len(of))
        assert row.mean == pytest.approx(of["relative_l2"].mean(), nan_ok=True)
    with pytest.raises(ValueError, match="no metric 'l3'"):
        made.collapse(metrics=["l2", "l3"])


def test_the_probe_of_the_pipeline(made, job):
    model, tokenizer = load_checkpoint(job.base)
    category = next(c for c in read_study(job.templates) if c.name == "people")
    states = category_states(model, tokenizer, category)
    table = made.collapse_probe("people")
    assert list(table.columns) == ["category", "model", "layer", "metric", "mean", "sd", "n", "sentences", "chance"]
    assert len(table) == 2 * 4 * 3
    for layer in range(4):
        expected = probe_words(states[:, :, layer].numpy(), category.pair_numbers)
        for metric, values in expected.items():
            row = table[(table["model"] == "base") & (table["layer"] == layer) & (table["metric"] == metric)].iloc[0]
            defined = values[~np.isnan(values)]
            assert (row["n"], row["sentences"]) == (len(defined), 2 * 3 * len(defined))
            assert row["mean"] == pytest.approx(defined.mean() if len(defined) else np.nan, nan_ok=True)
            assert row["chance"] == {"pair_accuracy": 0.5, "d_prime": 0, "identity_accuracy": 1 / 4}[metric]
    assert set(made.collapse_probe()["category"]) == {"people", "numbers"}
    with pytest.raises(ValueError, match="no category 'x'"):
        made.collapse_probe("x")


def test_without_a_base_there_is_one_model(made, job, tmp_path):
    run(replace(job, base=None, out=tmp_path / "out"), ["collapse"])
    alone = Artifacts.open(tmp_path / "out")
    assert set(alone.collapse_probe()["model"]) == {"tide"}
    rows = made.collapse_probe()
    assert alone.collapse_probe().equals(rows[rows["model"] == "tide"].reset_index(drop=True))
