"""FLUX.1's autoencoder in its original layout: shapes, state, equality, memory, loading."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from vae_tiles import estimate_decode, estimate_encode, flux_ae
from vae_tiles.fixtures import demo_vae, photo
from vae_tiles.flux_ae import AutoEncoder, Params, from_diffusers, load_autoencoder, read_params, retry_tiled, scoped_tiling
from vae_tiles.peaks import Follow

SMALL = Params(ch=8, groups=4)


def made(params=SMALL):
    torch.manual_seed(0)
    return AutoEncoder(params).eval().requires_grad_(False)


def trained():
    net = demo_vae("flux1")
    weights = from_diffusers(net.state_dict())
    c = net.config
    ae = AutoEncoder(replace(read_params(weights), groups=c.norm_num_groups, scale_factor=c.scaling_factor, shift_factor=c.shift_factor))
    ae.load_state_dict(weights)
    return net, ae.eval().requires_grad_(False)


def noise(h, w, batch=1, seed=0):
    return torch.randn(batch, 16, h, w, generator=torch.Generator().manual_seed(seed))


def test_equal_to_diffusers():
    net, ae = trained()
    z = noise(12, 9)
    x = torch.rand(1, 3, 96, 72, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        assert (ae.decode(z) - net.decode(ae.unscaled(z)).sample).abs().max() < 5e-5  # rounding of 30 layers in fp32
        want = ae.scaled(net.encode(x).latent_dist.parameters).chunk(2, 1)[0]
        assert (ae.encode(x) - want).abs().max() < 5e-5


@pytest.mark.parametrize("canvas", [(32, 32), (40, 24), (37, 29), (16, 50)])
def test_identity_norms_make_tiles_exact(canvas):
    """Without GroupNorm and attention all is local: tiles with halos see all that a pixel depends on."""
    ae = made()
    for half in (ae.encoder, ae.decoder):
        for parent in list(half.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, (nn.GroupNorm, flux_ae.AttnBlock)): setattr(parent, name, nn.Identity())
    z = noise(*canvas)
    want = ae.decode(z)
    for mode in ("exact", "auto"):
        ae.enable_tiling(128, overlap=64, mode=mode)
        assert (ae.decode(z) - want).abs().max() <= 1e-6


@pytest.mark.parametrize("tile", [128, 136, 160, 200, 256, 384, 0])
def test_exact_shape_of_49_combinations(tile):
    ae = made()
    for (h, w), mode in product([(16, 16), (17, 16), (19, 33), (40, 7), (1, 37), (31, 31), (64, 23)], ["blend"]):
        ae.enable_tiling(tile, mode=mode)
        assert ae.decode(noise(h, w)).shape == (1, 3, 8 * h, 8 * w)


def test_within_a_tile_untouched_and_untiled_repeatable():
    ae, z = made(), noise(20, 20)
    first, second = ae.decode(z), ae.decode(z)
    assert torch.equal(first, second)
    ae.enable_tiling(256)
    assert torch.equal(ae.decode(z), first)
    ae.enable_tiling(128, mode="blend")
    ae.decode(z)
    ae.disable_tiling()
    assert torch.equal(ae.decode(z), first)


@pytest.mark.parametrize("mode", ["blend", "auto"])
def test_batch_is_independent(mode):
    ae, z = made(), noise(24, 20, batch=2)
    ae.enable_tiling(128, mode=mode)
    both = ae.decode(z)
    assert torch.equal(both[1:], ae.decode(z[1:]))


def test_scopes_put_everything_back():
    ae, other = made(), made()
    other.enable_tiling(256, overlap=32)
    before, beside = dict(vars(ae)), dict(vars(other))
    with scoped_tiling(ae, 128), scoped_tiling(other, 384):
        assert ae.use_tiling and ae.tile_latent_min_size == 16 and other.tile_latent_min_size == 48
    assert vars(ae) == before and vars(other) == beside
    with scoped_tiling(other, enabled=False): assert not other.use_tiling
    assert vars(other) == beside
    with pytest.raises(KeyError), scoped_tiling(ae, 128): raise KeyError("in the block")
    assert vars(ae) == before


@pytest.mark.parametrize("make", [made, lambda: demo_vae("flux1")])
def test_retry_once_in_tiles(make):
    vae, tries = make(), []
    def fn():
        tries.append(vae.use_tiling)
        if not vae.use_tiling: raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"
    assert retry_tiled(vae, fn, 256) == "done" and tries == [False, True] and not vae.use_tiling
    def wrong(): raise KeyError("another error")
    with pytest.raises(KeyError): retry_tiled(vae, wrong)


def peak_of(ae, op, x):
    with torch.no_grad(), Follow() as follow: y = getattr(ae, op)(x)
    return follow.peak, y.numel() * y.element_size()


def test_peak_is_flat_from_1024_to_4096():
    ae = made(Params(ch=4, groups=4, ch_mult=(1, 2, 2, 2), num_res_blocks=1))
    ae.enable_tiling(512, mode="blend")
    beside = []
    for n in (1024, 2048):
        peak, out = peak_of(ae, "decode", noise(n // 8, n // 8))
        assert 0.995 <= estimate_decode(ae, n, n, tile_size=512) / peak <= 1.15
        beside.append(peak - out)  # the output, put together in fp32
    beside.append(estimate_decode(ae, 4096, 4096, tile_size=512) - 3 * 4096**2 * 4)
    assert max(beside) <= 1.05 * min(beside)


@pytest.mark.parametrize("mode", ["blend", "auto"])
def test_estimate_bounds_the_followed_peak(mode):
    ae = made()
    ae.enable_tiling(256, mode=mode)
    for h, w in ((384, 640),):
        for op, estimate, x in (("decode", estimate_decode, noise(h // 8, w // 8)), ("encode", estimate_encode, torch.randn(1, 3, h, w))):
            assert 0.995 <= estimate(ae, h, w, tile_size=256) / peak_of(ae, op, x)[0] <= 1.15, (op, h, w)


def test_shared_and_blend_beat_a_fixed_quarter():
    net, ae = trained()
    x = photo("seeding")[..., :512, :512]
    with torch.no_grad():
        z = ae.encode(x)
        want = ae.decode(z)
        error = {}
        for mode in ("blend", "shared"):
            ae.enable_tiling(256, mode=mode)
            error[mode] = (ae.decode(z) - want).abs().mean()
        with scoped_tiling(net, 256): error["quarter"] = (net.decode(ae.unscaled(z)).sample - want).abs().mean()
    assert error["blend"] * 2 <= error["quarter"]
    assert error["shared"] * 10 <= error["quarter"]


def test_load_and_refuse(tmp_path):
    from safetensors.torch import save_file
    net, ae = trained()
    params = {k: getattr(ae.config, k) for k in ("groups", "scale_factor", "shift_factor")}
    z = noise(6, 5)
    for name, weights in (("original", ae.state_dict()), ("diffusers", net.state_dict())):
        save_file({k: w.contiguous() for k, w in weights.items()}, tmp_path / name)
        assert torch.equal(load_autoencoder(tmp_path / name, **params).decode(z), ae.decode(z))
    assert load_autoencoder(tmp_path / "original", torch.bfloat16, **params).decode(z.bfloat16()).dtype == torch.bfloat16
    weights = {k: w.contiguous() for k, w in ae.state_dict().items()}
    save_file({**weights, "decoder.extra.weight": torch.zeros(1)}, tmp_path / "odd")
    with pytest.raises(ValueError, match="decoder.extra.weight"): load_autoencoder(tmp_path / "odd", **params)
    weights.pop("decoder.norm_out.bias")
    save_file(weights, tmp_path / "short")
    with pytest.raises(ValueError, match="decoder.norm_out.bias"): load_autoencoder(tmp_path / "short", **params)
