"""The reader gives what the stages measured: each answer against a few lines of its own."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from precompute import ArtifactError, Artifacts
from precompute.text import HeldOutText
from tide.checkpoint import load_checkpoint
from tide.cli import UserError
from tide.frequency import count_tokens, frequency_deciles
from tide.tokens import Vocabulary
from tide.training.corpus import read_documents

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(job):
    return load_checkpoint(job.checkpoint)[0]


def test_what_it_belongs_to(artifacts, job):
    assert artifacts.checkpoint == job.checkpoint.resolve()
    assert artifacts.base == job.base.resolve()
    assert (artifacts.num_layers, artifacts.num_banks, artifacts.vocab_size) == (3, 3, 330)
    assert all(artifacts.has(stage) for stage in ("frequency", "routing", "neighbors", "collapse"))
    assert not artifacts.has("history")
    assert artifacts.tables == ("embedding", "unembedding", 0, 1, 2)


def test_the_token_table(artifacts, job, tokenizer):
    vocabulary = Vocabulary(tokenizer, 330)
    counts = count_tokens(read_documents(job.text[0]), tokenizer, 330, show_progress=False)
    assert artifacts.counts.dtype == np.int64
    assert artifacts.counts.tolist() == counts.tolist()
    assert artifacts.bins.dtype == np.int8
    assert artifacts.bins.tolist() == frequency_deciles(counts, vocabulary).tolist()
    assert artifacts.texts == vocabulary.texts
    assert artifacts.shown == vocabulary.shown
    assert artifacts.special_ids == vocabulary.special_ids
    assert artifacts.count_corpus == "text.txt"


def test_neighbours_of_a_token(artifacts, model):
    memory = model.model.memory(torch.arange(330)).detach().double()
    tables = {"embedding": model.get_input_embeddings().weight.detach().double(), **{k: memory[:, k] for k in range(3)}}
    for table, vectors in tables.items():
        cosines = torch.cosine_similarity(vectors[7], vectors, dim=-1)
        cosines[7] = -2
        best, ids = cosines.topk(12)
        found_ids, found = artifacts.neighbors(7, table, k=12)
        assert found_ids.dtype == np.int64
        assert found.dtype == np.float32
        assert found_ids.tolist() == ids.tolist()
        np.testing.assert_allclose(found, best, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((330, "embedding", 10), "token id 330"),
        ((-1, "embedding", 10), "token id -1"),
        ((5, "memory", 10), "table 'memory'"),
        ((5, 3, 10), "table 3"),
        ((5, -1, 10), "table -1"),
        ((5, True, 10), "table True"),
        ((5, 0, 51), "k is 51; 1 to 50"),
        ((5, 0, 0), "k is 0"),
    ],
)
def test_what_is_not_there_is_said(artifacts, arguments, match):
    with pytest.raises(ValueError, match=match):
        artifacts.neighbors(*arguments)


def test_overlap_follows_from_the_neighbours(artifacts):
    tables = ["embedding", 0, 1, 2]
    sets = [set(artifacts.neighbors(9, table)[0].tolist()) for table in tables]
    expected = np.array([[len(a & b) / len(a | b) for b in sets] for a in sets])
    np.testing.assert_allclose(artifacts.overlap_matrix(9), expected, rtol=1e-6)
    np.testing.assert_allclose(artifacts.overlap(9), expected[0, 1:], rtol=1e-6)


def test_overlap_by_decile(artifacts):
    table = artifacts.overlap_by_decile()
    assert list(table.columns) == ["decile", "bank", "mean", "sd", "n"]
    assert len(table) == 30
    for row in table.itertuples():
        values = [artifacts.overlap(int(v))[row.bank] for v in np.flatnonzero(artifacts.bins == row.decile)]
        assert row.n == len(values)
        assert row.mean == pytest.approx(np.mean(values))
        assert row.sd == pytest.approx(np.std(values, ddof=1))


def test_routing_of_a_token(artifacts, job, model, tokenizer):
    text = HeldOutText.open(artifacts)
    tokens = torch.from_numpy(text.read(0, len(text)))
    token_id = int(tokens.bincount().argmax())
    weights = torch.cat([model.trace(window[None]).routing[0] for window in tokens.split(64)])
    mean, sd, n = artifacts.routing(token_id)
    assert n == int((tokens == token_id).sum())
    np.testing.assert_allclose(mean, weights[tokens == token_id].mean(0), atol=1e-5)
    np.testing.assert_allclose(sd, weights[tokens == token_id].std(0), atol=1e-5)
    overall_mean, overall_sd, total = artifacts.routing_overall()
    assert total == len(tokens)
    np.testing.assert_allclose(overall_mean, weights.mean(0), atol=1e-5)
    np.testing.assert_allclose(overall_sd, weights.std(0), atol=1e-5)


def test_routing_by_decile_is_over_positions(artifacts):
    mean, sd, n = artifacts.routing_by_decile()
    assert mean.shape == sd.shape == (10, 3, 4)
    for decile in range(10):
        routing = [artifacts.routing(int(v)) for v in np.flatnonzero(artifacts.bins == decile)]
        assert n[decile] == sum(r[2] for r in routing)
        weighted = sum(r[0].astype(np.float64) * r[2] for r in routing if r[2]) / n[decile]
        np.testing.assert_allclose(mean[decile], weighted, atol=1e-5)


def test_the_mean_injection_follows_from_the_tokens_mean_routing(artifacts, model):
    mean_injection = artifacts.mean_injection()
    assert mean_injection.shape == (3, 3, 32)
    assert mean_injection.dtype == np.float32
    memory = model.model.memory(torch.arange(330)).detach().double().numpy()  # M depends on the token id alone
    expected, total = np.zeros((3, 3, 32)), artifacts.routing_overall()[2]
    for token_id in range(330):
        mean, _, n = artifacts.routing(token_id)
        if n:
            expected += n / total * mean[:, :-1, None].astype(np.float64) * memory[token_id]
    np.testing.assert_allclose(mean_injection, expected, atol=1e-5)


def test_contexts_of_tokens_that_occur_once(artifacts, job, tokenizer):
    text = HeldOutText.open(artifacts)
    windows = [w.tolist() for w in torch.from_numpy(text.read(0, len(text))).split(64)]
    assert len(artifacts.once_contexts()) >= 3
    for context in artifacts.once_contexts():
        assert context.dtype == np.int64
        assert artifacts.routing(int(context[-1]))[2] == 1
        assert context.tolist() in [w[: len(context)] for w in windows]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("bank", [0, 3])
def test_top_tokens(artifacts, bank, largest):
    table = artifacts.top_tokens(1, bank, k=6, n_min=4, largest=largest)
    assert list(table.columns) == ["token_id", "mean", "sd", "n", "decile", "count"]
    routing = [(v, artifacts.routing(v)) for v in range(330)]
    ranked = sorted(((r[0][1, bank] * (-1 if largest else 1), v) for v, r in routing if r[2] >= 4))
    assert table["token_id"].tolist() == [v for _, v in ranked[:6]]
    for row in table.itertuples():
        mean, sd, n = artifacts.routing(row.token_id)
        assert (row.mean, row.sd, row.n) == (mean[1, bank], sd[1, bank], n)
        assert (row.decile, row.count) == (artifacts.bins[row.token_id], artifacts.counts[row.token_id])


def test_top_tokens_of_no_layer_or_bank(artifacts):
    with pytest.raises(ValueError, match="no layer 3"):
        artifacts.top_tokens(3, 0)
    with pytest.raises(ValueError, match="no bank 4"):
        artifacts.top_tokens(0, 4)


def test_the_collapse_study(artifacts):
    rows = artifacts._collapse
    everything = artifacts.collapse()
    assert list(everything.columns) == ["model", "layer", "metric", "mean", "sd", "n"]
    assert len(everything) == 2 * 4 * 3
    assert (everything["n"] == 2 * 3 + 1 * 2).all()
    for row in artifacts.collapse(category="people", pair="fox / captain").itertuples():
        of = rows[(rows["pair"] == "fox / captain") & (rows["model"] == row.model) & (rows["layer"] == row.layer)]
        assert row.n == len(of) == 3
        assert row.mean == pytest.approx(of[row.metric].mean())
        assert row.sd == pytest.approx(of[row.metric].std())


@pytest.mark.parametrize(
    "selection", [{"category": "x"}, {"pair": "x"}, {"category": "numbers", "pair": "fox / captain"}]
)
def test_no_such_category_or_pair(artifacts, selection):
    with pytest.raises(ValueError, match="There is no"):
        artifacts.collapse(**selection)


def test_the_pairs(artifacts):
    pairs = artifacts.collapse_pairs()
    assert pairs["pair"].tolist() == ["fox / captain", "neighbour / child", "3 / 21"]
    assert list(pairs.columns) == ["category", "pair", "word_a", "word_b", "tokens_a", "tokens_b"]


def test_a_folder_and_its_checkpoint_can_move_together(artifact_folder, tmp_path):
    moved = shutil.copytree(artifact_folder.parent, tmp_path / "elsewhere")
    opened = Artifacts.open(moved / "artifacts")
    assert opened.checkpoint == (moved / "tide").resolve()


def test_an_artifact_error_is_a_user_error():
    assert issubclass(ArtifactError, UserError)
