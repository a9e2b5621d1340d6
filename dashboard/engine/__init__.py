"""Live inference for the dashboard: one model for all sessions. No Streamlit in here.

`engine.py` loads a checkpoint, `live_model.py` answers, `device.py` decides who computes next, `cache.py` keeps
results; `run.py`, `sweep.py` and `generation.py` are the three things that are computed.
"""

from dashboard.engine.comparison import Comparison, ranking
from dashboard.engine.engine import DEVICE_VARIABLE, Engine, shared_engine
from dashboard.engine.live_model import LiveModel
from dashboard.engine.run import LiveRun

__all__ = ["DEVICE_VARIABLE", "Comparison", "Engine", "LiveModel", "LiveRun", "ranking", "shared_engine"]
