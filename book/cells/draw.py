# @title Draw blocks in the colours of their devices
device_color = "#696eef #a899e3 #aefaea #4ccd9d #fcee28 #f69c1d #cc5917 #977587".split()


def draw_tile(
    ax: plt.Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    device: int | None,
    text: object = "",
    **style,
) -> None:
    """Draw a tile at a corner (left, top) with a size (width, height), in the colour
    of the device with this id, or in white if it is None."""
    face = "white" if device is None else device_color[device]
    ink = "black" if device is None else "#111111"
    ax.add_patch(plt.Rectangle(corner, *size, fc=face, ec="black", lw=0.5))
    left, top = corner
    width, height = size
    middle = {"ha": "center", "va": "center_baseline", "fontsize": 9} | style
    ax.text(left + width / 2, top + height / 2, text, color=ink, **middle)


def draw_layout(
    ax: plt.Axes,
    sharding: jax.sharding.Sharding,
    shape: tuple[int, int],
    corner: tuple[float, float] = (0, 0),
    size: tuple[float, float] = (8, 8),
) -> None:
    """Draw how an array of shape [rows, columns] is sharded, in a box of this size:
    blocks with gaps between them, each with a stripe for every device that holds it."""
    holders = {}
    for device, index in sharding.devices_indices_map(shape).items():
        block = tuple(part.indices(length)[:2] for part, length in zip(index, shape))
        holders.setdefault(block, []).append(device.id)
    wide, high = size[0] / shape[1], size[1] / shape[0]  # of one element
    gap = 0.1
    for ((top, low), (left, right)), devices in holders.items():
        stripe = (right - left) * wide / len(devices) - 2 * gap / len(devices)
        height = (low - top) * high - 2 * gap
        for place, device in enumerate(devices):
            x = corner[0] + left * wide + gap + place * stripe
            y = corner[1] + top * high + gap
            draw_tile(ax, (x, y), (stripe, height), device, device)
    ax.set(xlim=(0, size[0]), ylim=(size[1], 0), aspect="equal")
    ax.axis("off")


def draw_held(**arrays: jax.Array) -> None:
    """Draw the values that each device holds, in the colours of the devices that hold
    them in the first array."""
    panels = {}
    for name, x in arrays.items():
        shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
        panels[name] = [np.c_[np.squeeze(shard.data)] for shard in shards]  # columns
    first = next(iter(panels.values()))
    home = {v: d for d, part in reversed([*enumerate(first)]) for v in part.flat}
    rows = max(len(part) for parts in panels.values() for part in parts)
    size = (3.9 * len(panels), 0.23 * rows + 0.85)
    axes = plt.subplots(1, len(panels), figsize=size, squeeze=False)[1][0]
    for ax, (name, parts) in zip(axes, panels.items()):
        for d, part in enumerate(parts):
            ax.text(d + 0.43, -0.35, d, ha="center", weight="bold")
            for (row, column), v in np.ndenumerate(part):
                width = 0.86 / part.shape[1]
                corner = (d + width * column, row)
                draw_tile(ax, corner, (width, 1), home.get(v), f"{v:g}")
        ax.set(xlim=(-0.05, len(parts)), ylim=(rows + 0.1, -1))
        ax.set_title(name.replace("_", " "), size=10)
        ax.axis("off")
    plt.tight_layout(w_pad=2)
