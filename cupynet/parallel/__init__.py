"""Replicas side by side: how workers talk, when replicas are brought together, how workers are started."""

from cupynet.parallel.averaging import ParameterAveraging
from cupynet.parallel.communicator import Communicator, PeerFailed, SerialCommunicator, Traffic, WorkerTimeout
from cupynet.parallel.groups import Groups
from cupynet.parallel.launch import Launcher, ThreadLauncher
from cupynet.parallel.pipeline import Pipeline, PipelineSpeed, one_forward_one_backward, parts
from cupynet.parallel.placement import Placement
from cupynet.parallel.replica import ReplicaView
from cupynet.parallel.synchronizers import Average, Moment, Synchronizer, is_finite
from cupynet.parallel.threads import ThreadCommunicator, ThreadGroup
from cupynet.parallel.when import When

__all__ = [
    "Average",
    "Communicator",
    "Groups",
    "Launcher",
    "Moment",
    "ParameterAveraging",
    "PeerFailed",
    "Pipeline",
    "PipelineSpeed",
    "Placement",
    "ReplicaView",
    "SerialCommunicator",
    "Synchronizer",
    "ThreadCommunicator",
    "ThreadGroup",
    "ThreadLauncher",
    "Traffic",
    "When",
    "WorkerTimeout",
    "is_finite",
    "one_forward_one_backward",
    "parts",
]
