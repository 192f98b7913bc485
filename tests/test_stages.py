"Stages against the classes' own calls: every class and option, awkward sizes, windows, videos, refusals."
from fractions import Fraction

import diffusers
import pytest
import torch
from torch import nn

from vae_tiles.fixtures import full_width, latent_shape, spatial_ratio, takes_frames, tiny
from vae_tiles.stages import (
    UnknownStructure, attention, chunks, decoder_stages, encoder_stages, group_norm, moments, reach_of, run, run_video,
)

WAN22 = dict(is_residual=True, patch_size=2, in_channels=12, out_channels=12, scale_factor_spatial=16)
KINDS = {
    "flux1": ("flux1", {}), "sdxl": ("sdxl", {}), "no quant convs": ("sdxl", dict(use_quant_conv=False, use_post_quant_conv=False)),
    "no attention": ("sdxl", dict(mid_block_add_attention=False)), "flux2": ("flux2", {}),
    "flux2 wider decoder": ("flux2", dict(decoder_block_out_channels=[8, 16, 24, 24])),
    "hunyuan": ("hunyuan-image-2.1", {}), "qwen": ("qwen-image", {}), "qwen deep": ("qwen-image", dict(num_res_blocks=2)),
    "qwen 2.1": ("qwen-image-2.1", {}), "qwen 2.1 plain": ("qwen-image-2.1", dict(is_residual=False)),
    "wan": ("wan", {}), "wan 2.2": ("wan", WAN22),
}
VIDEO = [k for k, (name, _) in KINDS.items() if name in ("qwen-image", "wan")]


@pytest.fixture(autouse=True)
def no_grad():
    torch.manual_seed(0)
    with torch.no_grad(): yield


@pytest.fixture(scope="module")
def vaes():
    made = {}
    def get(kind):
        if kind not in made: made[kind] = tiny(KINDS[kind][0], **KINDS[kind][1])
        return made[kind]
    return get


