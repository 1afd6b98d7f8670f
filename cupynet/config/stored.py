"""What a run has stored of its settings: read as from a stranger, and written again where it goes on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from cupynet import trust
from cupynet.checks import one_line
from cupynet.config.composing import conf_folder, flat, names, settings_of, spine
from cupynet.config.explain import GROUPS, explain
from cupynet.config.removed import refuse_removed, without_removed
from cupynet.errors import ConfigError, DataError
from cupynet.settings import Settings, own_names

FILE = re.compile(r"\w[\w-]*(/\w[\w-]*)*")  # in a folder of conf/


def load(run_folder: str | Path, overrides: Sequence[str] = (), trusted_modules: Iterable[str] = ()) -> Settings:
    """The settings of a finished run, from its `.hydra/config.yaml`, with some changed.

    overrides: settings (`batch_size=512`), or files for groups (`data=synthetic`).

    A stored configuration names classes to build but never who is trusted: its own trusted_modules are left out, and
    only the caller's count (the argument, or an override). ConfigError; DataError for a file that cannot be read.
    """
    path = Path(run_folder) / ".hydra" / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_folder}: is not the folder of a run: there is no {path}")
    stored = _stored(path)
    if not isinstance(stored, DictConfig):
        raise DataError(f"{path}: is not a configuration")
    stored = OmegaConf.create(without_removed(cast("dict[Any, Any]", OmegaConf.to_container(stored, resolve=False))))
    stored["trusted_modules"] = list(trusted_modules)
    try:
        config = spine(Settings)
        try:
            config.merge_with(stored)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path}: {explain(error, ())}: is this a run of another version?") from error
        OmegaConf.set_struct(config, True)
        refuse_removed(overrides)
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for each in sorted(parsed, key=lambda each: each.key_or_group not in GROUPS):  # files first, as Hydra does
            if each.is_delete() or each.is_sweep_override():
                raise ConfigError(f"{each.input_line}: only single settings can be changed here, as key=value")
            key, value = each.key_or_group, each.value()
            if key in GROUPS and isinstance(value, str):
                config[key] = _group_file(key, value)
            else:
                OmegaConf.update(config, key, value, merge=True, force_add=each.is_add() or each.is_force_add())
        return settings_of(config, [*overrides_of(run_folder), *overrides], Settings, ("trusted_modules",))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides)) from error


def overrides_of(folder: str | Path, schema: type[Settings] = Settings) -> list[str]:
    """What the command line of the job in `folder` asked for, as it was written; nothing where that is not stored.

    Of Hydra's own settings nothing is kept. DataError where the file cannot be read, or holds anything else.
    """
    path = Path(folder) / ".hydra" / "overrides.yaml"
    if not path.is_file():
        return []
    stored = _stored(path)
    found = OmegaConf.to_container(stored, resolve=False) if isinstance(stored, ListConfig) else None
    if not isinstance(found, list) and not (isinstance(stored, DictConfig) and not stored):
        raise DataError(f"{path}: is not a list of settings")
    kept = []
    for each in found or ():
        try:
            override = OverridesParser.create().parse_override(str(each))
        except Exception as error:
            raise DataError(f"{path}: {one_line(each)}: is not written as a setting") from error
        key, value = override.key_or_group, override.value()
        if key.startswith("hydra"):
            continue
        known = key.partition(".")[0] in {*names(schema), *GROUPS}
        chosen = (value if isinstance(value, list) else [value]) if key in GROUPS else []
        plain = all(FILE.fullmatch(name) for name in chosen if isinstance(name, str))
        if not known or not plain or override.package is not None or override.is_sweep_override():
            raise DataError(f"{path}: {one_line(each)}: is not a setting that a run is made with")
        kept.append(str(each))
    return kept


def arguments_of(folder: Path, schema: type[Settings], *without: str) -> list[str]:
    """What the job in `folder` was asked for that a training run takes too, as the arguments of its command.

    schema: of the job's settings, of which its own are left out. without: further settings and groups that are.
    """
    own, named = own_names(schema), own_folder_of(folder)
    asked = [(each, each.lstrip("+~").partition("=")[0]) for each in overrides_of(folder, schema)]
    kept = [each for each, name in asked if name not in without and name.partition(".")[0] not in own]
    return kept if named is None else [f"--config-dir={named}", *kept]


def written(folder: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that a run has stored, by their dotted keys, and which file it took of each group; to be shown.

    References (`${}`) in them stand as they were written, and nothing is built. DataError where a file cannot be read.
    """
    path = Path(folder) / ".hydra" / "config.yaml"
    plain = OmegaConf.to_container(_stored(path, resolved=False), resolve=False)
    if not isinstance(plain, dict):
        raise DataError(f"{path}: is not a configuration")
    path = path.with_name("hydra.yaml")
    chosen: Any = OmegaConf.to_container(_stored(path, resolved=False), resolve=False) if path.is_file() else {}
    for key in ("hydra", "runtime", "choices"):
        chosen = chosen.get(key) if isinstance(chosen, dict) else None
    choices = chosen if isinstance(chosen, dict) else {}
    return (
        flat({str(key): value for key, value in plain.items()}),
        {name: str(choices[name]) for name in GROUPS if choices.get(name) is not None},
    )


