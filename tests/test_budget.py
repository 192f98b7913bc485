"""Budget: sizes in words, one function per backend through fakes, containers, overrides and limits."""

import logging
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from vae_tiles import budget as budgets
from vae_tiles.budget import HEADROOM, Free, Limits, budget, container_free, free_memory, limits, parse_bytes, spills

GIB = 2**30


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("VAE_TILES_FREE", raising=False)
    monkeypatch.delenv("VAE_TILES_MAX_BUFFER", raising=False)
    budgets._said.clear()


def fake(monkeypatch, module, **functions):
    for name, fn in functions.items():
        monkeypatch.setattr(module, name, fn, raising=False)


@pytest.mark.parametrize(
    "words, size",
    [
        ("0", 0),
        ("0.6GiB", 644245094),
        ("0.6 gib", 644245094),
        ("640MB", 640_000_000),
        ("640MiB", 640 * 2**20),
        ("8G", 8 * GIB),
        ("8g", 8 * GIB),
        ("1.5K", 1536),
        ("1_000 bytes", 1000),
        ("12b", 12),
        ("1e9", 10**9),
        (".5 TiB", 2**39),
        ("2.GiB", 2 * GIB),
        ("+3", 3),
        (123, 123),
        (1.9, 1),
        ("1e30", int(1e30)),
    ],
)
def test_sizes(words, size):
    assert parse_bytes(words) == size


@pytest.mark.parametrize("bad", ["12 parsecs", "", " ", "GiB", "1.2.3", "0x10", "1,5GiB", "5 GiBs", "1e", None, True, [], b"1"])
def test_words_that_are_no_size(bad):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(bad)


@pytest.mark.parametrize("bad", [-1, -0.5, "-1GiB", float("nan"), "nan", "NaN GiB", float("inf"), "inf", "-inf", "1e999"])
def test_numbers_that_are_no_size(bad):
    with pytest.raises(ValueError, match="finite and not negative"):
        parse_bytes(bad)


def card(monkeypatch, free=2 * GIB, total=8 * GIB, reserved=5 * GIB, used=4 * GIB, fraction=1.0, integrated=False):
    fake(
        monkeypatch,
        torch.cuda,
        mem_get_info=lambda i: (free, total),
        memory_reserved=lambda i: reserved,
        memory_allocated=lambda i: used,
        current_device=lambda: 3,
        get_device_properties=lambda i: SimpleNamespace(is_integrated=integrated),
        get_per_process_memory_fraction=lambda i: fraction,
    )


def test_cuda_reports_device_and_cache_apart(monkeypatch):
    card(monkeypatch)
    assert free_memory("cuda") == Free(2 * GIB, GIB, "cuda:3")
    assert free_memory("cuda:1").source == "cuda:1"
    assert budget("cuda") == int(3 * GIB / HEADROOM)
    assert budget("cuda", count_cache=False) == int(2 * GIB / HEADROOM)


def test_cuda_within_a_fraction(monkeypatch):
    card(monkeypatch, fraction=0.7)
    assert free_memory("cuda").device == int(8 * GIB * 0.7) - 5 * GIB
    card(monkeypatch, fraction=0.5)
    assert free_memory("cuda") == Free(0, GIB, "cuda:3")  # past its share already: never negative


def test_cuda_without_a_fraction_to_ask_for(monkeypatch):
    card(monkeypatch)
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert free_memory("cuda").device == 2 * GIB


def test_chips_that_share_memory_with_the_cpu(monkeypatch):
    card(monkeypatch, integrated=True)
    monkeypatch.setattr(budgets, "_system", lambda: 6 * GIB)
    assert free_memory("cuda").device == 6 * GIB
    monkeypatch.setattr(budgets, "_system", lambda: 60 * GIB)
    assert free_memory("cuda").device == 8 * GIB  # not more than there is


def test_xpu_with_and_without_a_driver_that_tells(monkeypatch):
    fake(
        monkeypatch,
        torch.xpu,
        mem_get_info=lambda i: (3 * GIB, 16 * GIB),
        memory_reserved=lambda i: 5 * GIB,
        memory_allocated=lambda i: 4 * GIB,
        current_device=lambda: 0,
        get_device_properties=lambda i: SimpleNamespace(total_memory=16 * GIB),
    )
    assert free_memory("xpu") == Free(3 * GIB, GIB, "xpu:0")

    def silent(i):
        raise RuntimeError("The device does not support querying the available free memory")

    monkeypatch.setattr(torch.xpu, "mem_get_info", silent)
    assert free_memory("xpu") == Free(11 * GIB, GIB, "xpu:0")


def test_mps_is_bounded_by_the_system(monkeypatch):
    fake(
        monkeypatch,
        torch.mps,
        recommended_max_memory=lambda: 10 * GIB,
        driver_allocated_memory=lambda: 4 * GIB,
        current_allocated_memory=lambda: 3 * GIB,
    )
    monkeypatch.setattr(budgets, "_system", lambda: 20 * GIB)
    assert free_memory("mps") == Free(6 * GIB, GIB, "mps")
    monkeypatch.setattr(budgets, "_system", lambda: 2 * GIB)
    assert free_memory("mps") == Free(2 * GIB, GIB, "mps")
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 11 * GIB)
    assert free_memory("mps").device == 0


def test_cpu_within_a_container(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=50 * GIB))
    monkeypatch.setattr(budgets, "container_free", lambda: None)
    assert free_memory("cpu") == Free(50 * GIB, 0, "cpu")
    monkeypatch.setattr(budgets, "container_free", lambda: 8 * GIB)
    assert free_memory("cpu").device == 8 * GIB


