"Install, the contract with diffusers, the ladder, and state that never leaks."
import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch

import vae_tiles.installing as installing
from vae_tiles.fixtures import DEMOS, as_input, demo_vae, latent_shape, photo, spatial_ratio, tiny
from vae_tiles.installing import METHODS, decode, encode, install, read_geometry
from vae_tiles.metrics import line_score, psnr, worst_window
from vae_tiles.vaes import TILING, tiling

FAMILIES = ["flux1", "sdxl", "flux2", "qwen-image", "qwen-image-2.1", "hunyuan-image-2.1", "wan"]
WAN = ["qwen-image", "qwen-image-2.1", "wan"]
ROUNDING = 5e-5  # of the standard deviation: fp32 sums in another order through some 30 random layers; a seam is above 1e-2


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


def state(vae): return {a: vae.__dict__.get(a, "absent") for a in (*TILING, *METHODS)}


def latent(vae, h=7, w=5, batch=1):
    r = spatial_ratio(vae)
    return torch.randn(latent_shape(vae, h * r, w * r, batch), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_contract(name):
    vae, plain = tiny(name), tiny(name)
    z = latent(vae, batch=2)
    want = plain.decode(z)
    with install(vae, progress=False) as handle:
        got = vae.decode(z)
        assert type(got) is type(want) and got.sample.dtype == want.sample.dtype and got.sample.shape == want.sample.shape
        assert (got.sample - want.sample).abs().max() <= ROUNDING * want.sample.std()
        (t,) = vae.decode(z, return_dict=False)
        assert torch.equal(t, got.sample)
        vae.use_slicing = True
        assert torch.equal(vae.decode(z).sample, got.sample)
        vae.use_slicing = False
        x = want.sample.clamp(-1, 1)
        e, w = vae.encode(x), plain.encode(x)
        assert type(e) is type(w) and type(e.latent_dist) is type(w.latent_dist)
        assert (e.latent_dist.mean - w.latent_dist.mean).abs().max() <= ROUNDING * w.latent_dist.mean.std()
        assert vae.encode(x, return_dict=False)[0].mean.shape == w.latent_dist.mean.shape
        assert handle.last.op == "encode" and handle.last.seconds > 0
    assert all(m not in vae.__dict__ for m in METHODS)
    assert torch.equal(vae.decode(z).sample, want.sample)


def test_installing_twice_is_one_install():
    vae = tiny("qwen-image")
    before = state(vae)
    install(vae)
    second = install(vae, mode="blend")
    second.uninstall()
    assert state(vae) == before
    second.uninstall()
    assert state(vae) == before


def test_copies_and_pickles_are_stock():
    vae = tiny("flux1")
    z = latent(vae)
    want = vae.decode(z).sample
    with install(vae):
        for other in (copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))):
            assert other.decode.__self__ is other and torch.equal(other.decode(z).sample, want)


def test_nothing_of_ours_is_saved(tmp_path):
    vae = tiny("flux1")
    vae.save_pretrained(tmp_path / "plain")
    with install(vae): vae.save_pretrained(tmp_path / "installed")
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "installed" / name).read_bytes()


def test_a_pipeline():
    class Pipe: vae = tiny("flux1")
    with install(Pipe()) as handle: assert handle.vae is Pipe.vae
    with pytest.raises(ValueError, match="neither a VAE"): install(object())


@pytest.mark.parametrize("name", ["qwen-image", "flux1"])
def test_the_switches_keep_their_meaning(name):
    vae = tiny(name, **({"sample_size": 256} if name == "flux1" else {}))
    z, small = latent(vae, 40, 33), latent(vae, 9, 9)
    with install(vae, progress=False) as handle:
        vae.enable_tiling()
        vae.decode(z)
        assert handle.last.calls > 1
        vae.decode(small)
        assert handle.last.path == "untiled"  # within one tile
        vae.disable_tiling()
        vae.decode(z)
        assert handle.last.path == "untiled"
        vae.tiled_decode(z)
        assert handle.last.calls > 1
        moments = vae.tiled_encode(torch.randn(vae.decode(z).sample.shape))
        assert handle.last.op == "encode" and handle.last.calls > 1
        assert getattr(moments, "latent_dist", moments) is not None


@pytest.mark.parametrize("name", ["qwen-image", "wan"])
def test_video(name):
    vae = tiny(name)
    z = torch.randn(1, 16, 3, 11, 9)
    want = vae.decode(z).sample
    moments = vae.encode(want).latent_dist.parameters
    for mode, tile in (("exact", 4), ("blend", None), ("auto", None)):
        assert (decode(vae, z, mode=mode, tile=tile) - want).abs().max() <= ROUNDING * want.std()
        assert (encode(vae, want, mode=mode, tile=tile).parameters - moments).abs().max() <= ROUNDING * moments.std()


