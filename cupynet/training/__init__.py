"""Training: the loop that every worker runs, what watches it, and the wrapper that is the way in."""

from cupynet.training.advice import advise, unlearned
from cupynet.training.callbacks import Callback, History
from cupynet.training.checkpoint import Checkpoint
from cupynet.training.clock import Clock
from cupynet.training.console import Progress
from cupynet.training.early_stopping import EarlyStopping, EarlyStoppingResult
from cupynet.training.graph_replica import GraphReplica
from cupynet.training.metrics import Evaluation
from cupynet.training.nonfinite import NonFinite
from cupynet.training.pools import Pools
from cupynet.training.profile import Profile
from cupynet.training.rate_test import RateTest, find_rate
from cupynet.training.records import EpochRecord, Report, Spent, Stop, StopReason, TrainerView
from cupynet.training.replica import Replica
from cupynet.training.report_page import ReportPage
from cupynet.training.trainer import Trainer
from cupynet.training.weight_average import WeightAverage
from cupynet.training.wrapper import ParallelWrapper

__all__ = [
    "Callback",
    "Clock",
    "Checkpoint",
    "EarlyStopping",
    "EarlyStoppingResult",
    "EpochRecord",
    "Evaluation",
    "GraphReplica",
    "History",
    "NonFinite",
    "ParallelWrapper",
    "Pools",
    "Profile",
    "Progress",
    "RateTest",
    "Replica",
    "Report",
    "ReportPage",
    "Spent",
    "Stop",
    "StopReason",
    "Trainer",
    "TrainerView",
    "WeightAverage",
    "advise",
    "find_rate",
    "unlearned",
]
