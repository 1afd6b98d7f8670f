"""What worker threads borrow from their workspaces."""

from __future__ import annotations

from cupynet.backend import Workspace
from cupynet.training import ParallelWrapper


def workspaces(wrapper: ParallelWrapper) -> list[Workspace]:
    """The workspace of each worker's own thread, in rank order."""
    found: dict[int, Workspace] = {}
    wrapper.on_workers(lambda trainer: found.update({trainer.rank: trainer.backend.workspace}))
    return [found[rank] for rank in sorted(found)]


def on_loan(wrapper: ParallelWrapper) -> list[int]:
    """How many buffers each worker has on loan, in rank order; zeros between tasks."""
    return [workspace.on_loan for workspace in workspaces(wrapper)]
