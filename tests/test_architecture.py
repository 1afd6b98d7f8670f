"""Rules for the sources: allowed imports between packages, places of third-party packages, calls that may run code.

Every rule is a function from a source to its violations, and is also tested on sources that break it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from graphlib import TopologicalSorter
from typing import NamedTuple

import pytest

from cupynet.config.schema import BenchSettings, rules
from tests.support.commands import ROOT

# Packages in the order of the package's map. Each may import itself and the packages before it.
LIBRARY = ("core", "backend", "nn", "optim", "data", "parallel", "runs", "training")  # needs no configuration
PROGRAM = ("config", "interop", "sklearn", "reporting", "bench", "commands", "guides", "__init__", "__main__", "train")
ORDER = LIBRARY + PROGRAM
# Packages or modules that may import less than the order allows.
NARROWER: dict[str, tuple[str, ...]] = {
    "optim": ("core", "backend", "nn.params"),
    "data": ("core", "backend"),
    "parallel": ("core", "backend", "nn.params"),
    "parallel.pipeline": ("core", "backend", "nn"),
    "runs": ("core",),
    "interop": ("core", "backend", "nn"),
    "bench.torch_peer": (),  # runs in a separate process, with cupynet installed or only PyTorch
    "guides": ("", *LIBRARY),  # users' programs
}

# The only files or packages that may use a third-party package; "" means everywhere.
HOMES: dict[str, tuple[str, ...]] = {
    "numpy": ("",),
    "cupy": ("backend/cuda/", "parallel/communicators/nccl.py"),
    "cupy_backends": ("backend/cuda/", "parallel/communicators/nccl.py"),
    "cupyx": ("backend/cuda/",),
    "cuda": ("backend/cuda/",),
    "ml_dtypes": ("backend/",),
    "numba": ("backend/cpu/kernels/",),
    "llvmlite": ("backend/cpu/kernels/",),
    "filelock": ("core/lock.py", "data/download.py", "training/callbacks/loggers/mlflow.py"),
    "hydra": ("config/",),
    "omegaconf": ("config/",),
    "yaml": ("config/",),
    "mnist": ("data/files.py",),
    "PIL": ("data/pictures.py",),
    "h5py": ("interop/keras.py",),
    "platformdirs": ("data/",),
    "rich": ("training/callbacks/progress.py", "core/table.py", "commands/"),
    "safetensors": ("core/files.py",),
    "mpi4py": ("parallel/communicators/mpi.py",),
    "onnx": ("interop/onnx.py",),
    "onnxruntime": ("interop/onnx.py",),
    "threadpoolctl": ("backend/", "commands/bench.py"),
    "torch": ("bench/torch_peer.py",),
    "matplotlib": ("core/notebook.py", "reporting/charts.py"),
    "jinja2": ("reporting/render.py",),
    "tensorboardX": ("training/callbacks/loggers/tensorboard.py",),
    "mlflow": ("training/callbacks/loggers/mlflow.py",),
    "wandb": ("training/callbacks/loggers/wandb.py",),
    "optuna": ("commands/tune/", "config/search_space.py"),
    "sqlalchemy": ("commands/tune/",),
    "sklearn": ("sklearn.py",),
}
REQUIRED = {"numpy", "filelock", "hydra", "omegaconf", "yaml", "mnist", "platformdirs", "rich", "safetensors"}
REQUIRED |= {"threadpoolctl", "torch"}  # torch is installed on few machines, and never hidden in tests
OPTIONAL = tuple(sorted(HOMES.keys() - REQUIRED))  # the package imports and trains without them

# No data file, checkpoint or configuration may be able to run code.
CODE_LOADERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "code"}
RUN_TEXT = {"eval", "exec", "compile", "__import__", "execfile"}
REBUILD = ("torch.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load")
BUILD = {"instantiate", "get_class", "get_method", "get_object", "_locate"}  # Hydra's: use config/instantiate.py
SHELLS = ("os.system", "os.popen", "os.startfile", "os.exec", "os.spawn", "os.posix_spawn", "subprocess.getoutput")
IMPORTS_BY_NAME = {"config/instantiate.py", "__init__.py", "__main__.py"}  # names are checked there or are our own


class Source(NamedTuple):
    """A module of the package."""

    path: str  # relative to cupynet/, such as "nn/conv.py"
    text: str

    @property
    def module(self) -> str:
        return ".".join(("cupynet", *self.path.removesuffix(".py").split("/"))).removesuffix(".__init__")

    @property
    def package(self) -> str:
        return self.path.removesuffix(".py").split("/")[0]


PACKAGE = ROOT / "cupynet"
SOURCES = [Source(p.relative_to(PACKAGE).as_posix(), p.read_text("utf-8")) for p in sorted(PACKAGE.rglob("*.py"))]
MODULES = {source.module for source in SOURCES}


@cache
def nodes(source: Source) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source.text, source.path)))


def called(node: ast.Call) -> str:
    """Return the last name of a called function: `import_module` for importlib.import_module(...)."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def dotted(node: ast.AST) -> str:
    """Return an expression's dotted name, such as `np.load`, or "" if it is anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported(source: Source) -> Iterator[tuple[str, int]]:
    """Yield (module, line) of every import, at any depth of the source, even those for type checkers."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*parents, *filter(None, [base])))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield (name if name in MODULES else base), node.lineno
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__") and node.args:
            argument = getattr(node.args[0], "value", None)
            if isinstance(argument, str):
                yield argument, node.lineno


