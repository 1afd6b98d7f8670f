"""The reference pages are up to date, and their generator reads what it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupynet.config.schema import Settings
from tests.pages.__main__ import GUIDES, PAGES, page
from tests.pages.api import signature
from tests.pages.conf import choice, schema, words, written
from tests.pages.markdown import meaning
from tests.pages.settings import rows
from tests.support.settings import CHOICES

UPDATE = "cupynet/guides/{} differs from its sources. Write it again: make pages, or python -m tests.pages"


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_up_to_date(name: str) -> None:
    pytest.importorskip("sklearn")
    assert (GUIDES / name).read_text("utf-8") == page(name), UPDATE.format(name)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_setting_of_a_choice_has_a_meaning(group: str, name: str) -> None:
    if group not in ("model", "experiment"):  # only the first layer of each kind has comments
        missing = [row[0] for row in rows(group, choice(group, name), schema(Settings)) if not row[3]]
        assert not missing, f"conf/{group}/{name}.yaml: add a comment to {', '.join(missing)}"


def test_values_and_comments_of_a_yaml_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(
        "# A file\n# of a group.\n_target_: a.B\nx: [1, 2]   # one\n           # and two\npart:\n"
        "  _target_: a.C   # of the part\n  y: null\nz: 'a: b'\n"
    )
    node = written(tmp_path / "file.yaml")
    assert (node.comment, node.target) == ("A file of a group.", "a.B")
    assert (node.below["x"].value, node.below["x"].comment) == ("[1, 2]", "one and two")
    assert (node.below["part"].comment, node.below["part"].below["y"].value) == ("of the part", "null")
    assert node.below["z"].value == "'a: b'"


def test_alternatives_settings_and_files_of_a_comment_are_code() -> None:
    assert meaning("kind: half (16) | full") == "Kind: `half` (16) | `full`"
    assert meaning("auto: the best | none; null = off") == "`auto`: the best | `none`; `null` = off"
    assert meaning("of train.log, as data.seed=3 <x>") == r"Of `train.log`, as `data.seed=3` \<x>"


def test_types_are_in_the_words_of_yaml() -> None:
    assert words("dict[str, int | None] | Sequence[tuple[int, int]] | None") == "mapping, list, null"
    found = schema(Settings)
    assert found["workers"] == "integer ≥ 1, null" and found["memory.device_pool_limit"] == "bytes, amount, null"
    assert found["parallel.launcher"] == "`thread`, `mpi`" and found["fast_dev_run"] == "true, false, integer ≥ 1"


def test_a_signature_is_as_in_the_source() -> None:
    class Example:
        def __init__(self, size: int | None = None, *, name: str = "a b", call: object = len) -> None: ...

    assert signature("Example", Example).startswith("Example(size: int | None = None, *, name: str = 'a b'")
