"""Damaged data end a run with one line and exit code 65."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import run, run_folder
from tests.support.mirrors import NAMES


def test_a_damaged_file_ends_the_command_before_training(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text("<!DOCTYPE html>\n<title>Sign in to the network</title>")
    _, stderr = run(tmp_path, "data=mnist", f"data.folder={folder.parent}", code=65)
    assert str(folder / NAMES[0]) in stderr and stderr.count("\n") == 1
    assert {each.name for each in run_folder(tmp_path).iterdir()} == {".hydra", "train.log"}


FAILING = """
import errno, os, threading
from dataclasses import replace
import numpy as np
from cupynet.data import Dataset, Synthetic

class Labels(np.ndarray):
    '''Their disk fails in the second epoch, where batches are made ahead.'''
    read = 0

    def __getitem__(self, rows):
        if threading.current_thread().name == "cupynet-prefetch":
            Labels.read += 1
            if Labels.read > 30:
                raise OSError(errno.EIO, os.strerror(errno.EIO), "digits.npy")
        return super().__getitem__(rows)

class Failing(Dataset):
    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        return found.view(Labels) if name == "labels" else found

class Source(Synthetic):
    def load(self):
        data = super().load()
        train = data.train
        return replace(data, train=Failing("digits", train.images, train.labels, train.classes))
"""


def test_a_disk_that_fails_during_prefetching_ends_a_run(tmp_path: Path) -> None:
    """It does not hang, does not blame the output, and keeps the earlier checkpoint."""
    (tmp_path / "own.py").write_text(FAILING)
    arguments = ["trusted_modules=[own]", "data._target_=own.Source", "++data.train=640", "++data.test=40"]
    _, stderr = run(tmp_path, *arguments, "batch_size=32", "workers=2", "epochs=3", code=65)
    assert "'digits.npy'" in stderr and "epoch 2" in stderr and stderr.count("\n") == 1
    folder = run_folder(tmp_path)
    assert not (folder / "weights.safetensors").exists() and not (folder / "summary.json").exists()
    assert len(list((folder / "checkpoints").glob("step-*"))) == 1
    assert '"epoch": 1' in (folder / "history.jsonl").read_text()
