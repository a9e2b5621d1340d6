"""The tables on screen, for people: fewer than the files hold, and rounded."""

from collections.abc import Mapping, Sequence

import pandas as pd

from tide.evaluation.bins import NO_BIN, WHOLE
from tide.evaluation.compare import ALL_TEXTS, AVERAGINGS

WORDING = {"position": "every position weighs the same", "type": "every token id weighs the same"}


def loss_text(tables: Mapping[str, pd.DataFrame], labels: Mapping[str, str], base: str | None, counted: str) -> str:
    """What `loss_tables` made: perplexity a text, cross entropy a bin of all texts, differences, and who wins where.

    Args:
        tables: "losses" and perhaps "differences", "repeats", "repeat_differences".
        labels: what to call each model.
        base: which model the others are compared with.
        counted: what the deciles were counted over, or why there are none.
    """
    losses, differences = tables["losses"], tables.get("differences")
    whole = losses[(losses["bin_kind"] == WHOLE) & (losses["averaging"] == "position")]
    blocks = [
        "Perplexity by text, with 95 % bootstrap intervals over windows",
        _show(_pivot(whole, "text", labels, _perplexity), whole.drop_duplicates("text")[["text", "n"]]),
    ]
    if differences is not None:
        rows = differences[(differences["bin_kind"] == WHOLE) & (differences["averaging"] == "position")]
        blocks += [
            f"\nCross entropy by text, {base} - model in nats; positive: the model predicts better; "
            "?: the interval holds 0 or is unknown",
            _show(_pivot(rows, "text", labels, _difference), rows.drop_duplicates("text")[["text", "n"]]),
        ]
    if "repeats" in tables:
        blocks += _repeat_blocks(tables["repeats"], tables.get("repeat_differences"), labels, base)
    if not (losses["bin_kind"] == "decile").any():
        return "\n".join([*blocks, f"\nNo tables by frequency: {counted}"])
    for averaging in AVERAGINGS:
        blocks.append(
            f"\nCross entropy by frequency of the token to predict, all texts, nats; {WORDING[averaging]}\n"
            f"(decile 0 is the rarest, by count in {counted}; rare 0-2, mid 3-6, common 7-9; "
            f"{NO_BIN}: punctuation, space, special, unseen)"
        )
        rows = losses[(losses["text"] == ALL_TEXTS) & (losses["averaging"] == averaging)]
        columns = [_pivot(rows, "bin", labels, lambda row: f"{row['mean']:.3f}")]
        if differences is not None:
            apart = differences[(differences["text"] == ALL_TEXTS) & (differences["averaging"] == averaging)]
            columns.append(_pivot(apart, "bin", labels, _difference, f"{base} - "))
        blocks.append(_show(pd.concat(columns, axis=1), rows.drop_duplicates("bin")[["bin", "n", "n_types"]]))
    if differences is not None:
        blocks += ["", *verdicts(differences, labels)]
    return "\n".join(blocks)


def _repeat_blocks(
    repeats: pd.DataFrame, differences: pd.DataFrame | None, labels: Mapping[str, str], base: str | None
) -> list[str]:
    """Every text's cross entropy by what the window has shown, and what sets the models apart there."""

    def whole(table: pd.DataFrame) -> pd.DataFrame:
        rows = table[table["bin_kind"] == WHOLE]
        return rows.assign(key=rows["text"] + " " + rows["repeat"])

    rows = whole(repeats)
    columns = [_pivot(rows, "key", labels, lambda row: f"{row['mean']:.3f}")]
    if differences is not None:
        columns.append(_pivot(whole(differences), "key", labels, _difference, f"{base} - "))
    front = rows.drop_duplicates("key")[["key", "text", "repeat", "n"]]
    title = (
        "\nCross entropy by what the window has shown before, nats; every position weighs the same\n"
        "(new: the token to predict was not there yet; token: it was; pair: it was, behind the token just read)"
    )
    return [title, _show(pd.concat(columns, axis=1), front)]


