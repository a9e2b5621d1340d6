"""How numbers are written on every page: three significant digits, and units a person knows."""

import math

MISSING = "–"
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNT_UNITS = ("", " K", " M", " B")


def probability(value: float) -> str:
    """A weight, overlap or cosine as .412; 1.00 for one; a minus sign where it is negative."""
    if not math.isfinite(value):
        return MISSING
    text = f"{abs(value):.3f}"
    text = text[1:] if text.startswith("0") else f"{abs(value):.2f}"
    return f"−{text}" if value < 0 and float(text) else text


def digits(value: float) -> str:
    """Three significant digits, without an exponent between 0.001 and a million."""
    if not math.isfinite(value):
        return MISSING
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}".replace("-", "−")
    exponent = int(f"{value:.2e}".split("e")[1])  # after rounding: 0.9997 is 1.00
    decimals = max(0, 2 - exponent)
    return f"{value:,.{decimals}f}".replace("-", "−")


def count(value: int) -> str:
    """A number of parameters or tokens with three significant digits: 16.8 M."""
    step = 0
    scaled = float(value)
    while abs(scaled) >= 999.5 and step < len(_COUNT_UNITS) - 1:
        scaled, step = scaled / 1000, step + 1
    return f"{digits(scaled) if step else f'{value:,}'}{_COUNT_UNITS[step]}"


def byte_size(value: int) -> str:
    """A size in B, KiB, MiB, GiB or TiB."""
    step = 0
    scaled = float(value)
    while scaled >= 1000 and step < len(_BYTE_UNITS) - 1:
        scaled, step = scaled / 1024, step + 1
    return f"{digits(scaled) if step else value} {_BYTE_UNITS[step]}"
