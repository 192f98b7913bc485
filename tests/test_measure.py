"""Measured peaks: the counters of each backend through fakes, tables saved and loaded, and which figure a plan goes by."""

import builtins
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from vae_tiles import measure
from vae_tiles.fixtures import full_width, tiny
from vae_tiles.measure import (
    Figure,
    figure,
    figures,
    load_figures,
    machine,
    measure_peaks,
    plot_peaks,
    predict_figure,
    save_figures,
    shipped_figures,
)
from vae_tiles.peaks import BOUND, predict_decode, predict_encode

FAMILIES = ("flux1", "flux2", "qwen-image", "qwen-image-2.1", "hunyuan-image-2.1")


@pytest.fixture(autouse=True)
def own_figures(monkeypatch, tmp_path):
    """No test reads, or writes, the figures of whoever runs it."""
    path = tmp_path / "own" / "figures.csv"
    monkeypatch.setenv("VAE_TILES_FIGURES", str(path))
    return path


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("op", ["decode", "encode"])
def test_measured_on_cpu_is_as_predicted(name, op):
    vae = tiny(name)
    before = {k: id(v) for k, v in vae.state_dict(keep_vars=True).items()}
    frame = measure_peaks(vae, sides=(4, 6), op=op)
    predict = predict_decode if op == "decode" else predict_encode
    for side, peak in zip(frame.side, frame.peak_bytes):
        run = predict(vae, side, side, dtype=torch.float32)
        assert abs(run.peak / peak - 1) < 0.03
    assert {k: id(v) for k, v in vae.state_dict(keep_vars=True).items()} == before
    assert set(frame.op) == {op} and set(frame.decoder) == {"stock"} and set(frame.error) == {""}


def test_lean_is_measured_too_and_takes_less():
    vae = tiny("qwen-image")
    stock, lean = (measure_peaks(vae, sides=(24,), lean=lean) for lean in (False, True))
    assert lean.peak_bytes[0] < stock.peak_bytes[0] / 2
    assert list(lean.decoder) == ["lean"]


def test_another_type_is_measured_on_a_copy():
    vae = tiny("flux1")
    frame = measure_peaks(vae, sides=(4,), dtype=torch.bfloat16)
    assert list(frame.dtype) == ["bfloat16"]
    assert next(vae.parameters()).dtype == torch.float32
    assert frame.peak_bytes[0] < measure_peaks(vae, sides=(4,)).peak_bytes[0]


def test_columns_say_what_the_numbers_depend_on():
    done = []
    frame = measure_peaks(tiny("flux1"), sides=(4, 5), progress=lambda i, n: done.append((i, n)))
    wanted = "class ratio op decoder dtype memory_format side peak_bytes reserved_bytes mib_per_latent seconds device_type"
    assert set(wanted.split()) | {"device", "driver", "torch", "diffusers", "key"} <= set(frame.columns)
    assert done == [(1, 2), (2, 2)]
    assert frame.torch[0] == torch.__version__


def test_mistakes_are_named():
    vae = tiny("flux1")
    for sides in ((), (0,), (8, -1)):
        with pytest.raises(ValueError, match="tile sides are 1 latent or more"):
            measure_peaks(vae, sides=sides)
    with pytest.raises(ValueError, match="op='upscale'"):
        measure_peaks(vae, op="upscale")
    with pytest.raises(ValueError, match="has no weights"):
        measure_peaks(full_width("flux1"))


