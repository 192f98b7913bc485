"""The bench: arms that fail are rows, files that are continued, every kind of device, and the notebooks for Colab's cards."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import run_notebooks
import torch
from click.testing import CliRunner
from execnb.nbio import read_nb

from vae_tiles import bench as module
from vae_tiles.bench import (
    ARMS,
    COLUMNS,
    MODELS,
    append_rows,
    arm_of,
    begin,
    bench,
    bench_case,
    beside_published,
    header_of,
    held,
    interleave,
    latent_of,
    measured,
    mirrored,
    read_bench,
)
from vae_tiles.cli import cli
from vae_tiles.fixtures import photo, published, tiny

GIB = 2**30


@pytest.fixture(scope="module")
def vae():
    return tiny("flux1", sample_size=128)  # stock tiles of 16 latents


@pytest.fixture(scope="module")
def z():
    return torch.randn(1, 16, 20, 20, generator=torch.Generator().manual_seed(0))


def fake_device(monkeypatch, kind, calls, **state):
    """A device's memory functions: what they are asked goes to `calls`, what they answer is in `state`."""
    home = getattr(torch, kind)
    answers = dict(memory_allocated=100, memory_reserved=GIB, max_memory_allocated=150, max_memory_reserved=GIB + 60, current_device=0,
                   is_available=True, mem_get_info=(6 * GIB, 8 * GIB), get_per_process_memory_fraction=0.9, driver_allocated_memory=700,
                   get_device_properties=SimpleNamespace(total_memory=8 * GIB, name="A card", driver_version="1.2"), **state)  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(home, name, lambda *a, answer=answer: answer, raising=False)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(home, name, lambda *a, name=name: calls.append(name), raising=False)
    monkeypatch.setattr(home, "set_per_process_memory_fraction", lambda f, d=None: calls.append(f), raising=False)


# --- devices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_allocators_count_and_hold(monkeypatch, kind):
    calls = []
    fake_device(monkeypatch, kind, calls)
    x, peak = measured(lambda: torch.ones(3, 4) @ torch.ones(4, 5), kind)
    assert x.shape == (3, 5) and peak == (50, 60, 60)
    with held(GIB, kind):
        assert calls[-1] == 0.25  # 1 GiB held already and 1 more, of 8
        inside = len(calls)
    assert calls[inside:] == [0.9]
    with pytest.raises(RuntimeError, match="inside"), held(100 * GIB, kind):
        raise RuntimeError("inside")
    assert calls[-2:] == [1.0, 0.9]
    with held(None, kind):
        assert calls[-1] == "empty_cache"
    monkeypatch.delattr(getattr(torch, kind), "set_per_process_memory_fraction")
    with held(GIB, kind):  # an older torch
        assert calls[-1] == "empty_cache"


