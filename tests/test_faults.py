"Memory that runs out at any allocation, odd classes, odd geometry, and any size: the right image or the true error."
import logging

import pytest
import torch
from hypothesis import given, settings, strategies as st

from vae_tiles.blending import tile_weights
from vae_tiles.fixtures import latent_shape, spatial_ratio, tiny
from vae_tiles.geometry import Layout, wide_axis
from vae_tiles.installing import METHODS, decode, encode, install
from vae_tiles.peaks import Follow, is_oom
from vae_tiles.vaes import TILING, read_geometry, tiling

NAMES = ["flux1", "sdxl", "flux2", "qwen-image", "qwen-image-2.1", "hunyuan-image-2.1", "wan"]
WHERE = {"qwen-image": dict(mode="exact", tile=3), "flux1": dict(mode="shared", tile=3), "hunyuan-image-2.1": dict(mode="auto")}
SEAM = 5e-5  # of the standard deviation: fp32 through some 30 random layers


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "vae_tiles")
    with torch.no_grad(): yield


@pytest.fixture(scope="module")
def vaes(): return {name: tiny(name) for name in NAMES}


def state(vae): return {a: vae.__dict__.get(a, "absent") for a in (*TILING, *METHODS)}


def latent(vae, h, w):
    r = spatial_ratio(vae)
    return torch.randn(latent_shape(vae, h * r, w * r), generator=torch.Generator().manual_seed(h * 50 + w))


