"""PyTorch's training step on the same network, which `cupynet bench` compares with.

    cupynet export RUN --torch-module net.py
    python -m cupynet.bench.torch_peer --network net.py --optimizer Nesterov

Measures forward, backward and update on a resident batch: no loading, shuffling or logging. `--device cuda` measures on
a GPU, where `--tf32` allows TF32 in float products and `--graph` captures the step as a CUDA graph. `--dtype half` and
`bfloat16` keep the weights in float under autocast, with a GradScaler for half. `--processes 2` trains in two processes
of one thread each, averaged by PyTorch's periodic averager over gloo. Prints one JSON object.

The only file that imports torch. It runs in its own process.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

FUSED = ("SGD", "Adam", "AdamW")  # one kernel on a GPU; a GradScaler's found_inf is read on the device
TIMEOUT_S = 60.0  # of the processes' collectives
OPTIMIZERS: dict[str, dict[str, Any]] = {  # ours -> PyTorch's, at rates at which no training diverges
    "SGD": {"name": "SGD", "lr": 0.01},
    "Momentum": {"name": "SGD", "lr": 0.01, "momentum": 0.9},
    "Nesterov": {"name": "SGD", "lr": 0.01, "momentum": 0.9, "nesterov": True},
    "Adam": {"name": "Adam", "lr": 0.001},
    "AdamW": {"name": "AdamW", "lr": 0.001},
    "AMSGrad": {"name": "Adam", "lr": 0.001, "amsgrad": True},
    "Nadam": {"name": "NAdam", "lr": 0.001},
    "AdaMax": {"name": "Adamax", "lr": 0.001},
    "AdaGrad": {"name": "Adagrad", "lr": 0.001},
    "AdaDelta": {"name": "Adadelta", "lr": 0.001},
    "RMSProp": {"name": "RMSprop", "lr": 0.001},
}


def main() -> None:
    """Run the command."""
    setup = parse()
    if setup.processes > 1:
        result = measure_processes(setup)
    else:
        result = measure_on_gpu(setup) if setup.device == "cuda" else measure(setup)
    print(json.dumps(result))


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the options of the command."""
    parser = ArgumentParser(description="Measure PyTorch's training step.")
    parser.add_argument("--network", required=True, help="file written by cupynet export --torch-module")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="Nesterov", help="a class of cupynet.optim")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], default="channels_last")
    parser.add_argument("--dtype", choices=["float", "half", "bfloat16"], default="float")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--number", type=int, default=0, help="of the GPU")
    parser.add_argument("--tf32", action="store_true", help="on a GPU: use tensor cores for float products")
    parser.add_argument("--graph", action="store_true", help="on a GPU: capture the step as a CUDA graph")
    parser.add_argument("--processes", type=int, default=1, help="replicas on the CPU in float, one thread each")
    parser.add_argument("--average-every", type=int, default=3, help="iterations between averages")
    return parser.parse_args(arguments)


