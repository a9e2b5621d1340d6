"""Live: a prompt through the model as trained and with switches, side by side."""

import json
import os
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import trust
from dashboard.components.token_chips import token_chips
from dashboard.engine import DEVICE_VARIABLE, Comparison, Engine, shared_engine
from dashboard.frame import figure_columns, how_to_read, page_header, problem
from dashboard.live import controls, evidence, ranking, state, tables, writing
from dashboard.state import current_source, selection
from precompute import ArtifactError
from tide.cli import UserError

EXPLANATION = """
**As trained** is always left, **switched** always right. A bank that is off hands its routing weight to the null
bank: what it would have injected becomes zero, and the other banks keep their weights. Later layers see the changed
stream, so their routing changes too. Under **More**: inject the corpus mean or a random direction of the same length
instead, take the weights from a rule, let the marked token read another token's memory.

**Δ log p** is the change of a token's log-probability in nats, switched minus trained. **KL(trained ‖ switched)** is
the divergence of the whole prediction at the target position, in nats; 0 means that the switches changed nothing
there. **Surprisal** is −log p of each token of the prompt given those before it.

**To the logit**: the last stream is a sum of what every part added; with the final norm's divisor held at its value,
each (layer, bank) has an exact share in the target's logit. What it does by way of later layers is not in it: that
is what a switch shows. **Logit lens**: what a layer's stream would predict if the model ended there, before and after
that layer's injection m. **|m| / |h|** is the length of the injection beside the residual stream that enters the
layer: mean and sd over the prompt, the circle at the marked token. **Effective banks** is the exponential of the
entropy of the choice among banks, null left out.
"""


def render() -> None:
    """Draws the page."""
    source = current_source()
    fingerprint = source.artifacts.manifest["checkpoint"]["fingerprint"]
    with st.spinner("Loading the model …"):
        engine = shared_engine(source.artifacts.checkpoint, fingerprint, os.environ.get(DEVICE_VARIABLE))
    trust.check(engine, source.artifacts)
    page_header(
        "Live",
        "What does the memory do for this prompt, and what happens without parts of it? "
        "Switch single banks or whole layers off and compare the predictions.",
    )
    try:
        engine = engine.with_mean_injection(source.artifacts.mean_injection())
        has_mean = True
    except ArtifactError:
        has_mean = False
    state.start(engine.model.config, engine.model.config.vocab_size)
    _live(engine, has_mean)
    one, other = figure_columns(2, "experiments")
    with one:
        ranking.draw(engine)
    with other:
        writing.draw(engine)
    how_to_read(EXPLANATION)


def _set(key: str, value: int | None) -> None:
    st.session_state[key] = value


def _take_prompt() -> None:
    st.session_state[state.PROMPT] = st.session_state["live_prompt_input"]
    st.session_state[state.AT] = st.session_state[state.TARGET] = None


@st.fragment
def _live(engine: Engine, has_mean: bool) -> None:
    """All that depends on prompt and switches; a fragment, so that a switch reruns nothing else."""
    # A widget's own state is dropped while another page is shown; a copy of ours keeps the prompt.
    st.session_state["live_prompt_input"] = prompt = st.session_state[state.PROMPT]
    st.text_input("prompt", key="live_prompt_input", on_change=_take_prompt)
    try:
        token_ids = engine.encode(prompt)
        trained = engine.run(token_ids)
        switched = engine.run(token_ids, state.switches())
    except UserError as error:
        problem(error)
        if state.switches():
            st.button("As trained", on_click=state.undo, icon=":material/undo:")
        return
    at = state.position(token_ids)
    state.write_url()

    shown = engine.vocabulary.show_all(token_ids)
    special = engine.vocabulary.special_ids
    tokens = [{"id": i, "shown": s, "special": i in special} for i, s in zip(token_ids, shown, strict=True)]
    st.caption("The model predicts what follows the marked token; click another one to look there.")
    token_chips(tokens, at, key="live_chips", on_target=lambda position: _set(state.AT, position))

    grid, left, right = figure_columns([6, 5, 6], "predictions")
    comparison = engine.compare(trained, switched, at)
    target = _target(engine, comparison, token_ids, at)
    with grid:
        st.markdown("**Switches**")
        controls.draw(engine, token_ids, at, has_mean)
    left.html(tables.next_tokens(engine, comparison.trained, "as trained", movement=False))
    with left:
        _choose_target(engine, comparison, token_ids, at, target)
    right.html(tables.next_tokens(engine, comparison.switched, "switched", movement=True))
    right.html(tables.measures(engine, comparison, trained, switched))
    with right:
        _downloads(engine, comparison, token_ids, at, target)
    changed = engine.surprisal(switched) if switched is not trained else None
    st.html(tables.surprisal_strip(engine, token_ids, engine.surprisal(trained), changed, at))
    evidence.draw(engine, trained, switched, shown, at, target)


