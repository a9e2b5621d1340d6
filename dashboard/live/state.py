"""What a person has chosen on the Live page: prompt, target, switches, and the way back. All of it is in the URL."""

from collections.abc import Iterable

import streamlit as st

from dashboard.components.switch_grid import Pairs
from dashboard.engine import Engine
from dashboard.frame import problem
from tide import Intervention, TideConfig
from tide.intervention import Off, Rule, Swap

DEFAULT_PROMPT = "The capital of France is"
HISTORY = 100  # steps that undo goes back
PROMPT, AT, TARGET, SWITCHES, PAST, HOW, VIEW = (
    f"live_{name}" for name in ("prompt", "at", "target", "switches", "past", "how", "view")
)


def start(config: TideConfig, vocab_size: int) -> None:
    """Takes everything from the link, once a session."""
    if PROMPT in st.session_state:
        return
    params, state = st.query_params, st.session_state
    state[PROMPT] = params.get("prompt", DEFAULT_PROMPT)
    state[AT] = int(params["at"]) if params.get("at", "").isdigit() else None
    wanted = params.get("target", "")
    state[TARGET] = int(wanted) if wanted.isdigit() and int(wanted) < vocab_size else None
    state[VIEW] = int(params.get("view") == "1")
    state[PAST], state[SWITCHES], state[HOW] = [], Intervention(), Off()
    try:
        intervention = Intervention.from_text(params.get("off", ""))
        intervention.validate(config)
    except ValueError as error:
        problem(error)
        return
    state[SWITCHES] = intervention
    if intervention.offs:
        state[HOW] = intervention.offs[-1]


def write_url() -> None:
    """Puts the state into the link."""
    state = st.session_state
    wanted = {
        "prompt": state[PROMPT],
        "at": None if state[AT] is None else str(state[AT]),
        "target": None if state[TARGET] is None else str(state[TARGET]),
        "off": state[SWITCHES].to_text() or None,
        "view": str(state[VIEW]) if state[VIEW] else None,
    }
    for name, value in wanted.items():
        if value is None:
            st.query_params.pop(name, None)
        elif st.query_params.get(name) != value:
            st.query_params[name] = value


def view() -> int:
    """Number of the chosen view of the evidence, 0 or 1."""
    return st.session_state[VIEW]


def set_view(number: int) -> None:
    """Chooses a view of the evidence."""
    st.session_state[VIEW] = number


def position(token_ids: tuple[int, ...]) -> int:
    """The marked position: the chosen one where the prompt has it, else the last."""
    wanted = st.session_state[AT]
    return wanted if wanted is not None and wanted < len(token_ids) else len(token_ids) - 1


def question(engine: Engine) -> tuple[tuple[int, ...], int, int]:
    """Prompt, marked position and target: the chosen token, else the likeliest as trained.

    Raises:
        UserError: as `Engine.encode` and `Engine.run`.
    """
    token_ids = engine.encode(st.session_state[PROMPT])
    at, target = position(token_ids), st.session_state[TARGET]
    if target is None:
        trained = engine.run(token_ids)
        target = int(engine.compare(trained, trained, at).trained["token_id"][0])
    return token_ids, at, target


def switches() -> Intervention:
    """What is switched now."""
    return st.session_state[SWITCHES]


def how() -> Off:
    """In which way the grid switches off: replacement, seed, positions, renormalising; layer and bank mean nothing."""
    return st.session_state[HOW]


def change(intervention: Intervention) -> None:
    """Sets the switches; undo comes back from there."""
    state = st.session_state
    if intervention != state[SWITCHES]:
        state[PAST] = [*state[PAST], state[SWITCHES]][-HISTORY:]
        state[SWITCHES] = intervention


def undo() -> None:
    """Takes the last change back."""
    state = st.session_state
    if state[PAST]:
        *state[PAST], state[SWITCHES] = state[PAST]
        if state[SWITCHES].offs:
            state[HOW] = state[SWITCHES].offs[-1]


def others(intervention: Intervention, kind: type[Off] | type[Rule] | type[Swap]) -> Intervention:
    """An intervention without its edits of one kind."""
    return Intervention(tuple(edit for edit in intervention.edits if not isinstance(edit, kind)))


def off_pairs(intervention: Intervention, config: TideConfig) -> Pairs:
    """The (layer, bank) pairs that are off, at whatever positions."""
    layers, banks = range(config.num_hidden_layers), range(config.num_memory_blocks)
    return frozenset(
        (layer, bank)
        for layer in layers
        for bank in banks
        if any(off.layer in (None, layer) and off.bank in (None, bank) for off in intervention.offs)
    )


def switched_off(pairs: Iterable[tuple[int, int]], config: TideConfig, kind: Off) -> Intervention:
    """The shortest intervention that switches these pairs off in the way of `kind`."""
    pairs = frozenset(pairs)
    layers, banks = range(config.num_hidden_layers), range(config.num_memory_blocks)
    fields = {
        "positions": kind.positions,
        "replacement": kind.replacement,
        "seed": kind.seed,
        "renormalize": kind.renormalize,
    }
    if pairs and len(pairs) == len(layers) * len(banks):
        return Intervention.all_off(**fields)
    whole_layers = [layer for layer in layers if all((layer, bank) in pairs for bank in banks)]
    whole_banks = [bank for bank in banks if all((layer, bank) in pairs for layer in layers)]
    rest = [(layer, bank) for layer, bank in pairs if layer not in whole_layers and bank not in whole_banks]
    return (
        Intervention.layers_off(whole_layers, **fields)
        | Intervention.banks_off(whole_banks, **fields)
        | Intervention.off(rest, **fields)
    )


def set_pairs(pairs: Pairs, config: TideConfig) -> None:
    """Takes what the grid says."""
    change(others(switches(), Off) | switched_off(pairs, config, how()))


def set_how(kind: Off, config: TideConfig) -> None:
    """Changes the way in which everything that is off is off."""
    st.session_state[HOW] = kind
    set_pairs(off_pairs(switches(), config), config)


PRESETS = ("all off", "only layer 0", "null everywhere", "uniform")


def preset(name: str, config: TideConfig) -> Intervention:
    """The switches of a preset, in the way that is chosen for switching off."""
    layers, banks = range(config.num_hidden_layers), range(config.num_memory_blocks)
    if name == "all off":
        return switched_off([(layer, bank) for layer in layers for bank in banks], config, how())
    if name == "only layer 0":
        return switched_off([(layer, bank) for layer in layers[1:] for bank in banks], config, how())
    return Intervention.route("null" if name == "null everywhere" else "uniform")
