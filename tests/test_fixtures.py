"""What the package ships: photographs, weights, configurations."""

import json

import pytest
import torch

from vae_tiles.fixtures import DEMOS, NAMES, PHOTOS, as_input, config, data_folder, demo_vae, full_width, load_vae, photo, photos
from vae_tiles.fixtures import latent_shape, tiny
from vae_tiles.metrics import psnr


def test_every_photograph_is_credited_and_the_other_way_round():
    assert {p.stem for p in (data_folder() / "photos").glob("*.jpg")} == set(PHOTOS)
    assert all(row["licence"] in {"CC0-1.0", "CC-BY-4.0"} and min(row["height"], row["width"]) >= 1024 for row in photos())


@pytest.mark.parametrize("name", NAMES)
def test_configurations_are_complete(name):
    c = {k: v for k, v in config(name).items() if not k.startswith("_")}
    made = {k: v for k, v in full_width(name).config.items() if not k.startswith("_")}
    assert json.loads(json.dumps(made)) == c


@pytest.mark.parametrize("name", NAMES)
def test_tiny_has_the_real_attributes(name):
    small, real = tiny(name), full_width(name)
    for key in vars(real):
        if key.startswith("tile_") or key in ("use_tiling", "spatial_compression_ratio", "temporal_compression_ratio"):
            assert getattr(small, key) == getattr(real, key), key
    assert latent_shape(small, 256, 128) == latent_shape(real, 256, 128)


@pytest.mark.parametrize("name", DEMOS)
def test_demonstration_weights_show_the_picture(name):
    vae, x = demo_vae(name), photo("mountain", 384, 576)
    with torch.no_grad():
        y = vae.decode(vae.encode(as_input(x, vae)).latent_dist.mode()).sample
    assert psnr(y, as_input(x, vae)) > 15
    assert y.abs().max() <= 1.5 and y.isfinite().all()


def test_only_safetensors_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ValueError, match="holds no .safetensors weights"):
        load_vae(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "system"}))
    with pytest.raises(ValueError, match="not an autoencoder"):
        load_vae(tmp_path)
