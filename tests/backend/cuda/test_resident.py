"""Images that stay on a device."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.backend.cuda.resident import ResidentTransfer
from cupynet.core.errors import ConfigError


def test_images_on_a_device_cannot_be_edited_on_the_host() -> None:
    transfer = object.__new__(ResidentTransfer)
    transfer._at, transfer._labels, transfer._resident = 0, np.zeros(4, np.int64), object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="cannot be edited"):
        transfer.make(np.arange(2), lambda images: images)
