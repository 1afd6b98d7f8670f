"""Parallel training: communicators, synchronizers, launchers and pipelines."""

from cupynet.parallel.communicators.base import REDUCES, Communicator, PeerFailed, Traffic, WorkerTimeout
from cupynet.parallel.communicators.devices import check_reduce
from cupynet.parallel.communicators.groups import Groups
from cupynet.parallel.communicators.mpi import MpiCommunicator
from cupynet.parallel.communicators.serial import SerialCommunicator
from cupynet.parallel.communicators.threads import ThreadCommunicator, ThreadGroup
from cupynet.parallel.launchers.base import Launcher
from cupynet.parallel.launchers.mpi import MpiJob, MpiLauncher, job
from cupynet.parallel.launchers.threads import ThreadLauncher
from cupynet.parallel.pipeline import Pipeline, PipelineSpeed, one_forward_one_backward, parts
from cupynet.parallel.placement import Placement
from cupynet.parallel.synchronizers.averaging import ParameterAveraging
from cupynet.parallel.synchronizers.base import Average, Synchronizer, check_state
from cupynet.parallel.synchronizers.elastic import ElasticAveraging
from cupynet.parallel.synchronizers.gradients import GradientSharing
from cupynet.parallel.synchronizers.outer import DiLoCo, Mean, Outer, SlowMo
from cupynet.parallel.synchronizers.replica_view import ReplicaView, is_finite
from cupynet.parallel.synchronizers.schedule import Adaptive, AveragingSchedule, Moment, PostLocal
from cupynet.parallel.synchronizers.threshold import (
    AdaptiveThreshold,
    FixedThreshold,
    TargetSparsity,
    Threshold,
    ThresholdEncoding,
)

__all__ = [
    "REDUCES",
    "check_reduce",
    "check_state",
    "Adaptive",
    "AdaptiveThreshold",
    "Average",
    "Communicator",
    "DiLoCo",
    "ElasticAveraging",
    "FixedThreshold",
    "GradientSharing",
    "Groups",
    "Launcher",
    "Mean",
    "Moment",
    "MpiCommunicator",
    "MpiJob",
    "MpiLauncher",
    "Outer",
    "ParameterAveraging",
    "PeerFailed",
    "Pipeline",
    "PipelineSpeed",
    "Placement",
    "PostLocal",
    "ReplicaView",
    "SerialCommunicator",
    "SlowMo",
    "Synchronizer",
    "TargetSparsity",
    "ThreadCommunicator",
    "ThreadGroup",
    "ThreadLauncher",
    "Threshold",
    "ThresholdEncoding",
    "Traffic",
    "AveragingSchedule",
    "WorkerTimeout",
    "is_finite",
    "job",
    "one_forward_one_backward",
    "parts",
]
