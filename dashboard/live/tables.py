"""HTML tables of the Live page. Every token goes through `token_chip`, which escapes it."""

import html

import numpy as np
import pandas as pd

from dashboard.engine import Comparison, Engine, LiveRun
from dashboard.frame import token_chip
from dashboard.numbers import probability
from tide.tokens import as_html, shorten

CHIP_WIDTH = 18  # characters of a token in a table
MOST_SURPRISED = 12.0  # nats at which the strip's colour is full: one in 160,000
FULL_CHANGE = 2.0  # nats of change at which its colour is full


def next_tokens(engine: Engine, rows: pd.DataFrame, title: str, movement: bool) -> str:
    """A next-token table.

    Args:
        engine: whose vocabulary names the tokens.
        rows: of a `Comparison`.
        title: "as trained" or "switched".
        movement: show how each token moved against the other table.
    """
    head = "<th>rank</th><th>token</th><th>p</th>" + ("<th>moved</th><th>Δ log p</th>" if movement else "")
    body = []
    for row in rows.itertuples():
        chip = token_chip(engine.vocabulary.show(row.token_id), row.token_id, width=CHIP_WIDTH)
        cells = f"<td>{row.rank}</td><td>{chip}</td><td>{probability(row.probability)}</td>"
        if movement:
            cells += f"<td>{moved(row.other_rank - row.rank)}</td><td>{change(row.delta)}</td>"
        body.append(f"<tr>{cells}</tr>")
    caption = f"<caption>next token, {title}</caption>"
    return f'<table class="tide-table">{caption}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def change(nats: float) -> str:
    """+0.91 or −0.94; a change that rounds to nothing has no sign."""
    return "0.00" if abs(nats) < 0.005 else f"{nats:+.2f}".replace("-", "−")


def moved(places: int) -> str:
    """▲3, ▼1 or =."""
    if places == 0:
        return "="
    return f"▲{places}" if places > 0 else f"▼{-places}"


def measures(engine: Engine, comparison: Comparison, trained: LiveRun, switched: LiveRun) -> str:
    """What the switches did in one number, and how long it took."""
    reuse = f" from layer {switched.reused_from}" if switched.reused_from else ""
    return (
        '<p class="tide-measures">KL(trained ‖ switched) = '
        f"<b>{comparison.kl:.4f} nats</b> at the marked position<br>"
        f'<span class="tide-note">{engine.description} · forward as trained {trained.milliseconds:.1f} ms, '
        f"switched {switched.milliseconds:.1f} ms{reuse}</span></p>"
    )


def surprisal_strip(
    engine: Engine, token_ids: tuple[int, ...], trained: np.ndarray, switched: np.ndarray | None, at: int
) -> str:
    """The prompt's tokens, each on a ground as strong as its surprisal; with switches a second row for the change.

    Args:
        engine: whose vocabulary names the tokens.
        token_ids: [T].
        trained: [T-1] nats, surprisal of tokens 1..T-1.
        switched: [T-1] nats, or None where nothing is switched.
        at: the marked position.
    """
    shown = engine.vocabulary.show_all(token_ids)
    rows = [("as trained", ["none", *(_ground("11, 110, 153", value / MOST_SURPRISED) for value in trained)], trained)]
    if switched is not None:
        rows.append(("switched", ["none", *(_change_ground(value) for value in switched - trained)], switched))
    body = []
    for name, grounds, values in rows:
        cells = []
        for position, (token, ground) in enumerate(zip(shown, grounds, strict=True)):
            value = "has none" if position == 0 else f"{values[position - 1]:.2f} nats"
            if position and name == "switched":
                value += f", {change(values[position - 1] - trained[position - 1])} against trained"
            title = html.escape(f"position {position}, id {token_ids[position]}: surprisal {value}", quote=True)
            marked = ' class="marked"' if position == at else ""
            text = as_html(shorten(token, CHIP_WIDTH))
            cells.append(f'<span{marked} style="background:{ground}" title="{title}">{text}</span>')
        total = f"{values.mean():.2f} nats a token" if len(values) else "no token to predict"
        body.append(f'<div class="tide-strip"><b>{name}</b> {"".join(cells)} <i>{total}</i></div>')
    return "".join(body)


def _ground(rgb: str, strength: float) -> str:
    return f"rgba({rgb}, {0.75 * min(max(strength, 0.0), 1.0):.2f})"


def _change_ground(nats: float) -> str:
    """Orange where the switches made a token more surprising, blue where less; nothing at zero."""
    return _ground("194, 87, 26" if nats > 0 else "11, 110, 153", abs(nats) / FULL_CHANGE)


def lens(engine: Engine, trained: pd.DataFrame, switched: pd.DataFrame, target: int) -> str:
    """The logit lens at the marked position: what each layer's stream would predict, before and after its injection.

    Args:
        engine: whose vocabulary names the tokens.
        trained: a row a layer: layer, before_id, before_p, after_id, after_p, before_target, after_target (log p of
            the target in nats).
        switched: the same with the switches.
        target: token id of the target.
    """
    both = trained.merge(switched, on="layer", suffixes=("_trained", "_switched"))
    body = []
    for row in both.sort_values("layer", ascending=False).to_dict("records"):
        cells = [f"<td>{row['layer']}</td>"]
        for side in ("trained", "switched"):
            for stage in ("before", "after"):
                token_id = int(row[f"{stage}_id_{side}"])
                chip = token_chip(engine.vocabulary.show(token_id), token_id, width=12)
                cells.append(f"<td>{chip} {probability(row[f'{stage}_p_{side}'])}</td>")
            cells.append(f"<td>{change(row[f'after_target_{side}'] - row[f'before_target_{side}'])}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    goal = token_chip(engine.vocabulary.show(target), target, width=12)
    head = "<th>layer</th>" + 2 * f"<th>before m</th><th>after m</th><th>Δ log p({goal})</th>"
    group = '<tr><th></th><th colspan="3">as trained</th><th colspan="3">switched</th></tr>'
    caption = "<caption>Logit lens: likeliest next token in every layer's stream</caption>"
    return (
        f'<div class="tide-scroll"><table class="tide-table tide-lens">{caption}<thead>{group}<tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


USAGE = {
    "null": "weight of null",
    "entropy": "entropy, nats",
    "banks": "effective banks",
    "size": "|m| / |h|",
    "cosine": "cos(m, FFN)",
}


def usage(trained: pd.DataFrame, switched: pd.DataFrame) -> str:
    """How each layer uses its memory at the marked position, trained and switched beside one another.

    Args:
        trained: a row a layer: layer and the columns of `USAGE`; NaN where a measure does not exist.
        switched: the same with the switches.
    """
    body = []
    for layer in range(len(trained) - 1, -1, -1):
        cells = [f"<td>{layer}</td>"]
        for name in USAGE:
            values = (trained[name][layer], switched[name][layer])
            one, other = ("–" if np.isnan(value) else f"{value:.2f}".replace("-", "−") for value in values)
            cells.append(f"<td>{one}</td><td>{other}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    group = "<th></th>" + "".join(f'<th colspan="2">{title}</th>' for title in USAGE.values())
    head = "<th>layer</th>" + "<th>trained</th><th>sw.</th>" * len(USAGE)
    caption = "<caption>Use of the memory at the marked position</caption>"
    return (
        f'<div class="tide-scroll"><table class="tide-table tide-usage">{caption}<thead><tr>{group}</tr>'
        f"<tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