def test_a_capped_run_on_cuda_is_under_the_allocators_cap(monkeypatch):
    calls = []
    fake_device(monkeypatch, "cuda", calls)

    def run():
        assert 0.25 in calls
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    assert module.outcome(lambda: measured(run, "cuda", GIB)) == (None, "CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert calls[-1] == 0.9


def test_metal_is_followed_and_the_driver_asked(monkeypatch):
    calls = []
    fake_device(monkeypatch, "mps", calls)
    assert measured(lambda: torch.zeros(1024), "mps")[1][:2] == (4096, 0)
    with pytest.raises(torch.OutOfMemoryError):
        measured(lambda: torch.zeros(1024), "mps", cap=1024)
    with held(GIB, "mps"):
        assert calls[-1] == "empty_cache"


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_the_clock_waits_for_the_device(monkeypatch, kind):
    calls = []
    fake_device(monkeypatch, kind, calls)
    interleave({"a": lambda: calls.append("a")}, 1, kind, caps={"a": 2 * GIB})
    around = ["synchronize", "a", "synchronize"]
    assert calls == (["empty_cache", *around] if kind == "mps" else ["empty_cache", 0.375, *around, 0.9])
    monkeypatch.setattr(torch.version, "hip", "7.1")
    header = header_of(kind, repeats=9)
    assert header["device_type"] == kind and header["repeats"] == "9" and "threads" not in header
    assert kind == "mps" or header["device"] == "A card"
    assert kind != "cuda" or header["driver"] == "ROCm 7.1"


# --- arms and rows --------------------------------------------------------------------------------------------


def test_every_arm_of_both_families(vae, z):
    arms = [arm for arm in ARMS if "lean" not in arm]
    rows = {r["arm"]: r for r in bench_case(vae, z, arms=arms, repeats=1)}
    assert list(rows) == arms and all(r.keys() == COLUMNS.keys() - {"vae"} for r in rows.values())
    assert rows["untiled"]["psnr_db"] == rows["untiled again"]["psnr_db"] == 99
    assert rows["stock tiles"]["offset_levels"] > 0 == rows["untiled"]["offset_levels"]
    for row in rows.values():
        assert bool(row["why"]) == (row["seconds"] is None) == (row["runs"] == 0), row
        assert row["why"] or row["arm"].startswith(("untiled", "stock")) or row["peak_allocated_mib"] <= row["cap_mib"]
    wan = tiny("qwen-image")
    rows = {r["arm"]: r for r in bench_case(wan, torch.zeros(1, 16, 1, 12, 14), arms=["shared", "exact lean"], free="8MiB", repeats=1)}
    assert "can be untiled, exact, blend, stock" in rows["shared"]["why"]
    assert rows["exact lean"]["lean"] and rows["exact lean"]["work_ratio"] < 1


def test_what_fails_is_a_row(vae, z, monkeypatch):
    calls = {"stock": 0}

    def stock(*args):
        calls["stock"] += 1
        if calls["stock"] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    def broken(*args):
        raise RuntimeError("expected #1\nand more")

    real = module.stock_tiles
    monkeypatch.setattr(module, "stock_tiles", stock)
    monkeypatch.setattr(module, "planned", broken)
    seen = []
    rows = bench_case(vae, z, arms=["untiled", "stock tiles", "shared"], repeats=2, tick=seen.append)
    assert [r["why"] for r in rows] == ["", "CUDA out of memory", "RuntimeError: expected no. 1"]
    assert [r["runs"] for r in rows] == [2, 0, 0] and rows[1]["psnr_db"] is not None and calls["stock"] == 2
    assert seen[:3] == ["untiled", "stock tiles", "shared"]


def test_a_card_too_small_for_the_untiled_decode(vae, z, monkeypatch):
    rows = bench_case(vae, z, arms=["untiled", "shared"], free="4MiB", repeats=1)
    assert "out of memory" in rows[0]["why"] and rows[1]["psnr_db"] > 30 and rows[1]["cap_mib"] == 4
    assert rows[1]["peak_allocated_mib"] < 4

    def whole(*args):
        raise RuntimeError("MPS backend out of memory")

    monkeypatch.setattr(module, "untiled_decode", whole)
    row = bench_case(vae, z, arms=["shared"], free="4MiB", repeats=1)[0]  # nothing to measure a picture against
    assert row["psnr_db"] is None and row["line_score"] and row["work_ratio"] > 1 and row["why"] == ""


def test_lean_where_a_vae_cannot_be(vae, z, monkeypatch):
    monkeypatch.setattr("vae_tiles.planning.not_lean", lambda vae, op: "an unknown layer")
    assert arm_of("exact lean", vae, z, free=GIB).why == "not lean: an unknown layer"
    with pytest.raises(ValueError, match="no arm 'lean'"):
        arm_of("lean", vae, z)


def test_not_a_number_is_no_number(vae, z, monkeypatch):
    monkeypatch.setattr(module, "stock_tiles", lambda *args: torch.full((1, 3, 160, 160), float("nan")))
    row = bench_case(vae, z, arms=["stock tiles"], free=GIB, repeats=1)[0]
    assert row["psnr_db"] is None and row["seconds"] > 0
    json.dumps(row, allow_nan=False)


def test_canvases_larger_than_the_photograph(vae):
    assert torch.equal(mirrored(photo("brushes", 64, 64), 64, 100)[..., 64:], photo("brushes", 64, 64)[..., 28:].flip(-1))
    with pytest.raises(ValueError, match="no photograph 'cat'"):
        latent_of(vae, 64, 64, "cat")


# --- the file -------------------------------------------------------------------------------------------------


def loads(vae, seen):
    return {"a": lambda: seen.append("a") or vae, "b": lambda: seen.append("b") or vae}


def test_a_broken_run_is_continued(vae, tmp_path, monkeypatch):
    file, seen, arms = tmp_path / "bench.csv", [], ["untiled", "stock tiles"]
    real = module.bench_case

    def breaks(*args, **kwargs):
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "bench_case", breaks)
    with pytest.raises(KeyboardInterrupt):
        bench(loads(vae, seen), [(64, 64)], file=file, arms=arms, repeats=1)
    before = file.read_text()
    assert [r["vae"] for r in read_bench(file)[1]] == ["a", "a"]
    file.write_text(before.rstrip("\n").rsplit("\n", 1)[0] + "\na,torn")  # and its last row is only half there
    monkeypatch.setattr(module, "bench_case", lambda *a, **kw: seen.append(kw["arms"]) or real(*a, **kw))
    seen.clear()
    header, rows = bench(loads(vae, seen), [(64, 64)], file=file, arms=arms, repeats=1, resume=True)
    assert seen == ["a", ["stock tiles"], "b", arms]
    assert [(r["vae"], r["arm"]) for r in rows] == [("a", "untiled"), ("a", "stock tiles"), ("b", "untiled"), ("b", "stock tiles")]
    again, back = read_bench(file)
    assert again == header and [r["seconds"] for r in back] == pytest.approx([r["seconds"] for r in rows], rel=1e-5)
    assert {k: type(v) for k, v in back[0].items() if v is not None}.items() <= COLUMNS.items()
    assert len(pd.read_csv(file, comment="#")) == 4


