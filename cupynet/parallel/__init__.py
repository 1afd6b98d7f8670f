"""Replicas side by side: how workers talk, when replicas are brought together, how workers are started."""

from cupynet.parallel.averaging import ParameterAveraging
from cupynet.parallel.communicator import Communicator, PeerFailed, SerialCommunicator, Traffic, WorkerTimeout
from cupynet.parallel.groups import Groups
from cupynet.parallel.launch import Launcher, ThreadLauncher
from cupynet.parallel.mpi import MpiCommunicator
from cupynet.parallel.placement import Placement
from cupynet.parallel.ranks import MpiJob, MpiLauncher, job
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
    "MpiCommunicator",
    "MpiJob",
    "MpiLauncher",
    "ParameterAveraging",
    "PeerFailed",
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
    "job",
]
