"Scoped tiling: exact sizes at every tile size, and attributes that always come back."
import threading

import pytest
import torch

from vae_tiles.fixtures import tiny
from vae_tiles.vaes import TILING, check_image, check_latent, read_geometry, resolve_tile, tiling, vae_of

AWKWARD = [(16, 16), (80, 80), (400, 400), (272, 144), (1024, 576), (144, 272), (1200, 80), (64, 64)]  # pixels
SIZES = [0, *range(8, 1025, 8)]  # pixels
WAN = ["qwen-image", "qwen-image-2.1", "wan"]


def state(vae): return {a: vae.__dict__.get(a, "absent") for a in TILING}


def hollow(name):
    "A VAE on the meta device whose networks only make the right shapes, so that the stock loops can be run by the thousand."
    vae = tiny(name).to("meta")
    r = read_geometry(vae).ratio
    vae.quant_conv = vae.post_quant_conv = torch.nn.Identity()

    class Net(torch.nn.Module):
        def __init__(self, channels, scale): super().__init__(); self.channels, self.scale = channels, scale
        def forward(self, x, **kwargs):
            h, w = (int(n * self.scale) for n in x.shape[-2:])
            return x.new_empty(1, self.channels, *x.shape[2:-2], h, w)

    vae.decoder, vae.encoder = Net(3, r), Net(2 * (getattr(vae.config, "latent_channels", None) or vae.config.z_dim), 1 / r)
    vae._cached_conv_counts = {"decoder": 0, "encoder": 0}
    vae.blend_v = vae.blend_h = lambda a, b, extent: b  # blends do not change a shape
    return vae, r


@pytest.mark.parametrize("name", WAN)
def test_exact_size_at_every_tile_size(name):
    "The stock loops under our geometry give every pixel."
    vae, r = hollow(name)
    for size in SIZES:
        geometry = resolve_tile(vae, size)
        for h, w in AWKWARD:
            h, w = h // r, w // r
            if geometry.one_tile(h, w): continue  # an untiled call
            with torch.no_grad(), tiling(vae, tile_size=size):
                out = vae.decode(torch.empty(1, vae.config.z_dim, 1, h, w, device="meta")).sample
                assert out.shape[-2:] == (h * r, w * r), (size, h, w)
                mean = vae.encode(torch.empty(1, 3, 1, h * r, w * r, device="meta")).latent_dist.mean
                assert mean.shape[-2:] == (h, w), (size, h, w)


@pytest.mark.parametrize("name", WAN)
@pytest.mark.parametrize("size,h,w", [(72, 80, 80), (80, 144, 272), (64, 16, 16), (128, 400, 400)])
def test_exact_size_for_real(name, size, h, w):
    vae = tiny(name)
    r, image = read_geometry(vae).ratio, 4 if name == "qwen-image-2.1" else 3
    h, w = h // r, w // r
    with torch.no_grad(), tiling(vae, tile_size=size):
        assert vae.decode(torch.randn(1, vae.config.z_dim, 1, h, w)).sample.shape[-2:] == (h * r, w * r)
        assert vae.encode(torch.randn(1, image, 1, h * r, w * r)).latent_dist.mean.shape[-2:] == (h, w)


@pytest.mark.parametrize("name", ["flux1", "flux2", "hunyuan-image-2.1"])
def test_exact_size_kl(name):
    vae, r = hollow(name)
    for size in range(0, 1025, 24):
        for h, w in ((24, 24), (33, 17), (50, 5)):  # latents
            with torch.no_grad(), tiling(vae, tile_size=size):
                out = vae.decode(torch.empty(1, vae.config.latent_channels, h, w, device="meta")).sample
            assert out.shape[-2:] == (h * r, w * r), (size, h, w)


def test_work_stays_near_twice_the_canvas():
    vae = tiny("qwen-image")
    def work(size):
        layout = resolve_tile(vae, size).stock(180, 320)
        return layout.calls * layout.area / (180 * 320)
    assert work(256) == pytest.approx(1.99, abs=.01)  # published, 2560 x 1440 px
    assert max(work(size) for size in SIZES if size <= 512) < 3.2  # the last row and column at full size


