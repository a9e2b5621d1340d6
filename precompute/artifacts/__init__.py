"""`Artifacts`: reading what `tide-precompute` wrote, a few rows at a time.

No model is loaded here, and no tensor is read whole to answer for one token: tensors are memory-mapped and sliced.
FAISS is loaded for live queries alone. Layers and banks are 0-based; the null bank is the last column of every routing
table.
"""

from precompute.artifacts.ablation import AblationReader
from precompute.artifacts.collapse import CollapseReader
from precompute.artifacts.compression import CompressionReader
from precompute.artifacts.geometry import GeometryReader
from precompute.artifacts.history import HistoryReader
from precompute.artifacts.maps import MapReader
from precompute.artifacts.neighbors import NeighborReader
from precompute.artifacts.overlap import OVERLAP_K, OverlapReader
from precompute.artifacts.rare_tokens import RareTokensReader
from precompute.artifacts.routing import RoutingReader
from precompute.artifacts.specialisation import SpecialisationReader
from precompute.artifacts.text import TextReader
from precompute.store import ArtifactError

__all__ = ["OVERLAP_K", "ArtifactError", "Artifacts"]


class Artifacts(
    SpecialisationReader,
    TextReader,
    RoutingReader,
    OverlapReader,
    NeighborReader,
    GeometryReader,
    MapReader,
    CollapseReader,
    AblationReader,
    CompressionReader,
    RareTokensReader,
    HistoryReader,
):
    """The artifacts of one checkpoint. Make it with `Artifacts.open`; safe to share between threads.

    Each stage has a class of its own with what can be asked of it; this one is all of them together.
    """
