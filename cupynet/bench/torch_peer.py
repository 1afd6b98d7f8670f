"""Measures PyTorch's training step on the same network, for comparison in `cupynet bench`.

    cupynet export RUN --torch-module net.py
    python -m cupynet.bench.torch_peer --network net.py --optimizer Nesterov

Runs the forward pass, backward pass and update on one batch in memory, and prints images per second. `--dtype half`
and `bfloat16` use autocast with float weights; half also uses a GradScaler.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from threading import BrokenBarrierError
from typing import Any

WARM_UP = 10  # untimed steps
WAIT_S = 100  # seconds that a process waits until the others are ready
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {  # cupynet -> PyTorch, with learning rates that do not diverge
    "SGD": ("SGD", {"lr": 0.01}),
    "Momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}),
    "Nesterov": ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "Adam": ("Adam", {"lr": 0.001}),
    "AdamW": ("AdamW", {"lr": 0.001}),
    "AMSGrad": ("Adam", {"lr": 0.001, "amsgrad": True}),
}


def main() -> None:
    setup = parse()
    print(images_per_s(setup) if setup.processes == 1 else images_per_s_of_all(setup))


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = ArgumentParser(description="Measure PyTorch's training step.")
    parser.add_argument("--network", required=True, help="file written by cupynet export --torch-module")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="Nesterov", help="a class in cupynet.optim")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--processes", type=int, default=1, help="number of concurrent processes")
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], default="channels_last")
    parser.add_argument("--dtype", choices=["float", "half", "bfloat16"], default="float")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0, cuda:1 ...")
    parser.add_argument("--tf32", action="store_true", help="on a GPU: use TF32 for float products")
    parser.add_argument("--graph", action="store_true", help="on a GPU: capture the step as a CUDA graph")
    parser.add_argument("--compile", action="store_true", help="compile the network (requires a C++ compiler)")
    return parser.parse_args(arguments)


def images_per_s_of_all(setup: Namespace) -> float:
    """Return the images per second of all processes together. They start measuring at the same time."""
    context = multiprocessing.get_context("spawn")
    ready, rates = context.Barrier(setup.processes, timeout=WAIT_S), context.SimpleQueue()
    processes = [context.Process(target=_measure, args=(setup, ready, rates)) for _ in range(setup.processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)  # the process has printed its error
    return sum(float(rates.get()) for _ in processes)


def _measure(setup: Namespace, ready: Any, rates: Any) -> None:
    try:
        rates.put(images_per_s(setup, ready.wait))
    except BrokenBarrierError:
        sys.exit(1)  # another process has failed
    except BaseException:
        ready.abort()
        raise


def images_per_s(setup: Namespace, ready: Callable[[], object] = lambda: None) -> float:
    """Return the images per second of the median step. ready: called before the first timed step."""
    import torch

    torch.set_flush_denormal(True)  # as cupynet does; before PyTorch starts threads, which inherit it
    torch.set_num_threads(setup.threads)
    torch.manual_seed(0)
    on_gpu = setup.device != "cpu"
    if on_gpu:
        torch.cuda.set_device(setup.device)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = setup.tf32
    network, step = training_step(setup)
    if setup.graph:
        step = captured(network, step)

    def timed() -> float:
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        timed()
    ready()
    times: list[float] = []
    while sum(times) < setup.seconds:
        times.append(timed())
    return float(setup.batch / statistics.median(times))


def load_module(path: str) -> Any:
    """Import the module at `path`. This runs its code, which must be trusted."""
    spec = importlib.util.spec_from_file_location("network", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def create_optimizer(name: str, parameters: Any, *, on_gpu: bool) -> Any:
    """Create PyTorch's equivalent of a cupynet optimizer, on a GPU in the fused form that CUDA graphs can capture."""
    import torch

    kind, arguments = OPTIMIZERS[name]
    options = {"fused": True} if on_gpu else {"foreach": True}
    if on_gpu and kind != "SGD":
        options["capturable"] = True
    return getattr(torch.optim, kind)(parameters, **arguments, **options)


def training_step(setup: Namespace) -> tuple[Any, Callable[[], None]]:
    """Return the network and a function that runs one training step on one batch in memory."""
    import torch
    from torch import nn

    module, device = load_module(setup.network), torch.device(setup.device)
    memory_format = torch.channels_last if setup.layout == "channels_last" else torch.contiguous_format
    height, width, channels = module.INPUT_SHAPE
    network = module.network().to(device, memory_format=memory_format)
    forward = torch.compile(network) if setup.compile else network
    optimizer = create_optimizer(setup.optimizer, network.parameters(), on_gpu=device.type == "cuda")
    images = torch.rand(setup.batch, channels, height, width, device=device).to(memory_format=memory_format)
    labels = torch.randint(0, module.OUTPUTS, (setup.batch,), device=device)
    narrow = torch.bfloat16 if setup.dtype == "bfloat16" else torch.float16
    scaler = torch.amp.GradScaler(device.type, enabled=setup.dtype == "half")  # does nothing if disabled

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with nullcontext() if setup.dtype == "float" else torch.autocast(device.type, narrow):
            loss = nn.functional.cross_entropy(forward(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return network, step


def captured(network: Any, step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step as a CUDA graph, warmed up on a side stream as PyTorch recommends. Return the replay function."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    network.zero_grad(set_to_none=True)  # so that the gradients are allocated in the graph's memory pool
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


if __name__ == "__main__":
    main()
