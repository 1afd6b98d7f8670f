"""Replicas side by side: how workers talk, when they are averaged, how they are started."""

from cupynet.parallel.communicator import Communicator, SerialCommunicator, ThreadCommunicator, ThreadGroup
from cupynet.parallel.launch import WorkerTeam
from cupynet.parallel.synchronizers import (
    Average,
    Moment,
    ParameterAveraging,
    Replica,
    Synchronizer,
    check_frequency,
    is_finite,
)

__all__ = [
    "Average",
    "Communicator",
    "Moment",
    "ParameterAveraging",
    "Replica",
    "SerialCommunicator",
    "Synchronizer",
    "ThreadCommunicator",
    "ThreadGroup",
    "WorkerTeam",
    "check_frequency",
    "is_finite",
]
