"""Parallel training: communicators, synchronizers, launchers and pipelines."""

from cupynet.parallel.communicators.base import (
    Communicator,
    Groups,
    PeerFailed,
    SerialCommunicator,
    Traffic,
    WorkerTimeout,
)
from cupynet.parallel.launchers.mpi import MpiJob, MpiLauncher, job
from cupynet.parallel.launchers.threads import ThreadLauncher
from cupynet.parallel.pipeline import Pipeline
from cupynet.parallel.placement import Placement
from cupynet.parallel.synchronizers.averaging import ParameterAveraging
from cupynet.parallel.synchronizers.base import Average, Synchronizer
from cupynet.parallel.synchronizers.elastic import ElasticAveraging
from cupynet.parallel.synchronizers.gradients import GradientSharing
from cupynet.parallel.synchronizers.outer_optimizer import DiLoCo, OuterOptimizer, SlowMo
from cupynet.parallel.synchronizers.replica_view import ReplicaView, Tally, is_finite
from cupynet.parallel.synchronizers.schedule import Adaptive, AveragingSchedule, Moment, PostLocal
from cupynet.parallel.synchronizers.threshold import (
    AdaptiveThreshold,
    FixedThreshold,
    TargetSparsity,
    ThresholdEncoding,
)

__all__ = [
    "Adaptive",
    "AdaptiveThreshold",
    "Average",
    "Communicator",
    "DiLoCo",
    "ElasticAveraging",
    "FixedThreshold",
    "GradientSharing",
    "Groups",
    "Moment",
    "MpiJob",
    "MpiLauncher",
    "OuterOptimizer",
    "ParameterAveraging",
    "PeerFailed",
    "Pipeline",
    "Placement",
    "PostLocal",
    "ReplicaView",
    "SerialCommunicator",
    "SlowMo",
    "Synchronizer",
    "Tally",
    "TargetSparsity",
    "ThreadLauncher",
    "ThresholdEncoding",
    "Traffic",
    "AveragingSchedule",
    "WorkerTimeout",
    "is_finite",
    "job",
]
