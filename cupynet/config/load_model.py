"""Load trained models from runs, checkpoints and model files."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from cupynet import config
from cupynet.backend import create_backend, select_backend
from cupynet.config.instantiate import build_as, with_class_weights
from cupynet.config.removed import translated
from cupynet.config.resume import checkpoint_of, run_of
from cupynet.config.schema import Settings
from cupynet.core import checks, shared_options, wording
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.files import load_described, read_weights
from cupynet.core.wording import shown
from cupynet.data import Source
from cupynet.data.normalize import checked as checked_normalize
from cupynet.nn import Flat, Image, InputType, Layer, Loss, Model, Params, input_type
from cupynet.parallel import Synchronizer
from cupynet.runs.layout import MODEL, checkpoints, runs_inside
from cupynet.runs.run import Run, Summary
from cupynet.training.checkpointing import found, set_image_metadata, trained

T = TypeVar("T")
AnyRun: TypeAlias = "Run | str | Path"


def load(
    path: AnyRun, backend: str = "auto", dtype: str | None = None, *, trusted_modules: Iterable[str] = ()
) -> Model:
    """Load a trained model with its weights, running statistics, pixel scale and class names.

        model = cupynet.load("digits.safetensors")
        model = cupynet.load("outputs/latest")
        model.predict(images)  # (N, 28, 28) uint8 -> probabilities (N, 10)

    Nothing in the file or folder is executed.

    Args:
        path: a file written by `Model.save`, the folder of a finished run, a `Run`, or a checkpoint of `cupynet train`.
        backend: numpy, numba, cupy, or auto for the best available.
        dtype: half, bfloat16, float or double; by default the dtype of the model, with TF32 if the run used it.
        trusted_modules: your modules with classes that the model uses. The list stored with a run is ignored.

    Raises:
        ConfigError: an argument is invalid, the file or finished run does not exist, or a class is not trusted.
        DataError: files are damaged or do not match each other.
    """
    if not isinstance(path, Run | str | os.PathLike):
        raise ConfigError("must be a file from Model.save, or the folder of a run or checkpoint", "path", shown(path))
    if isinstance(trusted_modules, str):
        raise ConfigError("must be a list of modules", "trusted_modules", shown(trusted_modules))
    file = _model_file(path)
    if file is not None:
        return _read_model(file, backend, dtype, list(trusted_modules))
    return LoadedRun(path, trusted_modules).model(backend, dtype)


def weights_of(path: AnyRun, trusted_modules: Iterable[str] = ()) -> dict[str, Any]:
    """Return the weights of a safetensors file, a finished run or a checkpoint, by name (see `load`)."""
    file = _model_file(path)
    return LoadedRun(path, trusted_modules).weights if file is None else read_weights(file)


def _model_file(path: AnyRun) -> Path | None:
    """Return the file written by `Model.save` at this path or in this folder, or None."""
    place = path.folder if isinstance(path, Run) else Path(path)
    return next((file for file in (place, place / MODEL) if os.path.isfile(file)), None)


def _read_model(path: Path, backend: str, dtype: str | None, trusted: list[str]) -> Model:
    """Load a file written by `Model.save`, which is untrusted input."""
    weights, description = load_described(path)
    name, _ = select_backend(backend)
    try:
        network = build_as(Layer, translated(description["network"]), "network", trusted)
        loss = build_as(Loss, translated(description["loss"]), "loss", trusted)
        if type(loss) is Loss:
            raise ConfigError("must be a subclass of Loss", "loss")
        own = shared_options.dtype("dtype", description["dtype"] if dtype is None else dtype)
        shape, seed = description["input"], checks.seed("seed", description["seed"])
        input = Flat(*shape) if isinstance(shape, list) and len(shape) == 1 else input_type(shape)
        _check_shapes(network, input, weights)
        model = Model(network, input, create_backend(name, own), seed, loss)
        model.load_weights(weights)
        set_image_metadata(model, checked_normalize(description["normalize"]), description["class_names"])
        model.set_learning_rate_factors(description.get("learning_rate_factors", {}))
        model.trained_on = checks.one_of("trained_on", description["trained_on"], ("", "pixels", "floats"))
    except ConfigError as error:
        if error.setting.endswith("_target_") or dtype is not None and error.setting == "dtype":
            raise  # caused by the caller's arguments
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # anything can fail with an untrusted file
        raise DataError(f"{path}: its metadata are invalid ({type(error).__name__}: {error})") from error
    return model


def _check_shapes(network: Layer, input: InputType, weights: dict[str, Any]) -> None:
    """Raise ConfigError if the network does not match the weights in the file. Call this before allocating memory."""
    params = Params()
    copy.deepcopy(network).build(input, params.scope(), create_backend("numpy"))
    shapes = {name: tuple(each.shape) for name, each in (*params.named(), *params.named_buffers())}
    found = {name: tuple(each.shape) for name, each in weights.items()}
    if shapes != found:
        differing = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise ConfigError(f"does not match the weights in the file: {', '.join(differing[:3])}", "network")


class LoadedRun:
    """A finished run or one of its checkpoints.

    Args:
        run: the folder of a finished run, a `Run`, or a checkpoint.
        trusted_modules: see `load`.

    Attributes:
        path: the folder of the run or checkpoint.
        checkpoint: the checkpoint; None for the result of the run.

    Raises:
        ConfigError: there is no such run or checkpoint.
        DataError: the run or checkpoint is damaged.
    """

    def __init__(self, run: AnyRun, trusted_modules: Iterable[str] = ()) -> None:
        self.path = run.folder if isinstance(run, Run) else Path(run)
        self.run, self._trusted = Run(run_of(self.path)), list(trusted_modules)
        if not os.path.isdir(self.path):  # isdir returns False for invalid names
            missing = "there is no such file or folder. Run folders are in outputs/"
            reason = "is a file. Use the folder of the run" if os.path.isfile(self.path) else missing
            raise ConfigError(f"{wording.one_line(self.path)}: {reason}")
        named = self.run.folder != self.path
        try:
            self.checkpoint = found(checkpoint_of(self.path)) if named else None
            described = self.run.settings_path.is_file()
            undescribed = not described and (self.checkpoint is not None or bool(checkpoints(self.path)))
        except PermissionError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error
        if undescribed:
            raise ConfigError(
                f"{self.path}: a checkpoint written in Python does not contain the network. Create the model and its "
                f"ParallelWrapper, and call wrapper.restore({str(self.path)!r})"
            )
        if self.checkpoint is None and not os.path.isfile(self.run.summary_path):
            saved = checkpoints(self.run.checkpoints_path)
            remedy = f"Use its newest checkpoint, {saved[max(saved)]}" if saved else "Use a run's folder under outputs/"
            if os.path.isfile(self.path / MODEL):
                remedy = f"It was trained in Python. Load its model in Python: cupynet.load({str(self.path)!r})"
            missing = f"{self.path}: not a finished run, because {self.run.summary_path.name} is missing. {remedy}"
            raise ConfigError(runs_inside(self.path) or missing)

    @cached_property
    def summary(self) -> Summary | None:
        return self.run.summary() if os.path.isfile(self.run.summary_path) else None

    def settings(self, overrides: Sequence[str] = ()) -> Settings:
        """Return the run's settings with overrides, for loading its data."""
        settings = config.load(self.run.folder, overrides, self._trusted)
        config.check_downloads(settings, self.run.folder, overrides)
        return settings

    @cached_property
    def own_settings(self) -> Settings:
        """The run's settings. Nothing is built from them."""
        return config.load(self.run.folder, (), self._trusted)

    def _part(self, key: str, node: Any, kind: type[T]) -> T:
        return build_as(kind, node, key, self.own_settings.trusted_modules)

    @cached_property
    def weights(self) -> dict[str, Any]:
        """The weights as host arrays by name, averaged over replicas if they differ."""
        if self.checkpoint is None:
            return self.run.weights()
        part = self.own_settings.parallel.synchronizer
        return trained(self.checkpoint, self._part("parallel.synchronizer", part, Synchronizer))

    @cached_property
    def source(self) -> Source:
        """The run's data source, not yet loaded."""
        return self._part("data", self.own_settings.data, Source)  # type: ignore[type-abstract]

    @cached_property
    def _described(self) -> Mapping[str, Any]:
        if self.checkpoint is not None and isinstance(self.checkpoint.state.get("model"), dict):
            return dict(self.checkpoint.state["model"])
        if self.summary is None:
            return {}
        return {name: getattr(self.summary.setup, name) for name in ("image_shape", "normalize", "class_names")}

    @property
    def normalize(self) -> Any:
        found = self._described.get("normalize", self.own_settings.data.get("normalize"))
        return translated(found, "data.normalize.") if isinstance(found, Mapping) else found

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names in the order of the outputs; empty if there are none."""
        found = self._described.get("class_names")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    @property
    def class_weights(self) -> list[float] | None:
        """Balanced class weights of the training loss; None if unused or unknown."""
        found = self.run.last_start().get("class_weights")  # not saved by earlier versions
        return found if isinstance(found, list) else None

    def model(self, backend: str = "auto", dtype: str | None = None) -> Model:
        settings = self.own_settings
        network = self._part("model", settings.model, Layer)
        loss = self._part("loss", with_class_weights(settings.loss, self.class_weights), Loss)
        options = settings.backend
        if checks.one_of("backend", backend, ("auto", *shared_options.BACKENDS)) == "auto":
            backend, _ = select_backend(gpu_priority=options.priority.gpu, cpu_priority=options.priority.cpu)
        tf32 = options.tf32 and backend == "cupy" and dtype is None  # an explicit dtype="float" disables TF32
        dtype = shared_options.dtype("dtype", settings.dtype if dtype is None else dtype)
        block, grid = options.max_block_size, options.max_grid_size
        where = create_backend(backend, dtype, max_block_size=block, max_grid_size=grid, tf32=tf32)
        try:
            shape = self._described.get("image_shape") or self.source.image_shape
            model = Model(network, Image(*shape), where, settings.seed, loss)
            set_image_metadata(model, self.normalize, self.class_names)
        except ConfigError as error:
            raise DataError(f"{self.path}: {error}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise DataError(f"{self.path}: its image metadata are invalid ({error})") from error
        model.trained_on = "pixels"
        try:
            model.load_weights(self.weights)
        except ConfigError as error:
            raise DataError(f"{self.path}: {error}") from error
        return model
