"""Write the lean rows of the shipped table of figures anew, as the lean stages are now.

python scripts/make_figures.py          # rewrite vae_tiles/data/figures.csv
python scripts/make_figures.py --check  # only say whether it is still true
"""

import argparse

import torch

from vae_tiles.fixtures import data_folder
from vae_tiles.measure import load_figures, named_vae, predict_figure, write_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a row is out of date")
    check, path, stale = parser.parse_args().check, data_folder() / "figures.csv", 0
    rows = load_figures(path)
    for row in (r for r in rows if r["decoder"] == "lean"):
        now = round(predict_figure(named_vae(row["name"]), op=row["op"], lean=True, dtype=torch.bfloat16).mib, 4)
        print(f"{row['name']:18} {row['op']} {row['mib_per_latent']:.4f} -> {now:.4f} MiB per latent")
        stale += not 0.98 <= row["mib_per_latent"] / now <= 1.25
        row["mib_per_latent"] = now
    if check:
        raise SystemExit(int(stale > 0))
    write_table(rows, path)


if __name__ == "__main__":
    main()
