"""The command line: exit codes, single-line errors, files that are never lost."""

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

from vae_tiles.cli import cli
from vae_tiles.fixtures import demo_vae, photo, tiny, to_pil, to_tensor
from vae_tiles.metrics import psnr
from vae_tiles.planning import plan


def invoke(*args, code=0):
    """The result of a command; a failure must be one line on standard error and nothing else."""
    result = CliRunner().invoke(cli, [str(a) for a in args])
    assert result.exit_code == code, result.output
    if code:
        assert result.stdout == "" and result.stderr.count("\n") == 1 and result.stderr.startswith("vae-tiles: "), result.output
        assert "Traceback" not in result.stderr
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A picture, and a VAE's and a pipeline's folder."""
    folder = tmp_path_factory.mktemp("cli")
    to_pil(photo("mountain", 200, 264)).save(folder / "photo.png")
    tiny("flux1", sample_size=256).save_pretrained(folder / "model" / "vae")
    return folder


@pytest.mark.parametrize("name", ["flux1", "wan"])
def test_plan_json_is_to_dict(name):
    found = json.loads(invoke("plan", name, "--size", "512x1024", "--free", "3GiB", "--json").stdout)
    expected = plan(name, 512, 1024, free="3GiB").to_dict()
    assert found == json.loads(json.dumps(expected, default=str))


@pytest.mark.parametrize("args, words", [
    (["plan", "flux9", "--size", "512"], "one of flux1"),
    (["plan", "flux1"], "--size"),
    (["plan", "flux1", "--size", "4k"], "such as 1024x1536"),
    (["plan", "flux1", "--size", "0x512"], "such as 1024x1536"),
    (["plan", "flux1", "--size", "512", "--mode", "best"], "best"),
    (["plan", "wan", "--size", "512", "--mode", "shared"], "shared"),
    (["plan", "flux1", "--size", "512", "--free", "lots"], "lots"),
    (["plan", "flux1", "--size", "512", "--free", "-1GiB"], ""),
    (["plan", "flux1", "--size", "512", "--nonsense"], "nonsense"),
    (["estimate", "flux1", "--size", "513"], ""),
    (["peaks", "/nowhere"], "neither a folder"),
    (["decode", "/nowhere.safetensors", "--vae", "flux1", "-o", "a.png"], "nowhere"),
    (["encode"], "IMAGE"),
    (["demo", "--vae", "sdxl"], "sdxl"),
    (["demo", "--photo", "cat"], "cat"),
    (["demo", "--size", "500"], "multiples of 32"),
    (["nonsense"], "nonsense"),
])
def test_a_mistake_is_one_line_and_exit_code_2(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in invoke(*args, code=2).stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("vae", ["model", "model/vae"])
def test_round_trip_through_files(folder, tmp_path, vae):
    latent, picture = tmp_path / "z.safetensors", tmp_path / "a.png"
    invoke("encode", folder / "photo.png", "--vae", folder / vae, "-o", latent)
    z = load_file(latent)["latent"]
    model = tiny("flux1", sample_size=256)
    with torch.no_grad():
        expected = model.encode(photo("mountain", 200, 264)).latent_dist.mode()
        assert (z - expected).abs().max() < 1e-3
        whole = model.decode(z).sample
    invoke("decode", latent, "--vae", folder / vae, "-o", picture)
    assert Image.open(picture).size == (264, 200)
    assert psnr(to_tensor(Image.open(picture)), whole) > 50


def test_files_are_not_overwritten_and_appear_whole(folder, tmp_path, monkeypatch):
    latent = tmp_path / "z.safetensors"
    invoke("encode", folder / "photo.png", "--vae", folder / "model", "-o", latent)
    before = latent.read_bytes()
    assert "--force" in invoke("encode", folder / "photo.png", "--vae", folder / "model", "-o", latent, code=2).stderr
    invoke("encode", folder / "photo.png", "--vae", folder / "model", "-o", latent, "--force")
    assert latent.read_bytes() == before

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full_disk)
    picture = tmp_path / "a.png"
    assert "No space left" in invoke("decode", latent, "--vae", folder / "model", "-o", picture, code=2).stderr
    assert [p.name for p in tmp_path.iterdir()] == ["z.safetensors"]


def test_what_cannot_be_decoded(folder, tmp_path):
    good = torch.zeros(1, 16, 8, 8)
    for name, tensors, words in [
        ("channels", {"latent": good[:, :4]}, "channels"),
        ("rank", {"latent": good[:, :, None]}, "dimensions"),
        ("batch", {"latent": good.repeat(2, 1, 1, 1)}, "one picture at a time"),
        ("two", {"a": good, "b": good}, "holds 2 tensors"),
    ]:
        file = tmp_path / f"{name}.safetensors"
        save_file({k: v.clone().contiguous() for k, v in tensors.items()}, file)
        assert words in invoke("decode", file, "--vae", folder / "model", "-o", tmp_path / "a.png", code=2).stderr
    save_file({"latent": good}, tmp_path / "good.safetensors")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x80\x04 this is a pickle")
    assert "no safetensors file" in invoke("decode", broken, "--vae", folder / "model", "-o", tmp_path / "a.png", code=2).stderr
    assert "picture format" in invoke("decode", broken, "--vae", folder / "model", "-o", tmp_path / "a.txt", code=2).stderr
    assert "no folder" in invoke("decode", broken, "--vae", folder / "model", "-o", tmp_path / "x" / "a.png", code=2).stderr
    assert "less than one latent" in invoke("decode", tmp_path / "good.safetensors", "--vae", folder / "model", "-o", tmp_path / "a.png",
                                            "--tile-size", "4", code=2).stderr
    assert not (tmp_path / "a.png").exists()


def test_pictures_that_do_not_fit_the_grid(folder, tmp_path):
    to_pil(photo("brushes", 201, 270)).save(tmp_path / "odd.png")
    args = ["encode", tmp_path / "odd.png", "--vae", folder / "model", "-o", tmp_path / "z.safetensors"]
    assert "--crop takes the middle 200x264" in invoke(*args, code=2).stderr
    invoke(*args, "--crop")
    assert load_file(tmp_path / "z.safetensors")["latent"].shape == (1, 16, 25, 33)
    (tmp_path / "text.png").write_text("not a picture")
    assert "no picture" in invoke("encode", tmp_path / "text.png", *args[2:4], "-o", tmp_path / "y.safetensors", code=2).stderr


def test_demo_writes_one_table_and_a_picture_per_class(tmp_path):
    out = tmp_path / "demo"
    args = ["demo", "--vae", "flux1", "--vae", "flux2", "--size", "448x512", "--stock-tile", "256", "-o", out]
    result = invoke(*args, "--json")
    rows = json.loads(result.stdout)["rows"]
    assert [(r["vae"], r["arm"]) for r in rows] == [(v, a) for v in ("flux1", "flux2")
                                                  for a in ("untiled", "stock tiles", "ours")]
    assert all(r["psnr_db"] == 99 for r in rows if r["arm"] == "untiled")
    assert all({"psnr_db", "window_levels", "line_score", "peak_mib", "seconds", "tiles"} <= r.keys() for r in rows)
    for name in ("flux1", "flux2"):
        assert Image.open(out / f"{name}.png").width > 1000
    assert "--force" in invoke(*args, code=2).stderr


def run(*args, **kwargs):
    command = [sys.executable, "-c", "from vae_tiles.cli import main; main()", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def test_as_a_program(tmp_path):
    done = run("decode", tmp_path / "none", "--vae", "flux1", "-o", tmp_path / "a.png")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    help_text = run("--help")
    assert help_text.returncode == 0
    assert all(c in help_text.stdout for c in ("demo", "plan", "decode", "encode", "peaks", "estimate", "bench"))
    assert run().stdout == help_text.stdout


def test_errors_in_our_own_code_are_one_line_too_but_for_debugging(tmp_path):
    code = "import vae_tiles.cli as c; c.Size.convert = lambda *args: 1 / 0; c.main()"
    command = [sys.executable, "-c", code, "plan", "flux1", "--size", "512"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("vae-tiles: ZeroDivisionError") and done.stderr.count("\n") == 1
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "VAE_TILES_DEBUG": "1"})
    assert done.returncode == 1 and "Traceback" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="there is no head on Windows")
def test_a_closed_pipe_is_no_error():
    command = f"'{sys.executable}' -c 'from vae_tiles.cli import main; main()' --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.startswith("Usage")


def test_weights_that_are_not_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"latent": torch.zeros(1, 16, 8, 8)}, tmp_path / "z.safetensors")
    for vae in (tmp_path, tmp_path / "none"):
        invoke("decode", tmp_path / "z.safetensors", "--vae", vae, "-o", tmp_path / "a.png", code=2)
    assert demo_vae("flux1").dtype == torch.float32


def test_peaks_of_a_folder_are_measured_kept_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("VAE_TILES_FIGURES", str(tmp_path / "figures.csv"))
    monkeypatch.setattr("vae_tiles.measure.SIDES", (4, 8))
    tiny("qwen-image").save_pretrained(tmp_path / "vae")
    import vae_tiles.measure as measure
    monkeypatch.setattr(measure, "measure_peaks", lambda vae, real=measure.measure_peaks, **kw: real(vae, (4, 8), **kw))
    rows = json.loads(invoke("peaks", tmp_path / "vae", "--save", "--plot", tmp_path / "peaks.png", "--json").stdout)
    assert [r["side"] for r in rows] == [4, 8] and all(r["peak_bytes"] > 0 for r in rows)
    assert (tmp_path / "figures.csv").is_file() and Image.open(tmp_path / "peaks.png").width > 100
    invoke("peaks", "flux1", "--save", code=2)
