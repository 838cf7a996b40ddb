# @title Recorded schedules
recorded_with = {
    "date": "2026-11-28",
    "jax": "0.12.0.1",
    "libtpu": "0.0.50.1",
    "jax-cuda12-plugin": "0.12.0.1",
}
# Chip: names and operations of the compiled program "forward".
recorded_lines = {
    "TPU v5e": [
        "all-gather.24 = all-gather",
        "async-collective-start = fusion",
        "fusion.7 = fusion",
        "async-collective-done = fusion",
        "async-collective-start.1 = fusion",
        "fusion.14 = fusion",
        "async-collective-done.1 = fusion",
        "convolution_tanh_fusion = fusion",
    ],
    "H100": [
        "all_gather.9.2 = all-gather",
        "all-gather-start.1 = all-gather-start",
        "gemm_fusion_dot_general.9 = fusion",
        "all-gather-done.1 = all-gather-done",
        "all-gather-start.2 = all-gather-start",
        "gemm_fusion_dot_general.10 = fusion",
        "all-gather-done.2 = all-gather-done",
        "gemm_fusion_dot_general.11 = fusion",
    ],
}
# Matmuls and collectives in the order of the compiled text.
recorded_orders = """
forward on TPU v5e: all-gather, start all-gather 0, matmul, done all-gather 0, start
  all-gather 1, matmul, done all-gather 1, matmul
forward on TPU v5p: all-gather, matmul, all-gather, matmul, all-gather, matmul
forward on TPU v6e: all-gather, matmul, all-gather, matmul, all-gather, matmul
forward on TPU7x: start all-gather 0, start all-gather 1, start all-gather 2, done
  all-gather 0, matmul, done all-gather 1, matmul, done all-gather 2, matmul
forward on H100: all-gather, start all-gather 0, matmul, done all-gather 0, start
  all-gather 1, matmul, done all-gather 1, matmul
forward, scheduler off on TPU v5e: 3 all-gather, 3 matmul
forward, scheduler off on TPU v5p: all-gather, matmul, all-gather, matmul, all-gather,
  matmul
forward, scheduler off on TPU v6e: all-gather, matmul, all-gather, matmul, all-gather,
  matmul
forward, scheduler off on TPU7x: start all-gather 0, done all-gather 0, matmul, start
  all-gather 1, done all-gather 1, matmul, start all-gather 2, done all-gather 2, matmul
forward, scheduler off on H100: all-gather, matmul, all-gather, matmul, all-gather,
  matmul
forward, fusion off on TPU v5e: all-gather, matmul, all-gather, matmul, all-gather,
  matmul
forward, fusion off on TPU7x: start all-gather 0, start all-gather 1, start all-gather
  2, done all-gather 0, matmul, done all-gather 1, matmul, done all-gather 2, matmul
ordered on TPU v5e: all-gather, matmul, all-gather, matmul, all-gather, matmul
ordered on TPU7x: start all-gather 0, done all-gather 0, matmul, start all-gather 1,
  done all-gather 1, matmul, start all-gather 2, done all-gather 2, matmul
ordered on H100: all-gather, matmul, all-gather, matmul, all-gather, matmul
backward on TPU v5e: matmul, reduce-scatter, matmul
backward on TPU7x: matmul, start reduce-scatter 0, matmul, done reduce-scatter 0
backward, started on TPU v5e: matmul, reduce-scatter, matmul
backward, started on TPU7x: matmul, start reduce-scatter 0, matmul, done reduce-scatter
  0
backward, started, ordered on TPU7x: matmul, start reduce-scatter 0, matmul, done
  reduce-scatter 0
"""
recorded_schedules = {}
for row in recorded_orders.strip().replace("\n  ", " ").splitlines():
    key, _, schedule = row.partition(": ")
    recorded_schedules[tuple(key.split(" on "))] = schedule
