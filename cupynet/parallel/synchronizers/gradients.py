"""Gradient sharing: replicas exchange gradients or encoded updates in each iteration, and weights stay identical."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend.array import Array
from cupynet.core.checks import flag, integer, one_of
from cupynet.core.errors import ConfigError
from cupynet.nn.params import Params
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.synchronizers.base import Average, Synchronizer
from cupynet.parallel.synchronizers.half_precision import TRANSFER_DTYPES, half_mean
from cupynet.parallel.synchronizers.replica_view import (
    ReplicaView,
    Tally,
    by_name,
    check_finite_replicas,
    take_by_name,
)
from cupynet.parallel.synchronizers.schedule import Moment
from cupynet.parallel.synchronizers.threshold import Message, ThresholdEncoding, encoding_of


class GradientSharing(Synchronizer):
    """Exchanges gradients in every iteration, so that all replicas take the same step.

    Without an encoding, each optimizer gets the mean gradient over all samples of the iteration, or with `reduce=sum`
    the sum of the workers' mean gradients. The mean is equivalent to one replica on the concatenated batch, for any
    optimizer. Workers without a batch take the same step.

    With an encoding (Deeplearning4j's SHARED_GRADIENTS), each optimizer computes an update from the local gradient, and
    the large elements of the update are sent to all workers (see `ThresholdEncoding`). Weights are bit-identical on all
    replicas, but optimizer states (momentum) differ. Residuals persist across fits, and are not added to the weights at
    the end of a fit. Encoding runs on the host, so weights on a GPU are copied to the host and back in every iteration.

    Buffers (running statistics) are averaged in every iteration in full precision, weighted by samples. A single
    replica sends nothing.

    Args:
        encoding: None for exact gradients; otherwise `threshold`, or a `ThresholdEncoding`.
        reduce: `mean`, weighted by samples, or `sum`, which Deeplearning4j uses for updates. With `sum`, steps grow
            with the number of workers.
        transfer_dtype: `full` sends exact gradients in full precision, and `half` sends them in 16 bits (see
            `half_mean`). An encoding requires `full`.
        report_score: True to compute `Average.score`, reading the losses from the device.
        score_every: iterations between scores.
    """

    def __init__(
        self,
        encoding: str | ThresholdEncoding | None = None,
        *,
        reduce: str = "mean",
        transfer_dtype: str = "full",
        report_score: bool = True,
        score_every: int = 10,
    ) -> None:
        self.encoding = encoding_of(encoding)
        self.shares_gradients = self.encoding is None
        self.reduce = one_of("reduce", reduce, ("mean", "sum"))
        self.transfer_dtype = one_of("transfer_dtype", transfer_dtype, TRANSFER_DTYPES)
        if self.encoding is not None and self.transfer_dtype != "full":
            raise ConfigError(
                "applies only to exact gradients, not to encoded updates. Remove this setting",
                "transfer_dtype",
                transfer_dtype,
            )
        self.report_score = flag("report_score", report_score)
        self.score_every = integer("score_every", score_every, 1)
        self._tally = Tally()  # counts since the last score
        self._next = 0  # the next iteration
        self._samples = 0  # size of this worker's batch

    def start(self, replica: ReplicaView, communicator: Communicator) -> None:
        super().start(replica, communicator)
        self._replica = replica
        self._tally = replica.tally(losses=self.report_score)
        if self.encoding is not None and communicator.size > 1:
            master = replica.params.master
            self.encoding.start(len(master), replica.params.count, master.dtype)
            self._common: NDArray[Any] = np.empty_like(self.encoding.residual)
            self._update = np.empty_like(self._common)

    def begin(self, replica: ReplicaView) -> None:
        super().begin(replica)
        if self._encoder is not None:
            self._remember(replica)

    def _remember(self, replica: ReplicaView) -> None:
        self._common[...] = replica.backend.to_host(replica.params.master)

    @property
    def _encoder(self) -> ThresholdEncoding | None:
        return self.encoding if self.communicator.size > 1 else None

    def shared(self, replica: ReplicaView) -> list[Array]:
        return super().shared(replica) if self._encoder is None else [replica.params.master]

    def before_update(self, replica: ReplicaView, samples: int) -> None:
        self._samples = samples
        if self.communicator.size > 1 and self.encoding is None:
            self._share_gradients(replica.params, samples)

    def after_update(self, replica: ReplicaView, iteration: int) -> Average | None:
        self._next = iteration + 1
        if self._encoder is not None:
            self._share_updates(replica, self._encoder)
        return self._score(replica, iteration) if (iteration + 1) % self.score_every == 0 else None

    def finish(self, replica: ReplicaView, moment: Moment) -> Average | None:
        return self._score(replica, None) if self._tally.iterations and moment != "epoch" else None

    def __str__(self) -> str:
        what = f"gradients{' sent as half' * (self.transfer_dtype == 'half')}"
        if self.encoding is not None:
            what = f"updates encoded with {self.encoding}"
        return f"{what}, {'averaged' if self.reduce == 'mean' else 'added up'} in every iteration"

    def state(self) -> dict[str, Any]:
        content: dict[str, Any] = {"next": self._next, "tally": self._tally.state()}
        if self._encoder is not None:
            residual = by_name(self._replica, self._encoder.residual)
            content["encoding"] = {**self._encoder.state(), "residual": residual}
        return content

    def restore(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        self._tally.restore(state["tally"])
        if self._encoder is not None:
            self._encoder.restore(state["encoding"])
            take_by_name(self._replica, self._encoder.residual, state["encoding"]["residual"])
            self._replica.params.clear_frozen(self._encoder.residual)  # layers that were trained when it was saved
            self._remember(self._replica)  # the weights have already been restored

    def merge(self, state: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        return 1.0, {**state, "tally": Tally().state()}

    def _share_gradients(self, params: Params, samples: int) -> None:
        grad, together = params.grad, self.transfer_dtype == "full" and self.reduce == "mean"
        weight = samples if self.reduce == "mean" else 1
        if self.transfer_dtype == "full":
            self.communicator.allreduce_mean([grad, *(params.running if together else ())], weight)
        else:
            half_mean(self.communicator, grad, weight)
        if params.running and not together:
            self.communicator.allreduce_mean(params.running, samples)
        if self.reduce == "sum":
            grad *= self.communicator.size

    def _share_updates(self, replica: ReplicaView, encoder: ThresholdEncoding) -> None:
        params, common = replica.params, self._common
        np.subtract(replica.backend.to_host(params.master), common, out=self._update)
        message = encoder.encode(self._update, self._samples).vector()
        messages = [Message.of(received) for received in self.communicator.all_gather(message)]
        check_finite_replicas([received.finite for received in messages], self._next - 1)
        total = sum(received.samples for received in messages)
        for received in messages:  # in rank order, so that sums are bit-identical
            if received.samples:
                received.add_to(common, received.samples / total if self.reduce == "mean" else 1.0)
        if params.running:
            self.communicator.allreduce_mean(params.running, self._samples)
        params.master[...] = replica.backend.asarray(common)
        params.publish()

    def _score(self, replica: ReplicaView, iteration: int | None) -> Average:
        score = self._tally.gather(replica, self.communicator, iteration)
        self._tally.clear()
        return Average(score, math.nan)