def verdicts(differences: pd.DataFrame, labels: Mapping[str, str]) -> list[str]:
    """A sentence a model: in how many texts and deciles it beats the base, and where it does not."""
    sentences = []
    for (model, base), rows in differences.groupby(["model", "base"], sort=False):
        texts = rows[(rows["bin_kind"] == WHOLE) & (rows["text"] != ALL_TEXTS) & (rows["averaging"] == "position")]
        said = [_count(texts, "text", "texts")]
        for averaging in AVERAGINGS:
            deciles = rows[(rows["bin_kind"] == "decile") & (rows["bin"] != NO_BIN)]
            deciles = deciles[(deciles["text"] == ALL_TEXTS) & (deciles["averaging"] == averaging)]
            if len(deciles):
                said.append(_count(deciles, "bin", f"deciles by {averaging}"))
        sentences.append(f"{labels[model]} predicts better than {labels[base]} in {', '.join(said)}.")
    return sentences


def _count(rows: pd.DataFrame, key: str, what: str) -> str:
    parts = [f"{(rows['better'] == 'model').sum()} of {len(rows)} {what}"]
    for verdict, words in (("base", "worse in"), ("unclear", "unclear in")):
        if names := list(rows.loc[rows["better"] == verdict, key]):
            parts.append(f"{words} {'all' if len(names) == len(rows) > 1 else ' '.join(names)}")
    return parts[0] + (f" ({'; '.join(parts[1:])})" if len(parts) > 1 else "")


def task_text(table: pd.DataFrame, labels: Mapping[str, str], base: str | None) -> str:
    """What `task_table` made: a row a task and metric, a column a model."""
    table = table.assign(key=table["task"] + " " + table["metric"])
    columns = [_pivot(table, "key", labels, lambda row: _plus_minus(row["value"], row["stderr"], ".4f"))]
    if base is not None and table["gain"].notna().any():
        apart = table[table["model"] != base]
        gain = _pivot(apart, "key", labels, lambda row: _plus_minus(row["gain"], row["gain_stderr"], "+.4f"))
        columns.append(gain.add_suffix(f" - {base}"))
    title = "Tasks (lm-eval), with standard errors; differences are paired by document; average is the mean acc"
    return f"{title}\n{_show(pd.concat(columns, axis=1), table.drop_duplicates('key')[['key', 'task', 'metric', 'n']])}"


def _pivot(rows: pd.DataFrame, key: str, labels: Mapping[str, str], write, prefix: str = "") -> pd.DataFrame:
    """Cells of text: a row a value of `key`, in the order in which they come, a column a model."""
    cells = rows.assign(cell=[write(row) for row in rows.to_dict("records")])
    models = list(dict.fromkeys(rows["model"]))
    table = cells.pivot(index=key, columns="model", values="cell").loc[list(dict.fromkeys(rows[key])), models]
    return table.rename(columns={model: prefix + labels[model] for model in models})


def _show(cells: pd.DataFrame, front: pd.DataFrame) -> str:
    """The table as text; `front` holds the first columns, of which the first is the key and is joined by."""
    key = front.columns[0]
    table = front.join(cells, on=key)
    if key == "key":
        table = table.drop(columns="key")
    return table.to_string(index=False, na_rep="", formatters=_thousands(table.columns))


def _thousands(columns: Sequence[str]) -> dict:
    return {column: "{:,}".format for column in columns if column in ("n", "n_types")}


def _perplexity(row: dict) -> str:
    return f"{row['perplexity']:.2f}{_interval(row['perplexity_low'], row['perplexity_high'], '.2f')}"


def _difference(row: dict) -> str:
    mark = "?" if row["better"] == "unclear" else " "
    return f"{row['mean']:+.3f}{_interval(row['low'], row['high'], '+.3f')}{mark}"


def _interval(low: float, high: float, form: str) -> str:
    return "" if pd.isna(low) else f" [{low:{form}}, {high:{form}}]"


def _plus_minus(value: float, error: float, form: str) -> str:
    if pd.isna(value):
        return ""
    return f"{value:{form}}" + ("" if pd.isna(error) else f" ± {error:.4f}")
