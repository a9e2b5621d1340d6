"""Arrays as tidy tables: a row a combination of what the array's axes stand for."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd


def long_table(axes: Mapping[str, Sequence | np.ndarray], **values: np.ndarray) -> pd.DataFrame:
    """Arrays over the same axes as one table.

    Args:
        axes: name of each axis in turn, and what its places stand for: numbers, or names (strings).
        values: arrays that have those axes, or can be broadcast to them.

    Returns:
        A row a place, the last axis running fastest; a column an axis, then a column an array, its dtype kept.
    """
    shape = tuple(map(len, axes.values()))
    columns = {}
    for number, (name, places) in enumerate(axes.items()):
        named = any(isinstance(place, str) for place in places)
        along = np.asarray(places, dtype=object if named else None)
        columns[name] = along.reshape(-1, *[1] * (len(shape) - 1 - number))
    return pd.DataFrame(
        {name: np.broadcast_to(array, shape).reshape(-1) for name, array in {**columns, **values}.items()}
    )