def test_video_in_wide_tiles():
    vae, z = tiny("qwen-image"), torch.randn(1, 16, 2, 40, 20)
    out = decode(vae, z, mode="blend", free=0, progress=False)
    assert out.shape == (1, 3, 5, 320, 160) and out.isfinite().all()


@pytest.mark.parametrize("name", ["flux1", "sdxl", "flux2"])
def test_blend_is_stock_where_stock_meets_the_floor(name):
    vae = tiny(name, sample_size=256)  # 32-latent tiles with 8-latent overlaps never meet it
    big = tiny(name, sample_size=512)  # 64 with 16: of 128 latents, the last tile has 32
    z = latent(big, 128, 128)
    with tiling(big): want = big.decode(z).sample
    assert torch.equal(decode(big, z, mode="blend", progress=False), want)
    with install(big, mode="blend", progress=False) as handle:
        big.enable_tiling()
        assert torch.equal(big.decode(z).sample, want) and handle.last.path == "stock"
    assert not read_geometry(vae).stock_stays(56, 56)


@pytest.mark.parametrize("name", ["qwen-image", "qwen-image-2.1", "hunyuan-image-2.1"])
def test_seams_fall_on_trained_vaes(name):
    vae = demo_vae(name)
    r = spatial_ratio(vae)
    h, w = {8: (72, 72), 16: (48, 48), 32: (36, 13)}[r]
    z = vae.encode(as_input(photo("seeding", h * r, w * r), vae)).latent_dist.mode()
    whole = vae.decode(z).sample
    with tiling(vae, tile_size=None): stock = vae.decode(z).sample
    wide = decode(vae, z, mode="blend", tile=48 if r == 8 else 32, progress=False)
    pick = lambda x: x.reshape(1, -1, h * r, w * r)[:, :3]
    gain = 0 if r == 8 else 3  # published: 38.0 to 38.6, 35.7 to 50.6, 21.8 to 28.3 or untiled
    assert psnr(pick(wide), pick(whole)) > psnr(pick(stock), pick(whole)) + gain
    assert worst_window(pick(wide), pick(whole)) < worst_window(pick(stock), pick(whole))
    assert line_score(pick(wide)) < line_score(pick(stock))


def test_clamped_as_untiled_is():
    vae = tiny("qwen-image")
    vae.decoder.conv_out.weight.data *= 50
    for mode in ("stock", "blend", "exact", "untiled"):
        out = decode(vae, latent(vae, 40, 36), mode=mode, tile=16 if mode in ("exact", "blend") else None, progress=False)
        assert out.min() >= -1 and out.max() <= 1


def test_hunyuan_encodes_in_tiles():
    vae = tiny("hunyuan-image-2.1")
    x = torch.rand(1, 3, 20 * 32, 14 * 32) * 2 - 1
    want = vae.encode(x).latent_dist.mean
    for mode in ("stock", "blend"):
        got = encode(vae, x, mode=mode, progress=False).mean
        assert got.shape == want.shape and got.isfinite().all()


def test_blend_widths_are_in_the_right_unit():
    "A local encoder makes seamless latents in any tiles: blending in pixels where latents are meant would show at once."
    vae = tiny("qwen-image")
    x = torch.rand(1, 3, 1, 800, 800)
    pool = lambda t: torch.nn.functional.avg_pool3d(t, (1, 8, 8)).repeat(1, 11, 1, 1, 1)[:, :32]
    layout = read_geometry(vae).wide(100, 100)
    got = installing.blend(pool, x, layout, 8, 1)
    assert (got - pool(x)).abs().max() < 1e-6


def test_progress_and_cancel():
    vae, seen = tiny("qwen-image"), []
    z = latent(vae, 40, 40)
    decode(vae, z, mode="exact", tile=16, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 9) for i in range(1, 10)]
    before, calls = state(vae), []

    class Stop(Exception): pass

    def stop(done, total): calls.append(done); raise Stop

    for mode, tile in (("exact", 16), ("blend", 24)):
        calls.clear()
        with pytest.raises(Stop): decode(vae, z, mode=mode, tile=tile, progress=stop)
        assert calls == [1] and state(vae) == before


def test_decode_and_encode_have_their_own_tiles():
    vae = tiny("qwen-image")
    with install(vae, mode="exact", tile=16, encode_tile=32, progress=False) as handle:
        x = vae.decode(latent(vae, 40, 40)).sample
        assert handle.last.tile == (14, 14)  # three tiles of at most 16 cover 40 latents
        vae.encode(x)
        assert handle.last.tile == (20, 20)


def test_uncopied_latents_and_untouched_state():
    vae = tiny("qwen-image")
    z = latent(vae, 40, 24)
    kept, before = z.clone(), state(vae)
    for mode in ("auto", "exact", "blend", "stock", "untiled"):
        decode(vae, z, mode=mode, tile=16 if mode in ("exact", "blend") else None, progress=False)
        assert torch.equal(z, kept) and state(vae) == before


