"""The reference pages are up to date and show a comment for every setting."""

import pytest

from cupynet.config.schema import Settings
from tests.pages.__main__ import GUIDES, PAGES, page
from tests.pages.conf import choice, schema
from tests.pages.settings import rows
from tests.support.settings import CHOICES

UPDATE = "cupynet/guides/{} differs from its sources. Write it again: make pages, or python -m tests.pages"


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_up_to_date(name: str) -> None:
    pytest.importorskip("sklearn")
    assert (GUIDES / name).read_text("utf-8") == page(name), UPDATE.format(name)


@pytest.mark.parametrize(("group", "name"), [each for each in CHOICES if each[0] not in ("model", "experiment")])
def test_every_setting_in_conf_has_a_comment(group: str, name: str) -> None:
    """Except in models and experiments, where only the first layer of each kind has comments."""
    missing = [row[0] for row in rows(group, choice(group, name), schema(Settings)) if not row[3]]
    assert not missing, f"conf/{group}/{name}.yaml: add a comment to {', '.join(missing)}"
