"""Draw shardings.svg: one 8 x 8 matrix, laid over eight devices in five ways.

Needs JAX and Matplotlib; run it as  python book/figures/shardings.py
"""

from pathlib import Path

import jax
import matplotlib.pyplot as plt
from jax.sharding import AxisType, NamedSharding, PartitionSpec

jax.config.update("jax_num_cpu_devices", 8)
plt.rcParams["svg.hashsalt"] = "parallel-jax"
COLORS = "#696eef #a899e3 #aefaea #4ccd9d #fcee28 #f69c1d #cc5917 #977587".split()
SPECS = [(), ("x",), (None, "y"), ("x", "y"), (("x", "y"),)]


def draw(ax: plt.Axes, spec: tuple, mesh: jax.sharding.Mesh) -> None:
    """Fill each block with the colors and numbers of the devices that hold it."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    holders = {}
    for device, (rows, cols) in sharding.devices_indices_map((8, 8)).items():
        block = (*rows.indices(8)[:2], *cols.indices(8)[:2])
        holders.setdefault(block, []).append(device.id)
    for (top, bottom, left, right), devices in holders.items():
        height, width = bottom - top, (right - left) / len(devices)
        for place, device in enumerate(devices):
            corner = (left + place * width, top)
            ax.add_patch(
                plt.Rectangle(corner, width, height, color=COLORS[device], lw=0)
            )
            middle = (corner[0] + width / 2, top + height / 2)
            ax.text(*middle, device, ha="center", va="center", fontsize=11)
        ax.add_patch(
            plt.Rectangle(
                (left, top), right - left, height, fill=False, ec="white", lw=3
            )
        )
    ax.set(xlim=(0, 8), ylim=(8, 0), aspect="equal")
    ax.axis("off")
    ax.set_title(f"P{spec}".replace(",)", ")"), family="monospace", fontsize=10)


if __name__ == "__main__":
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    figure, axes = plt.subplots(1, len(SPECS), figsize=(12.5, 2.9))
    for ax, spec in zip(axes, SPECS, strict=True):
        draw(ax, spec, mesh)
    figure.tight_layout()
    file = Path(__file__).with_suffix(".svg")
    figure.savefig(file, metadata={"Date": None})
    file.write_text(file.read_text().replace(" \n", "\n"))