@pytest.mark.parametrize("bad,words", [
    (dict(mode="fast"), "mode='fast'"), (dict(tile=0), "tile=0"), (dict(tile_size=float("nan")), "number of pixels"),
    (dict(free="12 parsecs"), "parsecs"), (dict(tile=3, tile_size=256), "give one"), (dict(mode="shared"), "mode='shared'"),
])
def test_refused_options(bad, words):
    vae = tiny("qwen-image")
    before = state(vae)
    with pytest.raises(ValueError, match=words): install(vae, **bad)
    assert state(vae) == before


@pytest.mark.parametrize("shape,words", [
    ((1, 16, 8, 8), "5 dimensions"), ((1, 4, 1, 8, 8), "4 channels"), ((1, 16, 1, 0, 8), "side of zero"),
])
def test_refused_latents(shape, words):
    vae = tiny("qwen-image")
    with install(vae), pytest.raises(ValueError, match=words): vae.decode(torch.zeros(shape))
    with pytest.raises(ValueError, match=words): decode(vae, torch.zeros(shape))


def test_off(monkeypatch):
    vae = tiny("qwen-image")
    before = state(vae)
    handle = install(vae)
    monkeypatch.setenv("VAE_TILES", "0")
    assert torch.equal(vae.decode(z := latent(vae)).sample, tiny("qwen-image").decode(z).sample) and handle.last is None
    handle.uninstall()
    with install(vae): assert state(vae) == before


def test_max_tile(monkeypatch):
    vae = tiny("qwen-image")
    monkeypatch.setenv("VAE_TILES_MAX_TILE", "12")
    with install(vae, progress=False) as handle:
        vae.decode(latent(vae, 40, 40))
        assert max(handle.last.tile) <= 12
    monkeypatch.setenv("VAE_TILES_MAX_TILE", "many")
    with pytest.raises(ValueError, match="VAE_TILES_MAX_TILE='many'"): decode(vae, latent(vae))


class Fails:
    "Stands for `run_plan`: runs out of memory the first `n` times, holding a tensor in its frame as a real one would."

    def __init__(self, monkeypatch, n):
        self.n, self.plans, self.held = n, [], []
        self.real = installing.run_plan
        monkeypatch.setattr(installing, "run_plan", self)

    def __call__(self, plan, vae, x, options):
        gc.collect()
        assert all(ref() is None for ref in self.held), "the try before still holds its tensors"
        self.plans.append(plan)
        if len(self.plans) > self.n: return self.real(plan, vae, x, options)
        big = torch.zeros(1000)
        self.held.append(weakref.ref(big))
        try: raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as e: raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED") from e


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen-image", "flux1", "hunyuan-image-2.1"])
def test_ladder(monkeypatch, caplog, name, n):
    vae = tiny(name)
    z = latent(vae, *((16, 12) if spatial_ratio(vae) == 32 else (48, 40)))
    want, before = vae.decode(z).sample, state(vae)
    fails = Fails(monkeypatch, n)
    try: got = decode(vae, z, progress=False)
    except torch.OutOfMemoryError as e:
        assert "out of memory in every plan" in str(e) and len(fails.plans) <= n
    else: assert got.shape == want.shape and len(fails.plans) == n + 1
    peaks = [p.peak_bytes for p in fails.plans]
    assert all(b < a for a, b in zip(peaks, peaks[1:])), peaks  # each try strictly smaller
    assert state(vae) == before
    assert sum("out of memory in" in r.message for r in caplog.records) == min(n, len(fails.plans))


def test_freeing_comes_first(monkeypatch):
    vae, order = tiny("qwen-image"), []
    fails = Fails(monkeypatch, 2)
    decode(vae, latent(vae, 40, 40), progress=False, free_memory=lambda: order.append(len(fails.plans)))
    assert order == [1] and fails.plans[0] == fails.plans[1] and fails.plans[2].peak_bytes < fails.plans[1].peak_bytes


def test_other_errors_go_through(monkeypatch):
    vae = tiny("qwen-image")
    error = KeyError("not about memory")

    def fail(*args): raise error

    monkeypatch.setattr(installing, "run_plan", fail)
    with pytest.raises(KeyError) as caught: decode(vae, latent(vae))
    assert caught.value is error


def test_unknown_geometry_is_said_once(caplog):
    vae = tiny("flux1")
    del vae.tile_latent_min_size
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        with install(vae, progress=False): assert torch.isfinite(vae.decode(latent(vae)).sample).all()
    assert sum("no tile geometry" in r.message for r in caplog.records) == 1


def test_gradients_take_the_class_own_way():
    vae = tiny("flux1")
    with install(vae), torch.enable_grad():
        z = latent(vae).requires_grad_()
        vae.decode(z).sample.sum().backward()
        assert z.grad is not None and z.grad.abs().sum() > 0


def test_every_demo_vae_is_installable():
    for name in DEMOS:
        with install(demo_vae(name), progress=False) as handle:
            handle.vae.decode(latent(handle.vae, 3, 2))
