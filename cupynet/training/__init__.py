"""Training: the loop that every worker runs, what watches it, and what it leaves behind."""

from cupynet.files import load_weights, save_weights, write_json
from cupynet.training.callbacks import Callback, EpochRecord, History, Report
from cupynet.training.clock import Clock
from cupynet.training.metrics import Evaluation
from cupynet.training.trainer import Trainer, warm_up
from cupynet.training.wrapper import ParallelWrapper

__all__ = [
    "Callback",
    "Clock",
    "EpochRecord",
    "Evaluation",
    "History",
    "ParallelWrapper",
    "Report",
    "Trainer",
    "load_weights",
    "save_weights",
    "warm_up",
    "write_json",
]
