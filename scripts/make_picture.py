"""The README's picture, nbs/images/demo.jpg: one photograph untiled, in stock tiles and in ours.

    python scripts/make_picture.py
"""

from pathlib import Path

import torch

from vae_tiles.bench import compare, note, side_by_side
from vae_tiles.fixtures import as_input, demo_vae, photo

target = Path(__file__).resolve().parent.parent / "nbs" / "images" / "demo.jpg"


def main():
    vae = demo_vae("qwen-image")
    with torch.no_grad():
        latent = vae.encode(as_input(photo("seeding", 704, 960), vae)).latent_dist.mode()
    rows, pictures, plan = compare(vae, latent)
    notes = {row["arm"]: note(row) for row in rows if row["arm"] != "untiled"}
    target.parent.mkdir(exist_ok=True)
    side_by_side(pictures, notes, width=400).save(target, quality=88)
    print(plan)


if __name__ == "__main__":
    main()
