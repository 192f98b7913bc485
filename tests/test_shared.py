"Tiles that share one set of group-norm statistics: no seam, no shift, against untiled on trained weights."
import pytest
import torch

from vae_tiles.fixtures import as_input, demo_vae, latent_shape, photo, spatial_ratio, tiny
from vae_tiles.installing import decode
from vae_tiles.metrics import psnr, worst_window
from vae_tiles.planning import plan
from vae_tiles.stages import merge, moments
from vae_tiles.vaes import tiling


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


def tile_means(x, y, side): return torch.nn.functional.avg_pool2d(x - y, side).abs().max() * 127.5


@pytest.mark.parametrize("name", ["flux1", "flux2", "hunyuan-image-2.1"])
def test_no_shift_on_trained_vaes(name):
    vae = demo_vae(name)
    z = vae.encode(as_input(photo("brushes", 768, 768), vae)).latent_dist.mode()
    want = vae.decode(z).sample
    with tiling(vae, tile_size=384): stock = vae.decode(z).sample
    most = plan(vae, 768, 768, mode="untiled", dtype=torch.float32, free="64GiB").peak_bytes
    for share in (.8, .5):
        p = plan(vae, 768, 768, mode="shared", dtype=torch.float32, free=int(most * share * 1.25))
        got = decode(vae, z, plan=p, progress=False)
        assert p.path == "shared" and p.work_ratio <= 1.3
        assert psnr(got, want) >= 50 and psnr(got, want) >= psnr(stock, want) + 10
        assert worst_window(got, want) <= 1 and tile_means(got, want, 96) <= 1


@pytest.mark.parametrize("name", ["flux1", "sdxl", "flux2", "hunyuan-image-2.1"])
def test_all_tiles_agree(name):
    "The same statistics with one tile or many: what tiles add is rounding."
    vae, r = tiny(name), spatial_ratio(tiny(name))
    z = torch.randn(latent_shape(vae, 20 * r, 14 * r), generator=torch.Generator().manual_seed(0))
    kw = dict(mode="shared", dtype=torch.float32, free="64GiB")
    a, b = (decode(vae, z, plan=plan(vae, 20 * r, 14 * r, tile=t, **kw), progress=False) for t in (32, 6))
    assert (a - b).abs().max() <= 5e-5 * a.std()  # fp32 sums in another order; a seam is above 1e-2


def test_variance_between_parts_counts():
    "A half-bright map: pooled from its halves, the variance has what lies between them (1.09, not 0.09)."
    x = torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(0)) * .3
    x[..., 32:] += 2
    halves = merge(moments(x[..., :32], 1), moments(x[..., 32:], 1))
    assert halves[2].item() == pytest.approx(x.var(correction=0).item(), rel=1e-5) == pytest.approx(1.09, abs=.02)