def test_without_pandas_the_message_helps(monkeypatch):
    real = builtins.__import__

    def none(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError("No module named 'pandas'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(ImportError, match=r"vae_tiles\[plots\]"):
        measure_peaks(tiny("flux1"), sides=(4,))


def test_running_out_ends_the_table_and_other_errors_do_not(monkeypatch):
    vae = tiny("flux1")
    real = measure._caller

    def caller(vae, op, lean):
        call = real(vae, op, lean)

        def small_only(x):
            if x.shape[-1] > 5:
                raise RuntimeError("HIP out of memory. Tried to allocate 9 GiB")
            return call(x)

        return small_only

    monkeypatch.setattr(measure, "_caller", caller)
    frame = measure_peaks(vae, sides=(4, 5, 6, 7))
    assert list(frame.side) == [4, 5, 6] and list(frame.error) == ["", "", "out of memory"]
    assert pd.isna(frame.peak_bytes[2])
    save_figures(frame)
    assert [r["side"] for r in load_figures()] == [4, 5]

    def broken(vae, op, lean):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(measure, "_caller", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        measure_peaks(vae, sides=(4,))


# --- counters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_allocators_with_peak_counters(monkeypatch, kind):
    calls = []
    state = dict(memory_allocated=100, memory_reserved=200, max_memory_allocated=150, max_memory_reserved=260)
    module = getattr(torch, kind)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(module, name, lambda *a, name=name: calls.append(name), raising=False)
    for name, n in state.items():
        monkeypatch.setattr(module, name, lambda *a, n=n: n, raising=False)
    stop = measure._meter(torch.device(kind, 0))()
    assert calls == ["synchronize", "empty_cache", "reset_peak_memory_stats"]  # a fresh reset
    assert stop() == (50, 60)


def test_metal_is_followed_and_the_driver_asked(monkeypatch):
    held = [1000]
    fakes = dict(synchronize=lambda: None, empty_cache=lambda: None, driver_allocated_memory=lambda: held[0])
    for name, fn in fakes.items():
        monkeypatch.setattr(torch.mps, name, fn, raising=False)
    stop = measure._meter(torch.device("mps"))()
    x = torch.zeros(1024)
    held[0] = 9000
    assert stop() == (4096, 8000)
    assert len(x) == 1024


def test_machines(monkeypatch):
    assert machine("cpu")["device_type"] == "cpu"
    card = SimpleNamespace(name="A card", driver_version="1.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: card)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert {"device": "A card", "driver": "CUDA 13.0"}.items() <= machine("cuda:0").items()
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert machine("cuda")["driver"] == "ROCm 7.1"
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda d: card, raising=False)
    assert machine("xpu")["driver"] == "1.2"
    assert machine("mps")["driver"].startswith("macOS")


# --- tables ---------------------------------------------------------------------------------------------------


def test_a_table_survives_saving_and_loading(own_figures, tmp_path):
    assert load_figures() == [] == load_figures(tmp_path / "none.csv")
    frame = measure_peaks(tiny("flux1"), sides=(4, 5))
    assert save_figures(frame) == own_figures == figures.path()
    rows = figures.load()
    assert [r["side"] for r in rows] == [4, 5]
    assert [r["mib_per_latent"] for r in rows] == list(frame.mib_per_latent)
    assert rows[0]["reserved_bytes"] is None
    save_figures(frame.assign(mib_per_latent=9.0).iloc[:1])  # measured again: replaced
    save_figures([{**rows[0], "side": 6}])  # dicts do as well; another side is added
    assert [(r["side"], r["mib_per_latent"]) for r in load_figures()][::2] == [(4, 9.0), (6, rows[0]["mib_per_latent"])]
    assert not list(own_figures.parent.glob("*.part"))
    assert b"\r" not in own_figures.read_bytes()


def test_tables_that_are_none(own_figures, caplog):
    own_figures.parent.mkdir(parents=True)
    own_figures.write_text("side,peak\n1,2\n")
    with pytest.raises(ValueError, match="no table of figures: no column class, decoder"):
        load_figures()
    assert figure("flux1").source.startswith("shipped")  # a plan goes on without it, and says so
    assert "no table of figures" in caplog.text
    own_figures.write_text("class,op,decoder,dtype,mib_per_latent\nA,decode,stock,bfloat16,lots\n")
    with pytest.raises(ValueError, match="lots"):
        load_figures()
    own_figures.write_text("")
    assert load_figures() == []


# --- which figure ---------------------------------------------------------------------------------------------

PUBLISHED = {"qwen-image": 0.27, "qwen-image-2.1": 1.7, "hunyuan-image-2.1": 1.3, "flux1": 0.17, "sdxl": 0.17, "flux2": 0.17}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_figures_of_stock_decoders_are_the_published_ones(name):
    found = figure(name)
    assert (found.mib, found.bound) == (PUBLISHED[name], 1.0) and "published" in found.source
    assert figure(full_width(name), device="cuda:0") == found


@pytest.mark.parametrize("name", FAMILIES)
def test_shipped_figures_of_lean_decoders_are_still_true(name, monkeypatch):
    ships = figure(name, lean=True)
    assert "lean stages" in ships.source and ships.bound == BOUND
    monkeypatch.setattr(measure, "LEAN_SIDES", (32,))
    now = predict_figure(full_width(name), lean=True, dtype=torch.bfloat16, layout_copies=True).mib
    assert 0.8 * ships.mib <= now <= 1.05 * ships.mib
    assert ships.safe < PUBLISHED[name]


def test_a_figure_belongs_to_a_structure_not_to_a_class():
    small = figure(tiny("flux1"), device="cuda", dtype=torch.bfloat16)
    assert "predicted" in small.source and small.mib < 0.05 and small.bound == BOUND


def test_a_class_without_a_figure_is_predicted():
    found = figure("wan")
    assert "predicted" in found.source and found.safe == found.mib * BOUND
    assert "predicted" in figure("qwen-image", op="encode").source
    fp32 = figure("flux1", dtype=torch.float32)
    assert "predicted" in fp32.source and fp32.mib > 0.17  # no layout copies, but twice the bytes
    assert figure("flux1", dtype=torch.float16) == figure("flux1")


def test_on_a_cpu_nothing_is_charged_that_only_gpus_do():
    vae = tiny("flux1")
    cpu = figure(vae, dtype=torch.bfloat16)
    assert cpu.mib < figure(vae, dtype=torch.bfloat16, device="cuda").mib


def test_the_users_own_figure_comes_first_where_it_was_measured():
    vae = tiny("flux1")
    frame = measure_peaks(vae, sides=(4, 32))
    save_figures(frame)
    mine = figure(vae)
    assert (mine.mib, mine.bound) == (frame.mib_per_latent.max(), 1.0) and "measured here" in mine.source
    assert "measured here" not in figure(vae, device="cuda").source
    assert "measured here" not in figure(vae, op="encode").source
    assert "measured here" not in figure(vae, dtype=torch.bfloat16).source
    assert "measured here" not in figure(tiny("flux1", block_out_channels=[16, 16, 16, 16])).source
    lean = measure_peaks(vae, sides=(4, 32), lean=True)
    save_figures(lean)
    assert figure(vae, lean=True).mib == lean.mib_per_latent[1]  # from 32 latents on
    row = {**shipped_figures()[0], "mib_per_latent": 0.25, "source": None, "device": "my card"}
    save_figures([row])
    assert figure(row["name"]) == Figure(0.25, "measured here: my card", 1.0)


def test_unknown_names():
    with pytest.raises(ValueError, match="no VAE named 'flux9': the names are flux1, sdxl"):
        figure("flux9")


def test_a_picture():
    ax = plot_peaks(measure_peaks(tiny("flux1"), sides=(4, 6)))
    assert "latents" in ax.get_xlabel() and "MiB" in ax.get_ylabel()