@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("name", WHERE)
def test_memory_runs_out_at_any_allocation(vaes, name, op):
    "One allocation refused: a smaller plan gives an image of the right size; the untiled one where nothing was tiled smaller."
    vae = vaes[name]
    z = latent(vae, 4, 5)
    want = vae.decode(z).sample
    x, call = (z, decode) if op == "decode" else (want.clamp(-1, 1), lambda *a, **kw: encode(*a, **kw).parameters)
    kw = dict(WHERE[name] if op == "decode" or name == "qwen-image" else {}, progress=False, free="64GiB")
    good = call(vae, x, **kw)
    before = state(vae)
    with Follow() as follow: call(vae, x, **kw)
    held = follow.count
    for k in range(1, held + 1, max(1, held // 60)):  # every kind of step: each k on a stride that sixty tries allow
        with Follow(fail_at=k) as follow:
            try: got = call(vae, x, **kw)
            except Exception as e: assert is_oom(e), e
            else: assert got.shape == good.shape and got.isfinite().all()
            got = None
            assert follow.now == 0, f"allocation {k}: {follow.now} bytes left behind"
        assert state(vae) == before
    assert torch.equal(call(vae, x, **kw), good)


def test_an_error_in_a_tile_leaves_nothing(vaes):
    vae, calls = vaes["qwen-image"], []
    z, before = latent(vae, 12, 12), state(vaes["qwen-image"])

    def stop(done, total):
        calls.append(done)
        if done == 2: raise KeyboardInterrupt

    with Follow() as follow:
        with pytest.raises(KeyboardInterrupt): decode(vae, z, mode="exact", tile=6, progress=stop)
        assert follow.now == 0 and calls == [1, 2] and state(vae) == before


def test_weights_add_up_where_overlaps_cross():
    layout, total = Layout(wide_axis(50), wide_axis(75)), torch.zeros(400, 600)
    for ((y0, y1), (x0, x1)), (r, c) in zip(layout.tiles(), tile_weights(layout, 8)): total[y0 * 8:y1 * 8, x0 * 8:x1 * 8] += r * c
    assert (total - 1).abs().max() < 1e-6


def test_the_refiner_gives_the_right_size():
    "diffusers' own tiled decode of HunyuanImage's refiner gives 9x9 pixels' worth where 16x16 is right."
    from diffusers import AutoencoderKLHunyuanImageRefiner
    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanImageRefiner(latent_channels=32, block_out_channels=(64, 64, 64, 64, 64), layers_per_block=1).eval()
    z = torch.randn(1, 32, 1, 20, 18)
    want = vae.decode(z).sample.shape
    with install(vae, mode="blend", tile=16, progress=False): assert vae.decode(z).sample.shape == want


def test_patches_and_missing_quant_convolutions():
    from vae_tiles.fixtures import config, vae_class
    c = {**config("wan"), "base_dim": 8, "num_res_blocks": 1, "patch_size": 2, "scale_factor_spatial": 16, "in_channels": 12,
         "out_channels": 12, "is_residual": True, "decoder_base_dim": 8}
    torch.manual_seed(0)
    patched = vae_class(c).from_config(c).eval().requires_grad_(False)
    for vae, shape in ((patched, (1, 3, 1, 224, 160)), (tiny("flux1"), (1, 3, 160, 224))):
        x = torch.rand(shape) * 2 - 1
        moments = vae.encode(x).latent_dist.parameters
        z = moments[:, :moments.shape[1] // 2]
        want = vae.decode(z).sample
        with install(vae, tile=6, progress=False) as handle:
            got = vae.encode(x).latent_dist.parameters
            assert handle.last.path in ("exact", "shared") and got.shape == moments.shape and got.isfinite().all()
            if handle.last.path == "exact": assert (got - moments).abs().max() <= SEAM * moments.std()
            got = vae.decode(z).sample
            assert got.shape == want.shape == torch.Size(shape) and got.isfinite().all()


@pytest.mark.parametrize("name", ["qwen-image", "flux1"])
def test_tile_then_stride_leak(name):
    "diffusers' bugs 1 and 2: a tile below the inherited stride gives a smaller picture, and stays; not once installed."
    vae = tiny(name)
    z = latent(vae, 40, 40)
    if name == "qwen-image": vae.enable_tiling(tile_sample_min_height=128, tile_sample_min_width=128)
    with tiling(vae, tile_size=128): assert vae.decode(z).sample.shape[-2:] == (320, 320)
    with install(vae, progress=False): assert vae.decode(z).sample.shape[-2:] == (320, 320)
    vae.enable_tiling()
    with install(vae, progress=False): assert vae.decode(z).sample.shape[-2:] == (320, 320)


@pytest.mark.parametrize("free", [0, "0", "1KiB"])
@pytest.mark.parametrize("name", ["qwen-image", "flux1", "hunyuan-image-2.1"])
def test_no_memory_still_gives_an_image(vaes, name, free):
    vae = vaes[name]
    z = latent(vae, 34, 9)
    assert decode(vae, z, free=free, progress=False).shape == vae.decode(z).sample.shape


@pytest.mark.parametrize("free", [-1, float("nan"), float("inf"), "12 parsecs", "nan"])
def test_pathological_memory_is_refused(vaes, free):
    vae = vaes["qwen-image"]
    before = state(vae)
    with pytest.raises(ValueError): decode(vae, latent(vae, 4, 4), free=free)
    with pytest.raises(ValueError): install(vae, free=free)
    assert state(vae) == before


@settings(max_examples=25, deadline=None, derandomize=True)
@given(name=st.sampled_from(NAMES), h=st.integers(1, 14), w=st.integers(1, 14), tile=st.none() | st.integers(1, 20),
       mode=st.sampled_from(["auto", "untiled", "blend", "stock"]))
def test_any_size_is_exact(vaes, name, h, w, tile, mode):
    vae = vaes[name]
    z, r = latent(vae, h, w), spatial_ratio(vae)
    image = decode(vae, z, mode=mode, tile=tile, progress=False)
    assert image.shape[-2:] == (h * r, w * r) and image.isfinite().all()
    assert encode(vae, image.clamp(-1, 1), mode=mode, tile=tile, progress=False).mean.shape[-2:] == (h, w)
    assert read_geometry(vae) is not None
