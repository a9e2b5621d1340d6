"""Stage `overlap` against the definitions."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pandas as pd
import pytest

from precompute import OVERLAP_K, ArtifactError, Artifacts
from precompute.pipeline import run
from precompute.search import rank_biased_overlap
from precompute.stages.overlap import Overlap, overlaps, pair_rows, random_overlaps
from tests.conftest import tiny_model

pytest.importorskip("faiss")

TABLES = ("embedding", "unembedding", 0, 1, 2)
NAMES = ["embedding", "unembedding", "bank_0", "bank_1", "bank_2"]


def jaccard_of(a: np.ndarray, b: np.ndarray) -> float:
    a, b = set(a.tolist()), set(b.tolist())
    return len(a & b) / len(a | b)


def rbo_of(a: np.ndarray, b: np.ndarray, p: float = 0.9) -> float:
    """Webber, Moffat and Zobel (2010), equation 30."""
    k = len(a)
    agreement = [len(set(a[:d].tolist()) & set(b[:d].tolist())) / d for d in range(1, k + 1)]
    return agreement[-1] * p**k + (1 - p) / p * sum(x * p**d for d, x in enumerate(agreement, start=1))


@pytest.fixture(scope="module")
def made(job, tmp_path_factory) -> Artifacts:
    own = replace(job, out=tmp_path_factory.mktemp("overlap"))
    assert run(own, ["overlap"]) == ["frequency", "neighbors", "overlap"]
    return Artifacts.open(own.out)


@pytest.fixture(scope="module")
def expected(made) -> dict[str, np.ndarray]:
    """[V, T, T] of each measure, by definition; of some pairs, the others NaN."""
    lists = [[made.neighbors(v, table, k=50)[0] for v in range(330)] for table in TABLES]
    jaccard = np.array([[[jaccard_of(a[v][:10], b[v][:10]) for b in lists] for a in lists] for v in range(330)])
    rbo = np.full_like(jaccard, np.nan)
    for a, b in ((0, 1), (0, 3), (2, 4)):
        rbo[:, a, b] = rbo[:, b, a] = [rbo_of(lists[a][v], lists[b][v]) for v in range(330)]
    return {"jaccard": jaccard, "rbo": rbo}


def test_jaccard_sees_the_ten_nearest_and_rbo_all():
    a = np.arange(50)[None]
    b = np.concatenate([np.arange(10), np.arange(100, 140)])[None]
    assert overlaps(a, b)["jaccard"].tolist() == [1]
    assert 0.5 < overlaps(a, b)["rbo"][0] < 1
    assert OVERLAP_K == 10


def test_random_lists_overlap_as_the_mean_over_all_lists():
    every = np.array(list(permutations(range(6), 3)))
    found = random_overlaps(3, 6)
    fixed = np.repeat([[4, 0, 2]], len(every), axis=0)
    assert found["jaccard"] == pytest.approx(np.mean([jaccard_of(a, b) for a, b in zip(fixed, every, strict=True)]))
    assert found["rbo"] == pytest.approx(np.mean([rbo_of(a, b) for a, b in zip(fixed, every, strict=True)]))


def test_random_lists_of_a_vocabulary_overlap_as_drawn_ones_do():
    rng = np.random.default_rng(0)
    a, b = (np.argsort(rng.random((4000, 300)), axis=1)[:, :50] for _ in range(2))
    found, drawn = random_overlaps(50, 300), overlaps(a, b)
    for measure, values in drawn.items():
        assert found[measure] == pytest.approx(values.mean(), abs=4 * values.std() / np.sqrt(4000))
    assert random_overlaps(50, 131_071)["jaccard"] == pytest.approx(10 / 131_071 / 2, rel=0.1)


def test_means_by_decile():
    rng = np.random.default_rng(0)
    values, deciles = rng.random(200).astype(np.float32), rng.integers(-1, 9, size=200)  # none in decile 9
    deciles[deciles == 8] = 7
    deciles[3] = 8  # one token
    table = pair_rows("x", "y", {"rbo": values}, deciles)
    assert table["decile"].tolist() == [*range(10), -1, pd.NA]
    assert table["n"].tolist() == [*((deciles == d).sum() for d in (*range(10), -1)), 200]
    for row in table.itertuples():
        group = values if row.decile is pd.NA else values[deciles == row.decile]
        if len(group):
            assert row.mean == pytest.approx(group.mean())
        else:
            assert np.isnan(row.mean)
        assert row.sd == pytest.approx(group.std(ddof=1) if len(group) > 1 else np.nan, nan_ok=True)


def test_every_token_with_every_table(made, expected):
    for token_id in (0, 7, 329):
        table = made.overlap_by_table(token_id)
        assert table["table"].tolist() == NAMES[1:]
        np.testing.assert_allclose(table["jaccard"], expected["jaccard"][token_id, 0, 1:], rtol=1e-6)
        np.testing.assert_allclose(table["rbo"][[0, 2]], expected["rbo"][token_id, 0, [1, 3]], atol=1e-6)
        np.testing.assert_array_equal(made.overlap(token_id), table["jaccard"][1:])
        np.testing.assert_array_equal(made.overlap(token_id, measure="rbo"), table["rbo"][1:])
    assert made.overlap(7).dtype == np.float32


@pytest.mark.parametrize("measure", ["jaccard", "rbo"])
def test_by_decile(made, expected, measure):
    table = made.overlap_by_decile(measure)
    assert list(table.columns) == ["decile", "bank", "mean", "sd", "n"]
    assert [*zip(table["decile"], table["bank"], strict=True)] == [(d, k) for d in range(10) for k in range(3)]
    for row in table[table["bank"] == 1].itertuples():
        values = expected[measure][made.bins == row.decile, 0, 3]
        assert row.n == len(values)
        assert row.mean == pytest.approx(values.mean())
        assert row.sd == pytest.approx(values.std(ddof=1))


@pytest.mark.parametrize("decile", [None, -1, 0, 9])
@pytest.mark.parametrize("measure", ["jaccard", "rbo"])
def test_every_two_tables(made, expected, measure, decile):
    table = made.overlap_between(measure, decile)
    assert list(table.columns) == ["a", "b", "mean", "sd", "n"]
    assert [*zip(table["a"], table["b"], strict=True)] == [(a, b) for a in NAMES for b in NAMES]
    of = expected[measure] if decile is None else expected[measure][made.bins == decile]
    assert (table["n"] == len(of)).all()
    known = ~np.isnan(of[0].reshape(-1))
    np.testing.assert_allclose(table["mean"][known], of.mean(axis=0).reshape(-1)[known], atol=1e-6)
    np.testing.assert_allclose(table["sd"][known], of.std(axis=0, ddof=1).reshape(-1)[known], atol=1e-6)
    itself = table[table["a"] == table["b"]]
    assert itself["mean"].tolist() == [1] * 5
    turned = table.pivot(index="a", columns="b", values="mean").to_numpy()
    np.testing.assert_array_equal(turned, turned.T)


def test_the_matrix_of_a_token(made, expected):
    rows = np.array([0, 2, 3, 4])  # without the unembedding
    found = made.overlap_matrix(9)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected["jaccard"][9][np.ix_(rows, rows)], rtol=1e-6)
    lists = [made.neighbors(9, table, k=7)[0] for table in ("embedding", 0, 1, 2)]
    by_rank = np.array([[rbo_of(a, b) for b in lists] for a in lists])
    np.testing.assert_allclose(made.overlap_matrix(9, k=7, measure="rbo"), by_rank, atol=1e-6)
    np.testing.assert_array_equal(made.overlap_matrix(9, k=50, measure="rbo")[0, 1:], made.overlap(9, "rbo"))


def test_chance_is_told(made):
    assert made.random_overlap() == random_overlaps(50, 329)["jaccard"]
    assert made.random_overlap("rbo") == random_overlaps(50, 329)["rbo"]


@pytest.mark.parametrize("measure", ["jaccard", "rbo"])
def test_tables_that_have_nothing_to_do_with_one_another_overlap_by_chance(made, measure):
    table = made.overlap_between(measure)
    others = table[table["a"] != table["b"]]["mean"]
    assert others.mean() == pytest.approx(made.random_overlap(measure), rel=0.1)


def test_the_weight_of_ranks_is_the_one_of_the_kernel(made):
    ids = [made.neighbors(5, table, k=50)[0][None] for table in ("embedding", 2)]
    assert made.overlap(5, "rbo")[2] == rank_biased_overlap(*ids, p=made.parameters("overlap")["rbo_p"])[0]


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda a: a.overlap(330), "no token id 330"),
        (lambda a: a.overlap(3, "cosine"), "no measure 'cosine'; there are 'jaccard', 'rbo'"),
        (lambda a: a.overlap_by_decile("cosine"), "no measure"),
        (lambda a: a.overlap_matrix(3, measure="cosine"), "no measure"),
        (lambda a: a.random_overlap("cosine"), "no measure"),
        (lambda a: a.overlap_between("rbo", 10), "no decile 10"),
        (lambda a: a.overlap_between("rbo", -2), "no decile -2"),
    ],
)
def test_what_is_not_there_is_said(made, ask, match):
    with pytest.raises(ValueError, match=match):
        ask(made)


def test_the_stage_is_named_where_it_is_missing_and_the_matrix_needs_it_not(job, tmp_path):
    run(replace(job, out=tmp_path / "out"), ["neighbors"])
    opened = Artifacts.open(tmp_path / "out")
    assert opened.overlap_matrix(3).shape == (4, 4)
    for ask in (lambda: opened.overlap(3), opened.overlap_by_decile, opened.overlap_between, opened.random_overlap):
        with pytest.raises(ArtifactError, match="--only overlap"):
            ask()


def test_a_run_that_was_stopped_ends_with_the_same_bytes(job, made, tmp_path, monkeypatch):
    measure, asked = Overlap.measure, []

    def stop(self, context, piece):
        asked.append(piece)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return measure(self, context, piece)

    monkeypatch.setattr(Overlap, "measure", stop)
    own = replace(job, out=tmp_path / "out", reuse=made.folder)
    run(own, ["frequency", "neighbors"])
    own = replace(own, reuse=None)
    with pytest.raises(KeyboardInterrupt):
        run(own, ["overlap"])
    run(own, ["overlap"])
    assert asked == [*NAMES[:2], *NAMES[1:-1]]
    files = [file.relative_to(own.out) for file in (own.out / "overlap").iterdir()]
    assert len(files) == 2
    assert all((own.out / file).read_bytes() == (made.folder / file).read_bytes() for file in files)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_banks(job, tokenizer, tmp_path, tied):
    tiny_model(vocab_size=330, num_memory_blocks=0, tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run(replace(job, checkpoint=tmp_path / "base", base=None, out=tmp_path / "out"), ["overlap"])
    opened = Artifacts.open(tmp_path / "out")
    assert opened.overlap(3).shape == (0,)
    assert opened.overlap_by_table(3)["table"].tolist() == ([] if tied else ["unembedding"])
    assert opened.overlap_by_decile().empty
    assert list(opened.overlap_by_decile().columns) == ["decile", "bank", "mean", "sd", "n"]
    assert len(opened.overlap_between("rbo", 3)) == (1 if tied else 4)
    assert opened.overlap_matrix(3).tolist() == [[1]]