def test_files_that_are_left_alone(tmp_path):
    file, header = tmp_path / "bench.csv", header_of("cpu", repeats=9)
    assert begin(file, header) is begin(file, header, resume=True) is None and not file.exists()
    append_rows(file, [], header)
    before = file.read_bytes()
    for other, resume, words in [
        (header, False, "exists: --resume continues it, --force overwrites it"),
        (header_of("cpu", repeats=5), True, "of another run: repeats is 9 there, 5 here"),
        ({**header, "card": "L4"}, True, "card is not told there, L4 here"),
    ]:
        with pytest.raises(ValueError, match=words):
            begin(file, other, resume=resume)
        assert file.read_bytes() == before
    assert begin(file, header, force=True) is None and begin(file, header, resume=True) == []
    append_rows(file, [], header_of("cpu", repeats=5))
    assert read_bench(file)[0]["repeats"] == "5"
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no file of this bench"):
        begin(tmp_path / "other.csv", header, resume=True)
    with pytest.raises(ValueError, match="no folder"):
        begin(tmp_path / "none" / "bench.csv", header)


# --- the command ----------------------------------------------------------------------------------------------


def invoke(*args, code=0):
    result = CliRunner().invoke(cli, ["bench", *map(str, args)])
    assert result.exit_code == code, result.output
    assert not code or (result.stdout == "" and result.stderr.count("\n") == 1), result.output
    return result


