"""The measures, over damages of known size and shapes of every kind."""

import pytest
import torch

from vae_tiles.metrics import boundary_gradient, line_score, measures, psnr, tile_offsets, window_map, worst_window


def picture(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.8


@pytest.mark.parametrize("d", [1, 2, 5, 20, 60])
def test_a_constant_offset_of_d_levels(d):
    a = picture(1, 3, 96, 80)
    b = a + d / 127.5
    a, b = ((t * 127.5 + 127.5).round().clamp(0, 255).byte() for t in (a, b))
    exact = (b.float() - a.float()).abs()
    assert worst_window(a, b) == pytest.approx(exact.mean(1).unfold(1, 64, 1).unfold(2, 64, 1).mean((-1, -2)).max().item(), rel=1e-5)
    assert psnr(a, b) == pytest.approx(20 * torch.log10(255 / exact.square().mean().sqrt()).item(), abs=1e-3)
    assert tile_offsets(b, a, [((0, 96), (0, 80))]).mean() == pytest.approx((b.float() - a.float()).mean().item(), abs=1e-3)


@pytest.mark.parametrize("shape", [(1, 3, 40, 70), (3, 70, 40), (64, 65), (2, 4, 1, 64, 64), (1, 3, 130, 8)])
def test_shapes(shape):
    a, b = picture(*shape), picture(*shape, seed=1)
    h, w = shape[-2:]
    assert window_map(a, b).shape == (max(h - 63, 1), max(w - 63, 1))
    found = measures(a, b)
    assert all(isinstance(v, float) for v in found.values()) and found["psnr_db"] < 20
    assert measures(a, a)["psnr_db"] == 99 and worst_window(a, a) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_and_values_outside(dtype):
    a = torch.linspace(-3, 3, 64 * 64).reshape(1, 1, 64, 64).to(dtype)
    assert psnr(a, a.clamp(-1, 1)) == 99


@pytest.mark.parametrize("at", [1, 2, 17, 62, 63])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_line_is_found_anywhere(at, axis):
    a = picture(1, 3, 64, 64) * 0.02
    b = a.clone()
    b.narrow(axis, at, 64 - at).add_(12 / 127.5)
    assert line_score(b) > 2.5 > 1.6 > line_score(a)
    edges = {"cols" if axis == -1 else "rows": [at]}
    assert boundary_gradient(b, reference=a, **edges) > 9


def test_nan_is_not_hidden():
    a = picture(1, 3, 64, 64)
    b = a.clone()
    b[0, 0, 5, 5] = float("nan")
    assert not psnr(a, b) > 0
