"""Draw the landing page's figure shardings.svg, the logo, and the link preview.

The figure is an 8 x 8 matrix with six shardings over eight devices, computed by JAX.
Needs JAX and Matplotlib; run it as  python book/figures/shardings.py
"""

from pathlib import Path

import jax
import matplotlib.pyplot as plt
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

jax.config.update("jax_num_cpu_devices", 8)
plt.rcParams.update({"svg.hashsalt": "parallel-jax", "svg.fonttype": "none"})
COLORS = "#696eef #a899e3 #aefaea #4ccd9d #fcee28 #f69c1d #cc5917 #977587".split()
SPECS = [(), ("x",), (None, "y"), ("x", "y"), ("y", "x"), (("x", "y"),)]
RING = [(0, 0), (6, 0), (12, 0), (12, 6), (12, 12), (6, 12), (0, 12), (0, 6)]
STYLE = """<style>svg { fill: #59636e }
@media (prefers-color-scheme: dark) { svg { fill: #9ea8b3 } }</style>
"""
GAP = 0.3  # between blocks, in rows of the matrix


def draw_layout(ax: plt.Axes, mesh: jax.sharding.Mesh, spec: tuple) -> None:
    """Draw each block as a rounded tile with a stripe for each device that holds it."""
    indices = NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map((8, 8))
    for device, index in indices.items():
        (top, bottom), (left, right) = (part.indices(8)[:2] for part in index)
        width, height = right - left - GAP, bottom - top - GAP
        look = dict(boxstyle="round, pad=0, rounding_size=0.25", transform=ax.transData)
        tile = FancyBboxPatch((left, top), width, height, **look)
        replicas = [other for other in indices if indices[other] == index]
        stripe = width / len(replicas)
        at = left + stripe * replicas.index(device)
        look = dict(color=COLORS[device.id], lw=0, clip_path=tile)
        overlap = 0.05  # hides the background between two stripes
        ax.add_patch(Rectangle((at, top), stripe + overlap, height, **look))
        middle = at + stripe / 2, top + height / 2
        look = dict(size=11, color="#111111", ha="center", va="center_baseline")
        ax.text(*middle, device.id, **look)
    ax.set(xlim=(0, 8 - GAP), ylim=(8 - GAP, 0), aspect="equal")
    typed = str(spec).replace(",)", ")").replace("'", '"')
    ax.set_title(f"P{typed}", family="monospace", size=13)
    ax.axis("off")


def draw_layouts(figure: Figure, **place: float) -> None:
    """Draw the six layouts into a part of a figure."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    for ax, spec in zip(figure.subplots(2, 3, gridspec_kw=place).flat, SPECS):
        draw_layout(ax, mesh, spec)


def write_figure(file: Path) -> None:
    """Write the six layouts, 640 x 460 pixels, for light and dark pages."""
    figure = plt.figure(figsize=(640 / 96, 460 / 96))
    place = dict(left=0.02, right=0.98, bottom=0.02, top=0.925)
    draw_layouts(figure, **place, wspace=0.14, hspace=0.22)
    figure.savefig(file, metadata={"Date": None}, transparent=True)
    svg = file.read_text().replace(" \n", "\n")
    file.write_text(svg.replace("</svg>", f"{STYLE}</svg>"))


def write_logo(file: Path) -> None:
    """Write the ring of eight devices, 16 x 16."""
    tiles = "".join(
        f'<rect x="{x}" y="{y}" width="4" height="4" rx=".75" fill="{color}"/>\n'
        for (x, y), color in zip(RING, COLORS)
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">\n'
    file.write_text(f"{head}<title>Eight devices in a ring</title>\n{tiles}</svg>\n")


def write_card(file: Path) -> None:
    """Write the preview that other sites show with a link, 1200 x 630 pixels."""
    figure = plt.figure(figsize=(1200 / 96, 630 / 96))
    place = dict(left=0.42, right=0.95, bottom=0.14, top=0.833)
    draw_layouts(figure, **place, wspace=0.14, hspace=0.25)
    ax = figure.add_axes((0.05, 0.633, 0.105, 0.2))
    for corner, color in zip(RING, COLORS):
        shape = "round, pad=0, rounding_size=0.75"
        ax.add_patch(FancyBboxPatch(corner, 4, 4, shape, color=color, lw=0))
    ax.set(xlim=(0, 16), ylim=(16, 0), aspect="equal")
    ax.axis("off")
    figure.text(0.05, 0.32, "Parallel JAX", size=40, weight="bold", color="#111111")
    promise = "One program, many devices:\nevery claim executed and checked"
    figure.text(0.05, 0.15, promise, size=17, color="#111111", linespacing=1.6)
    figure.savefig(file, dpi=96, metadata={"Software": None})


if __name__ == "__main__":
    static = Path(__file__).parents[1] / "_static"
    write_figure(Path(__file__).with_suffix(".svg"))
    write_logo(static / "logo.svg")
    write_card(static / "preview.png")
