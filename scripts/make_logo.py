"""The site's pictures, from the library's own geometry: logo and favicon (SVG) and the card that links show (JPEG).

    python scripts/make_logo.py           # write nbs/images/{logo,favicon}.svg and card.jpg
    python scripts/make_logo.py --check   # exit 1 if the SVGs are not what would be written
"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vae_tiles.geometry import Layout, wide_axis

images = Path(__file__).resolve().parent.parent / "nbs" / "images"
blue, light = (31, 95, 139), (233, 242, 248)
colors = ["#2a7fb8", "#2bb3a3", "#63b84f", "#f0a93c"]  # of the tiles, from the top left


def tiles(side: float) -> list[tuple[float, float, float, float]]:
    """Two by two tiles as the library lays them on 48 x 48 latents: left, top, width, height, on a square of `side`."""
    layout, k = Layout(wide_axis(48), wide_axis(48)), side / 48
    return [(x0 * k, y0 * k, (x1 - x0) * k, (y1 - y0) * k) for (y0, y1), (x0, x1) in layout.tiles()]


def svg(side: int) -> str:
    """The layout as a drawing: where tiles overlap, their colours mix."""
    rect = '<rect x="{:g}" y="{:g}" width="{:g}" height="{:g}" rx="{:g}" fill="{}"/>'
    rects = "".join(rect.format(x + 2, y + 2, w, h, side / 16, c) for (x, y, w, h), c in zip(tiles(side), colors))
    whole = side + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {whole}" width="{whole}" height="{whole}">'
        f'<rect width="{whole}" height="{whole}" rx="{side / 10:g}" fill="#fff"/><g fill-opacity=".62">{rects}</g></svg>\n'
    )


def card() -> Image.Image:
    """1200 x 630: name, claim and the picture of the README."""
    sheet = Image.new("RGB", (1200, 630), light)
    mark, draw = 132, ImageDraw.Draw(sheet, "RGBA")
    draw.rounded_rectangle((48, 44, 60 + mark, 56 + mark), 14, fill="white")
    for (x, y, w, h), color in zip(tiles(mark), colors):
        draw.rounded_rectangle((54 + x, 50 + y, 54 + x + w, 50 + y + h), 8, fill=color + "9e")
    draw.text((222, 40), "vae_tiles", blue, font=ImageFont.load_default(size=84))
    draw.text((226, 142), "Decode any latent on any card: VAE tiles that agree", (40, 60, 75), font=ImageFont.load_default(size=34))
    with Image.open(images / "demo.jpg") as demo:
        shown = demo.resize((1104, round(1104 * demo.height / demo.width)), Image.Resampling.LANCZOS)
    sheet.paste(shown.crop((0, 0, 1104, 630 - 228)), (48, 228))
    return sheet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say whether the SVGs are in step")
    made = {"logo.svg": svg(96), "favicon.svg": svg(28)}
    if parser.parse_args().check:
        stale = [name for name, text in made.items() if (images / name).read_text() != text]
        print(f"out of step: {stale}" if stale else "in step")
        return bool(stale)
    for name, text in made.items():
        (images / name).write_text(text)
    card().save(images / "card.jpg", quality=85)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
