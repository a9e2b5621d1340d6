"""Tables of losses by text, bin and averaging, against brute force."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import VOCAB_SIZE
from tide.evaluation import loss_tables, perplexity
from tide.evaluation.bins import REPEATS, repeats_of
from tide.frequency import GROUPS

KEYS = ["model", "text", "bin_kind", "bin", "averaging"]


@pytest.fixture(scope="module")
def case():
    """Two texts of random losses under three models, and deciles of which some are -1."""
    rng = np.random.default_rng(1)
    windows = {"a.txt": rng.integers(VOCAB_SIZE, size=(19, 20)), "b.txt": rng.integers(VOCAB_SIZE, size=(14, 20))}
    base = {name: rng.gamma(2.0, size=(len(w), 19)).astype(np.float32) for name, w in windows.items()}
    losses = {"base": base}
    for model, gain in (("k2", 0.3), ("k8", -0.3)):
        losses[model] = {t: x - rng.normal(gain, 0.3, size=x.shape).astype(np.float32) for t, x in base.items()}
    return losses, windows, rng.integers(-1, 10, size=VOCAB_SIZE).astype(np.int8)


@pytest.fixture(scope="module")
def tables(case):
    return loss_tables(*case, base="base", replicates=200)


def positions(case, model, text):
    """Token ids and losses of one text, or of all."""
    losses, windows, _ = case
    texts = list(windows) if text == "all" else [text]
    return (
        np.concatenate([windows[t][:, 1:].ravel() for t in texts]),
        np.concatenate([losses[model][t].ravel() for t in texts]).astype(np.float64),
    )


def in_bin(deciles, bin_kind, name):
    """Which token ids belong to a bin."""
    if bin_kind == "all":
        return np.ones(len(deciles), dtype=bool)
    return np.isin(deciles, GROUPS[name] if bin_kind == "group" else [-1 if name == "none" else int(name)])


def test_every_row_is_what_brute_force_says(case, tables):
    deciles = case[2]
    rows = tables["losses"]
    assert len(rows) == 3 * 3 * 15 * 2  # models, texts, bins, averagings
    for row in rows.itertuples():
        ids, losses = positions(case, row.model, row.text)
        here = in_bin(deciles, row.bin_kind, row.bin)[ids]
        types = np.unique(ids[here])
        assert (row.n, row.n_types) == (here.sum(), len(types))
        by_type = np.mean([losses[ids == t].mean() for t in types])
        assert row.mean == pytest.approx(losses[here].mean() if row.averaging == "position" else by_type)
        assert row.low < row.mean < row.high


def test_the_difference_is_paired(case, tables):
    losses = tables["losses"].set_index(KEYS)["mean"]
    assert set(tables["differences"]["model"]) == {"k2", "k8"}
    for row in tables["differences"].itertuples():
        key = (row.text, row.bin_kind, row.bin, row.averaging)
        assert row.mean == pytest.approx(losses["base", *key] - losses[row.model, *key])
    whole = tables["differences"].query("bin_kind == 'all' and text == 'all' and averaging == 'position'")
    widths = (whole["high"] - whole["low"]).to_numpy()
    alone = tables["losses"].query("bin_kind == 'all' and text == 'all' and averaging == 'position'")
    assert (widths < 0.5 * (alone["high"] - alone["low"]).min()).all()


def test_a_model_beside_itself_differs_by_nothing(case):
    losses, windows, deciles = case
    twice = {"base": losses["base"], "same": losses["base"]}
    rows = loss_tables(twice, windows, deciles, base="base", replicates=50)["differences"]
    assert (rows[["mean", "low", "high"]] == 0).all(axis=None)
    assert set(rows["better"]) == {"unclear"}


def test_better_says_which_model_predicts_better(tables):
    rows = tables["differences"].set_index(KEYS)
    assert rows.loc[("k2", "all", "all", "all", "position"), "better"] == "model"
    assert rows.loc[("k8", "all", "all", "all", "position"), "better"] == "base"
    for row in rows.itertuples():
        assert row.better == ("model" if row.low > 0 else "base" if row.high < 0 else "unclear")


def test_perplexity_is_that_of_the_positions(case, tables):
    rows = tables["losses"]
    whole = (rows["bin_kind"] == "all") & (rows["averaging"] == "position")
    assert rows.loc[~whole, ["perplexity", "perplexity_low", "perplexity_high"]].isna().all(axis=None)
    for row in rows[whole].itertuples():
        assert row.perplexity == pytest.approx(perplexity(positions(case, row.model, row.text)[1]))
        assert (row.perplexity_low, row.perplexity_high) == pytest.approx((np.exp(row.low), np.exp(row.high)))


def test_deciles_and_groups_divide_the_text(tables):
    for _, rows in tables["losses"].query("averaging == 'position'").groupby(["model", "text"]):
        n = rows.set_index(["bin_kind", "bin"])["n"]
        assert n["decile"].sum() == n["all", "all"]
        for group, deciles in GROUPS.items():
            assert n["group", group] == n["decile"][[str(d) for d in deciles]].sum()


def test_an_interval_depends_neither_on_other_models_nor_on_other_texts(case, tables):
    losses, windows, deciles = case
    alone = loss_tables({"k8": {"b.txt": losses["k8"]["b.txt"]}}, {"b.txt": windows["b.txt"]}, deciles, replicates=200)
    assert list(alone) == ["losses"]
    same = tables["losses"].query("model == 'k8' and text == 'b.txt'").reset_index(drop=True)
    rows = alone["losses"].query("text == 'b.txt'").reset_index(drop=True)
    pd.testing.assert_frame_equal(rows, same)


def test_without_deciles_there_is_the_whole_text_alone(case):
    losses, windows, _ = case
    assert set(loss_tables(losses, windows, None, "base", 20)["losses"]["bin_kind"]) == {"all"}


def test_a_bin_in_one_window_has_no_interval(case):
    losses, windows, _ = case
    deciles = np.zeros(VOCAB_SIZE, dtype=np.int8)
    deciles[VOCAB_SIZE - 1] = 5
    windows = {"a.txt": np.where(windows["a.txt"] == VOCAB_SIZE - 1, 0, windows["a.txt"])}
    windows["a.txt"][3, 4] = VOCAB_SIZE - 1
    rows = loss_tables(losses, windows, deciles, "base", 50)
    assert set(rows["losses"].query("bin_kind == 'decile'")["bin"]) == {"0", "5"}  # empty bins have no row
    lonely = rows["differences"].query("bin == '5'")
    assert (lonely["n_windows"] == 1).all()
    assert lonely[["low", "high"]].isna().all(axis=None)
    assert set(lonely["better"]) == {"unclear"}


def test_repeats_by_hand():
    names = [REPEATS[r] for r in repeats_of(np.array([[5, 7, 5, 7, 7, 9, 7, 9]]))[0]]
    #        5 before 7: new; 5 again; 5 7 again; 7 after 7; 9: new; 7 after 9; 7 9 again
    assert names == ["new", "token", "pair", "token", "new", "token", "pair"]


@given(st.lists(st.lists(st.integers(0, 4), min_size=12, max_size=12), min_size=1, max_size=4))
def test_repeats_are_what_a_search_finds(windows):
    found = repeats_of(np.array(windows, dtype=np.int32))
    for window, row in zip(windows, found, strict=True):
        for t in range(1, len(window)):
            pair = any(window[s - 1 : s + 1] == window[t - 1 : t + 1] for s in range(1, t))
            assert REPEATS[row[t - 1]] == ("pair" if pair else "token" if window[t] in window[:t] else "new")


def test_repeats_divide_every_bin(case, tables):
    repeats = loss_tables(*case, base="base", replicates=200, by_repetition=True)
    for name in ("losses", "differences"):
        pd.testing.assert_frame_equal(repeats[name], tables[name])
    of_losses = tables["losses"].query("averaging == 'position'").set_index(["model", "text", "bin_kind", "bin"])
    rows = repeats["repeats"]
    assert set(rows["repeat"]) == set(REPEATS)
    total = rows.assign(sum=rows["mean"] * rows["n"]).groupby(["model", "text", "bin_kind", "bin"])[["n", "sum"]].sum()
    assert (total["n"] == of_losses["n"].loc[total.index]).all()
    np.testing.assert_allclose(total["sum"] / total["n"], of_losses["mean"].loc[total.index])

    losses, windows, deciles = case
    for row in repeats["repeat_differences"].query("model == 'k2' and text == 'b.txt'").itertuples():
        here = repeats_of(windows["b.txt"]) == REPEATS.index(row.repeat)
        here &= in_bin(deciles, row.bin_kind, row.bin)[windows["b.txt"][:, 1:]]
        apart = (losses["base"]["b.txt"] - losses["k2"]["b.txt"])[here]
        assert (row.n, row.n_types) == (here.sum(), len(np.unique(windows["b.txt"][:, 1:][here])))
        assert row.mean == pytest.approx(apart.mean(dtype=np.float64), rel=1e-5, abs=1e-6)
        assert np.isnan(row.low) or row.low <= row.mean <= row.high


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_intervals_lie_around_means_by_type_of_rare_types(seed):
    """Most types occur once, and the rarer a type the dearer: nothing may pull the replicates to one side."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.3, size=(60, 40)), 4000)
    losses = (2 + 0.9 * np.log(ids) + rng.normal(0, 0.3, ids.shape))[:, 1:]
    rows = loss_tables({"m": {"t": losses}}, {"t": ids}, None, replicates=200)["losses"]
    row = rows.query("averaging == 'type' and text == 't'").iloc[0]
    assert row["low"] < row["mean"] < row["high"]
    assert abs((row["low"] + row["high"]) / 2 - row["mean"]) < 0.2 * (row["high"] - row["low"])
