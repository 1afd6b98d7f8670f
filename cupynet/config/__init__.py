"""Configuration: the command line, conf/ and stored runs, through Hydra, to plain values and typed errors.

The only package that knows Hydra and OmegaConf. hydra_main.py is the entry point of commands. composing.py turns
overrides into settings (schema.py), stored.py reads those of a run, messages.py words Hydra's errors, removed.py lists
settings that no longer exist. instantiate.py builds parts, experiment.py all objects of a run (memory_estimate.py
checks that they fit, memory_pools.py limits pools of GPUs, announcement.py writes the first lines of the log),
load_model.py the model of a finished run; resume.py finds the run to resume. sweep_record.py records the jobs of a
sweep, process_launcher.py runs them side by side (plugins/ registers it with Hydra), search_space.py reads the search
space of `tune`, equal_settings.py finds runs that are repetitions of each other.
"""

from cupynet.config.composing import GROUPS, compose, conf_folder, own_folder
from cupynet.config.equal_settings import effective, is_alone
from cupynet.config.hydra_main import Entry, in_sweep, run, training_begins
from cupynet.config.search_space import search_space, split
from cupynet.config.stored import check_downloads, check_outputs, keep, load, not_stored, overrides_of, written

__all__ = [
    "GROUPS",
    "Entry",
    "check_downloads",
    "check_outputs",
    "compose",
    "conf_folder",
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
    "training_begins",
    "written",
]
