"GroupNorm families: tiles that share sampled statistics, or find the canvas's own, against untiled; no seam, no shift."
from dataclasses import replace

import pytest
import torch

from vae_tiles.execution import execute
from vae_tiles.fixtures import as_input, demo_vae, latent_shape, photo, spatial_ratio, tiny
from vae_tiles.installing import decode, encode
from vae_tiles.metrics import psnr, worst_window
from vae_tiles.peaks import Follow
from vae_tiles.planning import plan, plan_exact, plan_shared, request, stages_of
from vae_tiles.search import Segment
from vae_tiles.stages import merge, moments
from vae_tiles.vaes import tiling


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


def tile_means(x, y, side): return torch.nn.functional.avg_pool2d((x - y).mean(1, keepdim=True), side).abs().max() * 127.5


NORMED = ["flux1", "sdxl", "flux2", "hunyuan-image-2.1"]
EXACT = 2e-5  # of the standard deviation: fp32 sums in another order, as the class's own are 1e-5 to 2e-5 from fp64


def source(vae, op, h, w, batch=1, dtype=torch.float32):
    r, g = spatial_ratio(vae), torch.Generator().manual_seed(h * 100 + w)
    if op == "decode": return torch.randn(latent_shape(vae, h * r, w * r, batch), generator=g).to(dtype)
    return (torch.rand(batch, 3, h * r, w * r, generator=g) * 2 - 1).to(dtype)


def untiled(vae, op, x): return vae.decode(x).sample if op == "decode" else vae.encode(x).latent_dist.parameters


def ours(vae, op, x, **kw):
    y = (decode if op == "decode" else encode)(vae, x, progress=False, **kw)
    return y if op == "decode" else y.parameters


def worst(got, want): return float((got - want).abs().max() / want.std())


def asked(vae, op, x, lean=True, **kw):
    "A request as for a card, whose maps may lie on the host."
    r = spatial_ratio(vae)
    h, w = (n * (r if op == "decode" else 1) for n in x.shape[-2:])
    kw = {**dict(free="64GiB", mode="auto", tile=None, dtype=x.dtype, op=op, lean=lean, batch=1, frames=1, figure=None), **kw}
    return replace(request(vae, h, w, **kw), copies=True)


@pytest.mark.parametrize("name", ["flux1", "flux2", "hunyuan-image-2.1"])
def test_no_shift_on_trained_vaes(name):
    vae = demo_vae(name)
    z = vae.encode(as_input(photo("brushes", 768, 768), vae)).latent_dist.mode()
    want = vae.decode(z).sample
    with tiling(vae, tile_size=384): stock = vae.decode(z).sample
    most = plan(vae, 768, 768, mode="untiled", dtype=torch.float32, free="64GiB").peak_bytes
    for share in (.8, .5) if name == "flux1" else (.5,):
        p = plan(vae, 768, 768, mode="shared", dtype=torch.float32, free=int(most * share * 1.25))
        with Follow() as follow: got = decode(vae, z, plan=p, progress=False)
        assert p.path == "shared" and p.work_ratio <= 1.3 and .98 * p.peak_bytes <= follow.peak <= 1.01 * p.peak_bytes
        assert psnr(got, want) >= 50 and psnr(got, want) >= psnr(stock, want) + 10
        assert worst_window(got, want) <= 1 and tile_means(got, want, 256) <= .25  # tiles of 32 latents; smaller ones see the same


@pytest.mark.parametrize("name", ["flux1", "flux2"])
def test_encode_on_trained_vaes(name):
    "Shared statistics of an image averaged 2 x 2 or 4 x 4: the picture that comes back is the one that untiled encode gives."
    vae = demo_vae(name)
    x = as_input(photo("brushes", 768, 768), vae)
    latent = vae.encode(x).latent_dist.mode()
    most = plan(vae, 768, 768, mode="untiled", op="encode", dtype=torch.float32, free="64GiB").peak_bytes
    want = vae.decode(latent).sample
    for share in (.7, .4) if name == "flux1" else (.4,):
        p = plan(vae, 768, 768, mode="shared", op="encode", dtype=torch.float32, free=int(most * share * 1.25))
        got = vae.decode(encode(vae, x, plan=p, progress=False).mode()).sample
        assert p.path == "shared" and p.work_ratio <= 1.3
        assert psnr(got, want) >= 50 and worst_window(got, want) <= 1 and tile_means(got, want, 256) <= .25


