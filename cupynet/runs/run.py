"""The folder of a run and its summary."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cupynet.core import files
from cupynet.core.checks import finite
from cupynet.core.errors import ConfigError, DataError, OutputError, described, exit_code
from cupynet.core.wording import listed, shown
from cupynet.runs import layout
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.history import History, present

PRUNED = "pruned"  # prefix of `stopped_by` for pruned trials


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Setup of a run.

    Attributes:
        fallback: True if synthetic data replaced a data set that could not be loaded.
        stages: number of pipeline stages of each replica.
        parameters: number of trainable parameters.
        image_shape: shape (H, W, C) of an image.
        normalize: mean and standard deviation of each channel on a 0-1 scale; None without normalization.
        class_weights: balanced class weights of the loss, computed from the training labels; None if not used.
        commit: commit of the source, with `-dirty` if there are uncommitted changes; None outside a repository.
        environment: the machine, its BLAS libraries and the versions of packages.
    """

    dataset: str
    fallback: bool
    backend: str
    devices: list[str]
    dtype: str
    workers: int
    stages: int = 1
    seed: int
    batch_size: int
    averaging_frequency: int | str | None
    synchronizer: str
    parameters: int
    image_shape: list[int] | None = None
    normalize: dict[str, list[float]] | None = None
    class_names: list[str] | None = None
    class_weights: list[float] | None = None
    commit: str | None = None
    environment: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of training.

    Attributes:
        epochs, iterations, images: numbers of epochs and iterations completed, and of images processed.
        train_loss: loss of the last epoch (see `EpochRecord.loss`); None without a complete epoch.
        stopped_by: why training ended early; None if it was not stopped.
        stop_reason: `request`, `signal` or `early`; `diverged` if a value was not finite and the best weights were
            kept.
        early_stopping: see `EarlyStoppingResult`.
        drift, drift_by_layer: last measured drift of the replicas (see `IterationRecord`).
        skipped_steps: number of steps skipped because a 16-bit gradient overflowed (see `LossScaler`).
        advice: how to train faster (see `advise`).
    """

    epochs: int
    iterations: int
    images: int
    train_loss: float | None = None
    stopped_by: str | None
    stop_reason: str | None = None
    early_stopping: dict[str, Any] | None = None
    drift: float | None = None
    drift_by_layer: dict[str, float] | None = None
    skipped_steps: int = 0
    advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Times and traffic of a run.

    Attributes:
        images_per_s: training throughput, excluding the first 10 iterations if there were more.
        wall_s: wall time of the last process, plus compilation, training and evaluation in earlier processes.
        compile_s, train_s, evaluate_s, data_s, averaging_s: see `Clock`.
        bytes_sent: bytes sent by all workers.
        spent: times of each worker (see `Spent`).
        pipeline: see `Pipeline.speed`; None without a pipeline.
        memory: size and use of the memory pool of each device (see `Pools`); None on a CPU.
    """

    images_per_s: float
    wall_s: float
    train_s: float
    compile_s: float
    evaluate_s: float
    data_s: float
    averaging_s: float
    bytes_sent: int = 0
    spent: dict[str, list[Any]] | None = None
    pipeline: dict[str, Any] | None = None
    memory: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of the trained model. `test` and `validation` are complete evaluations, or None."""

    validation_accuracy: float | None = None
    validation_samples: int | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    test_f1: float | None = None
    test: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Content of summary.json, which stores the fields of all parts at the top level.

    Names of durations end in `_s`, and names of rates in `_per_s`. Accuracies are between 0 and 1. None means not
    measured or not finite.
    """

    setup: Setup
    outcome: Outcome
    cost: Cost
    scores: Scores

    def flat(self) -> dict[str, Any]:
        """Return the fields of all parts in one dictionary."""
        parts = asdict(self).values()
        return {name: value for part in parts for name, value in part.items()}

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Summary:
        """Build a summary from its fields, ignoring other keys. Raise DataError if a field is missing or invalid."""
        parts, flat = {}, present(flat)
        for name, part in get_type_hints(cls).items():
            missing = [field.name for field in fields(part) if field.default is MISSING and field.name not in flat]
            if missing:
                raise DataError(f"incomplete summary: {', '.join(missing)} missing")
            kinds = {key: kind for key, kind in get_type_hints(part).items() if key in flat}
            for key, kind in kinds.items():
                if not _is_a(flat[key], kind):
                    raise DataError(f"{key}={shown(flat[key])}: invalid value in the summary")
            parts[name] = part(**{key: flat[key] for key in kinds})
        return cls(**parts)


