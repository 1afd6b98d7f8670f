"""What writes a run down for programs that show many: TensorBoard, MLflow, Weights & Biases. See README.md here."""

from cupynet.loggers.logger import Logger
from cupynet.loggers.mlflow import MLflow
from cupynet.loggers.tensorboard import TensorBoard
from cupynet.loggers.wandb import WandB

__all__ = ["Logger", "MLflow", "TensorBoard", "WandB"]
