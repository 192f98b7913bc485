"""Shared statistics on the trained VAEs: every photograph, size, tile and family against untiled, beside diffusers' stock tiles.

    python scripts/sweep_shared.py                     # about half an hour on one core; writes shared_sweep.csv
    python scripts/sweep_shared.py --sizes 256 --tiles 16 --names flux1 --photos brushes --out sweep.csv
"""

import argparse
import csv
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from vae_tiles.fixtures import as_input, demo_vae, photo, spatial_ratio
from vae_tiles.installing import decode
from vae_tiles.metrics import psnr, worst_window
from vae_tiles.planning import plan, stages_of
from vae_tiles.vaes import tiling

FIELDS = ["vae", "photo", "height_px", "width_px", "tile_latents", "cut", "step", "work_ratio", "shared_db", "stock_db",
          "window_levels", "tile_mean_levels"]


def rows_of(name: str, picture: str, height: int, width: int, tiles: list[int]):
    """One row per tile side, latents, on one photograph."""
    vae = demo_vae(name)
    ratio = spatial_ratio(vae)
    with torch.inference_mode():
        z = vae.encode(as_input(photo(picture, height, width), vae)).latent_dist.mode()
        want = vae.decode(z).sample
        for tile in tiles:
            p = plan(vae, height, width, mode="shared", tile=tile, dtype=torch.float32, free="64GiB")
            got = decode(vae, z, plan=p, progress=False)
            with tiling(vae, tile_size=tile * ratio):
                stock = vae.decode(z).sample
            side, (cut, step) = min(tile * ratio, height, width), p.statistics
            means = torch.nn.functional.avg_pool2d((got - want).mean(1, keepdim=True), side).abs().max() * 127.5
            measured = (psnr(got, want), psnr(stock, want), worst_window(got, want), float(means))
            asked = (name, picture, height, width, tile, stages_of(vae, "decode")[cut].name, step, p.work_ratio)
            yield dict(zip(FIELDS, (*asked, *(round(m, 3) for m in measured))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1024, 1600, 2048], help="long sides, pixels; short ones are 1440 at most")
    parser.add_argument("--tiles", type=int, nargs="*", default=[32, 64, 128], help="tile sides, latents of 8 pixels")
    parser.add_argument("--names", nargs="*", default=["flux1", "flux2", "hunyuan-image-2.1"])
    parser.add_argument("--photos", nargs="*", default=["brushes", "seeding", "mountain"])
    parser.add_argument("--out", type=Path, default=Path("shared_sweep.csv"))
    args = parser.parse_args()
    cases = [(n, p, min(s, 1440), s) for s in args.sizes for n in args.names for p in args.photos]
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for name, picture, height, width in tqdm(cases, disable=not sys.stderr.isatty()):
            tiles = [max(1, t * 8 // spatial_ratio(demo_vae(name))) for t in args.tiles]
            writer.writerows(rows_of(name, picture, height // 32 * 32, width // 32 * 32, tiles))
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
