"""The training loop, callbacks, and `ParallelWrapper`."""

from cupynet.training.advice import advise, unlearned
from cupynet.training.callbacks.base import Callback, LambdaCallback
from cupynet.training.callbacks.checkpoint import Checkpoint
from cupynet.training.callbacks.early_stopping import EarlyStopping, EarlyStoppingResult
from cupynet.training.callbacks.history import HistoryWriter
from cupynet.training.callbacks.loggers import Logger, MLflow, TensorBoard, WandB
from cupynet.training.callbacks.memory_pools import Pools
from cupynet.training.callbacks.profile import Profile
from cupynet.training.callbacks.progress import Progress
from cupynet.training.callbacks.rate_test import RateTest, find_rate
from cupynet.training.callbacks.weight_average import WeightAverage
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import EpochRecord, IterationRecord, Spent, Stop, StopReason
from cupynet.training.graph_replica import GraphReplica
from cupynet.training.options import TrainingOptions
from cupynet.training.parallel_wrapper import ParallelWrapper
from cupynet.training.regression import RegressionEvaluation
from cupynet.training.replica import Replica
from cupynet.training.trainer import Trainer

__all__ = [
    "Logger",
    "MLflow",
    "TensorBoard",
    "WandB",
    "Callback",
    "LambdaCallback",
    "Checkpoint",
    "EarlyStopping",
    "EarlyStoppingResult",
    "EpochRecord",
    "Evaluation",
    "GraphReplica",
    "HistoryWriter",
    "ParallelWrapper",
    "Pools",
    "Profile",
    "Progress",
    "RateTest",
    "RegressionEvaluation",
    "Replica",
    "IterationRecord",
    "Spent",
    "Stop",
    "StopReason",
    "Trainer",
    "TrainingOptions",
    "WeightAverage",
    "advise",
    "find_rate",
    "unlearned",
]
