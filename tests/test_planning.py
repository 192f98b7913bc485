"Plans: the published tiles, real caps, budgets that are used, and requests that are refused."
import pytest
import torch

from vae_tiles.fixtures import full_width, latent_shape, published, tiny
from vae_tiles.installing import decode, encode
from vae_tiles.peaks import Follow, capped, encode_shape, skimming
from vae_tiles.planning import MODES, plan
from vae_tiles.stages import decoder_stages

NAME = {"FLUX.1 ae": "flux1", "Qwen-Image": "qwen-image", "Qwen-Image-2.1": "qwen-image-2.1", "HunyuanImage-2.1": "hunyuan-image-2.1"}
FIGURE = {"FLUX.1 ae": .09, "Qwen-Image": .19, "Qwen-Image-2.1": .43, "HunyuanImage-2.1": 1.3}  # MiB per latent, fused
FAMILIES = ["flux1", "flux2", "qwen-image", "qwen-image-2.1", "hunyuan-image-2.1"]


@pytest.fixture(scope="module")
def vaes(): return {name: full_width(name) for name in FAMILIES}


@pytest.mark.parametrize("row", published("decode_b200"), ids=lambda r: f"{r['vae']}-{r['size_px']}-{r['free_gib']}")
def test_published_tiles(row):
    p = plan(NAME[row["vae"]], row["size_px"], row["size_px"], free=f"{row['free_gib']}GiB", mode="blend", figure=FIGURE[row["vae"]])
    assert ("stock" if p.path == "stock" else "{}x{}".format(*p.tile)) == row["sized_tile"]


CASES = [  # family, height, width, free GiB, op
    ("qwen-image", 1024, 1024, .35, "decode"), ("qwen-image", 2048, 2048, .35, "decode"), ("qwen-image", 832, 3328, .6, "encode"),
    ("qwen-image", 4096, 4096, 1, "decode"), ("qwen-image-2.1", 1024, 1024, .35, "decode"), ("qwen-image-2.1", 1664, 1664, .6, "decode"),
    ("qwen-image-2.1", 2048, 2048, 1, "encode"), ("flux1", 1024, 1024, 1, "decode"), ("flux1", 2048, 2048, .6, "decode"),
    ("flux1", 4096, 4096, .6, "decode"), ("flux1", 1600, 1600, 4, "decode"), ("flux2", 1024, 1024, .6, "encode"),
    ("flux1", 4096, 4096, .6, "encode"), ("hunyuan-image-2.1", 1024, 1024, .6, "decode"), ("hunyuan-image-2.1", 3072, 3072, .35, "decode"),
    ("hunyuan-image-2.1", 2048, 2048, .6, "encode"),
]