def load_module(path: str) -> Any:
    """Import the module at `path`, which the caller has just written: this runs its code."""
    spec = importlib.util.spec_from_file_location("network", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def create_optimizer(name: str, parameters: Any, device: str = "cpu", *, capturable: bool = False) -> Any:
    """Create PyTorch's equivalent of an optimizer of ours, in its fastest implementation.

    Args:
        name: a key of `OPTIMIZERS`.
        capturable: count the steps on the device, as a CUDA graph needs it.
    """
    import torch

    arguments = dict(OPTIMIZERS[name])
    kind = arguments.pop("name")
    optimizer = getattr(torch.optim, kind)
    if capturable and "capturable" in inspect.signature(optimizer).parameters:
        arguments["capturable"] = True
    arguments["fused" if device == "cuda" and kind in FUSED else "foreach"] = True
    return optimizer(parameters, **arguments)


@dataclass(frozen=True)
class Step:
    """A training step on a resident batch, in its parts."""

    network: Any
    clear: Callable[[], None]  # the gradients
    gradient: Callable[[], None]
    update: Callable[[], None]

    def __call__(self) -> None:
        self.clear()
        self.gradient()
        self.update()


def training_step(setup: Namespace, *, capturable: bool = False) -> Step:
    """Return the training step of the network; capturable: its update can be captured in a CUDA graph."""
    import torch
    from torch import nn

    torch.set_num_threads(setup.threads)
    torch.manual_seed(0)
    module, device, dtype = load_module(setup.network), setup.device, setup.dtype
    memory_format = torch.channels_last if setup.layout == "channels_last" else torch.contiguous_format
    height, width, channels = module.INPUT_SHAPE
    network = module.network().to(device, memory_format=memory_format)
    optimizer = create_optimizer(setup.optimizer, network.parameters(), device, capturable=capturable)
    images = torch.rand(setup.batch, channels, height, width, device=device).to(memory_format=memory_format)
    labels = torch.randint(0, module.OUTPUTS, (setup.batch,), device=device)
    narrow = torch.bfloat16 if dtype == "bfloat16" else torch.float16
    scaler = torch.amp.GradScaler(device, enabled=dtype == "half")  # does nothing if it is not enabled

    def clear() -> None:
        optimizer.zero_grad(set_to_none=True)

    def gradient() -> None:
        with nullcontext() if dtype == "float" else torch.autocast(device, narrow):
            loss = nn.functional.cross_entropy(network(images), labels)
        scaler.scale(loss).backward()

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Step(network, clear, gradient, update)


def median_of(work: Callable[[], None], seconds: float, wait: Callable[[], None] | None = None) -> float:
    """Return the median seconds of one `work()`, after a warm-up; wait: returns when the device has finished it."""
    wait = wait or (lambda: None)
    for _ in range(10):
        work()
    wait()
    times: list[float] = []
    while sum(times) < seconds:
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(setup: Namespace) -> dict[str, object]:
    """Return images per second on the CPU, from the median step."""
    import torch

    median = median_of(training_step(setup), setup.seconds)
    return {"version": torch.__version__, "step_ms": median * 1e3, "images_per_s": setup.batch / median}


def measure_on_gpu(setup: Namespace) -> dict[str, object]:
    """Return images per second on a GPU; the host waits for each step, as when cupynet's is measured."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"PyTorch {torch.__version__} finds no GPU")
    torch.cuda.set_device(setup.number)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = setup.tf32
    # the host has to see what a GradScaler finds in the gradients, unless the optimizer is fused
    whole = setup.graph and (setup.dtype != "half" or OPTIMIZERS[setup.optimizer]["name"] in FUSED)
    step = training_step(setup, capturable=whole)
    work = captured_step(step, whole=whole) if setup.graph else step
    median = median_of(work, setup.seconds, torch.cuda.synchronize)
    versions = {"version": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {**versions, "step_ms": median * 1e3, "images_per_s": setup.batch / median}


def captured_step(step: Step, *, whole: bool) -> Callable[[], None]:
    """Capture the step as a CUDA graph, after a warm-up on another stream, as PyTorch's documentation does.

    whole: capture the update too; else it is launched after each replay.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    step.clear()  # so that the gradients are allocated in the graph's own memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.gradient()
        if whole:
            step.update()

    def replay() -> None:
        graph.replay()
        if not whole:
            step.update()

    return replay


def measure_processes(setup: Namespace) -> dict[str, object]:
    """Return images per second of several processes, from the median period: some steps and one average."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        # joins the processes: one that fails ends the others, and its traceback is printed
        torch.multiprocessing.spawn(run_process, (setup, folder), nprocs=setup.processes)
        medians = []
        for rank in range(setup.processes):
            with open(f"{folder}/{rank}", encoding="utf-8") as file:
                medians.append(float(file.read()))
    median, images = statistics.fmean(medians), setup.processes * setup.average_every * setup.batch
    return {
        "version": torch.__version__,
        "step_ms": median / setup.average_every * 1e3,
        "images_per_s": images / median,
    }


def run_process(rank: int, setup: Namespace, folder: str) -> None:
    """Train in one process, averaged with the others by PyTorch; write the median period to `folder`."""
    from datetime import timedelta

    import torch
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=setup.processes,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    step = training_step(setup)
    averager = PeriodicModelAverager(period=setup.average_every, warmup_steps=0)

    def period() -> None:
        for _ in range(setup.average_every):
            step()
            averager.average_parameters(step.network.parameters())

    for _ in range(4):
        period()
    # every process runs the same number of periods: an average needs them all
    began = time.perf_counter()
    period()
    periods = torch.tensor([max(setup.seconds / (time.perf_counter() - began), 3.0)])
    torch.distributed.broadcast(periods, 0)
    times = []
    for _ in range(int(periods)):
        began = time.perf_counter()
        period()
        times.append(time.perf_counter() - began)
    with open(f"{folder}/{rank}", "w", encoding="utf-8") as file:
        file.write(repr(statistics.median(times)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
