"""Configuration: settings and objects from the command line, conf/ and stored runs.

No other package uses Hydra or OmegaConf.

- hydra_main.py: the entry point of commands
- composing.py, schema.py: overrides to settings, and their validation
- overrides.py: parse and format overrides
- stored.py, removed.py: the settings of a stored run, even of an earlier version
- messages.py: errors of Hydra and OmegaConf as ConfigError
- instantiate.py, experiment.py: build parts, and all objects of a run
- memory_estimate.py: check that a run fits into memory
- announcement.py: the first lines of the log
- load_model.py, model_file.py: `cupynet.load`, for runs and for files
- resume.py: the run to resume
- sweep_record.py, process_launcher.py: record the jobs of a sweep, and run them in parallel (see plugins/)
- search_space.py: the search space of `tune`
- equal_settings.py: find runs that are repetitions of each other
"""

from cupynet.config.composing import GROUPS, compose, conf_folder, own_folder
from cupynet.config.equal_settings import effective, is_alone
from cupynet.config.hydra_main import Entry, in_sweep, run, training_begins
from cupynet.config.search_space import search_space, split
from cupynet.config.stored import check_downloads, check_outputs, keep, load, not_stored, overrides_of, stored_settings

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
    "stored_settings",
    "training_begins",
]
