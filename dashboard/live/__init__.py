"""The parts of the Live page: its state, its controls, and what it shows."""
