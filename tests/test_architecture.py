"""Rules of the sources: which package may import which, where a third-party package may appear, what no file does.

Every rule is a function from one source to its violations, and is fed sources that break it: a rule that cannot fail
protects nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from cupynet.config.schema import BenchSettings, rules
from tests.support.sources import MODULES, SOURCES, Source, called, dotted, imported

ROOT = Path(__file__).resolve().parents[1]

# From the top to the bottom of the package's map: a package imports itself and those before it.
ORDER = (
    *("core", "backend", "nn", "optim", "data", "parallel", "runs", "training"),
    *("config", "interop", "reporting", "bench", "commands", "guides", "__init__", "__main__", "train"),
)
LIBRARY = ("core", "backend", "nn", "optim", "data", "parallel", "runs", "training")  # needs no configuration
# Packages, or modules of them, that see less than the order allows.
NARROWER: dict[str, tuple[str, ...]] = {
    "optim": ("core", "backend", "nn.params"),
    "data": ("core", "backend"),
    "parallel": ("core", "backend", "nn.params"),
    "parallel.pipeline": ("core", "backend", "nn"),
    "runs": ("core",),
    "interop": ("core", "backend", "nn"),
    "bench.torch_peer": (),  # runs in a process of its own, beside an installed package or a bare PyTorch
    "guides": ("", *LIBRARY),  # programs of users
}


def allowed(package: str) -> tuple[str, ...]:
    """What a package, or a module of one, may import besides its own package."""
    if package in NARROWER:
        return NARROWER[package]
    return ORDER[: ORDER.index(package)] if package in ORDER else ()


# The only places of a third-party package (a file, or a package with all its files); "" is everywhere.
HOMES: dict[str, tuple[str, ...]] = {
    "numpy": ("",),
    "cupy": ("backend/cuda/", "parallel/communicators/nccl.py"),
    "cupy_backends": ("backend/cuda/", "parallel/communicators/nccl.py"),
    "cupyx": ("backend/cuda/",),
    "cuda": ("backend/cuda/",),
    "ml_dtypes": ("backend/",),
    "numba": ("backend/cpu/kernels/",),
    "llvmlite": ("backend/cpu/kernels/",),
    "filelock": ("core/lock.py", "data/download.py"),
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
    "onnxruntime": ("interop/onnx_check.py",),
    "threadpoolctl": ("backend/", "commands/bench.py"),
    "torch": ("bench/torch_peer.py",),
    "matplotlib": ("reporting/charts.py",),
    "jinja2": ("reporting/render.py",),
    "tensorboardX": ("training/callbacks/loggers/tensorboard.py",),
    "mlflow": ("training/callbacks/loggers/mlflow.py",),
    "wandb": ("training/callbacks/loggers/wandb.py",),
    "optuna": ("commands/tune/", "config/search_space.py"),
}
OPTIONAL = (  # without them the package imports and trains
    *("PIL", "cuda", "cupy", "cupy_backends", "cupyx", "h5py", "jinja2", "llvmlite", "matplotlib", "ml_dtypes"),
    *("mlflow", "mpi4py", "numba", "onnx", "onnxruntime", "tensorboardX", "wandb", "optuna"),
)

CODE_LOADERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "code"}
RUN_TEXT = {"eval", "exec", "compile", "__import__", "execfile"}
# Hydra's: config/instantiate.py builds
BUILD_FROM_CONFIGURATION = {"instantiate", "get_class", "get_method", "get_object", "_locate"}
SHELLS = ("os.system", "os.popen", "os.startfile", "os.exec", "os.spawn", "os.posix_spawn", "subprocess.getoutput")
# These import what a name says that they have checked, or have of us.
BY_NAME = {"config/instantiate.py", "__init__.py", "__main__.py"}
REGISTRIES = ("pypi" + ".org", "pythonhosted" + ".org", "anaconda" + ".org", "anaconda" + ".com", "npmjs" + ".")
TOP_LEVEL = {"pyproject.toml", "README.md", "Makefile", "LICENSE", "conf", "cupynet", "tests", "outputs"}


def import_directions(source: Source) -> Iterator[str]:
    inner = source.module.removeprefix("cupynet.")
    package = inner if inner in NARROWER else source.package
    if package.split(".")[0] not in ORDER:
        yield f"unknown package {package!r}: give it a place in ORDER"
        return
    seen = (source.package, *allowed(package))
    for name, line in imported(source):
        target = name.removeprefix("cupynet").removeprefix(".")
        if name.split(".")[0] == "cupynet" and not any(f"{target}.".startswith(f"{each}.") for each in seen):
            yield f"line {line}: {package} may not import {name}"


def third_party_homes(source: Source) -> Iterator[str]:
    for name, line in imported(source):
        package = name.split(".")[0]
        if package == "cupynet" or package in sys.stdlib_module_names:
            continue
        homes = HOMES.get(package, ())
        if not any(
            source.path == home or (home.endswith("/") or not home) and source.path.startswith(home) for home in homes
        ):
            yield f"line {line}: {package} belongs into {', '.join(homes) or 'no file yet: give it a home in HOMES'}"


def no_code_from_data(source: Source) -> Iterator[str]:
    """Nothing that runs or rebuilds objects from bytes or text: no data file or checkpoint may be able to run code.

    The one exception is not in our sources: numba keeps its compiled kernels in a cache of its own, pickled.
    """
    for name, line in imported(source):
        if name.split(".")[0] in CODE_LOADERS:
            yield f"line {line}: {name} runs code from data"
    for node in source.nodes:
        text = dotted(node) if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Name) and node.id in RUN_TEXT:
            yield f"line {node.lineno}: {node.id} runs code from text"
        elif text.startswith("builtins.") and text.removeprefix("builtins.") in RUN_TEXT:
            yield f"line {node.lineno}: {text.removeprefix('builtins.')} runs code from text"
        elif text.startswith(SHELLS):
            yield f"line {node.lineno}: {text} runs a command from text"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield f"line {node.value.lineno}: allow_pickle runs code from data"
        elif isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
            yield f"line {node.value.lineno}: shell runs a command from text"
        elif isinstance(node, ast.Call):
            yield from _code_from_call(source, node)


def _code_from_call(source: Source, node: ast.Call) -> Iterator[str]:
    """What a call may do that its name alone does not tell."""
    name, whole = called(node), dotted(node.func)
    given = {keyword.arg for keyword in node.keywords}
    if (
        whole in ("np.load", "numpy.load", "cp.load", "cupy.load", "np.lib.format.read_array")
        and "allow_pickle" not in given
    ):
        yield f"line {node.lineno}: {whole} without allow_pickle=False"
    elif (
        whole.startswith("torch.load") or whole.startswith("yaml.") and name not in ("safe_load", "safe_dump", "parse")
    ):
        yield f"line {node.lineno}: {whole} rebuilds objects from data"
    elif name in ("extract", "extractall", "unpack_archive") and "filter" not in given:
        yield f"line {node.lineno}: {name} writes where an archive says"
    elif name in BUILD_FROM_CONFIGURATION:
        yield f"line {node.lineno}: {name} builds what a configuration says, trusted or not: use instantiate.build"
    elif name == "import_module" and not isinstance(node.args[0], ast.Constant) and source.path not in BY_NAME:
        yield f"line {node.lineno}: imports what a name says"


def no_package_registry(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        yield from (f"line {number}: names the package registry {host}" for host in REGISTRIES if host in line.lower())


Rule = Callable[[Source], Iterator[str]]
RULES: list[Rule] = [import_directions, third_party_homes, no_code_from_data, no_package_registry]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_rule(rule: Rule) -> None:
    assert SOURCES
    violations = [f"cupynet/{source.path}: {violation}" for source in SOURCES for violation in rule(source)]
    assert not violations, "\n".join(violations)


BROKEN: dict[Rule, list[tuple[str, str]]] = {
    import_directions: [
        ("nn/conv.py", "from cupynet.optim.sgd import SGD"),
        ("nn/conv.py", "from ..data import Loader"),
        ("nn/conv.py", "import cupynet"),
        ("backend/x.py", "def f():\n    import cupynet.config"),
        ("data/x.py", "if TYPE_CHECKING:\n    from cupynet.nn import Image"),
        ("data/x.py", "importlib.import_module('cupynet.parallel')"),
        ("optim/sgd.py", "from cupynet.nn.params_of import x"),
        ("cellar/x.py", ""),
    ],
    third_party_homes: [
        ("backend/cudax.py", "import cupy.cuda"),
        ("backend/cpu/x.py", "def f():\n    from numba import njit"),
        ("training/report.py", "__import__('platformdirs')"),
        ("nn/conv.py", "import jax"),
    ],
    no_code_from_data: [
        ("data/x.py", "import pickle"),
        ("config/x.py", "x = eval(text)"),
        ("config/x.py", "run = builtins.exec"),
        ("train.py", "os.execvp(name, names)"),
        ("train.py", "subprocess.run(text, shell=True)"),
        ("data/x.py", "np.load(f)"),
        ("data/x.py", "np.load(f, allow_pickle=trusted)"),
        ("data/x.py", "torch.load(f, weights_only=True)"),
        ("config/x.py", "yaml.load(f, Loader=yaml.FullLoader)"),
        ("data/x.py", "tarfile.open(f).extractall(folder)"),
        ("config/x.py", "hydra.utils.instantiate(config)"),
        ("experiment.py", "importlib.import_module(name)"),
    ],
    no_package_registry: [("data/x.py", f"URL = 'https://{REGISTRIES[0]}/simple'")],
}

KEPT: dict[Rule, list[tuple[str, str]]] = {
    import_directions: [
        ("optim/sgd.py", "from cupynet.nn.params import Params\nfrom cupynet.core.errors import ConfigError"),
        ("parallel/pipeline.py", "from cupynet.nn import Sequential"),
    ],
    third_party_homes: [("data/folders.py", "from platformdirs import user_cache_path")],
    no_code_from_data: [
        ("data/x.py", "np.load(f, allow_pickle=False); model.eval(); re.compile('x')"),
        ("data/x.py", "tar.extractall(folder, filter='data'); subprocess.run([a, b], check=True)"),
        ("config/x.py", "yaml.safe_load(f); OmegaConf.load(f); import_module('cupynet.backend.cuda')"),
    ],
}


@pytest.mark.parametrize("rule", RULES)
def test_violations_of_a_rule_are_detected(rule: Rule) -> None:
    for path, text in BROKEN[rule]:
        assert list(rule(Source(path, text))), (path, text)
    for path, text in KEPT.get(rule, []):
        assert list(rule(Source(path, text))) == []


def imports(sources: Iterable[Source]) -> TopologicalSorter[str]:
    """Return the graph of imports inside the package: at any depth of a file, and for type checkers too."""
    return TopologicalSorter(
        {
            source.module: {name for name, _ in imported(source) if name in MODULES} - {source.module}
            for source in sources
        }
    )


def test_imports_are_not_circular() -> None:
    imports(SOURCES).prepare()


def test_a_circle_of_imports_is_detected() -> None:
    back = Source("backend/policy.py", "def f():\n    from cupynet.backend.select import create_backend\n")
    with pytest.raises(CycleError):
        imports([*(each for each in SOURCES if each.path != back.path), back]).prepare()


def keys_of_the_configuration(source: Source) -> Iterator[str]:
    """Only config and packages that may import it name dotted keys of the configuration: the library has none.

    Keys of dataclasses are in config/schema.py, those of parts in the files of conf/. Docstrings may show code, in
    which `data.train` is an attribute. Messages of the library name settings by `wording.setting`, which names them for
    Python too, see `settings_named`.
    """
    if source.package in ORDER[ORDER.index("config") :]:
        return
    known = "|".join(sorted(map(re.escape, configuration_keys()), key=len, reverse=True))
    alone = {node.value for node in source.nodes if isinstance(node, ast.Expr)}  # docstrings: used for nothing
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in alone:
            for found in re.findall(rf"(?<![\w.])(?:{known})(?!\w)", node.value):
                yield f"line {node.lineno}: {found} is a key of the configuration, for config and commands only"


@cache
def configuration_keys() -> set[str]:
    """Every key with a dot, from `parallel.timeout_s` to `model.layers.conv2.kernel`."""
    keys = {key for key, _ in rules(BenchSettings)}
    for group in (each.name for each in fields(BenchSettings)):
        for path in (ROOT / "conf" / group).glob("*.yaml"):
            above: list[str] = []
            for line in path.read_text("utf-8").splitlines():
                if named := re.match(r"( *)(\w+):", line):
                    above[len(named[1]) // 2 :] = [named[2]]
                    keys.add(".".join((group, *above)))
    return {key for key in keys if "." in key}


def test_only_config_and_commands_name_configuration_keys() -> None:
    assert {"parallel.timeout_s", "optimizer.learning_rate", "optimizer.learning_rate.peak"} < configuration_keys()
    assert {"data.fallback", "callbacks.progress.style", "backend.priority.gpu"} < configuration_keys()
    found = {source.path: list(keys_of_the_configuration(source)) for source in SOURCES}
    loud = {path: keys for path, keys in found.items() if keys}
    assert loud == {}


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("nn/conv.py", "raise E('lower optimizer.learning_rate')", 1),
        ("runs/run.py", "x = f'{a}: or data.fallback={b}'", 1),
        ("runs/run.py", "x = 'cupynet.data.seed'; y = 'data.seedling'; z = 'lower learning_rate'", 0),
        ("commands/train.py", "x = 'parallel.timeout_s'", 0),
    ],
)
def test_a_key_of_the_configuration_is_seen(path: str, text: str, count: int) -> None:
    assert len(list(keys_of_the_configuration(Source(path, text)))) == count


def settings_named(source: Source) -> Iterator[str]:
    """Yield the keys that messages name by `wording.setting` with constants."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and called(node) == "setting":
            names = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            if len(names) == 2:
                yield ".".join(map(str, names))


