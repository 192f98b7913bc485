"""Does any plan pass the memory it was made for? Full-width real configurations, on the meta device, under a real cap.

For each family, size, shape, free memory and direction: plan, then run the plan under a cap equal to the free memory, and
write one row: path, peak predicted and followed, share of the budget, work. `--quick` takes every seventh case.

    python scripts/sweep_caps.py [--quick] [--out caps.csv]
"""
import argparse
import csv
import sys
import time
from itertools import product

import torch

from vae_tiles.fixtures import full_width, latent_shape
from vae_tiles.installing import decode, encode
from vae_tiles.peaks import Follow, encode_shape, skimming
from vae_tiles.planning import plan

FAMILIES = ("flux1", "flux2", "qwen-image", "qwen-image-2.1", "hunyuan-image-2.1")
SIZES = (1024, 1600, 1664, 2048, 3072, 4096)  # pixels, the side of a square of that area
FREE = (.35, .6, 1, 2, 4, 8)  # GiB


def cases():
    "(family, height, width, free GiB, op); 1:4 canvases have the area of the square, down to a multiple of 32 pixels."
    for name, side, wide, free, op in product(FAMILIES, SIZES, (False, True), FREE, ("decode", "encode")):
        h, w = (side // 2 // 32 * 32, side * 2) if wide else (side, side)
        yield name, h, w, free, op


def run(vae, name, h, w, free, op) -> dict:
    "One case: the plan, and what following it under the cap says."
    start = time.perf_counter()
    p = plan(vae, h, w, free=int(free * 2**30), op=op)
    made = time.perf_counter() - start
    row = dict(vae=name, height=h, width=w, free_gib=free, op=op, path=p.path, calls=p.calls, predicted_mib=p.peak_bytes / 2**20,
               share=p.peak_bytes / p.budget_bytes, work_ratio=p.work_ratio, fits=p.fits, plan_s=made)
    shape = latent_shape(vae, h, w) if op == "decode" else encode_shape(vae, h // p.ratio, w // p.ratio)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    try:
        with skimming(), Follow(cap=int(free * 2**30), layout_copies=True) as follow:
            (decode if op == "decode" else encode)(vae, x, plan=p, progress=False)
        row.update(followed_mib=follow.peak / 2**20, tripped=False)
    except torch.OutOfMemoryError as e: row.update(followed_mib=None, tripped=True, error=str(e)[:120])
    return row


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--quick", action="store_true", help="every seventh case")
    a.add_argument("--family", choices=FAMILIES, help="one family only")
    a.add_argument("--out", default="caps.csv", help="where the rows go")
    args = a.parse_args()
    rows = [c for c in cases() if args.family in (None, c[0])][::7 if args.quick else 1]
    vaes = {name: full_width(name) for name in {c[0] for c in rows}}
    with open(args.out, "w", newline="", encoding="utf-8") as f:
        writer = None
        for i, case in enumerate(rows):
            row = run(vaes[case[0]], *case)
            writer = writer or csv.DictWriter(f, [*row, "error"])
            if i == 0: writer.writeheader()
            writer.writerow(row)
            f.flush()
            print(f"{i + 1}/{len(rows)}", row, file=sys.stderr)


if __name__ == "__main__": main()
