"""Select the GPU tests that `make test-standin` does not run; see `make test-gpu-standin`.

Most tests marked `gpu` are variants of a test marked `standin`. The others would never run without a GPU.
"""

import pytest


@pytest.hookimpl(trylast=True)  # after tests/conftest.py has added markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    done = {_function(item) for item in quick if item.get_closest_marker("standin")}
    kept = [item for item in quick if item.get_closest_marker("gpu") and _function(item) not in done]
    chosen = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
