"""What the tests of training share."""

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    """Accelerate keeps one state a process; a run with another recipe must make its own."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
