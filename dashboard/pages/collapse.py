"""Collapse: how far apart two models keep words that stand in the same place (figures 2 and 6 of the paper)."""

from dataclasses import dataclass

import pandas as pd
import streamlit as st

from dashboard.figures import collapse as figures
from dashboard.frame import download_table, figure_columns, how_to_read, page_header, show_figure
from dashboard.numbers import digits
from dashboard.state import Source, current_source, selection
from tide.tokens import as_html, as_markdown

N_MIN = 5  # measurements below which a mean is left out
LIST_HEIGHT = 330  # pixels; a longer list of pairs scrolls
ALL = ""  # stands for all categories, or all pairs of a category
_CATEGORY, _PAIR = "collapse_category", "collapse_pair"  # widgets
_CHOICE, _WRITTEN = "collapse_choice", "collapse_params_written"
EXPLANATION = f"""
Both words of a pair are put into the same templates, and the two residual streams are compared at the word, after
every layer, in the **Base** model and in **TIDE**. A model that **collapses** the pair keeps them close together.
**A word of several tokens is read at its last token**; the list says how many tokens each word has.

The lines are means over the chosen pairs and templates, the bands and whiskers 95 % intervals (1.96 sd / √n); **n** and
sd are on hover. Fewer than {N_MIN} measurements are not drawn. The difference's interval treats the two models as
independent. They see the same templates, so a paired interval would be narrower.

**L2** grows with the length of the vectors, which the models are free to choose. The **normalised L2** distance is
that of the vectors scaled to length one, the **cosine distance** is 1 − cosine: neither depends on length. Larger
means further apart, which is not in itself better.

The dotted line marks the layer chosen in the sidebar. The chosen token and bank change nothing here.
"""


@dataclass(frozen=True)
class Choice:
    """What is compared: all pairs, the pairs of a category, or one pair.

    Attributes:
        category: "" for all.
        pair: "" for all of the category.
    """

    category: str = ALL
    pair: str = ALL

    @classmethod
    def from_params(cls, params: dict[str, str], pairs: pd.DataFrame) -> tuple["Choice", str | None]:
        """Reads the URL parameters `category` and `pair`.

        Returns:
            The choice, and a sentence where the parameters name something that is not there; then it is all pairs.
        """
        category, pair = params.get("category", ALL), params.get("pair", ALL)
        if pair and not category:
            category = next(iter(pairs.loc[pairs["pair"] == pair, "category"]), ALL)
        for name, value in (("category", category), ("pair", pair)):
            if value and value not in set(pairs[name]):
                return cls(), f"The link names the {name} {value[:40]}, which these artifacts do not have."
        if pair and not ((pairs["category"] == category) & (pairs["pair"] == pair)).any():
            return cls(category), f"The link names the pair {pair[:40]}, which is not of the category {category[:40]}."
        return cls(category, pair), None

    def to_params(self) -> dict[str, str]:
        """The URL parameters that restore this choice."""
        return {name: value for name, value in (("category", self.category), ("pair", self.pair)) if value}


@st.cache_data(show_spinner=False, max_entries=128)
def _distances(cache_key: str, _source: Source, choice: Choice) -> pd.DataFrame:
    return _source.artifacts.collapse(category=choice.category or None, pair=choice.pair or None)


def render() -> None:
    """Draws the page."""
    page_header(
        "Collapse",
        "Do the layers keep two words apart that fit the same place? Base against TIDE, layer by layer. "
        "Words of several tokens are read at their last token.",
    )
    source, layer = current_source(), selection().layer
    pairs = source.artifacts.collapse_pairs()
    choice = _choose(pairs)
    table = _distances(source.cache_key, source, choice)
    if "base" in set(table["model"]):
        st.markdown(summary(figures.difference_table(table), source.space.num_layers))
    else:
        command = f"tide-precompute {source.artifacts.checkpoint.name} --base BASE_CHECKPOINT --only collapse"
        st.info(f"These artifacts have no Base model to compare with; `{command}` adds one.")
    for column, metric in zip(figure_columns(3, "collapse"), figures.METRIC_NAMES, strict=True):
        with column:
            figure = figures.distance_by_layer(table, metric, layer, N_MIN)
            show_figure(figure, key=f"collapse_{metric}", alt=f"{metric} by layer, Base against TIDE")
    _list_pairs(pairs, choice)
    how_to_read(EXPLANATION)
    download_table(table, "collapse", "Distances, CSV")