@pytest.mark.parametrize("name", ["flux1", "qwen-image", "hunyuan-image-2.1", "flux2", "qwen-image-2.1", "wan"])
def test_state_comes_back(name):
    vae = tiny(name)
    r, channels = read_geometry(vae).ratio, getattr(vae.config, "latent_channels", None) or vae.config.z_dim
    z = torch.randn(1, channels, *([1] if name in WAN else []), 6, 5)
    if name in WAN: vae.tile_sample_min_height, vae.tile_sample_stride_height = 512, 384  # foreign geometry, left behind
    else: vae.tile_latent_min_size = 64
    before = state(vae)
    with torch.no_grad():
        plain = vae.decode(z).sample
        with tiling(vae, tile_size=64): vae.decode(z)
        assert state(vae) == before
        with pytest.raises(KeyError), tiling(vae, tile_size=128): raise KeyError
        assert state(vae) == before
        with tiling(vae, tile_size=64):
            outer = state(vae)
            with tiling(vae, tile_size=256): pass
            with tiling(vae, enabled=False): assert not vae.use_tiling
            assert state(vae) == outer
        assert state(vae) == before
        assert torch.equal(vae.decode(z).sample, plain)
    assert resolve_tile(vae, 0) == resolve_tile(tiny(name), None)  # what was left behind plays no part
    assert r * z.shape[-2] == plain.shape[-2]


def test_forced(monkeypatch):
    vae = tiny("qwen-image")
    monkeypatch.setenv("VAE_TILES_FORCE", "1")
    with tiling(vae, enabled=False): assert vae.use_tiling
    monkeypatch.setenv("VAE_TILES_FORCE", "0")
    with tiling(vae, enabled=False): assert not vae.use_tiling


def test_scopes_of_two_threads_take_turns():
    vae, seen = tiny("qwen-image"), []

    def scope(size):
        for _ in range(50):
            with tiling(vae, tile_size=size): seen.append((size, vae.tile_sample_min_height, vae.tile_sample_stride_width))

    threads = [threading.Thread(target=scope, args=(s,)) for s in (64, 128, 512)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert {(s, s, s * 3 // 4) for s in (64, 128, 512)} == set(seen)


@pytest.mark.parametrize("name,shape", [("flux1", (1, 16, 1, 8, 8)), ("qwen-image", (1, 16, 8, 8)), ("flux1", (1, 3, 8, 8)),
                                        ("qwen-image", (1, 4, 1, 8, 8)), ("flux1", (1, 16, 8, 0)), ("flux1", (16, 8, 8))])
def test_refused_latents(name, shape):
    vae = tiny(name)
    before = state(vae)
    with pytest.raises(ValueError, match=r"latent of shape \("): check_latent(vae, torch.zeros(shape))
    assert state(vae) == before


@pytest.mark.parametrize("shape,words", [
    ((1, 3, 65, 64), "crop to 64 x 64"), ((1, 4, 64, 64), "4 channels"), ((3, 64, 64), "4 dimensions"),
])
def test_refused_images(shape, words):
    with pytest.raises(ValueError, match=words): check_image(tiny("flux1"), torch.zeros(shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), "256", [256], True, None.__class__])
def test_refused_tile_sizes(bad):
    vae = tiny("flux1")
    before = state(vae)
    with pytest.raises(ValueError, match="a number of pixels"):
        with tiling(vae, tile_size=bad): pass
    assert state(vae) == before


def test_vae_of_a_pipeline():
    class Pipe: vae = tiny("flux1")
    assert vae_of(Pipe()) is Pipe.vae and vae_of(Pipe.vae) is Pipe.vae
    with pytest.raises(ValueError, match="neither a VAE"): vae_of(object())


@pytest.mark.parametrize("size,tile,stride", [
    (72, 72, 48), (80, 80, 56), (64, 64, 48), (8, 64, 48), (256, 256, 192), (100, 96, 72), (0, 256, 192), (-1, 256, 192),
])
def test_the_stride_is_three_quarters_rounded_down(size, tile, stride):
    g = resolve_tile(tiny("qwen-image"), size)
    assert (g.tile[0] * 8, g.stride[0] * 8) == (tile, stride)
