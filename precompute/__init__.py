"""Artifacts of a checkpoint: what the dashboard shows and does not compute live."""

from precompute.artifacts import ArtifactError, Artifacts

__all__ = ["ArtifactError", "Artifacts"]
