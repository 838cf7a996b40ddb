# @title Chips, and the time of a collective
# %% table
import math
from typing import NamedTuple


class Chip(NamedTuple):
    """Published peak rates of one device, as JAX counts devices."""

    flops: float  # dense bfloat16 FLOP/s
    memory: float  # bytes of HBM
    memory_bandwidth: float  # bytes/s of HBM
    axis_bandwidth: float  # bytes/s that a device sends along an axis, on all its links
    axes: int  # axes of the torus, or 1 for a switch
    domain: int  # the most devices that links or one switch connect
    network: float  # bytes/s that a device sends into the data-center network
    latency: float = 1e-6  # seconds per hop; with a switch, per lap
    switch: bool = False  # whether a switch connects the devices


GiB = 2**30
chips = {
    # docs.cloud.google.com/tpu/docs/NAME, for NAME in v4, v5e, v5p, v6e, tpu7x, as of
    # November 2026. An axis has two links; Google adds all links and both directions.
    # Links and network of v4, and 1 us per hop: Scaling Book (tpus, sharding; 2025).
    "TPU v4": Chip(275e12, 32 * GiB, 1200e9, 2 * 45e9, 3, 4096, 6.25e9),
    "TPU v5e": Chip(197e12, 16e9, 819e9, 2 * 50e9, 2, 256, 25e9 / 8),
    "TPU v5p": Chip(459e12, 95 * GiB, 2765e9, 2 * 100e9, 3, 8960, 6.25e9),
    "TPU v6e": Chip(918e12, 32 * GiB, 1638e9, 2 * 100e9, 2, 256, 12.5e9),
    # JAX sees two devices in a TPU7x chip, each with half of everything except the
    # links: a ring through both devices uses all of those.
    "TPU7x": Chip(2307e12 / 2, 96 * GiB, 7380e9 / 2, 2 * 100e9, 3, 18432, 12.5e9 / 2),
    # Scaling Book (gpus, August 2025). B200 in an HGX at 1,000 W, GB200 at 1,200 W:
    # glennklockwood.com/garden/processors/B200. The network is one card per GPU. NVIDIA
    # adds both directions of NVLink: 900 GB/s of an H100 are 450 GB/s each way. The
    # latency is half of the 6 us that an all-reduce of 128 bytes took on two H100 with
    # NVLS (github.com/NVIDIA/nccl/issues/1259, April 2024), for every GPU and n.
    "A100": Chip(312e12, 80e9, 2039e9, 300e9, 1, 8, 25e9, 3e-6, True),
    "H100": Chip(989e12, 80e9, 3350e9, 450e9, 1, 8, 50e9, 3e-6, True),
    "H200": Chip(989e12, 141e9, 4800e9, 450e9, 1, 8, 50e9, 3e-6, True),
    "B200": Chip(2250e12, 179e9, 8000e9, 900e9, 1, 8, 50e9, 3e-6, True),
    "GB200 NVL72": Chip(2500e12, 186e9, 8000e9, 900e9, 1, 72, 50e9, 3e-6, True),
}


# %% bytes
def bytes_sent(collective: str, size: float, n: int, switch: bool = False) -> float:
    """Return the bytes that one device of n sends, those that it forwards included.

    size: bytes of one device's operand or result, whichever is larger
    switch: whether a switch delivers each chunk directly; otherwise the devices are a
        ring, and the chunks of an all-to-all are forwarded the shorter way around
    """
    chunk = size / n
    if collective == "all-reduce":
        return 2 * (n - 1) * chunk
    if collective in ("all-gather", "reduce-scatter"):
        return (n - 1) * chunk
    if collective == "all-to-all":
        hops = [1 if switch else min(k, n - k) for k in range(1, n)]
        return sum(hops) * chunk
    if collective == "collective-permute":
        return size
    raise ValueError(f"unknown collective: {collective}")


# %% seconds
def collective_seconds(
    collective: str,
    size: float,
    n: int | tuple[int, ...],
    chip: Chip,
    closed: bool = True,
) -> float:
    """Return the predicted seconds of a collective: hops x latency + bytes / bandwidth.

    size: bytes of one device's operand or result, whichever is larger
    n: devices in the group; a tuple, such as (4, 4), if they span several axes
    closed: whether the devices of an axis form a closed ring, which sends both ways; an
        open line has half of the bandwidth, and n - 1 hops per lap instead of n // 2

    An all-reduce is two laps, any other collective one; on a switch a lap is one hop. A
    permute is to a neighbour, over one link. Raise ValueError if the links of the chip
    do not connect n devices.
    """
    sides = n if isinstance(n, tuple) else (n,)
    devices = math.prod(sides)
    if len(sides) > chip.axes or devices > chip.domain:
        most = f"{chip.domain} devices along {chip.axes} axes"
        raise ValueError(f"n is {n}, but the links connect at most {most}")
    bandwidth = chip.axis_bandwidth
    if not chip.switch and (not closed or collective == "collective-permute"):
        bandwidth /= 2  # one link of two
    if collective == "collective-permute":
        return chip.latency + size / bandwidth
    if chip.switch:
        hops = min(devices - 1, 1)
    else:
        hops = sum(side // 2 if closed else side - 1 for side in sides)
    laps = 2 if collective == "all-reduce" else 1
    if collective == "all-to-all":  # each axis carries all chunks; the longest decides
        sent = max(bytes_sent(collective, size, side, chip.switch) for side in sides)
    else:
        sent = bytes_sent(collective, size, devices) / len(sides)
    return laps * hops * chip.latency + sent / bandwidth


# %% program
def program_seconds(
    found: dict[tuple[str, int], tuple[int, float]], chip: Chip, closed: bool = True
) -> float:
    """Return the predicted seconds of all collectives of a program, one after another.

    found: what `collectives` returns, which counts no forwarding
    """
    total = 0.0
    for (collective, n), (times, sent) in found.items():
        if times == 0:
            raise ValueError(f"it is not known how often the {collective} runs")
        size = sent / times / bytes_sent(collective, 1, n, switch=True)
        total += times * collective_seconds(collective, size, n, chip, closed)
    return total
