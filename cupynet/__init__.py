"""cupynet: convnets from scratch on NumPy and CuPy, trained by replicas in parallel whose parameters are averaged.

The public names are found here and loaded from their packages when they are first used:
`import cupynet` alone costs nothing and imports neither NumPy nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from cupynet.core.version import __version__ as __version__

if TYPE_CHECKING:  # the names again, as type checkers need them; `as` makes them public
    from cupynet.backend import Backend as Backend
    from cupynet.backend import create_backend as create_backend
    from cupynet.config.load_model import load_model as load_model
    from cupynet.core.errors import ConfigError as ConfigError
    from cupynet.core.errors import CupynetError as CupynetError
    from cupynet.core.errors import DataError as DataError
    from cupynet.core.errors import DeviceError as DeviceError
    from cupynet.core.errors import DivergedError as DivergedError
    from cupynet.core.errors import Interrupted as Interrupted
    from cupynet.core.errors import OutputError as OutputError
    from cupynet.core.files import load_weights as load_weights
    from cupynet.core.files import save_weights as save_weights
    from cupynet.data import CIFAR10 as CIFAR10
    from cupynet.data import KMNIST as KMNIST
    from cupynet.data import MNIST as MNIST
    from cupynet.data import Augmentation as Augmentation
    from cupynet.data import Batch as Batch
    from cupynet.data import CutOut as CutOut
    from cupynet.data import Data as Data
    from cupynet.data import Dataset as Dataset
    from cupynet.data import Draws as Draws
    from cupynet.data import Elastic as Elastic
    from cupynet.data import FashionMNIST as FashionMNIST
    from cupynet.data import Folder as Folder
    from cupynet.data import HorizontalFlip as HorizontalFlip
    from cupynet.data import Idx as Idx
    from cupynet.data import Loader as Loader
    from cupynet.data import Npz as Npz
    from cupynet.data import Prefetcher as Prefetcher
    from cupynet.data import Rotate as Rotate
    from cupynet.data import Sharded as Sharded
    from cupynet.data import ShardedLoader as ShardedLoader
    from cupynet.data import Shards as Shards
    from cupynet.data import Shift as Shift
    from cupynet.data import Source as Source
    from cupynet.data import Synthetic as Synthetic
    from cupynet.interop import export_onnx as export_onnx
    from cupynet.interop import export_torch as export_torch
    from cupynet.interop import import_keras as import_keras
    from cupynet.interop import import_torch as import_torch
    from cupynet.nn import Activation as Activation
    from cupynet.nn import AvgPool2D as AvgPool2D
    from cupynet.nn import BatchNorm as BatchNorm
    from cupynet.nn import BinaryCrossEntropy as BinaryCrossEntropy
    from cupynet.nn import Concat as Concat
    from cupynet.nn import Context as Context
    from cupynet.nn import Conv2D as Conv2D
    from cupynet.nn import Dense as Dense
    from cupynet.nn import Dropout as Dropout
    from cupynet.nn import Flat as Flat
    from cupynet.nn import Flatten as Flatten
    from cupynet.nn import GlobalAvgPool2D as GlobalAvgPool2D
    from cupynet.nn import Hinge as Hinge
    from cupynet.nn import Huber as Huber
    from cupynet.nn import Image as Image
    from cupynet.nn import Layer as Layer
    from cupynet.nn import LayerNorm as LayerNorm
    from cupynet.nn import Loss as Loss
    from cupynet.nn import MaxPool2D as MaxPool2D
    from cupynet.nn import MeanSquaredError as MeanSquaredError
    from cupynet.nn import Model as Model
    from cupynet.nn import Params as Params
    from cupynet.nn import Residual as Residual
    from cupynet.nn import Sequential as Sequential
    from cupynet.nn import SoftmaxNLL as SoftmaxNLL
    from cupynet.optim import LAMB as LAMB
    from cupynet.optim import SGD as SGD
    from cupynet.optim import AdaDelta as AdaDelta
    from cupynet.optim import AdaGrad as AdaGrad
    from cupynet.optim import Adam as Adam
    from cupynet.optim import AdaMax as AdaMax
    from cupynet.optim import AdamW as AdamW
    from cupynet.optim import AMSGrad as AMSGrad
    from cupynet.optim import Constant as Constant
    from cupynet.optim import Cosine as Cosine
    from cupynet.optim import Exponential as Exponential
    from cupynet.optim import Inverse as Inverse
    from cupynet.optim import Map as Map
    from cupynet.optim import Momentum as Momentum
    from cupynet.optim import Nadam as Nadam
    from cupynet.optim import Nesterov as Nesterov
    from cupynet.optim import OneCycle as OneCycle
    from cupynet.optim import Optimizer as Optimizer
    from cupynet.optim import Polynomial as Polynomial
    from cupynet.optim import ReduceOnPlateau as ReduceOnPlateau
    from cupynet.optim import RMSProp as RMSProp
    from cupynet.optim import Scaled as Scaled
    from cupynet.optim import Schedule as Schedule
    from cupynet.optim import Sigmoid as Sigmoid
    from cupynet.optim import Step as Step
    from cupynet.optim import Warmup as Warmup
    from cupynet.parallel import Adaptive as Adaptive
    from cupynet.parallel import AdaptiveThreshold as AdaptiveThreshold
    from cupynet.parallel import AveragingSchedule as AveragingSchedule
    from cupynet.parallel import DiLoCo as DiLoCo
    from cupynet.parallel import ElasticAveraging as ElasticAveraging
    from cupynet.parallel import FixedThreshold as FixedThreshold
    from cupynet.parallel import GradientSharing as GradientSharing
    from cupynet.parallel import Outer as Outer
    from cupynet.parallel import ParameterAveraging as ParameterAveraging
    from cupynet.parallel import Pipeline as Pipeline
    from cupynet.parallel import PostLocal as PostLocal
    from cupynet.parallel import SlowMo as SlowMo
    from cupynet.parallel import Synchronizer as Synchronizer
    from cupynet.parallel import TargetSparsity as TargetSparsity
    from cupynet.parallel import ThresholdEncoding as ThresholdEncoding
    from cupynet.runs import Run as Run
    from cupynet.runs import Summary as Summary
    from cupynet.training import Callback as Callback
    from cupynet.training import Checkpoint as Checkpoint
    from cupynet.training import EarlyStopping as EarlyStopping
    from cupynet.training import EarlyStoppingResult as EarlyStoppingResult
    from cupynet.training import EpochRecord as EpochRecord
    from cupynet.training import Evaluation as Evaluation
    from cupynet.training import History as History
    from cupynet.training import NonFinite as NonFinite
    from cupynet.training import ParallelWrapper as ParallelWrapper
    from cupynet.training import Profile as Profile
    from cupynet.training import Progress as Progress
    from cupynet.training import Replica as Replica
    from cupynet.training import Report as Report
    from cupynet.training import StopReason as StopReason
    from cupynet.training import Trainer as Trainer
    from cupynet.training import WeightAverage as WeightAverage

# fmt: off
_PACKAGES = {
    "backend": ("Backend", "create_backend"),
    "nn": ("Image", "Flat", "Context", "Params", "Layer", "Sequential", "Conv2D", "MaxPool2D", "Dense", "Activation",
           "Flatten", "BatchNorm", "LayerNorm", "Dropout", "AvgPool2D", "GlobalAvgPool2D", "Residual", "Concat",
           "Loss", "SoftmaxNLL", "MeanSquaredError", "BinaryCrossEntropy", "Hinge", "Huber", "Model"),
    "optim": ("Optimizer", "SGD", "Momentum", "Nesterov", "Adam", "AdamW", "Nadam", "AMSGrad", "AdaMax", "AdaGrad",
              "RMSProp", "AdaDelta", "LAMB", "Schedule", "Constant", "OneCycle", "Scaled", "Step", "Map", "Exponential",
              "Inverse", "Polynomial", "Sigmoid", "Cosine", "ReduceOnPlateau", "Warmup"),
    "data": ("Source", "MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "Synthetic", "Idx", "Npz", "Folder", "Data",
             "Dataset", "Loader", "Batch", "Prefetcher", "Sharded", "Shards", "ShardedLoader",
             "Augmentation", "Draws", "Shift", "Rotate", "Elastic", "CutOut", "HorizontalFlip"),
    "parallel": ("Synchronizer", "ParameterAveraging", "AveragingSchedule", "PostLocal", "Adaptive", "Outer",
                 "SlowMo", "DiLoCo", "ElasticAveraging", "GradientSharing", "ThresholdEncoding", "AdaptiveThreshold",
                 "FixedThreshold", "TargetSparsity", "Pipeline"),
    "training": ("ParallelWrapper", "Trainer", "Replica", "Evaluation", "Callback", "History", "Progress",
                 "Checkpoint", "EarlyStopping", "EarlyStoppingResult", "NonFinite", "StopReason", "Report",
                 "EpochRecord", "WeightAverage", "Profile"),
    "runs": ("Run", "Summary"),
    "core.files": ("save_weights", "load_weights"),
    "interop": ("import_torch", "import_keras", "export_torch", "export_onnx"),
    "config.load_model": ("load_model",),
    "core.errors": ("CupynetError", "ConfigError", "DivergedError", "DataError", "DeviceError", "OutputError",
               "Interrupted"),
}
# fmt: on
_PACKAGE_OF = {name: package for package, names in _PACKAGES.items() for name in names}

__all__ = list(_PACKAGE_OF)


def __getattr__(name: str) -> object:
    """Load a public name from its package (PEP 562)."""
    if name not in _PACKAGE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_PACKAGE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGE_OF})
