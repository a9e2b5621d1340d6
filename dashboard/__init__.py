"""The dashboard: pages that show what a TIDE model's memory does, and let a person switch parts of it off."""
