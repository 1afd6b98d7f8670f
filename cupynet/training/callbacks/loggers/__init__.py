"""Loggers for TensorBoard, MLflow, and Weights & Biases. See README.md in this folder."""

from cupynet.training.callbacks.loggers.base import Logger
from cupynet.training.callbacks.loggers.mlflow import MLflow
from cupynet.training.callbacks.loggers.tensorboard import TensorBoard
from cupynet.training.callbacks.loggers.wandb import WandB

__all__ = ["Logger", "MLflow", "TensorBoard", "WandB"]
