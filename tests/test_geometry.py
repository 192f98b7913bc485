"Layouts over every length, and the published tile sizes."
from itertools import product

import pytest

from vae_tiles.fixtures import published
from vae_tiles.geometry import (Geometry, Layout, even_axes, fewest_calls, fewest_latents, meets_floor, sliver_axes,
                                stock_axis, wide_axis)

STOCK = {
    "FLUX.1 ae": Geometry("kl", 8, (128, 128), (96, 96)),
    "Qwen-Image": Geometry("wan", 8, (32, 32), (24, 24), 5),
    "Qwen-Image-2.1": Geometry("wan", 16, (16, 16), (12, 12), 5),
    "HunyuanImage-2.1": Geometry("kl", 32, (12, 12), (9, 9)),
}
FIGURE = {"FLUX.1 ae": .09, "Qwen-Image": .19, "Qwen-Image-2.1": .43, "HunyuanImage-2.1": 1.3}  # MiB per latent, fused


def covers(axis):
    "Every latent of the axis lies in a tile, in order."
    at = 0
    for a, b in axis.spans:
        if a > at: return False
        at = max(at, b)
    return at == axis.length


@pytest.mark.parametrize("name", STOCK)
def test_every_length(name):
    g = STOCK[name]
    floor, ov = g.floor[0], g.ov[0]
    for length in range(1, 601):
        for axis in even_axes(length, floor, ov):
            assert covers(axis) and axis.spans[-1] == (length - axis.side, length)
            assert set(axis.sides) == {axis.side} and axis.side >= min(floor, length)
            assert min(axis.overlaps, default=ov) >= ov


def fits(free_gib, figure, size_px):
    "The published rule: area * f + accumulator <= free / 1.25."
    return lambda area: area * figure + 12 * size_px**2 / 2**20 <= free_gib * 1024 / 1.25


def sized(vae, size_px, free_gib):
    "The tile that the published rule takes, as the table writes it."
    g, n = STOCK[vae], size_px // STOCK[vae].ratio
    area_fits = fits(free_gib, FIGURE[vae], size_px)
    if g.small: layout = fewest_latents(g, n, n, area_fits)
    else: layout = None if g.stock_stays(n, n) else fewest_calls(g, n, n, area_fits)
    return "stock" if layout is None else "{}x{}".format(*layout.tile)


@pytest.mark.parametrize("row", published("decode_b200"), ids=lambda r: f"{r['vae']}-{r['size_px']}-{r['free_gib']}")
def test_published_tiles(row):
    assert sized(row["vae"], int(row["size_px"]), float(row["free_gib"])) == row["sized_tile"]


def brute(vae, size_px, free_gib):
    "The same rule by trying every pair of tile counts, written apart."
    n = size_px // STOCK[vae].ratio
    ok, best = fits(free_gib, FIGURE[vae], size_px), None
    for nh, nw in product(range(1, n), range(1, n)):
        h, w = (max(-(-(n + 16 * (k - 1)) // k), 32) for k in (nh, nw))
        h, w = min(h, n), min(w, n)
        if (n > h and nh == 1) or (n > w and nw == 1) or not ok(h * w): continue
        total = nh * h * nw * w
        if best is None or (total, h * w) < best[:2]: best = total, h * w
    return best


@pytest.mark.parametrize("vae", ["Qwen-Image", "Qwen-Image-2.1", "HunyuanImage-2.1"])
@pytest.mark.parametrize("size_px", [768, 1328, 1984, 2560])
@pytest.mark.parametrize("free_gib", [.5, .8, 1.5, 3, 6])
def test_rule_beyond_the_table(vae, size_px, free_gib):
    g, n = STOCK[vae], size_px // STOCK[vae].ratio
    layout = fewest_latents(g, n, n, fits(free_gib, FIGURE[vae], size_px))
    assert (None if layout is None else (layout.latents, layout.area)) == brute(vae, size_px, free_gib)


@pytest.mark.parametrize("free_gib", [.6, 2, 8])
def test_slivers(free_gib):
    g = STOCK["FLUX.1 ae"]
    for length in range(129, 420):
        stock = stock_axis(length, 128, 96)
        if meets_floor(stock): continue
        layout = fewest_calls(g, length, length, fits(free_gib, .09, length * 8))
        assert layout.calls < stock.n**2
        for axis in (layout.rows, layout.cols):
            assert covers(axis) and min(axis.overlaps, default=32) >= 32
            assert axis.total < stock.total + axis.n  # no more latents than stock, but for rounding up the side


def test_stock_tiles_of_the_last_column():
    for length in range(1, 601):
        for side, stride in ((128, 96), (32, 24), (16, 12), (12, 9)):
            assert covers(stock_axis(length, side, stride))
            assert all(a.n <= stock_axis(length, side, stride).n for a in sliver_axes(length, side, stride))


def test_an_empty_canvas_is_refused():
    with pytest.raises(ValueError, match="0 latents"): wide_axis(0)


def test_layout_is_the_product():
    layout = Layout(wide_axis(100), wide_axis(40))
    assert layout.calls == len(layout.tiles()) == layout.grid[0] * layout.grid[1]
