"""Columns of clickable tokens: neighbours on the Banks page, most and least weighted tokens on the Router page."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import streamlit as st

from tide.tokens import shorten

_HERE = Path(__file__).parent
_component = st.components.v2.component(
    "tide_token_table",
    html='<div class="columns" tabindex="-1"></div>',
    css=(_HERE / "token_table.css").read_text(encoding="utf-8"),
    js=(_HERE / "token_table.js").read_text(encoding="utf-8"),
)


@dataclass(frozen=True)
class Row:
    """One token of a column.

    Attributes:
        token_id: what a click sends.
        shown: visible form of the token, plain text.
        values: numbers beside it, as text, one for each of the column's `value_names`.
        special: whether it is a special token.
        detail: what hovering says besides the whole token and its id.
    """

    token_id: int
    shown: str
    values: tuple[str, ...] = ()
    special: bool = False
    detail: str = ""


@dataclass(frozen=True)
class Column:
    """One list of tokens.

    Attributes:
        title: above the list.
        rows: first to last.
        value_names: headers of the numbers.
        subtitle: a second line above the list, for example whose neighbours these are.
        notes: further lines above the list; the same number in all columns of a table, so that rows line up.
        color: CSS colour of the bar above the column.
        chosen: drawn as the chosen one.
        joined: stands close to the column before it, as one group.
        empty: what stands there when there are no rows.
    """

    title: str
    rows: Sequence[Row]
    value_names: tuple[str, ...] = ()
    subtitle: str = ""
    notes: tuple[str, ...] = ()
    color: str = ""
    chosen: bool = False
    joined: bool = False
    empty: str = "nothing to show"


@dataclass(frozen=True)
class _Shared:
    """Tints of the tokens that stand in several columns: token id -> number of the tint."""

    tints: dict[int, int] = field(default_factory=dict)
    columns: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Sequence[Column]) -> "_Shared":
        counts = Counter(token_id for column in columns for token_id in {row.token_id for row in column.rows})
        order = [token_id for token_id, n in counts.most_common() if n > 1]
        return cls({token_id: i for i, token_id in enumerate(order)}, {t: counts[t] for t in order})


def token_table(
    columns: Sequence[Column],
    key: str,
    on_pick: Callable[[int], None],
    label: str,
    width: int = 18,
) -> None:
    """Mounts the columns. A token that stands in several of them has the same tint in all.

    Args:
        columns: left to right; they scroll sideways where they do not fit.
        key: of the component in the session state.
        on_pick: called with the id of the token that was clicked, before the next run.
        label: what the table shows, for screen readers.
        width: characters after which a token is shortened in the middle.
    """

    def picked() -> None:
        token_id = st.session_state[key].get("pick")
        if token_id is not None:
            on_pick(int(token_id))

    _component(key=key, data=table_data(columns, label, width), on_pick_change=picked)


def table_data(columns: Sequence[Column], label: str, width: int) -> dict:
    """What the browser gets: plain texts and numbers, no markup."""
    shared = _Shared.of(columns)

    def row_data(row: Row) -> dict:
        n = shared.columns.get(row.token_id, 1)
        hints = [row.shown, f"id {row.token_id}", row.detail, f"in {n} columns" if n > 1 else ""]
        return {
            "id": row.token_id,
            "text": shorten(row.shown, width),
            "values": list(row.values),
            "special": row.special,
            "tint": shared.tints.get(row.token_id),
            "title": "\n".join(filter(None, hints)),
        }

    return {
        "label": label,
        "columns": [{**asdict(column), "rows": [row_data(row) for row in column.rows]} for column in columns],
    }