def _choose(pairs: pd.DataFrame) -> Choice:
    """The choice that the person or the link made; kept in the URL, and in the session while other pages are shown."""
    url = {name: st.query_params[name] for name in ("category", "pair") if name in st.query_params}
    if _CHOICE not in st.session_state or (url and url != st.session_state.get(_WRITTEN)):
        st.session_state[_CHOICE], sentence = Choice.from_params(url, pairs)
        if sentence:
            st.warning(as_markdown(sentence), icon=":material/link_off:")
    choice: Choice = st.session_state[_CHOICE]
    if choice.category and choice.category not in set(pairs["category"]):
        choice = Choice()  # another checkpoint's
    st.session_state[_CATEGORY], st.session_state[_PAIR] = choice.category, choice.pair

    def category_changed() -> None:
        st.session_state[_CHOICE] = Choice(st.session_state[_CATEGORY])

    def pair_changed() -> None:
        st.session_state[_CHOICE] = Choice(choice.category, st.session_state[_PAIR])

    left, right = st.columns(2, gap="small")
    categories = [ALL, *pairs["category"].unique()]
    left.selectbox(
        "category",
        categories,
        key=_CATEGORY,
        on_change=category_changed,
        format_func=lambda name: name or f"all {len(pairs)} pairs",
    )
    of_category = pairs[pairs["category"] == choice.category]
    right.selectbox(
        "pair",
        [ALL, *of_category["pair"]],
        key=_PAIR,
        on_change=pair_changed,
        format_func=lambda name: name or (f"all {len(of_category)} pairs of it" if choice.category else "all pairs"),
        disabled=not choice.category,
        help=None if choice.category else "Choose a category first.",
    )
    _write_url(url, choice.to_params())
    return choice


def _write_url(url: dict[str, str], params: dict[str, str]) -> None:
    for name in url.keys() - params.keys():
        del st.query_params[name]
    for name, value in params.items():
        if url.get(name) != value:
            st.query_params[name] = value
    st.session_state[_WRITTEN] = params


def summary(difference: pd.DataFrame, num_layers: int) -> str:
    """What the numbers say, in one sentence (Markdown).

    Args:
        difference: from `figures.difference_table`.
        num_layers: L.
    """
    after = difference[(difference["layer"] > 0) & (difference["n"] >= N_MIN)]
    if after.empty:
        return f"Fewer than {N_MIN} measurements: nothing can be said about the difference."
    further, closer = [], []
    for metric, name in figures.METRIC_TITLES.items():
        rows = after[after["metric"] == metric]
        further.append(f"**{int((rows['difference'] > rows['half_width']).sum())}** by {name}")
        closer.append(str(int((rows["difference"] < -rows["half_width"]).sum())))
    text = (
        f"Of {num_layers} layers, TIDE keeps these words **further apart** than Base after {', '.join(further)} "
        f"(closer after {', '.join(closer)}), beyond the 95 % interval."
    )
    last = after[(after["metric"] == "normalized_l2") & (after["layer"] == num_layers)]
    if last.empty:
        return text
    row = last.iloc[0]
    sign = "+" if row["difference"] > 0 else ""
    change = f"{sign}{digits(row['difference'])} ± {digits(row['half_width'])}"
    return f"{text} TIDE − Base after the last layer: {change} in {figures.METRIC_TITLES['normalized_l2']}."


def _list_pairs(pairs: pd.DataFrame, choice: Choice) -> None:
    kept = pairs[pairs["category"] == choice.category] if choice.category else pairs
    if choice.pair:
        kept = kept[kept["pair"] == choice.pair]
    several = int(((kept["tokens_a"] > 1) | (kept["tokens_b"] > 1)).sum())
    st.markdown(f"**Pairs compared**, {len(kept)}, of which {several} have a word of several tokens, read at its last")
    rows = "".join(
        f"<tr><td>{as_html(row.category)}</td><td>{as_html(row.word_a)}</td><td>{row.tokens_a}</td>"
        f"<td>{as_html(row.word_b)}</td><td>{row.tokens_b}</td></tr>"
        for row in kept.itertuples()
    )
    head = "<tr><th>category</th><th>word a</th><th>tokens of a</th><th>word b</th><th>tokens of b</th></tr>"
    with st.container(height=min(LIST_HEIGHT, 90 + 30 * len(kept)), border=False):
        st.html(f'<table class="tide-table tide-words"><thead>{head}</thead><tbody>{rows}</tbody></table>')
