# @title Read the record
from types import SimpleNamespace


def by_program_and_chip() -> dict[tuple[str, str], SimpleNamespace]:
    """Return the record of each program on each chip, from the tables above."""
    keys = [row[:2] for row in recorded_sent] + [*recorded_numbers]
    rows = {key: SimpleNamespace(collectives={}, printed={}) for key in keys}
    for program, chip, kind, size, lines, times, nbytes in recorded_sent:
        rows[program, chip].collectives[kind, size] = (times, nbytes)
        rows[program, chip].printed[kind] = lines
    for key, (arguments, temporary, peak, flops) in recorded_numbers.items():
        vars(rows[key]).update(
            arguments=arguments, temporary=temporary, peak=peak, flops=flops
        )
    for key, lines in recorded_lines.items():
        rows[key].lines = lines
    for line in recorded_orders.strip().replace("\n  ", " ").splitlines():
        names, _, order = line.partition(": ")
        rows[tuple(names.split(", "))].order = order
    return rows


recorded = by_program_and_chip()
