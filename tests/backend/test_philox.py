"""Philox random numbers: equal to its authors' and the same on all backends."""

import numpy as np
import pytest

from cupynet.backend import philox

# counters, key, numbers: the authors' known answers, distributed with Random123 1.09
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counters", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers_of_its_authors(counters: str, key: str, expected: str) -> None:
    a, b, c, d = (np.array([word], np.uint64) for word in words(counters))
    low, high = words(key)
    found = philox.numbers((a, b, c, d), low | high << 32)
    assert [int(each[0]) for each in found] == words(expected)
    compiled = pytest.importorskip("cupynet.backend.cpu.kernels.dropout")
    given = (np.uint64(word) for word in (*words(counters), low, high))
    assert [int(each) for each in compiled.four(*given)] == words(expected)


def test_a_random_number_follows_from_sample_epoch_key_and_place() -> None:
    samples = np.array([3, 1 << 35, 9])
    found = philox.of_examples(np, samples, 2, 77, 10)
    assert found.shape == (3, 10) and len(np.unique(found)) == 30
    np.testing.assert_array_equal(philox.of_examples(np, samples[::-1], 2, 77, 10), found[::-1])
    for other in (philox.of_examples(np, samples, 3, 77, 10), philox.of_examples(np, samples, 2, 78, 10)):
        assert (other != found).all()


def test_each_layer_and_seed_has_its_own_philox_key() -> None:
    keys = {philox.key_of(seed, name) for seed in (0, 1, 2**64 - 1) for name in ("", "drop1", "block.drop1")}
    assert len(keys) == 9 and all(0 <= key < 1 << 64 for key in keys)
