"""How settings come in: the command line, conf/ and finished runs, through Hydra, to plain values and typed errors.

The only room that knows Hydra and OmegaConf. door.py is a command's way in and out, composing.py makes settings of
overrides, stored.py reads those of a run, explain.py puts Hydra's errors into one line, search_space.py reads
what a search varies.
"""

from cupynet.config.composing import compose, conf_folder
from cupynet.config.door import Gate, Ranks, in_sweep, keep_settings, own_folder, run
from cupynet.config.explain import GROUPS
from cupynet.config.search_space import search_space, split
from cupynet.config.stored import arguments_of, keep, load, overrides_of, own_folder_of, written

__all__ = [
    "GROUPS",
    "Gate",
    "Ranks",
    "arguments_of",
    "compose",
    "conf_folder",
    "in_sweep",
    "keep",
    "keep_settings",
    "load",
    "overrides_of",
    "own_folder",
    "own_folder_of",
    "run",
    "search_space",
    "split",
    "written",
]
