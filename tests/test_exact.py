"Exact tiles against the class's own untiled call, on awkward shapes; nothing but rounding may differ."
import pytest
import torch

from vae_tiles.budget import HEADROOM
from vae_tiles.fixtures import latent_shape, spatial_ratio, tiny
from vae_tiles.installing import decode, encode
from vae_tiles.metrics import line_score
from vae_tiles.peaks import Follow
from vae_tiles.planning import plan

WAN = ["qwen-image", "qwen-image-2.1", "wan"]
LEAN = 2e-5  # of the standard deviation: fp32 with small kernels and other sums
PLAIN = 1e-5  # the class's own modules on windows: the convolutions' own rounding, which depends on the shape

SIDES = [1, 2, 3, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23]
SHAPES = [(a, b) for i, a in enumerate(SIDES) for b in SIDES[i % 3::3]][:40]  # latents: primes, strips, one more and one less


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


def latent(vae, h, w, batch=1):
    r = spatial_ratio(vae)
    return torch.randn(latent_shape(vae, h * r, w * r, batch), generator=torch.Generator().manual_seed(h * 100 + w))


def worst(got, want): return float((got - want).abs().max() / want.std())


@pytest.fixture(scope="module")
def vaes(): return {name: tiny(name) for name in WAN}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_decode_every_shape(vaes, shape):
    name = WAN[sum(shape) % 3]
    vae, z = vaes[name], latent(vaes[name], *shape)
    want = vae.decode(z).sample
    assert worst(decode(vae, z, mode="exact", tile=8, lean=True, progress=False), want) <= LEAN
    assert worst(decode(vae, z, mode="exact", tile=8, lean=False, progress=False), want) <= PLAIN


