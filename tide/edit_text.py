"""Reads the text form of edits, which comes from a URL: from anyone. What `Intervention.to_text` writes."""

import re

from tide.edits import RULES, Edit, Off, Positions, Replacement, Rule, RuleKind, Swap

# Bounds on a text from outside: nothing that fits in a URL may take a second or fill the memory.
MAX_CHARACTERS = 65_536  # what a web server takes as the whole head of a request
MAX_POSITIONS = 1_000_000  # of all edits together

_NUMBER = r"\d{1,12}"
_REAL = r"\d{1,17}(?:\.\d{1,20})?(?:e-?\d{1,3})?"
_PARTS: dict[type[Edit], str] = {
    Off: rf"(?P<all>\*)?(?P<layer>{_NUMBER})?(?:\.(?P<bank>{_NUMBER}))?"
    rf"(?:~(?P<replacement>mean|random)(?P<seed>{_NUMBER})?)?(?P<renormalize>!)?",
    Rule: rf"(?P<kind>{'|'.join(RULES)})(?P<value>{_REAL})?(?::(?P<layer>{_NUMBER}))?",
    Swap: rf"swap(?P<token>{_NUMBER})\.(?P<reads>{_NUMBER})",
}
_POSITIONS = rf"(?:@(?P<positions>{_NUMBER}(?:-{_NUMBER})?(?:,{_NUMBER}(?:-{_NUMBER})?)*))?"
_PATTERNS = {kind: re.compile(pattern + _POSITIONS, flags=re.ASCII) for kind, pattern in _PARTS.items()}


def read_edits(text: str) -> tuple[Edit, ...]:
    """The edits of a text form, in its order.

    Raises:
        ValueError: one sentence, for a text of another form or beyond the bounds above.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"The switches are {len(text)} characters long; at most {MAX_CHARACTERS} are read.")
    edits: list[Edit] = []
    left = MAX_POSITIONS
    for part in text.split("_") if text else ():
        edit = _read_edit(part, left)
        left -= len(edit.positions or ())
        edits.append(edit)
    return tuple(edits)


def _read_edit(part: str, max_positions: int) -> Edit:
    for kind, pattern in _PATTERNS.items():
        match = pattern.fullmatch(part)
        edit = match and _EDITS[kind](match.groupdict(), max_positions)
        if edit:
            return edit
    raise ValueError(
        f"{part[:40]!r} is no switch; write 3 for layer 3, 3.5 for bank 5 in layer 3, .5 for bank 5 in all layers."
    )


def _read_off(found: dict[str, str | None], max_positions: int) -> Off | None:
    layer, bank, seed = (_number(found[name]) for name in ("layer", "bank", "seed"))
    replacement: Replacement = found["replacement"] or "zero"  # type: ignore[assignment]
    names_all, names_some = bool(found["all"]), (layer, bank) != (None, None)
    if names_all == names_some or (replacement == "random") != (seed is not None):
        return None
    positions = _read_positions(found["positions"], max_positions)
    return Off(layer, bank, positions, replacement, seed or 0, bool(found["renormalize"]))


def _read_rule(found: dict[str, str | None], max_positions: int) -> Rule | None:
    kind: RuleKind = found["kind"]  # type: ignore[assignment]
    if (kind in ("only", "temperature")) != (found["value"] is not None):
        return None
    positions = _read_positions(found["positions"], max_positions)
    return Rule(kind, float(found["value"] or 0), _number(found["layer"]), positions)


def _read_swap(found: dict[str, str | None], max_positions: int) -> Swap:
    token, reads = (int(found[name] or 0) for name in ("token", "reads"))
    return Swap(token, reads, _read_positions(found["positions"], max_positions))


_EDITS = {Off: _read_off, Rule: _read_rule, Swap: _read_swap}


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _read_positions(text: str | None, max_positions: int) -> Positions:
    if text is None:
        return None
    ranges = []
    for span in text.split(","):
        first, _, last = span.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"The positions {span} run backwards; write {last}-{first}.")
        ranges.append(range(int(first), int(last or first) + 1))
    if sum(map(len, ranges)) > max_positions:
        raise ValueError(f"The switches name more than {MAX_POSITIONS} positions.")
    return frozenset(position for span in ranges for position in span)