def shape_of(vae, op, h, w, b=1, t=1):
    r, c = spatial_ratio(vae), vae.config
    z = latent_shape(vae, h * r, w * r, b)
    patch = c.patch_size or 1 if takes_frames(vae) and "patch_size" in c else 1
    shape = z if op == "decode" else (b, c.get("in_channels", c.get("input_channels", 3)) // patch**2, *z[2:-2], h * r, w * r)
    return (*shape[:2], t, *shape[3:]) if len(shape) == 5 else shape


def stock(vae, op, x): return vae.decode(x).sample if op == "decode" else vae.encode(x).latent_dist.parameters
def stages_of(vae, op): return decoder_stages(vae) if op == "decode" else encoder_stages(vae)
def close(a, b, tol=2e-5): return a.shape == b.shape and (a - b).abs().max() <= tol * b.std()


@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(vaes, kind, op):
    vae = vaes(kind)
    stages = stages_of(vae, op)
    for h, w, b in ((1, 1, 1), (1, 7, 1), (5, 1, 2), (4, 3, 2)):
        x = torch.randn(shape_of(vae, op, h, w, b))
        assert torch.equal(run(stages, x), stock(vae, op, x)), (h, w, b)
        assert torch.equal(run(stages, [x.clone()]), stock(vae, op, x))


@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_untouched(vaes, kind, op):
    "No stage writes on the autoencoder, its weights or a map that was not given away."
    vae = vaes(kind)
    before, attributes = {k: v.clone() for k, v in vae.state_dict().items()}, set(vars(vae))
    x = torch.randn(shape_of(vae, op, 2, 3))
    for s in stages_of(vae, op):
        y, copy = s.fn(x, None), x.clone()
        assert torch.equal(x, copy) and y.data_ptr() != x.data_ptr()
        x = y
    assert all(torch.equal(before[k], v) for k, v in vae.state_dict().items()) and set(vars(vae)) == attributes


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_where_the_modules_are(vaes, kind):
    vae = vaes(kind)
    for s in decoder_stages(vae) + encoder_stages(vae):
        if "block" in s.parts: assert vae.get_submodule(s.name) is s.parts["block"]
        assert set(s.norms) <= {m for p in s.parts.values() if isinstance(p, nn.Module) for m in p.modules()}
    assert sum(len(s.norms) for s in decoder_stages(vae)) == sum(isinstance(m, nn.GroupNorm) for m in vae.decoder.modules())


@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_windows(vaes, kind, op):
    "A stage on a window gives what it gives on the map, away from the window's edges by what `needs` says; at the map's edge, exactly."
    vae = vaes(kind)
    x = torch.randn(shape_of(vae, op, 6, 2))
    if x.ndim == 5: x = x[:, :, 0]
    for s in stages_of(vae, op):
        norms = {"norms": {m: (torch.zeros(1, m.num_groups), torch.ones(1, m.num_groups)) for m in s.norms}} if s.norms else None
        y = s.fn(x, norms)
        if not s.whole:
            H, step = y.shape[-2], max(1, int(1 / s.scale))
            for start, stop in ((0, H // 3), (H // 3, H // 2 + 1), (H // 2, H)):
                a, b = s.needs(start, stop)
                a, b = max(0, a // step * step), min(x.shape[-2], -(-b // step) * step)
                part = s.fn(x[..., a:b, :], norms)
                top = start - int(a * s.scale)
                assert close(part[..., top:top + stop - start, :], y[..., start:stop, :], 1e-5), (s.name, start, stop)
        x = y


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_reach(vaes, kind):
    vae = vaes(kind)
    ratio = spatial_ratio(vae)
    for stages, scale in ((decoder_stages(vae), Fraction(ratio)), (encoder_stages(vae), Fraction(1, ratio))):
        total = Fraction(1)
        for s in stages:
            total *= s.scale
            start, stop = s.needs(64, 96)
            own = 64 / s.scale, 96 / s.scale
            assert max(own[0] - start, stop - own[1]) <= s.reach <= 16 and not (s.whole and s.reach)
        assert total == scale
        assert reach_of(stages) < 20


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("kind", VIDEO)
def test_video(kind, frames):
    "In fp64, since the class convolves the latent over all frames at once; it rounds to fp32 inside its own upsampling."
    vae = tiny(KINDS[kind][0], **KINDS[kind][1]).double()
    for op, t in (("decode", frames), ("encode", 4 * frames - 3), ("encode", 4 * frames)):
        x = torch.randn(shape_of(vae, op, 2, 3, t=t), dtype=torch.float64)
        assert close(run_video(stages_of(vae, op), x, op), stock(vae, op, x), 1e-5)


@pytest.mark.parametrize("kind", VIDEO)
def test_tiles_remember_their_own_past(vaes, kind):
    "Two videos interleaved chunk by chunk, each with its own state, come out as on their own."
    vae = vaes(kind)
    stages, zs = decoder_stages(vae), [torch.randn(shape_of(vae, "decode", 2, 2, t=3)) for _ in range(2)]
    states, out = [{"cache": {}}, {"cache": {}}], [[], []]
    for t in chunks("decode", 3):
        for i in (0, 1): out[i].append(run(stages, zs[i][:, :, t], states[i]))
    for i in (0, 1): assert torch.equal(torch.cat(out[i], 2), run_video(stages, zs[i], "decode"))


def test_a_video_without_its_axis(vaes):
    with pytest.raises(ValueError, match="give a video as"):
        state = {"cache": {}}
        for _ in range(2): run(decoder_stages(vaes("wan")), torch.randn(1, 16, 2, 2), state)


def test_images_only(vaes):
    "Qwen-Image-2.1's own convolutions refuse a second frame, and so do the stages."
    vae = vaes("qwen 2.1")
    z = torch.randn(shape_of(vae, "decode", 2, 2, t=2))
    with pytest.raises((ValueError, RuntimeError)): vae.decode(z)
    with pytest.raises(ValueError, match="cannot take a feature cache"): run_video(decoder_stages(vae), z, "decode")


@pytest.mark.parametrize("name", ["flux1", "flux2", "qwen-image", "qwen-image-2.1", "hunyuan-image-2.1", "wan"])
def test_on_meta(name):
    vae = full_width(name)
    for op in ("decode", "encode"):
        x = torch.empty(shape_of(vae, op, 4, 6), dtype=torch.bfloat16, device="meta")
        assert run(stages_of(vae, op), x).shape == stock(vae, op, x).shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("height", [1, 7, 64])
def test_moments(dtype, height):
    x = (torch.randn(2, 12, height, 9) * 4 + 30).to(dtype)
    n, mean, var = moments(x, 3)
    v, m = torch.var_mean(x.double().view(2, 3, -1), dim=2, correction=0)
    assert n == 4 * height * 9 and mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(mean.double(), m, rtol=1e-6) and torch.allclose(var.double(), v, rtol=1e-5)


def test_moments_without_overflow():
    x = torch.full((1, 4, 300, 300), 60000.0, dtype=torch.float16)
    x[..., :150, :] = -60000.0
    n, mean, var = moments(x, 2)
    assert torch.isfinite(var).all() and mean.abs().max() < 1 and torch.allclose(var, torch.tensor(60000.0**2), rtol=1e-4)


def test_variance_between_tiles_counts():
    "A half-bright map, recorded tile by tile: the variance is the map's, not the mean of the tiles' variances."
    norm, x = nn.GroupNorm(1, 4), torch.randn(1, 4, 32, 32) * 0.3
    x[..., 16:, :] += 2
    state = {"record": {}}
    for rows in (slice(0, 16), slice(16, 32)): group_norm(x[..., rows, :], norm, state)
    n, mean, var = state["record"][norm]
    assert n == 4 * 32 * 32 and abs(var.item() - x.var(correction=0).item()) < 1e-5 and var.item() > 1


@pytest.mark.parametrize("tokens,step", [(1, 64), (65, 64), (200, 64)])
def test_attention_without_a_fused_kernel(monkeypatch, tokens, step):
    monkeypatch.setattr("vae_tiles.stages.fused", lambda *a: False)
    q, k, v = torch.randn(3, 2, tokens, 16) * 3
    want = torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v
    assert torch.allclose(attention(q, k, v, limit=1), want, atol=1e-5)
    half = [t.bfloat16() for t in (q, k, v)]
    assert torch.allclose(attention(*half).float(), attention(*(t.float() for t in half)), rtol=1e-2, atol=1e-2)


def test_fallback_without_structure(vaes):
    for vae in (diffusers.AutoencoderTiny(), nn.Linear(2, 2), diffusers.AutoencoderKLTemporalDecoder(block_out_channels=(32,))):
        with pytest.raises(UnknownStructure): decoder_stages(vae)
    assert issubclass(UnknownStructure, ValueError)


def test_time_embeddings_are_refused(vaes):
    vae = tiny("sdxl")
    vae.decoder.mid_block.resnets[0].time_emb_proj = nn.Linear(2, 2)
    with pytest.raises(UnknownStructure, match="decoder.mid_block.resnets.0, with a time embedding"): decoder_stages(vae)


def test_foreign_layers_are_refused(vaes):
    for name, at in (("sdxl", "decoder.up_blocks.0"), ("hunyuan-image-2.1", "decoder.up_blocks.0"), ("wan", "encoder.down_blocks.0")):
        vae = tiny(name)
        parent, _, child = at.rpartition(".")
        vae.get_submodule(parent)[int(child)] = nn.Tanh()
        with pytest.raises(UnknownStructure, match=f"{at} is a Tanh"): (decoder_stages if "decoder" in at else encoder_stages)(vae)


def test_hooks_are_called():
    vae, calls = tiny("wan"), []
    vae.decoder.up_blocks[0].resnets[0].register_forward_hook(lambda *a: calls.append(1))
    z = torch.randn(1, 16, 1, 2, 2)
    assert torch.equal(run(decoder_stages(vae), z), vae.decode(z).sample) and len(calls) == 2


def test_compiled_decoder_runs_as_it_is():
    vae = tiny("wan")
    z = torch.randn(1, 16, 1, 2, 2)
    want = vae.decode(z).sample
    vae.decoder = torch.compile(vae.decoder, backend="eager")
    assert torch.equal(run(decoder_stages(vae), z), want)
