# @title Recorded schedules
recorded_with = {
    "date": "2026-11-28",
    "jax": "0.12.0.1",
    "jax-cuda12-plugin": "0.12.0.1",
    "libtpu": "0.0.50.1",
}
# Program and chip: matmuls and collectives in the order of the compiled text.
recorded_schedules = {}
# Chip: names and operations of the compiled program "forward".
recorded_lines = {}