SIDES = [1, 2, 3, 5, 7, 8, 9, 11, 13, 17]
SHAPES = [(a, b) for i, a in enumerate(SIDES) for b in SIDES[i % 3::2]][:40]  # latents: primes, strips, one more and one less


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_every_shape(shape):
    "Exact tiles are exact; both kinds have the right size and finite values, in every float type and batch."
    i = SHAPES.index(shape)
    vae, op, dtype = small(NORMED[i % 3]), ("decode", "encode")[i % 2], (torch.float32, torch.bfloat16, torch.float16)[i % 3]
    x = source(vae, op, *shape, batch=1 + i % 2)
    want = untiled(small(NORMED[i % 3], torch.float64), op, x.double())
    allowed = max(EXACT, 1.5 * worst(untiled(vae, op, x), want))
    for lean in (True, False): assert worst(ours(vae, op, x, mode="exact", tile=4, lean=lean), want) <= allowed
    y = ours(small(NORMED[i % 3], dtype), op, x.to(dtype), mode="shared", tile=4)
    assert y.shape == want.shape and y.dtype == dtype and y.isfinite().all()


_small: dict = {}


def small(name, dtype=torch.float32):
    if (name, dtype) not in _small: _small[name, dtype] = tiny(name).to(dtype)
    return _small[name, dtype]


@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("name", NORMED)
def test_any_budget(name, op):
    "Tiles, attention in bands, maps on the host and copied ahead: whatever the planner finds is exact."
    vae, hosts = small(name), 0
    x = source(vae, op, *((11, 9) if spatial_ratio(vae) == 32 else (24, 17)))
    r, want = asked(vae, op, x), untiled(small(name, torch.float64), op, x.double())
    allowed = max(EXACT, 1.5 * worst(untiled(vae, op, x), want))
    most = plan_exact(r, untiled=True).peak_bytes
    for share in (.6, .35):
        p = plan_exact(replace(r, budget=int(most * share)))
        hosts += sum(s.host for s in p.segments)
        assert p.path == "exact" and worst(execute(p, stages_of(vae, op), x), want) <= allowed
    assert hosts


@pytest.mark.parametrize("name,op", [("flux1", "decode"), ("flux1", "encode")])
def test_a_cut_on_the_host_changes_nothing(name, op):
    "Shared plans of little memory, cut map on the host, against the same statistics on whole maps."
    vae = small(name)
    x = source(vae, op, 24, 17)
    r, stages = asked(vae, op, x), stages_of(vae, op)
    most = plan_exact(r, untiled=True).peak_bytes
    plans = [p for share in (.6, .25, .2) if (p := plan_shared(replace(r, budget=int(most * share)))) and any(s.host for s in p.segments)]
    assert plans
    for p in plans:
        whole = replace(p, segments=(Segment(0, p.statistics[0]), Segment(p.statistics[0], len(stages))))
        assert worst(execute(p, stages, x), execute(whole, stages, x)) <= 5 * EXACT  # two orders of fp32 sums


def test_exact_on_trained_vaes():
    vae = demo_vae("flux1")
    z = vae.encode(as_input(photo("brushes", 512, 512), vae)).latent_dist.mode()
    want = vae.decode(z).sample
    assert worst(decode(vae, z, mode="exact", tile=24, progress=False), want) <= 2e-5  # fp32 sums in another order


def test_no_overflow_in_half_precision():
    "Features near fp16's largest number: sums of them, and of their squares, are kept in fp32."
    x = torch.full((1, 4, 128, 128), 3e4).half()
    x[..., ::2] *= -1
    n, mean, var = moments(x, 1)
    assert n == x.numel() and mean.isfinite().all() and var.item() == pytest.approx(9e8, rel=1e-3)


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


@pytest.fixture(scope="module")
def trained(): return demo_vae("flux1")


def channel_shift(x, y): return float((x - y).mean((-2, -1)).abs().max() * 127.5)  # levels


@pytest.mark.parametrize("mode,side,most", [("shared", 384, .25), ("exact", 128, .001)])
def test_no_drift_over_nine_rounds(trained, mode, side, most):
    "A picture edited nine times over: encoded and decoded in tiles, its colours stay those of untiled rounds to `most` levels a round."
    a = b = as_input(photo("brushes", side, side), trained)
    kw = dict(mode=mode, tile=side // 16, progress=False)
    for _ in range(9):
        a = trained.decode(trained.encode(a).latent_dist.mode()).sample
        b = decode(trained, encode(trained, b, **kw).mode(), **kw)
    assert channel_shift(b, a) <= 9 * most and tile_means(b, a, side // 2) <= 9 * most


def test_a_half_bright_latent(trained):
    "Tiles of the dark half and of the bright one: no offset of their own, and no picture turned grey."
    z = trained.encode(as_input(photo("brushes", 384, 384), trained)).latent_dist.mode()
    z[..., 24:] += .6 * z.std()
    want = trained.decode(z).sample
    with tiling(trained, tile_size=128): stock = trained.decode(z).sample
    got = decode(trained, z, mode="shared", tile=16, progress=False)
    assert tile_means(got, want, 128) <= .5 < 2 < tile_means(stock, want, 128)
    assert got.std((-2, -1)) == pytest.approx(want.std((-2, -1)), rel=.01)