def test_cpu_for_real():
    found = free_memory("cpu")
    assert 0 < found.device <= psutil.virtual_memory().total and found.cached == 0


def group(folder, version, limit, usage, cache=0):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("max", "current", "inactive_file") if version == 2 else ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


def test_control_groups_version_2(tmp_path):
    own = tmp_path / "self"
    own.write_text("0::/pod/app\n")
    assert container_free(tmp_path, own) is None  # nothing there to read
    group(tmp_path / "pod/app", 2, "max", 100)
    assert container_free(tmp_path, own) is None
    group(tmp_path / "pod", 2, 1000, 800, 300)
    assert container_free(tmp_path, own) == 500
    group(tmp_path / "pod/app", 2, 400, 300)
    assert container_free(tmp_path, own) == 100
    group(tmp_path / "pod/app", 2, 400, 500)
    assert container_free(tmp_path, own) == 0  # over its limit: never negative


def test_control_groups_at_the_root_of_a_container(tmp_path):
    own = tmp_path / "self"
    own.write_text("0::/\n")
    group(tmp_path, 2, 1000, 200)
    assert container_free(tmp_path, own) == 800


def test_control_groups_version_1(tmp_path):
    own = tmp_path / "self"
    own.write_text("9:name=systemd:/\n7:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    group(tmp_path / "memory/docker/abc", 1, 1000, 600, 100)
    group(tmp_path / "memory", 1, 9223372036854771712, 5)  # how version 1 writes "no limit"
    assert container_free(tmp_path, own) == 500


def test_control_groups_seen_from_inside(tmp_path):
    """A container sees its own group mounted at the root, while its path is still the host's."""
    own = tmp_path / "self"
    own.write_text("4:memory:/kubepods/pod1\n")
    group(tmp_path / "memory", 1, 1000, 100)
    assert container_free(tmp_path, own) == 900


def test_no_control_groups_at_all(tmp_path):
    assert container_free(tmp_path, tmp_path / "missing") is None
    own = tmp_path / "self"
    own.write_text("nonsense\n")
    assert container_free(tmp_path, own) is None
    own.write_text("0::/a\n")
    group(tmp_path / "a", 2, "many", "few")
    assert container_free(tmp_path, own) is None


def test_who_is_asked_first(monkeypatch):
    assert free_memory("cpu", "1GiB") == Free(GIB, 0, "free=")
    given = Free(5, 6, "mine")
    assert free_memory("cuda", given) is given
    monkeypatch.setenv("VAE_TILES_FREE", "2GiB")
    assert free_memory("cuda") == Free(2 * GIB, 0, "VAE_TILES_FREE")
    assert free_memory("cuda", 0) == Free(0, 0, "free=")
    monkeypatch.setenv("VAE_TILES_FREE", "  ")
    assert free_memory("cpu").source == "cpu"


@pytest.mark.parametrize("bad", ["12 parsecs", "-1", "nan"])
def test_a_bad_variable_is_named(monkeypatch, bad):
    monkeypatch.setenv("VAE_TILES_FREE", bad)
    with pytest.raises(ValueError, match="VAE_TILES_FREE: "):
        free_memory("cpu")
    monkeypatch.setenv("VAE_TILES_MAX_BUFFER", bad)
    with pytest.raises(ValueError, match="VAE_TILES_MAX_BUFFER: "):
        limits("cpu")


def test_no_device_or_meta_means_where_a_vae_would_go(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card(monkeypatch)
    assert free_memory().source == free_memory("meta").source == "cuda:3"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert budgets.default_device().type == "xpu"
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert budgets.default_device().type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert budgets.default_device().type == "cpu"


def test_a_device_that_cannot_say_counts_as_full_and_says_so_once(monkeypatch, caplog):
    def broken(i):
        raise RuntimeError("CUDA error: invalid device ordinal\nmore words")

    card(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    with caplog.at_level(logging.WARNING, "vae_tiles"):
        assert [free_memory("cuda").total for _ in range(3)] == [0, 0, 0]
    assert len(caplog.records) == 1
    assert "invalid device ordinal" in caplog.text and "more words" not in caplog.text and "VAE_TILES_FREE" in caplog.text


def test_other_backends_are_asked_as_cuda_is(monkeypatch, caplog):
    assert free_memory("hpu").total == 0 and free_memory("hpu").source == "hpu does not say"
    fake(monkeypatch, torch, hpu=SimpleNamespace(mem_get_info=lambda i: (7, 9), current_device=lambda: 0))
    assert free_memory("hpu:0").device == 7


def test_windows_spills(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(torch.version, "hip", None)
    assert spills("cuda:0") and not spills("cpu") and not spills("xpu")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not spills("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not spills("cuda")


def test_budget_is_free_less_headroom():
    for n in (0, 1, 644245094, 10**30):
        assert budget(free=n) == int(n / 1.25)
    assert budget(free=Free(100, 25)) == 100 and budget(free=Free(100, 25), count_cache=False) == 80


def test_limits(monkeypatch):
    assert limits("cpu") == limits("cuda") == Limits(None, 2**31 - 1)
    assert limits("mps").nbytes == 2**32 - 1
    assert Limits(100, 10).allow(100, 10)
    assert not Limits(100, 10).allow(101, 10) and not Limits(100, 10).allow(100, 11)
    monkeypatch.setenv("VAE_TILES_MAX_BUFFER", "512MiB")
    assert limits("mps").nbytes == limits("meta").nbytes == 2**29


def test_free_in_words():
    assert str(Free(GIB)) == "1.00 GiB free"
    assert str(Free(GIB, 2**29, "cuda:0")) == "1.00 GiB free and 512.0 MiB cached (cuda:0)"
