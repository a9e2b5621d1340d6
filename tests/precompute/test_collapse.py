import json
from pathlib import Path

import numpy as np
import pytest
import torch

from precompute.collapse import Category, collapse_distances, distances, fill, pair_table, read_study, word_states
from tests.conftest import tiny_model
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


def test_distances_are_those_of_single_sentences(model, tokenizer):
    table = collapse_distances(model, tokenizer, STUDY, "tide", show_progress=False)
    assert len(table) == (2 * 2 + 1) * 4
    for row in table.itertuples():
        category = next(c for c in STUDY if c.name == row.category)
        word_a, word_b = row.pair.split(" / ")
        template = category.templates[row.template]
        a, b = (reference(model, tokenizer, template, w)[row.layer] for w in (word_a, word_b))
        assert row.l2 == pytest.approx((a - b).norm().item(), rel=1e-3)
        assert row.normalized_l2 == pytest.approx((a / a.norm() - b / b.norm()).norm().item(), rel=1e-3)
        assert row.cosine_distance == pytest.approx(1 - torch.cosine_similarity(a, b, dim=0).item(), abs=1e-4)


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
    table = collapse_distances(model, tokenizer, [Category("a", (("fox", "fox"),), ("A {} sings.",))], "tide", False)
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