def _target(engine: Engine, comparison: Comparison, token_ids: tuple[int, ...], at: int) -> int:
    """The token whose prediction is explained: the chosen one, else the likeliest as trained."""
    chosen = st.session_state[state.TARGET]
    return int(comparison.trained["token_id"][0]) if chosen is None else chosen


def _choose_target(engine: Engine, comparison: Comparison, token_ids: tuple[int, ...], at: int, target: int) -> None:
    """A choice among the likely tokens, the one that follows in the prompt, and the token of the sidebar."""
    # None of the switched run's tokens: a choice whose options change with a switch would be built anew with each.
    options = [*comparison.trained["token_id"], selection().token_id, target]
    if at + 1 < len(token_ids):
        options.insert(0, token_ids[at + 1])
    options = list(dict.fromkeys(int(token) for token in options))
    # A key of its own for every question: a click while the page is drawn anew comes with the browser's value of the
    # widget that it still shows, which would be taken for a choice among the new options.
    key = f"live_target_{hash((token_ids, at))}"
    st.session_state[key] = target

    def take() -> None:
        if st.session_state[key] in options:  # else it is the browser's text of an option that is gone
            _set(state.TARGET, st.session_state[key])

    st.selectbox("explain the logit of", options, key=key, format_func=engine.vocabulary.show, on_change=take)


def _downloads(engine: Engine, comparison: Comparison, token_ids: tuple[int, ...], at: int, target: int) -> None:
    """The results as CSV and JSON, made when they are asked for, when there is no session any more to ask."""
    prompt, switches = st.session_state[state.PROMPT], state.switches()

    def table() -> pd.DataFrame:
        sides = {"as trained": comparison.trained, "switched": comparison.switched}
        rows = pd.concat([rows.assign(side=side) for side, rows in sides.items()])
        return rows.assign(token=[engine.vocabulary.show(token) for token in rows["token_id"]])

    def csv() -> str:
        return table().to_csv(index=False)

    def everything() -> str:
        runs = {"as trained": engine.run(token_ids), "switched": engine.run(token_ids, switches)}
        results = {
            "prompt": prompt,
            "token_ids": token_ids,
            "tokens": engine.vocabulary.show_all(token_ids),
            "position": at,
            "target": {"token_id": target, "token": engine.vocabulary.show(target)},
            "switches": switches.to_text(),
            "kl_nats": comparison.kl,
            "next_tokens": records(table()),
            "surprisal_nats": {side: engine.surprisal(run).tolist() for side, run in runs.items()},
            "attribution_logits": {
                side: evidence.attribution(engine, run, at, target).tolist() for side, run in runs.items()
            },
            "routing": {side: run.routing.tolist() for side, run in runs.items()},
            "logit_lens": {side: records(evidence.lens(engine, run, at, target)) for side, run in runs.items()},
        }
        return json.dumps(results, ensure_ascii=False)

    with st.container(horizontal=True):
        how: dict[str, Any] = {"on_click": "ignore", "icon": ":material/download:"}
        st.download_button("CSV", csv, file_name="next_tokens.csv", mime="text/csv", **how)
        st.download_button("JSON", everything, file_name="live.json", mime="application/json", **how)


def records(table: pd.DataFrame) -> list[dict]:
    """A table as JSON rows, of plain numbers."""
    return json.loads(table.to_json(orient="records", double_precision=9))
