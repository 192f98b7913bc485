"Weights add up to one at every sample, for every length."
import pytest
import torch

from vae_tiles.blending import axis_weights
from vae_tiles.geometry import spread, wide_axis

FLOORS = [(32, 16, 8), (32, 16, 16), (32, 16, 32), (128, 32, 8), (64, 32, 1)]  # tile side, overlap, ratio; the last is encode


def total(axis, ratio):
    out = torch.zeros(axis.length * ratio, dtype=torch.float64)
    for (a, b), w in zip(axis.spans, axis_weights(axis, ratio)):
        assert w.min() >= 0 and len(w) == (b - a) * ratio
        out[a * ratio:b * ratio] += w.float()
    return out


@pytest.mark.parametrize("floor,ov,ratio", FLOORS)
def test_every_length(floor, ov, ratio):
    for length in range(1, 601): assert (total(wide_axis(length, floor, ov), ratio) - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("side,n", [(40, 4), (59, 5), (20, 3), (31, 2)])
def test_three_over_one_another_and_narrow_overlaps(side, n):
    assert (total(spread(60, side, n), 8) - 1).abs().max() <= 1e-6
