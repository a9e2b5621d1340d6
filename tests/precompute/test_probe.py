import numpy as np
import pytest

from precompute.probe import CellSums, check_names, difference_table, probe_windows
from precompute.text import HeldOutText
from tide.cli import UserError
from tide.evaluation.compare import loss_tables

VOCAB, LENGTH = 61, 12
KEYS = ["model", "text", "bin_kind", "bin"]


def random_losses(windows, models, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(VOCAB, size=(windows, LENGTH))
    losses = rng.gamma(2, size=(models, windows, LENGTH - 1)).astype(np.float32)
    deciles = (np.arange(VOCAB) % 11 - 1).astype(np.int8)
    return ids, losses, deciles


def test_means_and_intervals_are_those_of_tide_evaluate():
    ids, losses, deciles = random_losses(windows=13, models=3)
    domains, counts = ["a", "b"], [5, 8]
    made = difference_table(
        CellSums.of(losses, ids, deciles), np.repeat([0, 1], counts), domains, replicates=50, seed=3
    ).set_index(KEYS)
    of_text = dict(zip(domains, np.split(np.arange(13), np.cumsum(counts)[:-1]), strict=True))
    expected = loss_tables(
        {m: {text: losses[m][w] for text, w in of_text.items()} for m in range(3)},
        {text: ids[w] for text, w in of_text.items()},
        deciles,
        base=0,
        replicates=50,
        seed=3,
    )
    for name, of_base in (("losses", False), ("differences", True)):
        table = expected[name].query("averaging == 'position'")
        for row in table.itertuples():
            if row.bin_kind == "decile" and row.bin != "none":
                continue
            here = made.loc[(row.model, row.text, row.bin_kind, row.bin)]
            assert (here["n"], here["n_windows"]) == (row.n, row.n_windows)
            if of_base:  # base - model there
                measured = [-here["difference"], -here["high"], -here["low"]]
                np.testing.assert_allclose(measured, [row.mean, row.low, row.high], atol=1e-6)
            else:
                np.testing.assert_allclose(here["loss"], row.mean, rtol=1e-6)
                np.testing.assert_allclose(here["perplexity"], np.exp(row.mean), rtol=1e-6)
    assert len(made) == 3 * 3 * 5


def test_the_spread_and_the_percentage_by_brute_force():
    ids, losses, deciles = random_losses(windows=6, models=2, seed=1)
    made = difference_table(CellSums.of(losses, ids, deciles), np.zeros(6, dtype=int), ["a"]).set_index(KEYS)
    group = np.isin(deciles[ids[:, 1:]], (3, 4, 5, 6))
    apart = (losses[1].astype(np.float64) - losses[0])[group]
    row = made.loc[(1, "a", "group", "mid")]
    np.testing.assert_allclose(row["sd"], apart.std(ddof=1))
    ratio = np.exp(losses[1][group].mean()) / np.exp(losses[0][group].mean())
    np.testing.assert_allclose(row["perplexity_change_percent"], 100 * (ratio - 1), rtol=1e-4)
    assert row["low"] < row["difference"] < row["high"]


def test_the_unchanged_model_differs_from_itself_by_nothing_at_all():
    ids, losses, deciles = random_losses(windows=4, models=2)
    made = difference_table(CellSums.of(losses, ids, deciles), np.zeros(4, dtype=int), ["a"]).query("model == 0")
    assert (made[["difference", "sd", "low", "high", "perplexity_change_percent"]] == 0).all(axis=None)


@pytest.mark.filterwarnings("error")
def test_one_window_has_no_interval_one_position_no_spread_and_nothing_no_row():
    deciles = np.full(VOCAB, -1, dtype=np.int8)
    deciles[7] = 0
    ids = np.full((1, LENGTH), 5)
    ids[0, 4] = 7  # the one rare token; nothing is mid or common
    losses = np.random.default_rng(0).gamma(2, size=(2, 1, LENGTH - 1)).astype(np.float32)
    made = difference_table(CellSums.of(losses, ids, deciles), np.array([1]), ["empty", "b"])
    assert set(made["text"]) == {"b", "all"}
    assert set(made["bin"]) == {"all", "rare", "none"}
    assert made[["low", "high"]].isna().all(axis=None)
    rare = made.query("bin == 'rare'")
    assert (rare["n"] == 1).all()
    assert rare["sd"].isna().all()


def test_windows_in_parts_are_windows_together():
    ids, losses, deciles = random_losses(windows=7, models=3)
    whole = CellSums.of(losses, ids, deciles)
    parts = CellSums.join([CellSums.of(losses[:, a:b], ids[a:b], deciles) for a, b in ((0, 2), (2, 3), (3, 7))])
    for name, array in whole.arrays().items():
        np.testing.assert_array_equal(parts.arrays()[name], array)


def test_a_window_that_predicts_nothing_is_left_out():
    text = HeldOutText(np.arange(9), np.array([0, 1, 1, 9]), ["one", "empty", "b"], length=4)
    assert probe_windows(text, 100).tolist() == [1, 2]
    with pytest.raises(UserError, match=r"no two tokens in a row to measure a loss on; give a longer --text\.$"):
        probe_windows(HeldOutText(np.arange(1), np.array([0, 1]), ["one"], length=4), 100)


def test_no_text_is_called_as_all_are(tmp_path):
    with pytest.raises(UserError, match="called 'all'"):
        check_names([tmp_path / "a.txt", tmp_path / "heldout_all.txt"])
    check_names([tmp_path / "a.txt"])
