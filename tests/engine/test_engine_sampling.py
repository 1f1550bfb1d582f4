"""A sampler for one answer: values at the edge of their ranges."""

from __future__ import annotations

import pytest

from engine.generation.sampling import sampler


@pytest.mark.parametrize("top_p", [0.0, 1e-320, 1e-46, 1e-40, 1e-7])
def test_tiny_top_p_means_the_likeliest_token(top_p: float) -> None:
    """In float32 such a value is 0, and 0 turned the filter off."""
    assert sampler(1.0, top_p) is None
