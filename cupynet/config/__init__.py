"""Settings and objects from the command line, conf/ and stored runs. Only this package uses Hydra and OmegaConf."""

from cupynet.config.composing import GROUPS, compose, conf_folder, own_folder
from cupynet.config.equal_settings import effective, is_alone
from cupynet.config.hydra_main import Entry, deferred, in_sweep, run
from cupynet.config.search_space import search_space, split
from cupynet.config.stored import check_downloads, check_outputs, keep, load, not_stored, overrides_of, stored_settings

__all__ = [
    "GROUPS",
    "Entry",
    "check_downloads",
    "check_outputs",
    "compose",
    "conf_folder",
    "deferred",
    "effective",
    "in_sweep",
    "is_alone",
    "keep",
    "load",
    "not_stored",
    "overrides_of",
    "own_folder",
    "run",
    "search_space",
    "split",
    "stored_settings",
]