def own_folder_of(run: Path) -> Path | None:
    """The folder that --config-dir named when a run began; None where it named none, or that is not stored.

    A folder inside the run's is not taken: a run does not bring settings of its own along.

    Raises:
        ConfigError: it is not there any more.
        DataError: the file cannot be read.
    """
    path = run / ".hydra" / "hydra.yaml"
    if not path.is_file():
        return None
    stored: Any = OmegaConf.to_container(_stored(path, resolved=False), resolve=False)
    for key in ("hydra", "runtime", "config_sources"):
        stored = stored.get(key) if isinstance(stored, dict) else None
    for source in stored if isinstance(stored, list) else ():
        if isinstance(source, dict) and source.get("provider") == "command-line":
            folder = Path(str(source.get("path")))
            if run.resolve() in folder.resolve().parents:
                continue
            if not folder.is_dir():
                raise ConfigError(
                    f"{run}: began with --config-dir={folder}, which is not there: bring it back, or say with "
                    "--config-dir where it is now"
                )
            return folder
    return None


def _stored(path: Path, *, resolved: bool = True) -> Any:
    """What a run has stored, as OmegaConf has it. DataError where it cannot be read, or would unfold endlessly.

    resolved: whether references in it will be followed.
    """
    try:
        if path.is_symlink() or path.stat().st_size > 4 * trust.MOST_BYTES:
            raise DataError(f"{path}: must be a plain file of at most {trust.MOST_BYTES} characters")
        text = path.read_text(encoding="utf-8")
        trust.check_stored(
            text, path, _events(text), references=trust.MOST_REFERENCES if resolved else trust.MOST_BYTES
        )
        return OmegaConf.create(text)
    except DataError:
        raise
    except Exception as error:  # YAML, encoding, permissions
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def _events(text: str) -> Iterator[tuple[str, int]]:
    """The parts of a YAML text, one after the other, before anything is made of it."""
    kinds = {
        "Alias": "alias",
        "SequenceStart": "begin",
        "MappingStart": "begin",
        "SequenceEnd": "end",
        "MappingEnd": "end",
    }
    loader = get_yaml_loader()(text)
    while loader.check_event():
        event = loader.get_event()
        yield kinds.get(type(event).__name__.removesuffix("Event"), ""), event.start_mark.line + 1


def _group_file(group: str, name: str) -> Any:
    """What `group=name` on a command line stands for: the composed content of conf/<group>/<name>.yaml."""
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return hydra.compose("config", overrides=[f"{group}={name}"])[group]


def store(config: DictConfig, folder: Path) -> None:
    """Write the settings of a run that goes on over those it had: each file whole or as it was. OutputError."""
    from cupynet.files import write_whole  # brings NumPy, which --help can do without

    asked = HydraConfig.get().overrides.task
    for name, content in (("config.yaml", config), ("overrides.yaml", asked)):
        write_whole(folder / ".hydra" / name, OmegaConf.to_yaml(content).encode())


def keep(folder: Path, settings: Settings, overrides: Sequence[str] = ()) -> None:
    """Write the settings of a run that was not started by a command of its own, such as a trial. OutputError."""
    from cupynet.files import write_whole

    (folder / ".hydra").mkdir(exist_ok=True)
    plain = {name: value for name, value in asdict(settings).items() if name != "trusted_modules"}
    for name, content in (("config.yaml", plain), ("overrides.yaml", list(overrides))):
        write_whole(folder / ".hydra" / name, OmegaConf.to_yaml(OmegaConf.create(content)).encode())
