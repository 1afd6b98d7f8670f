"""Install the wheel with every supported Python and every extra, and train: `make wheels`.

The interpreters on the path, such as `python3.11`, are used. Each pair gets a new environment in a temporary folder:
the wheel is installed, `pip check` looks for conflicting requirements, and the default job runs in an empty folder with
an empty home. One line shows each pair's result. The exit code is 0 if all work. All extras of the wheel are tried
except CuPy (it needs a GPU), PyTorch and the development tools.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = re.compile(r"cuda.*|peer|dev")
STEP_S = 1200  # limit for one command: an installation may download several hundred MB
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CUPYNET_DATA", "CUPYNET_REPORT")


def supported() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def called(*command: str | Path, cwd: Path, **more: str) -> str:
    """Run a command in a folder, and return its output. Raises SystemExit with the output if the command fails."""
    environment = {key: value for key, value in os.environ.items() if key not in HIDDEN} | more
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=STEP_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def built(folder: Path) -> Path:
    called(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def extras_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        extras = re.findall(r"^Provides-Extra: (\S+)$", archive.read(name).decode(), re.MULTILINE)
    return [extra for extra in extras if not LEFT_OUT.fullmatch(extra)]


def use(python: str, wheel: Path, extra: str, folder: Path) -> Path:
    """Install the wheel with an extra into a new environment. Train in an empty folder, and return the folder."""
    empty, home, own = folder / "empty", folder / "home", folder / "env" / "bin"
    empty.mkdir()
    home.mkdir()
    called(python, "-m", "venv", folder / "env", cwd=folder)
    called(own / "python", "-m", "pip", "install", "-q", f"{wheel}[{extra}]" if extra else wheel, cwd=empty)
    called(own / "python", "-m", "pip", "check", cwd=empty)
    job = ("train", "data=synthetic", "data.train=2000", "epochs=1")
    if "test accuracy" not in called(own / "cupynet", *job, cwd=empty, HOME=str(home)):
        raise SystemExit("the training printed no accuracy")
    return empty


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", action="append", metavar="3.X", help="only this version; may be repeated")
    parser.add_argument("--extra", action="append", help="only this extra; '' is none of them")
    options = parser.parse_args(given)
    failed = False
    with tempfile.TemporaryDirectory(prefix="cupynet-wheels-") as name:
        wheel = built(Path(name))
        extras = [extra for extra in ("", *extras_of(wheel)) if options.extra is None or extra in options.extra]
        for version, extra in product(options.python or supported(), extras):
            began, folder = time.monotonic(), Path(name, f"{version}-{extra}")
            folder.mkdir()
            try:
                use(f"python{version}", wheel, extra, folder)
                result = f"{time.monotonic() - began:.0f} s"
            except (SystemExit, OSError, subprocess.TimeoutExpired) as error:
                failed, result = True, f"FAILED: {error}"
            print(f"Python {version}, {extra or 'no extra'}: {result}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
