"""TIDE (Token Identity Delivered Everywhere): the model, its training and its evaluation."""

from tide.config import ParameterBudget, TideConfig
from tide.intervention import Intervention
from tide.model import TideForCausalLM, TideModel
from tide.trace import Trace

__all__ = ["Intervention", "ParameterBudget", "TideConfig", "TideForCausalLM", "TideModel", "Trace"]