def _is_a(value: Any, kind: Any) -> bool:
    """Return True if a JSON value has the annotated type and is not NaN or infinite. Nested items are not checked."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    allowed = [get_origin(item) or item for item in kinds]
    fits = type(value) in allowed or (type(value) is int and float in allowed)
    return fits and (type(value) not in (int, float) or finite(value) is not None)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Content of started.json, written at the beginning of a run.

    Attributes:
        setup: stored as fields at the top level.
        started: local time of the first start.
        changed: True if settings that may change the results were changed when the run was resumed.
        overrides: command-line overrides; None if unknown.
        processes: number of processes started by mpiexec; None without mpiexec.
        layers: rows of `Model.rows`, as mappings from columns to strings.
    """

    setup: Setup
    started: str
    epochs: int
    overrides: list[str] | None
    config_dir: str | None
    processes: int | None
    layers: list[dict[str, str]]
    changed: bool = False


class Run:
    """The folder of a run, and the paths of its files (see layout.py).

    Attributes:
        folder: contains these files, `.hydra/`, train.log and, during the run, running.json (see lock.py).
        saved: True if this object has written results.
        settings: nested settings if a command makes the run; None in Python.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder, self.saved, self.settings = Path(folder), False, settings
        self.settings_path = self.folder / layout.SETTINGS
        self.started_path = self.folder / layout.START
        self.summary_path = self.folder / layout.SUMMARY
        results = [self.folder / name for name in layout.RESULTS]
        self.weights_path, self.history_path, self.examples_path, self.report_path, self.curves_path = results
        self.checkpoints_path = self.folder / layout.CHECKPOINTS
        self.reopened_path = self.folder / layout.REOPENED
        self.failed_path = self.folder / layout.FAILED

    @classmethod
    def of(cls, run: Run | str | Path, *, create: bool = True) -> Run:
        """Return `run` itself if it is a `Run`, otherwise a `Run` for this folder.

        create: True to create a missing folder, or raise OutputError if this fails; False on ranks that do not write.
        """
        if create:
            files.require_folder(run.folder if isinstance(run, Run) else run)
        if isinstance(run, Run):
            return run
        return cls(Path(run).absolute())  # the current folder may change between fits

    def __str__(self) -> str:
        return str(self.folder)

    def claim(self, identity: str, *, continued: bool) -> str:
        """Store the identity of the training run to which the folder of a `ParallelWrapper` belongs.

        Args:
            identity: of the run that begins or continues; "" if its checkpoint is from an earlier version.
            continued: True if a checkpoint of the run was restored.

        Returns:
            The identity of the run from now on. In a folder without results, a continued run gets a new one, because
            a run that starts from another run's checkpoint is a different run.

        Raises:
            ConfigError: the model or checkpoints of another run would be overwritten.
            DataError: the stored identity is damaged.
            OutputError: the identity cannot be written.
        """
        path = self.folder / layout.IDENTITY
        found = [each.name for each in (self.started_path, self.summary_path) if each.is_file()]  # written by commands
        if found:
            reason = f"contains {listed(found, 'and')} of a run of cupynet train. Choose another folder"
            raise ConfigError(reason, "run", str(self.folder))
        found = [layout.MODEL] * (self.folder / layout.MODEL).is_file()
        found += [layout.CHECKPOINTS] * bool(layout.checkpoints(self.checkpoints_path))
        owner = self._owner(path) if found and path.is_file() else ""  # earlier versions wrote no identity
        if found and (not continued or (identity != owner and identity and owner)):
            remedy = ", or continue its training with wrapper.restore(checkpoint)" * (layout.CHECKPOINTS in found)
            reason = f"contains {listed(found, 'and')} of another run. Choose another folder{remedy}"
            raise ConfigError(reason, "run", str(self.folder))
        if continued and not found:
            identity = uuid.uuid4().hex
        identity = identity or owner or uuid.uuid4().hex
        if identity != owner:
            files.write_json(path, {"run": identity})
        return identity

    def _owner(self, path: Path) -> str:
        owner = files.read_object(path).get("run")
        if not isinstance(owner, str) or not owner:
            raise DataError(f"{path}: is damaged. If the restored checkpoint belongs to this folder, delete this file")
        return owner

    def begin(self) -> None:
        """Delete the results and checkpoints of an earlier run in this folder. Raise OutputError if this fails."""
        self.tidy()
        for name in (layout.START, layout.SUMMARY, *layout.RESULTS, layout.REOPENED, layout.FAILED, layout.IDENTITY):
            with contextlib.suppress(IsADirectoryError):
                (self.folder / name).unlink(missing_ok=True)
        Checkpoints(self.checkpoints_path).keep(())

    def reopen(self, iteration: int) -> None:
        """Mark results as outdated until `save`, and delete checkpoints after `iteration`. May raise OutputError."""
        if self.summary_path.exists():
            text = "This run has been resumed. summary.json and the weights are outdated until it ends.\n"
            files.write_whole(self.reopened_path, text.encode())
        self.failed_path.unlink(missing_ok=True)
        store = Checkpoints(self.checkpoints_path)
        store.keep([step for step in store.steps() if step <= iteration])

    def tidy(self) -> None:
        """Delete incomplete files of a killed process. Raise OutputError if this fails."""
        try:
            for part in [*self.folder.glob(".*.part"), *self.folder.glob(".hydra/.*.part")]:
                part.unlink()
            Checkpoints(self.checkpoints_path).clean()
        except OSError as error:
            raise OutputError(f"{self.folder}: cannot delete incomplete files ({error})") from error

    def last_start(self) -> dict[str, Any]:
        """Return the content of started.json, or {} if it is missing or unreadable."""
        with contextlib.suppress(DataError):
            return files.read_object(self.started_path)
        return {}

    def describe(self, start: Start) -> None:
        """Write started.json. Raise OutputError if this fails."""
        content = asdict(start)
        files.write_json(self.started_path, {**content.pop("setup"), **content})

    def fail(self, error: BaseException) -> None:
        """Store the error and the exit code of a failed run if training has begun. Ignore failures to write them."""
        if self.started_path.exists():
            with contextlib.suppress(OutputError):
                files.write_json(self.failed_path, {"exit_code": exit_code(error), "error": described(error)})

    def save(self, summary: Summary, weights: dict[str, Any], examples: Any = None) -> None:
        """Write the weights, the examples and, last, the summary. Raise OutputError if this fails.

        examples: images of the M most confident mistakes, in descending order of confidence, (M, H, W, C) uint8.
        """
        self.summary_path.unlink(missing_ok=True)  # the old summary belongs to the previous weights
        self.reopened_path.unlink(missing_ok=True)
        files.save_weights(self.weights_path, weights, files.write_whole)
        self.examples_path.unlink(missing_ok=True)
        if examples is not None and len(examples):
            files.save_weights(self.examples_path, {"images": examples}, files.write_whole)
        files.write_json(self.summary_path, summary.flat())
        self.saved = True

    def summary(self) -> Summary:
        """Read the summary. Raise DataError if it is missing or damaged."""
        content = files.read_object(self.summary_path)
        try:
            return Summary.of(content)
        except DataError as error:
            raise DataError(f"{self.summary_path}: {error}") from error

    def weights(self) -> dict[str, Any]:
        """Read the trained weights by name. Raise DataError if the file is missing or damaged."""
        return files.load_weights(self.weights_path)

    def history(self) -> list[dict[str, Any]]:
        """Read the complete rows of history.jsonl. Raise DataError if the file is missing or damaged."""
        files.require_plain(self.history_path)
        try:
            *lines, _ = self.history_path.read_text(encoding="utf-8").split("\n")  # the last line may be incomplete
            rows = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{self.history_path}: cannot be read ({error})") from error
        return [present(row) for row in rows if isinstance(row, dict)]

    def columns(self) -> History:
        """Read the history as columns. Raise DataError if the file is missing or damaged."""
        return History.of(self.history())
