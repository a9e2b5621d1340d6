"""Artifacts of a checkpoint: what the dashboard shows and does not compute live."""

from precompute.artifacts import OVERLAP_K, ArtifactError, Artifacts

__all__ = ["OVERLAP_K", "ArtifactError", "Artifacts"]
