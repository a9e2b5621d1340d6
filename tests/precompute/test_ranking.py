import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from precompute.ranking import NOWHERE, TopPositions, pack, unpack

values_strategy = st.floats(0, 2.0**100, width=32, allow_subnormal=False)
positions_strategy = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(values_strategy, positions_strategy), min_size=1, max_size=30, unique=True), st.booleans())
def test_keys_sort_by_value_then_position(pairs, lowest):
    values = torch.tensor([value for value, _ in pairs])
    positions = torch.tensor([position for _, position in pairs])
    keys = pack(values, positions, lowest)
    assert (keys >= 0).all()
    back_values, back_positions = unpack(keys.numpy(), lowest)
    assert back_values.tolist() == values.tolist()
    assert back_positions.tolist() == positions.tolist()
    sign = 1 if lowest else -1
    by_hand = sorted(range(len(pairs)), key=lambda i: (sign * values[i].item(), positions[i].item()))
    found = keys.argsort(descending=True, stable=True).tolist()
    assert [(values[i], positions[i]) for i in found] == [(values[i], positions[i]) for i in by_hand]


def test_what_is_not_there():
    values, positions = unpack(np.array([NOWHERE, pack(torch.tensor([0.5]), torch.tensor(7)).item()]))
    assert np.isnan(values[0])
    assert positions.tolist() == [NOWHERE, 7]
    assert values[1] == 0.5


@given(st.data())
def test_the_lists_of_parts_make_the_list_of_the_whole(data):
    """However the positions are cut, and with many equal values."""
    n, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    values = rng.integers(0, 6, (n, columns)).astype(np.float32) / 7
    tokens = rng.integers(0, data.draw(st.integers(1, 12)), n)
    size, per_token = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=4))), n]

    whole = TopPositions(columns, size, per_token)
    for start, stop in itertools.pairwise(cuts):
        part = TopPositions(columns, size, per_token)
        keys = pack(torch.from_numpy(values[start:stop]), torch.arange(start, stop).unsqueeze(1))
        middle = data.draw(st.integers(0, stop - start))
        for stretch in (slice(middle), slice(middle, None)):  # a part is made in batches
            part.add(keys[stretch], torch.from_numpy(tokens[start:stop][stretch]))
        whole.merge(part.keys, part.token_ids)

    found, positions = unpack(whole.keys.numpy())
    for column in range(columns):
        expected, seen = [], dict.fromkeys(tokens, 0)
        for place in sorted(range(n), key=lambda i: (-values[i, column], i)):
            seen[tokens[place]] += 1
            if seen[tokens[place]] <= per_token:
                expected.append(place)
        expected = (expected + [NOWHERE] * size)[:size]
        assert positions[:, column].tolist() == expected
        there = positions[:, column] >= 0
        chosen = positions[there, column]
        assert found[there, column].tolist() == values[chosen, column].tolist()
        assert whole.token_ids[:, column].tolist() == [tokens[i] if i >= 0 else NOWHERE for i in expected]
