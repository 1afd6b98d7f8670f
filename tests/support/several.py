"""Several commands in one process: `python -m tests.support.several '[["predict", "run", "a.png"], ...]'`.

Their exit codes go to the file `codes`. Memory is limited, so that a command which allocates what a file claims fails.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import cupynet.__main__

MEMORY = 6 << 30  # bytes of addresses


def main() -> None:
    """Run them in order."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    codes: list[object] = []
    for words in json.loads(sys.argv[1]):
        sys.argv = ["cupynet", *words]
        try:
            cupynet.__main__.main()
            codes.append(0)
        except SystemExit as left:
            codes.append(left.code)
    Path("codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