def import_directions(source: Source) -> Iterator[str]:
    inner = source.module.removeprefix("cupynet.")
    package = inner if inner in NARROWER else source.package
    if package not in ORDER and package not in NARROWER:
        yield f"unknown package {package!r}: give it a place in ORDER"
        return
    allowed = NARROWER[package] if package in NARROWER else ORDER[: ORDER.index(package)]
    for name, line in imported(source):
        target = name.removeprefix("cupynet").removeprefix(".")
        seen = any(f"{target}.".startswith(f"{each}.") for each in (source.package, *allowed))
        if name.split(".")[0] == "cupynet" and not seen:
            yield f"line {line}: {package} may not import {name}"


def third_party_homes(source: Source) -> Iterator[str]:
    for name, line in imported(source):
        package = name.split(".")[0]
        homes = HOMES.get(package, ())
        folders = tuple(home for home in homes if home.endswith("/") or not home)
        at_home = source.path in homes or source.path.startswith(folders)
        if package != "cupynet" and package not in sys.stdlib_module_names and not at_home:
            yield f"line {line}: {package} belongs into {', '.join(homes) or 'no file yet: give it a home in HOMES'}"


def no_code_from_data(source: Source) -> Iterator[str]:
    for name, line in imported(source):
        if name.split(".")[0] in CODE_LOADERS:
            yield f"line {line}: {name} runs code from data"
    for node in nodes(source):
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Store):
            text = dotted(node).removeprefix("builtins.")
            if text in RUN_TEXT or text.startswith(SHELLS):
                yield f"line {node.lineno}: {text} runs code from text"
        elif isinstance(node, ast.Call) and _rebuilds(source, node):
            yield f"line {node.lineno}: {ast.unparse(node.func)} may run or write whatever its data says"


def _rebuilds(source: Source, node: ast.Call) -> bool:
    """Return True if a call's data may make it run code or write files."""
    name, whole = called(node), dotted(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if given.get("allow_pickle", "False") != "False" or given.get("shell", "False") != "False":
        return True
    if name == "import_module":
        return not isinstance(node.args[0], ast.Constant) and source.path not in IMPORTS_BY_NAME
    if name in ("extract", "extractall", "unpack_archive"):
        return "filter" not in given
    if whole.startswith(("np.", "numpy.", "cp.", "cupy.")) and name in ("load", "read_array"):
        return "allow_pickle" not in given
    return name in BUILD or whole.startswith(REBUILD)


def keys_of_the_configuration(source: Source) -> Iterator[str]:
    """Yield configuration keys in the library's strings. It must use `wording.setting`, which suits Python, too."""
    if source.package not in LIBRARY:
        return
    keys = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted(configuration_keys(), reverse=True)))})(?!\w)")
    docstrings = {node.value for node in nodes(source) if isinstance(node, ast.Expr)}
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            for found in keys.findall(node.value):
                yield f"line {node.lineno}: {found} is a key of the configuration"


