"""Trainers of workers on threads."""

from __future__ import annotations

import copy
from typing import Any

from cupynet.parallel import Communicator, Groups, Synchronizer
from cupynet.training import Callback, Replica, Trainer


def trainer_of(
    communicator: Communicator, replica: Replica, synchronizer: Synchronizer, *callbacks: Callback, **options: Any
) -> Trainer:
    """A worker's trainer with its own copy of the synchronizer."""
    own = copy.deepcopy(synchronizer)
    return Trainer(replica, groups=Groups.of(communicator), synchronizer=own, callbacks=callbacks, **options)