@pytest.mark.parametrize("name,h,w,free,op", CASES)
def test_a_real_cap_never_trips(vaes, name, h, w, free, op):
    vae, cap = vaes[name], int(free * 2**30)
    p = plan(vae, h, w, free=cap, op=op)
    shape = latent_shape(vae, h, w) if op == "decode" else encode_shape(vae, h // p.ratio, w // p.ratio)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with skimming(), Follow(cap=cap, layout_copies=True) as follow:
        (decode if op == "decode" else encode)(vae, x, plan=p, progress=False)
    assert p.fits and p.path in ("untiled", "exact", "shared")
    assert follow.peak <= p.peak_bytes * 1.05 + 2**20, (follow.peak / 2**20, p)


QWEN = [r for r in published("decode_b200") if r["vae"].startswith("Qwen")]


@pytest.mark.parametrize("row", QWEN, ids=lambda r: f"{r['vae']}-{r['size_px']}-{r['free_gib']}")
def test_less_work_than_untiled(row):
    p = plan(NAME[row["vae"]], row["size_px"], row["size_px"], free=f"{row['free_gib']}GiB")
    assert p.path in ("exact", "untiled") and p.fits
    assert p.work_ratio <= (.6 if row["vae"] == "Qwen-Image" else 1.25)


def test_work_and_peak_grow_slowly():
    "1024 to 8192 px under one budget: work a pixel outside attention rises less than a quarter."
    per_pixel = []
    for side in (1024, 2048, 4096, 8192):
        p = plan("qwen-image", side, side, free="1GiB", out_host=True)
        attention = 2 * 384 * (side / 8)**4 / stock_work_of(side)
        per_pixel.append((p.work_ratio - attention) / (1 - attention))
        assert p.fits and p.peak_bytes <= p.budget_bytes
    assert max(per_pixel) <= 1.25 * min(per_pixel), per_pixel


def stock_work_of(side):
    from vae_tiles.planning import stock_work, subject
    return stock_work(subject("qwen-image"), "decode", (side // 8, side // 8), torch.bfloat16)


@pytest.mark.parametrize("name", ["qwen-image", "qwen-image-2.1"])
def test_less_memory_is_never_less_work(name):
    "Unused budget is only left where more would not help."
    works = [plan(name, 1664, 1664, free=f"{g}GiB").work_ratio for g in (.4, .5, .7, 1, 1.5, 2, 4, 8)]
    for a, b in zip(works, works[1:]): assert b <= a * 1.03, works


@pytest.mark.parametrize("free", ["0", 0, "1KiB", 1])
@pytest.mark.parametrize("name", ["qwen-image", "flux1", "hunyuan-image-2.1"])
def test_no_memory_gives_the_last_step(name, free):
    p = plan(name, 1024, 1024, free=free)
    assert not p.fits and p.calls >= 1 and p.why


@pytest.mark.parametrize("free", [-1, float("nan"), float("inf"), "12 parsecs", "nan", "", [], "-2GiB"])
def test_pathological_memory_is_refused(free):
    with pytest.raises(ValueError): plan("qwen-image", 1024, 1024, free=free)


def test_huge_memory_is_untiled(): assert plan("flux1", 1024, 1024, free=10**18).path == "untiled"


@pytest.mark.parametrize("kw,words", [
    (dict(height=1001), "multiple of 8"), (dict(height=0), "at least 8"), (dict(height=64.0), "height=64.0"),
    (dict(mode="best"), "one of auto"), (dict(op="train"), "op='train'"), (dict(tile=-3), "tile=-3"),
    (dict(vae_or_name="vae"), "no VAE named 'vae'"), (dict(mode="shared"), "can be")])
def test_refused_requests(kw, words):
    with pytest.raises(ValueError, match=words): plan(**{**dict(vae_or_name="qwen-image", height=512, width=512, free="1GiB"), **kw})


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_explains_itself(mode):
    import json
    if mode == "shared": return
    p = plan("qwen-image", 1024, 1536, free="0.6GiB", mode=mode)
    d = json.loads(json.dumps(p.to_dict()))
    assert d["path"] == p.path and d["tile"] == list(p.tile) and d["peak_bytes"] == p.peak_bytes
    assert p.why and p.path in str(p) and "1024x1536" in str(p) and p._repr_svg_().startswith("<svg")
    with pytest.raises(AttributeError): p.path = "stock"


def test_planning_leaves_the_vae_alone():
    vae = tiny("qwen-image")
    before = dict(vae.__dict__)
    for op in ("decode", "encode"): plan(vae, 256, 256, op=op, free="1MiB")
    assert vae.__dict__ == before and all(not p.is_meta for p in vae.parameters())


def test_a_buffer_limit_counts(monkeypatch):
    monkeypatch.setenv("VAE_TILES_MAX_BUFFER", "100MiB")
    p = plan("qwen-image", 2048, 2048, free="64GiB")
    assert p.path == "exact"


@pytest.mark.parametrize("name,size,free", [("flux1", 2048, .6), ("flux1", 4096, .6), ("flux2", 2048, .6), ("hunyuan-image-2.1", 1024, .6),
                                            ("hunyuan-image-2.1", 2048, .6), ("hunyuan-image-2.1", 3072, .6)])
def test_shared_in_the_published_memory(name, size, free):
    "Where published tiles stay stock, at 21 to 42 dB: one of the two best cuts, for at most 1.3 times the work."
    vae = full_width(name)
    cards = dict(vae_or_name=vae, height=size, width=size, free=f"{free}GiB")
    p = plan(**cards)
    cuts = [i + 1 for i, s in enumerate(decoder_stages(vae)) if s.scale == 2]
    assert p.fits and p.path == "shared" and p.statistics[0] in cuts[-2:] and p.work_ratio <= 1.3
    exact = plan(**cards, mode="exact")
    assert exact.fits and exact.work_ratio <= 1.5 and exact.price_ratio >= p.price_ratio


def test_planning_under_a_cap_takes_nothing_of_it():
    "A plan made while memory is capped, as in a pipeline's call: its dry runs are not charged."
    vae = tiny("qwen-image", base_dim=6)  # a structure that no other test has planned for
    with capped(1000) as follow: p = plan(vae, 64, 64, mode="exact", free="4MiB", dtype=torch.float32)
    assert follow.peak == 0 and p.canvas == (8, 8)