@cache
def configuration_keys() -> set[str]:
    """Return every dotted key, from `parallel.timeout_s` to `model.layers.conv2.kernel_size`."""
    keys = {key for key, _ in rules(BenchSettings)}
    for group in (each.name for each in fields(BenchSettings)):
        for path in (ROOT / "conf" / group).glob("*.yaml"):
            above: list[str] = []
            for indent, name in re.findall(r"^( *)(\w+):", path.read_text("utf-8"), re.MULTILINE):
                above[len(indent) // 2 :] = [name]
                keys.add(".".join((group, *above)))
    return {key for key in keys if "." in key}


Rule = Callable[[Source], Iterator[str]]
RULES: list[Rule] = [import_directions, third_party_homes, no_code_from_data, keys_of_the_configuration]


@pytest.mark.parametrize("rule", RULES)
def test_every_module_of_the_package_follows_rule(rule: Rule) -> None:
    violations = [f"cupynet/{source.path}: {violation}" for source in SOURCES for violation in rule(source)]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (import_directions, "nn/conv.py", "from cupynet.optim.sgd import SGD"),
        (import_directions, "nn/conv.py", "from ..data import Loader"),
        (import_directions, "nn/conv.py", "import cupynet"),
        (import_directions, "data/x.py", "def f():\n    importlib.import_module('cupynet.parallel')"),
        (import_directions, "optim/sgd.py", "from cupynet.nn.params_of import x"),
        (third_party_homes, "backend/cudax.py", "import cupy.cuda"),
        (third_party_homes, "nn/conv.py", "def f():\n    import jax"),
        (no_code_from_data, "data/x.py", "import pickle"),
        (no_code_from_data, "config/x.py", "run = builtins.exec"),
        (no_code_from_data, "train.py", "os.execvp(name, names)"),
        (no_code_from_data, "train.py", "subprocess.run(text, shell=True)"),
        (no_code_from_data, "data/x.py", "np.load(f)"),
        (no_code_from_data, "data/x.py", "np.load(f, allow_pickle=trusted)"),
        (no_code_from_data, "data/x.py", "torch.load(f, weights_only=True)"),
        (no_code_from_data, "config/x.py", "yaml.load(f, Loader=yaml.FullLoader)"),
        (no_code_from_data, "data/x.py", "tarfile.open(f).extractall(folder)"),
        (no_code_from_data, "config/x.py", "hydra.utils.instantiate(config)"),
        (no_code_from_data, "experiment.py", "importlib.import_module(name)"),
        (keys_of_the_configuration, "nn/conv.py", "raise E('lower optimizer.learning_rate')"),
        (keys_of_the_configuration, "runs/run.py", "x = f'{a}: or data.fallback={b}'"),
    ],
)
def test_a_source_that_breaks_a_rule_is_found(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text)))


def test_settings_named_in_messages_exist() -> None:
    """Messages name settings by `wording.setting(group, name)`."""
    found = set()
    for source in SOURCES:
        for node in nodes(source):
            if isinstance(node, ast.Call) and called(node) == "setting":
                names = [str(each.value) for each in node.args[:2] if isinstance(each, ast.Constant)]
                found |= {".".join(names)} if len(names) == 2 else set()
    assert {"data.folder", "parallel.timeout_s", "parallel.averaging_frequency"} <= found <= configuration_keys()


def test_imports_are_not_circular() -> None:
    """This includes imports at any depth of a file and for type checkers."""
    graph: TopologicalSorter[str] = TopologicalSorter()
    for source in SOURCES:
        graph.add(source.module, *({name for name, _ in imported(source) if name in MODULES} - {source.module}))
    graph.prepare()


NETWORK = {"urllib", "http", "socket", "ssl", "ftplib", "socketserver", "asyncio", "xmlrpc", "smtplib"}


def test_only_data_download_uses_the_network_and_only_the_parser_of_the_mnist_package_is_used() -> None:
    """That package's downloader has no time-out and checks no digest."""
    modules = {(source.path, name) for source in SOURCES for name, _ in imported(source) if name != "urllib.parse"}
    assert {path for path, name in modules if name.split(".")[0] in NETWORK} == {"data/download.py"}
    names = {dotted(node) for source in SOURCES for node in nodes(source) if isinstance(node, ast.Attribute)}
    assert {name for name in names if name.startswith("mnist.")} == {"mnist.parse_idx"}


def import_without(hidden: tuple[str, ...], modules: list[str], then: str = "") -> None:
    """Import modules in a new interpreter, as if some packages were not installed."""
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({hidden!r}))
for name in {modules!r}:
    importlib.import_module(name)
{then}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_package_imports_without_optional_packages() -> None:
    made_for_them = ("backend/cpu/", "guides/", "commands/tune/", "sklearn.py")  # cuda/ imports without CuPy
    modules = [source.module for source in SOURCES if not source.path.startswith(made_for_them)]
    import_without(OPTIONAL, modules, "assert importlib.import_module('cupynet').create_backend('numpy')")


def test_the_library_needs_no_configuration() -> None:
    kernels = "backend/cpu/kernels/"
    modules = [each.module for each in SOURCES if each.package in LIBRARY and not each.path.startswith(kernels)]
    import_without(("hydra", "omegaconf"), modules)