@pytest.mark.parametrize("shape", SHAPES[::3], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("lean", [True, False])
def test_encode_every_shape(vaes, shape, lean):
    name = WAN[sum(shape) % 3]
    vae, r = vaes[name], spatial_ratio(vaes[name])
    x = torch.rand(latent(vae, *shape).shape[:1] + (4 if "2.1" in name else 3, 1, shape[0] * r, shape[1] * r)) * 2 - 1
    want = vae.encode(x).latent_dist.parameters
    assert worst(encode(vae, x, mode="exact", tile=8, lean=lean, progress=False).parameters, want) <= (LEAN if lean else PLAIN)


@pytest.mark.parametrize("name", WAN)
@pytest.mark.parametrize("free", ["60KiB", "300KiB", "2MiB"])
def test_any_budget(vaes, name, free):
    "Several cuts, attention in bands: whatever the planner finds is exact."
    vae = vaes[name]
    z = latent(vae, 24, 18)
    want = vae.decode(z).sample
    assert worst(decode(vae, z, mode="exact", free=free, progress=False), want) <= LEAN


@pytest.mark.parametrize("name", WAN)
def test_bf16_is_no_worse_than_untiled(vaes, name):
    vae, z = vaes[name], latent(vaes[name], 17, 13)
    want = vae.decode(z).sample
    half = tiny(name).bfloat16()
    own = half.decode(z.bfloat16()).sample.float() - want
    for lean in (True, False):
        ours = decode(half, z.bfloat16(), mode="exact", tile=6, lean=lean, progress=False).float() - want
        assert ours.square().mean() <= 1.5**2 * own.square().mean()


def test_no_line_at_a_tile_edge(vaes):
    vae = vaes["qwen-image"]
    z = latent(vae, 24, 24)
    want = vae.decode(z).sample[:, :, 0]
    got = decode(vae, z, mode="exact", tile=8, progress=False)[:, :, 0]
    assert line_score(got) == pytest.approx(line_score(want), rel=1e-3)


def test_batches_are_independent(vaes):
    vae = vaes["qwen-image"]
    z = latent(vae, 12, 9, batch=3)
    together = decode(vae, z, mode="exact", tile=5, progress=False)
    for i in range(3): assert torch.equal(together[i:i + 1], decode(vae, z[i:i + 1], mode="exact", tile=5, progress=False))


def test_one_shape_a_canvas(vaes):
    "All tiles of a canvas have one shape: one search for a convolution algorithm."
    vae, shapes = vaes["qwen-image"], set()
    real = torch.nn.functional.conv2d

    def watch(x, w, *args, **kwargs): shapes.add((tuple(w.shape), tuple(x.shape[-2:]))); return real(x, w, *args, **kwargs)

    p = plan(vae, 31 * 8, 29 * 8, mode="exact", tile=9, dtype=torch.float32, lean=False)
    torch.nn.functional.conv2d = watch
    try: decode(vae, latent(vae, 31, 29), plan=p, progress=False)
    finally: torch.nn.functional.conv2d = real
    assert len({s for _, s in shapes}) <= len({k for k, _ in shapes}) + 8


def test_work_grows_smoothly_past_a_tile():
    "One latent more does not double the work: tiles are as large as the memory of one stock tile allows."
    one = plan("qwen-image", 256, 256, mode="untiled", free="64GiB").peak_bytes
    works = [plan("qwen-image", s * 8, s * 8, mode="exact", free=int(one * 1.25)).work_ratio * s**2 for s in range(31, 37)]
    assert all(b <= a * 1.35 for a, b in zip(works, works[1:])), works


@pytest.mark.parametrize("op,frames", [("decode", 3), ("encode", 9)])
def test_a_video_is_planned_with_its_frames(op, frames):
    "Whole maps of all frames, caches between chunks, one film at the end: the followed peak is the predicted one."
    vae = tiny("qwen-image")
    x = torch.randn((1, 16, frames, 12, 18) if op == "decode" else (1, 3, frames, 96, 144))
    run = lambda p: decode(vae, x, plan=p, progress=False) if op == "decode" else encode(vae, x, plan=p, progress=False).parameters
    want, peak = (vae.decode(x).sample if op == "decode" else vae.encode(x).latent_dist.parameters), None
    for part in (None, .5):
        budget = dict(mode="untiled", free="64GiB") if part is None else dict(free=int(part * peak * HEADROOM))
        p = plan(vae, 96, 144, dtype=x.dtype, op=op, frames=frames, **budget)
        with Follow() as follow: got = run(p)
        assert worst(got, want) <= PLAIN
        assert p.path == ("untiled" if part is None else "exact") and p.fits and not p.lean
        assert follow.peak <= p.peak_bytes <= 1.01 * (follow.peak + x.nbytes)  # what comes in is planned for, and not followed
        peak = p.peak_bytes
    assert plan(vae, 96, 144, mode="untiled", op=op, dtype=x.dtype, lean=False).peak_bytes < peak  # one frame
    blended = [plan(vae, 512, 512, mode="blend", free="64GiB", dtype=x.dtype, op=op, frames=n).peak_bytes for n in (1, frames)]
    assert blended[1] > 2 * blended[0]


def test_a_video_for_a_class_of_single_frames():
    with pytest.raises(ValueError, match="single causal frame|single frame"): plan("qwen-image-2.1", 256, 256, frames=3, free="1GiB")


@pytest.mark.parametrize("name,mode", [("qwen-image", "exact"), ("flux1", "shared"), ("qwen-image", "untiled")])
def test_rows_for_a_sink(name, mode):
    "Bands from the top down, every row once, the same picture."
    vae = tiny(name)
    z = latent(vae, 21, 14)
    kw = dict(mode=mode, tile=None if mode == "untiled" else 8, progress=False)
    want, bands = decode(vae, z, **kw), []
    assert decode(vae, z, sink=lambda y, rows: bands.append((y, rows.clone())), **kw) is None
    assert [y for y, _ in bands] == [sum(r.shape[-2] for _, r in bands[:i]) for i in range(len(bands))]
    assert torch.equal(torch.cat([r for _, r in bands], -2), want[:, :, 0] if want.ndim == 5 else want)
    assert mode == "untiled" or len(bands) > 1
    with pytest.raises(ValueError, match="one picture"): decode(vae, latent(vae, 4, 4, batch=2), sink=print)
    with pytest.raises(ValueError, match="has no rows to give"): decode(vae, z, mode="blend", tile=8, sink=print)