def test_settings_named_in_messages_exist() -> None:
    found = {key for source in SOURCES for key in settings_named(source)}
    assert {"data.folder", "parallel.timeout_s", "callbacks.nonfinite.action"} <= found <= configuration_keys()


def strangers(tracked: list[str]) -> list[str]:
    """Tracked files that do not belong where they are: at the top, or in outputs/ outside of outputs/records/."""
    tops = [path.split("/")[0] for path in tracked]
    loose = [top for top in tops if top not in TOP_LEVEL and not top.startswith(".")]
    return loose + [path for path in tracked if path.startswith("outputs/") and not path.startswith("outputs/records/")]


def test_the_repository_has_no_other_top_level_files() -> None:
    try:
        listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    if not listing:
        pytest.skip("nothing is tracked here")
    assert strangers(listing.splitlines()) == []


def test_logger_folders_are_ignored_by_git() -> None:
    kept = ["mlflow.db", "mlflow.db-journal", "mlruns/0/meta.yaml", "mlartifacts/1/a", "wandb/run/files/config.yaml"]
    asked = ["git", "check-ignore", "--no-index", *kept]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.splitlines() == kept


def test_python_versions_agree() -> None:
    project, makefile = (ROOT / "pyproject.toml").read_text(), (ROOT / "Makefile").read_text()
    oldest, beyond = re.findall(r"^(?:OLDEST|BEYOND) := ([\d.]+)$", makefile, re.MULTILINE)
    assert f'requires-python = ">={oldest},<{beyond}"' in project


HIDE = """
import importlib, sys
from importlib.machinery import PathFinder
hidden = {hidden!r}
class Finder:  # as if they were not installed: import fails, find_spec says None
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in hidden else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
for name in hidden:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    sys.exit(name + " is not hidden")
for name in {modules!r}:
    importlib.import_module(name)
"""


def run_without(hidden: tuple[str, ...], modules: list[str], then: str = "") -> None:
    code = HIDE.format(hidden=hidden, modules=modules) + then
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_package_imports_without_optional_packages() -> None:
    made_for_them = ("backend/cpu/", "guides/", "commands/tune/")  # cuda/ imports without CuPy
    modules = [source.module for source in SOURCES if not source.path.startswith(made_for_them)]
    assert "cupynet.backend" in modules
    run_without(
        OPTIONAL, modules, "from cupynet.backend import create_backend\nassert create_backend('numpy').name == 'numpy'"
    )


def test_the_library_needs_no_configuration() -> None:
    modules = [
        source.module
        for source in SOURCES
        if source.package in LIBRARY and not source.path.startswith("backend/cpu/kernels/")
    ]
    run_without(("hydra", "omegaconf"), modules)
