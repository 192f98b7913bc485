"Lean stages against the modules: numbers, types, maps given away, peaks, sweeps, and when they must step back."
import weakref

import pytest
import torch
from torch import nn

from vae_tiles.fixtures import demo_vae, full_width, latent_shape, photo, as_input, spatial_ratio, takes_frames, tiny
from vae_tiles.lean import lean_stages, row_bands, sweep, up_kernels, why_not_lean
from vae_tiles.peaks import Follow, dry_run
from vae_tiles.stages import decoder_stages, encoder_stages, run, run_video

WAN22 = dict(is_residual=True, patch_size=2, in_channels=12, out_channels=12, scale_factor_spatial=16)
KINDS = {
    "flux1": ("flux1", {}), "sdxl": ("sdxl", {}), "no quant convs": ("sdxl", dict(use_quant_conv=False, use_post_quant_conv=False)),
    "flux2 wider decoder": ("flux2", dict(decoder_block_out_channels=[8, 16, 24, 24])), "hunyuan": ("hunyuan-image-2.1", {}),
    "qwen": ("qwen-image", {}), "qwen 2.1": ("qwen-image-2.1", {}), "qwen 2.1 plain": ("qwen-image-2.1", dict(is_residual=False)),
    "wan": ("wan", {}), "wan 2.2": ("wan", WAN22),
}


@pytest.fixture(autouse=True)
def no_grad():
    torch.manual_seed(0)
    with torch.no_grad(): yield


@pytest.fixture(scope="module")
def vaes():
    made = {}
    def get(kind, dtype=torch.float64):
        if (kind, dtype) not in made: made[kind, dtype] = nn.Module.to(tiny(KINDS[kind][0], **KINDS[kind][1]), dtype)
        return made[kind, dtype]
    return get


