"""Predictions: a question before a figure, an answer that one commits to, and only then the truth."""

from fsdp_sim.learn.predictions.ask import predict
from fsdp_sim.learn.predictions.prediction import Prediction, load, names

__all__ = ["Prediction", "load", "names", "predict"]
