"""The benchmark's PyTorch peer trains the exported module in every way that is measured."""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cupynet.bench import torch_peer as peer
from cupynet.bench.measure import torch_network
from cupynet.bench.torch_peer import OPTIMIZERS
from cupynet.config.experiment import Experiment
from tests.support.commands import ROOT
from tests.support.settings import settings_of

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def written(folder: Path, *overrides: str) -> list[str]:
    """Write a network's module to `folder`, and return the peer's option for it."""
    path = folder / "network.py"
    path.write_text(torch_network(Experiment(settings_of("data=synthetic", "backend=numpy", *overrides))))
    return ["--network", str(path)]


@needs_torch
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_peer_has_every_optimizer_and_on_a_gpu_one_that_can_be_captured(optimizer: str) -> None:
    """On a GPU, its step count and a GradScaler's result stay on the device. Otherwise PyTorch cannot capture it."""
    import torch

    weights = [torch.nn.Parameter(torch.ones(3))]
    (weights[0] ** 2).sum().backward()
    peer.create_optimizer(optimizer, weights, on_gpu=False).step()
    assert float(weights[0].detach().max()) < 1
    fused = peer.create_optimizer(optimizer, weights, on_gpu=True)
    assert fused._step_supports_amp_scaling and fused.defaults.get("capturable", True)


@needs_torch
@pytest.mark.parametrize(("model", "dtype"), [("resnet8", "float"), ("mlp", "half"), ("mlp", "bfloat16")])
def test_the_peer_trains_in_each_precision_with_weights_in_float(model: str, dtype: str, tmp_path: Path) -> None:
    """The peer uses autocast. In half it also scales the loss, because small gradients would be lost."""
    import torch
    from torch import nn

    options = [*written(tmp_path, f"model={model}"), "--batch", "4", "--dtype", dtype]
    network, step = peer.training_step(peer.parse(options))
    seen, scales = set(), []

    def watch(_: Any, __: Any, output: Any) -> None:
        seen.add(output.dtype)
        output.register_hook(lambda dy: scales.append(float(dy.abs().max())))

    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(watch)
    before = [each.detach().clone() for each in network.parameters()]
    step()
    assert seen == {{"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}[dtype]}
    assert {each.dtype for each in network.parameters()} == {torch.float32}
    assert (max(scales) > 100) == (dtype == "half")
    moved = max(float((a - b).detach().abs().max()) for a, b in zip(network.parameters(), before, strict=True))
    assert 0 < moved < 1


def run_peer(*options: object, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cupynet.bench.torch_peer", "--seconds", "0.05", *map(str, options)]
    environment = {**os.environ, **more}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)


@needs_torch
@pytest.mark.parametrize("processes", [1, 2])
def test_the_peer_prints_the_images_per_second_that_it_measured(processes: int, tmp_path: Path) -> None:
    done = run_peer(*written(tmp_path, "model=mlp"), "--batch", 4, "--processes", processes)
    assert done.returncode == 0 and float(done.stdout) > 0, done.stderr


@needs_torch
def test_without_a_gpu_the_peer_measures_nothing() -> None:
    done = run_peer("--network", "network.py", "--device", "cuda:0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0 and not done.stdout, done.stderr


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_rates_of_processes_are_added_and_a_failure_ends_the_others(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(setup: Namespace, ready: Callable[[], int]) -> float:
        if fails:
            (tmp_path / "first").mkdir()  # fails in the second process
        return 3.0 + ready()

    forking = multiprocessing.get_context("fork")  # so that the processes have the patched function
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forking)
    monkeypatch.setattr(peer, "images_per_s", rate)
    monkeypatch.setattr(peer, "WAIT_S", None)  # no timeout: the other process waits until the barrier is broken
    setup = peer.parse(["--network", "net.py", "--processes", "2"])
    with pytest.raises(SystemExit) if fails else nullcontext():
        assert peer.images_per_s_of_all(setup) == 7.0  # a process gets its number, 0 or 1, from the barrier