def shape_of(vae, op, h, w, b=1, t=1):
    r, c = spatial_ratio(vae), vae.config
    z = latent_shape(vae, h * r, w * r, b)
    patch = c.patch_size or 1 if takes_frames(vae) and "patch_size" in c else 1
    shape = z if op == "decode" else (b, c.get("in_channels", c.get("input_channels", 3)) // patch**2, *z[2:-2], h * r, w * r)
    return (*shape[:2], t, *shape[3:]) if len(shape) == 5 else shape


def stock(vae, op, x): return vae.decode(x).sample if op == "decode" else vae.encode(x).latent_dist.parameters
def worst(a, b): return float((a - b).abs().max() / b.std()) if a.shape == b.shape else float("inf")


def exact(vae, op):
    "fp64: nothing but the algebra is left; the Wan classes round to fp32 inside their own upsampling."
    return 1e-5 if takes_frames(vae) and op == "decode" else 1e-11


@pytest.mark.parametrize("limit", [0, 1, 3000])
@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_numbers(vaes, kind, op, limit):
    vae = vaes(kind)
    stages = lean_stages(vae, op, limit)
    assert not why_not_lean(vae, op)
    for h, w, b in ((1, 1, 1), (1, 5, 2), (5, 1, 1), (3, 4, 2)):
        x = torch.randn(shape_of(vae, op, h, w, b), dtype=torch.float64)
        want, kept = stock(vae, op, x), x.clone()
        got = run(stages, x)
        assert got.dtype == x.dtype and torch.equal(x, kept)
        if want.std() > 1e-3: assert worst(got, want) < exact(vae, op), (h, w, b)
        assert worst(run(stages, [x.clone()]), got) < 1e-12
        if x.ndim == 5: assert torch.equal(run(stages, x[:, :, 0]), got[:, :, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_stage_by_stage(vaes, kind):
    "Each stage alone, on a map, a window of a map, a map in the other layout, and one that was given away."
    vae = vaes(kind)
    for op, plain in (("decode", decoder_stages(vae)), ("encode", encoder_stages(vae))):
        x = torch.randn(shape_of(vae, op, 4, 3, 2), dtype=torch.float64)
        if x.ndim == 5: x = x[:, :, 0]
        for s, lean in zip(plain, lean_stages(vae, op, 4000)):
            assert (s.name, s.scale, s.reach, s.norms, s.whole) == (lean.name, lean.scale, lean.reach, lean.norms, lean.whole)
            want = s.fn(x)
            window = torch.nn.functional.pad(x, (1, 2, 3, 1))[..., 3:-1, 1:-2]
            for y in (x, window, x.to(memory_format=torch.channels_last)):
                kept = y.clone()
                assert worst(lean.fn(y), want) < exact(vae, op), s.name
                assert torch.equal(y, kept)
                assert worst(lean.fn([y.clone(memory_format=torch.preserve_format)]), want) < exact(vae, op), s.name
            assert worst(lean.fn([torch.nn.functional.pad(x, (1, 2, 3, 1))[..., 3:-1, 1:-2]]), want) < exact(vae, op), s.name
            x = want


@pytest.mark.parametrize("kind", ["sdxl", "hunyuan"])
@pytest.mark.parametrize("op", ["decode", "encode"])
def test_shared_statistics(vaes, kind, op):
    vae = vaes(kind)
    plain, lean = (decoder_stages if op == "decode" else encoder_stages)(vae), lean_stages(vae, op, 4000)
    x = torch.randn(shape_of(vae, op, 4, 3, 2), dtype=torch.float64)
    records = [{"record": {}}, {"record": {}}]
    want = [run(stages, x, state) for stages, state in zip((plain, lean), records)]
    assert worst(want[1], want[0]) < 1e-11
    for m, (n, mean, var) in records[0]["record"].items():
        other = records[1]["record"][m]
        assert n == other[0] and torch.allclose(mean, other[1]) and torch.allclose(var, other[2])
    norms = {m: (mean * 1.1, var * 0.9) for m, (_, mean, var) in records[0]["record"].items()}
    for extra in ({}, {"record": {}}):
        got = [run(stages, x, {"norms": norms, **extra}) for stages in (plain, lean)]
        assert worst(got[1], got[0]) < 1e-11 and worst(got[1], want[0]) > 1e-2


def test_recording_leaves_halos_out(vaes):
    vae = vaes("sdxl")
    s, x = lean_stages(vae)[-2], torch.randn(1, 8, 20, 6, dtype=torch.float64)
    whole, tiles = {"record": {}}, {"record": {}}
    norm = s.norms[0]
    s.fn(x, whole)
    for window, crop in ((slice(0, 14), slice(0, 10)), (slice(6, 20), slice(4, 14))):
        s.fn(x[..., window, :], {**tiles, "crop": (crop, slice(None))})
    a, b = whole["record"][norm], tiles["record"][norm]
    assert a[0] == b[0] and torch.allclose(a[1], b[1]) and torch.allclose(a[2], b[2])


@pytest.mark.parametrize("name", ["flux1", "flux2", "qwen-image", "qwen-image-2.1", "hunyuan-image-2.1"])
def test_trained(name):
    "fp32 within 2e-5 of the standard deviation; bf16 no worse than 1.5x the stock decode in bf16."
    vae = demo_vae(name)
    x = as_input(photo("seeding", 192, 256), vae)
    moments = stock(vae, "encode", x)
    assert worst(run(lean_stages(vae, "encode"), x), moments) <= 2e-5
    z = moments.chunk(2, 1)[0]
    want = stock(vae, "decode", z)
    assert worst(run(lean_stages(vae), z), want) <= 2e-5
    half = nn.Module.to(vae, torch.bfloat16)
    rms = lambda y: float((y.float() - want).square().mean().sqrt())
    assert rms(run(lean_stages(half), z.bfloat16())) <= 1.5 * rms(stock(half, "decode", z.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(vaes, kind, dtype):
    vae = vaes(kind, torch.float32)
    z = torch.randn(shape_of(vae, "decode", 5, 4))
    want = stock(vae, "decode", z)
    half = nn.Module.to(tiny(KINDS[kind][0], **KINDS[kind][1]), dtype)
    rms = lambda y: float((y.float() - want).square().mean().sqrt() / want.std())
    got = run(lean_stages(half), z.to(dtype))
    assert got.dtype == dtype and torch.isfinite(got).all() and rms(got) <= 1.5 * rms(stock(half, "decode", z.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_small_kernels(dtype):
    w = torch.randn(5, 3, 3, 3).to(dtype)
    k = up_kernels(w).float().unflatten(0, (4, 5))
    assert torch.allclose(k[0, ..., 0, 0], w[..., 0, 0].float()) and torch.allclose(k[3, ..., 1, 1], w[..., 2, 2].float())
    assert torch.allclose(k.sum((0, 3, 4)), 4 * w.float().sum((2, 3)), atol=0.1 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("height", [1, 2, 7, 64])
@pytest.mark.parametrize("limit", [1, 1000, 1 << 30])
def test_bands_cover(height, limit):
    bands = row_bands(height, torch.empty(1, 4, height, 10), limit)
    assert bands[0][0] == 0 and bands[-1][1] == height and all(a[1] == b[0] for a, b in zip(bands, bands[1:]))
    assert limit == 1 or len(bands) <= max(1, -(-height * 160 // limit) + 1)


@pytest.mark.parametrize("op", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_sweep(vaes, kind, op):
    vae = vaes(kind)
    plain, lean = (decoder_stages if op == "decode" else encoder_stages)(vae), lean_stages(vae, op)
    whole = [i for i, s in enumerate(plain) if s.whole]
    part = slice(whole[-1] + 1, None) if op == "decode" else slice(0, whole[0])
    x = torch.randn(shape_of(vae, op, 5, 3), dtype=torch.float64)
    if x.ndim == 5: x = x[:, :, 0]
    if op == "decode": x = run(plain[:part.start], x)
    state = {"record": {}}
    want, kept = run(plain[part], x, state), x.clone()
    state = {"norms": {m: (mean, var) for m, (_, mean, var) in state["record"].items()}}
    for limit in (1, 30_000):
        for stages, kw in ((lean, {}), (plain, {"lean": False})):
            bands = list(sweep(stages[part], x, limit, state, **kw))
            got = torch.cat([y for _, y in bands], 2)
            assert worst(got, want) < exact(vae, op)
            assert [a for a, _ in bands] == [sum(y.shape[-2] for _, y in bands[:i]) for i in range(len(bands))]
    assert torch.equal(x, kept)


def test_sweep_refuses(vaes):
    with pytest.raises(ValueError, match="needs the whole canvas"): next(sweep(lean_stages(vaes("wan")), torch.zeros(1, 16, 2, 2)))
    tail = lean_stages(vaes("sdxl"))[4:]
    with pytest.raises(ValueError, match="GroupNorms whose statistics are not given"): next(sweep(tail, torch.zeros(1, 16, 2, 2)))


@pytest.mark.parametrize("name,limit", [("qwen-image", 0.06), ("qwen-image-2.1", 0.25), ("wan", 0.06), ("flux1", 0.0625)])
def test_peak_of_the_last_level(name, limit):
    "bf16, full width, with the map given away, followed on the meta device: MiB per latent."
    vae = full_width(name)
    stages, last = lean_stages(vae), "up_blocks.3" if name == "qwen-image-2.1" else "up_blocks.2.upsamplers.0"
    i = next(i for i, s in enumerate(stages) if s.name.endswith(last))
    x = run(stages[:i], torch.empty(shape_of(vae, "decode", 32, 32), dtype=torch.bfloat16, device="meta"))
    shape = x.squeeze(2).shape if x.ndim == 5 else x.shape
    with Follow(layout_copies=True) as follow:
        x = [torch.empty(shape, dtype=torch.bfloat16, device="meta").to(memory_format=torch.channels_last)]
        run(stages[i:], x)
    assert follow.peak / 2**20 / 1024 <= limit


@pytest.mark.parametrize("name,low,high", [("qwen-image", 0.3, 0.45), ("qwen-image-2.1", 0.8, 0.9), ("flux1", 0.8, 0.9)])
def test_work(name, low, high):
    vae = full_width(name)
    shape, stages = shape_of(vae, "decode", 24, 24), lean_stages(vae)
    work = [dry_run(f, shape).work for f in (lambda z: vae.decode(z).sample, lambda z: run(stages, z))]
    assert low <= work[1] / work[0] <= high


@pytest.mark.parametrize("kind", ["qwen", "sdxl", "qwen 2.1", "hunyuan"])
def test_maps_die_when_given_away(vaes, kind):
    vae = vaes(kind, torch.float32)
    x = torch.randn(shape_of(vae, "decode", 3, 3))
    if x.ndim == 5: x = x[:, :, 0].clone()
    for s in lean_stages(vae):
        ref, box = weakref.ref(x), [x]
        del x
        x = s.fn(box)
        assert not box and (ref() is None or ref() is x), s.name


# when not

def reasons(vae): return why_not_lean(vae, "decode")


def check(vae, reason, z=None):
    "The stage steps back, and the numbers are the module's."
    z = torch.randn(shape_of(vae, "decode", 2, 3)) if z is None else z
    assert any(reason in r for r in reasons(vae)), reasons(vae)
    assert worst(run(lean_stages(vae), z), stock(vae, "decode", z)) <= 5e-5


def test_hooks():
    vae, seen = tiny("wan"), []
    vae.decoder.up_blocks[0].resnets[0].conv1.register_forward_pre_hook(lambda *a: seen.append(1))
    check(vae, "conv1 carries hooks")
    assert len(seen) == 2


def test_hooks_that_come_later():
    vae, seen = tiny("wan"), []
    stages, z = lean_stages(vae), torch.randn(1, 16, 1, 2, 2)
    run(stages, z)
    handle = vae.decoder.conv_out.register_forward_hook(lambda *a: seen.append(1))
    run(stages, z)
    handle.remove()
    run(stages, z)
    assert len(seen) == 1


def test_cpu_offload():
    accelerate = pytest.importorskip("accelerate")
    vae = tiny("sdxl")
    z = torch.randn(shape_of(vae, "decode", 2, 3))
    want = stock(vae, "decode", z)
    vae = accelerate.cpu_offload(vae, execution_device="cpu")
    if not any("carries hooks" in r for r in reasons(vae)): pytest.skip("nothing is offloaded here")
    assert worst(run(lean_stages(vae), z), want) <= 2e-5


def test_layerwise_casting():
    hooks = pytest.importorskip("diffusers.hooks")
    vae = tiny("sdxl")
    hooks.apply_layerwise_casting(vae, storage_dtype=torch.bfloat16, compute_dtype=torch.float32, skip_modules_pattern=("norm",))
    check(vae, "carries hooks")


def test_foreign_weights():
    class Quantised(torch.Tensor): pass
    vae = tiny("qwen-image")
    conv = vae.decoder.mid_block.resnets[0].conv2
    conv.weight = nn.Parameter(conv.weight.data.as_subclass(Quantised), requires_grad=False)
    check(vae, "conv2 has weights of another type")


def test_lora():
    class Conv2d(nn.Module):  # as a LoRA layer has it: the class's name, not the class
        def __init__(self, base):
            super().__init__()
            self.base, self.down = base, nn.Conv2d(base.in_channels, base.out_channels, 1).requires_grad_(False)
            self.kernel_size, self.dilation, self.in_channels = base.kernel_size, base.dilation, base.in_channels
        def forward(self, x): return self.base(x) + self.down(x)
    vae = tiny("sdxl")
    block = vae.decoder.up_blocks[0].resnets[0]
    block.conv1 = Conv2d(block.conv1)
    check(vae, "conv1 is a Conv2d")


def test_parametrization():
    vae = tiny("sdxl")
    torch.nn.utils.parametrizations.weight_norm(vae.decoder.mid_block.resnets[0].conv1)
    check(vae, "conv1 is a ParametrizedConv2d")


def test_compiled_block():
    vae = tiny("qwen-image")
    vae.decoder.mid_block.resnets[1] = torch.compile(vae.decoder.mid_block.resnets[1], backend="eager")
    check(vae, "is compiled")
    vae = tiny("qwen-image")
    vae.decoder.mid_block.resnets[1].compile(backend="eager")
    check(vae, "is compiled")


def test_circular_padding():
    vae = tiny("sdxl")
    for m in vae.decoder.modules():
        if isinstance(m, nn.Conv2d) and m.kernel_size[0] == 3:
            m.padding_mode = "circular"
            m._reversed_padding_repeated_twice = [1, 1, 1, 1]
    check(vae, "pads, groups or dilates")


def test_other_activation():
    vae = tiny("sdxl")
    vae.decoder.conv_act = nn.Mish()
    check(vae, "act is a Mish")


def test_weights_of_another_type_than_the_map():
    vae = tiny("sdxl").double()
    z = torch.randn(shape_of(vae, "decode", 2, 2))
    with pytest.raises(RuntimeError): vae.decode(z)
    with pytest.raises(RuntimeError): run(lean_stages(vae), z)


def test_gradients():
    "Where gradients are wanted the modules run, and the gradients are theirs."
    vae = tiny("qwen-image")
    z = torch.randn(1, 16, 1, 2, 3)
    grads = []
    with torch.enable_grad():
        for f in (lambda z: vae.decode(z).sample, lambda z: run(lean_stages(vae), z)):
            x = z.clone().requires_grad_()
            grads.append(torch.autograd.grad(f(x).square().sum(), x)[0])
    assert torch.equal(*grads)


def test_autocast():
    vae = tiny("sdxl")
    z = torch.randn(shape_of(vae, "decode", 2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16): assert torch.equal(run(lean_stages(vae), z), stock(vae, "decode", z))


def test_inference_mode():
    vae = tiny("qwen-image-2.1")
    with torch.inference_mode():
        z = torch.randn(shape_of(vae, "decode", 2, 2))
        assert worst(run(lean_stages(vae), z), stock(vae, "decode", z)) <= 5e-5


def test_video_runs_the_modules(vaes):
    vae = vaes("wan", torch.float32)
    z = torch.randn(1, 16, 2, 2, 2)
    assert worst(run_video(lean_stages(vae), z, "decode"), stock(vae, "decode", z)) <= 2e-5
