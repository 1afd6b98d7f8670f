"""Replicas side by side: how workers talk, when replicas are brought together, how workers are started."""

from cupynet.parallel.averaging import ParameterAveraging
from cupynet.parallel.communicator import REDUCES, Communicator, PeerFailed, SerialCommunicator, Traffic, WorkerTimeout
from cupynet.parallel.devices import check_reduce
from cupynet.parallel.elastic import ElasticAveraging
from cupynet.parallel.encoding import (
    AdaptiveThreshold,
    FixedThreshold,
    TargetSparsity,
    Threshold,
    ThresholdEncoding,
)
from cupynet.parallel.gradients import GradientSharing
from cupynet.parallel.groups import Groups
from cupynet.parallel.launch import Launcher, ThreadLauncher
from cupynet.parallel.mpi import MpiCommunicator
from cupynet.parallel.outer import DiLoCo, Mean, Outer, SlowMo
from cupynet.parallel.pipeline import Pipeline, PipelineSpeed, one_forward_one_backward, parts
from cupynet.parallel.placement import Placement
from cupynet.parallel.ranks import MpiJob, MpiLauncher, job
from cupynet.parallel.replica import ReplicaView
from cupynet.parallel.synchronizers import Average, Moment, Synchronizer, is_finite
from cupynet.parallel.threads import ThreadCommunicator, ThreadGroup
from cupynet.parallel.when import Adaptive, PostLocal, When

__all__ = [
    "REDUCES",
    "check_reduce",
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
    "When",
    "WorkerTimeout",
    "is_finite",
    "job",
    "one_forward_one_backward",
    "parts",
]
