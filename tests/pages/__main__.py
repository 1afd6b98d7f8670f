"""Write the reference pages of cupynet/guides/ from the sources: `make pages`.

The text above `MARK` is written by hand and is kept.
"""

import os
from collections.abc import Callable, Iterator

from cupynet.__main__ import COMMANDS
from tests.pages.api import api_page
from tests.pages.markdown import joined, marked, table
from tests.pages.settings import SCHEMAS, settings_page
from tests.support import warm
from tests.support.commands import ROOT

GUIDES = ROOT / "cupynet" / "guides"
MARK = "<!-- Written by `make pages`. Change the sources, not the text below. -->\n"


def cli_page() -> Iterator[str]:
    yield table(
        "command | purpose", ((f"[`{name}`](#cupynet-{name})", marked(about)) for name, (_, about) in COMMANDS.items())
    )
    for name in COMMANDS:
        text = help_of(name)
        place = "" if name == "train" else f"#cupynet-{name}"
        own = text.partition("\n\nGroups: ")[0] if name in SCHEMAS else text  # the rest is that of `train`
        yield from (f"## cupynet {name}", f"```text\n{own}\n```")
        yield f"[All its settings](settings.md{place})" if name in ("train", *SCHEMAS) else ""


def help_of(name: str) -> str:
    done = warm.command("cupynet", (name, "--help"), ROOT, {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PAGES: dict[str, Callable[[], Iterator[str]]] = {"settings.md": settings_page, "api.md": api_page, "cli.md": cli_page}


def page(name: str) -> str:
    """Return a page: its current introduction and the generated text."""
    introduction = (GUIDES / name).read_text("utf-8").partition(MARK)[0]
    return f"{introduction}{MARK}\n{joined(PAGES[name]())}\n"


if __name__ == "__main__":
    for each in PAGES:
        (GUIDES / each).write_text(page(each), "utf-8")
