"""Replicas side by side: how workers talk, when replicas are brought together, how workers are started."""

from cupynet.parallel.communicator import Communicator, PeerFailed, SerialCommunicator, WorkerTimeout
from cupynet.parallel.groups import Groups
from cupynet.parallel.launch import Launcher, ThreadLauncher
from cupynet.parallel.placement import Placement
from cupynet.parallel.replica import ReplicaView
from cupynet.parallel.synchronizers import Average, Moment, ParameterAveraging, Synchronizer, When, is_finite
from cupynet.parallel.threads import ThreadCommunicator, ThreadGroup

__all__ = [
    "Average",
    "Communicator",
    "Groups",
    "Launcher",
    "Moment",
    "ParameterAveraging",
    "PeerFailed",
    "Placement",
    "ReplicaView",
    "SerialCommunicator",
    "Synchronizer",
    "ThreadCommunicator",
    "ThreadGroup",
    "ThreadLauncher",
    "When",
    "WorkerTimeout",
    "is_finite",
]
