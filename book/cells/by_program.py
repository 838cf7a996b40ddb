# @title Read the record
from types import SimpleNamespace


def by_program_and_chip() -> dict[tuple[str, str], SimpleNamespace]:
    """What was recorded of each program for each chip, from the tables above."""
    keys = [row[:2] for row in recorded_sent] + [*recorded_numbers]
    rows = {key: SimpleNamespace(collectives={}, printed={}) for key in keys}
    for program, chip, kind, size, lines, times, nbytes in recorded_sent:
        rows[program, chip].collectives[kind, size] = (times, nbytes)
        rows[program, chip].printed[kind] = lines
    for key, (given, scratch, peak, flops) in recorded_numbers.items():
        vars(rows[key]).update(given=given, scratch=scratch, peak=peak, flops=flops)
    for key, lines in recorded_lines.items():
        rows[key].lines = lines
    for line in recorded_orders.strip().replace("\n  ", " ").splitlines():
        names, _, order = line.partition(": ")
        rows[tuple(names.split(", "))].order = order
    return rows


recorded = by_program_and_chip()