def test_the_command(vae, tmp_path):
    folder, file = tmp_path / "model" / "vae", tmp_path / "bench.csv"
    vae.save_pretrained(folder)
    args = ["--vae", folder.parent, "--size", "64", "--arm", "untiled", "--arm", "stock tiles", "--repeats", 1, "-o", file]
    shown = invoke(*args, "--free", "0.7MiB").stdout
    assert shown.startswith("vae_tiles ") and "model 64x64, untiled: out of memory" in shown
    assert "--force" in invoke(*args, code=2).stderr
    assert "free is 734003 there, as stock tiles here" in invoke(*args, "--resume", code=2).stderr
    found = json.loads(invoke(*args, "--force", "--json").stdout)
    assert [r["arm"] for r in found["rows"]] == ["untiled", "stock tiles"] and found["header"]["repeats"] == "1"
    before = file.read_bytes()
    assert json.loads(invoke(*args, "--resume", "--json").stdout)["rows"][0]["vae"] == "model"
    assert file.read_bytes() == before


@pytest.mark.parametrize("args, words", [
    (["flux9"], "neither a folder"),
    (["flux1", "--arm", "lean"], "no arm 'lean'"),
    (["flux1", "--free", "lots", "--size", "64"], "lots"),
    (["flux1", "--photo", "cat", "--size", "64"], "no photograph 'cat'"),
    (["flux1", "--resume"], "go with -o"),
    (["flux1", "--resume", "--force", "-o", "a.csv"], "give one"),
    (["flux1", "--vae", "flux1"], "two VAEs are called flux1"),
    (["flux1", "--size", "60"], "multiple"),
])
def test_mistakes_are_one_line(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in invoke(*args, code=2).stderr
    assert not list(tmp_path.iterdir())


# --- Colab ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card, dtype", [("T4", "float16"), ("L4", "bfloat16")])
def test_colab_notebook_runs_with_weights_in_place_of_the_download(card, dtype, vae, tmp_path, monkeypatch):
    """Every cell but the installation and the download, in a folder where the download has left a VAE."""
    path = run_notebooks.nbs / "tutorials" / f"colab_{card.lower()}.ipynb"
    book = read_nb(path)
    assert book.metadata["accelerator"] == "GPU" and book.metadata["colab"]["gpuType"] == card
    link = f"https://colab.research.google.com/github/vae-tiles/vae-tiles/blob/main/nbs/tutorials/{path.name}"
    assert any(f"colab-badge.svg)]({link})" in cell.source for cell in book.cells[:2])
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    left_out = [source for source in code if source.startswith("#| eval: false")]
    assert ["pip install" in source for source in left_out] == [True, False] and "from_pretrained(repo, subfolder=" in left_out[1]
    assert sum(f"torch.{dtype})" in source for source in code) == 1
    vae.save_pretrained(tmp_path / "vaes" / "flux1")
    monkeypatch.chdir(tmp_path)
    here: dict = {}
    for source in code:
        if source not in left_out:
            exec(source, here)
    assert [r["arm"] for r in here["rows"]] == list(here["arms"]) and here["rows"][0]["psnr_db"] == 99
    assert here["load"]("flux1").config.block_out_channels == vae.config.block_out_channels  # not the package's own
    assert set(here["beside"].published_px) == {"1600x1600"} and here["beside"].measured_stock_s.notna().all()
    assert [p.name for p in tmp_path.iterdir()] == ["vaes"]


def test_published_figures_of_cards():
    cards = published("cards")
    assert {p["model"].split()[0] for p in cards} == set(MODELS)
    rows = [dict(vae="qwen-image-2.1", height_px=n, width_px=n, arm=arm, path=path, seconds=s, psnr_db=db)
            for n in (1024, 1536) for arm, path, s, db in (("untiled", "untiled", 1.0, 99), ("stock tiles", "stock", 2.0, 40.0),
                                                           ("blend", "blend", 3.0, 50.0), ("exact", "exact", None, None))]  # fmt: skip
    found = beside_published(rows, "T4")
    assert len(found) == sum(p["card"].startswith("T4") and "2.1" in p["model"] for p in cards)
    assert [f["measured_px"] for f in found] == ["1024x1024", "1536x1536", "1536x1536"]
    assert all(f["measured_untiled_over_stock"] == 0.5 and f["best_of_ours_db"] == 50 for f in found)
    assert beside_published(rows, "G4") == []
