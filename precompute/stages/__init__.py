"""The stages: one file each, pure functions first, then the few lines that tie them to a run."""

from precompute.stage import Stage
from precompute.stages.ablation import Ablation
from precompute.stages.collapse import Collapse
from precompute.stages.compression import Compression
from precompute.stages.frequency import Frequency
from precompute.stages.geometry import Geometry
from precompute.stages.history import History
from precompute.stages.maps import Maps
from precompute.stages.neighbors import Neighbors
from precompute.stages.overlap import Overlap
from precompute.stages.rare_tokens import RareTokens
from precompute.stages.routing import Routing
from precompute.stages.specialisation import Specialisation
from precompute.stages.text import Text

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Text(),
        Frequency(),
        Routing(),
        Specialisation(),
        Neighbors(),
        Overlap(),
        Geometry(),
        Maps(),
        Collapse(),
        Ablation(),
        Compression(),
        RareTokens(),
        History(),
    )
}
"""By name, in the order in which they run."""

__all__ = ["STAGES"]
