# @title Recorded verdicts
recorded_with = {"date": "2026-11-28", "jax": "0.12.0.1", "libtpu": "0.0.50.1"}
# Program: chip: the result of compilation.
recorded_verdicts = {
    "ring_all_gather": {
        "TPU v5e": "compiles: kernels 1, collectives 0",
        "TPU v5p": "compiles: kernels 1, collectives 0",
        "TPU v6e": "compiles: kernels 1, collectives 0",
        "TPU7x": "compiles: kernels 1, collectives 0",
    },
    "ring_reduce_scatter": {
        "TPU v5e": "compiles: kernels 1, collectives 0",
        "TPU v5p": "compiles: kernels 1, collectives 0",
        "TPU v6e": "compiles: kernels 1, collectives 0",
        "TPU7x": "compiles: kernels 1, collectives 0",
    },
    "ring_all_reduce": {
        "TPU v5e": "compiles: kernels 2, collectives 0",
        "TPU v5p": "compiles: kernels 2, collectives 0",
        "TPU v6e": "compiles: kernels 2, collectives 0",
        "TPU7x": "compiles: kernels 2, collectives 0",
    },
    "ring_matmul": {
        "TPU v5e": "compiles: kernels 1, collectives 0",
        "TPU v5p": "compiles: kernels 1, collectives 0",
        "TPU v6e": "compiles: kernels 1, collectives 0",
        "TPU7x": "compiles: kernels 1, collectives 0",
    },
    "column_sums": {
        "TPU v5e": "compiles: kernels 1, collectives 0",
        "TPU v5p": "compiles: kernels 1, collectives 0",
        "TPU v6e": "compiles: kernels 1, collectives 0",
        "TPU7x": "compiles: kernels 1, collectives 0",
    },
    "no wait_recv": {
        "TPU v5e": "compiles: kernels 1, collectives 0",
        "TPU v5p": "compiles: kernels 1, collectives 0",
        "TPU v6e": "compiles: kernels 1, collectives 0",
        "TPU7x": "compiles: kernels 1, collectives 0",
    },
    "column_sums, no shard_map": {
        "TPU v5e": "refused: cannot be automatically partitioned",
        "TPU v5p": "refused: cannot be automatically partitioned",
        "TPU v6e": "refused: cannot be automatically partitioned",
        "TPU7x": "refused: cannot be automatically partitioned",
    },
    "column_sums, custom_partitioning": {
        "TPU v5e": "refused: Custom emitter for CustomSPMDPartitioning not found",
        "TPU v5p": "refused: Custom emitter for CustomSPMDPartitioning not found",
        "TPU v6e": "refused: Custom emitter for CustomSPMDPartitioning not found",
        "TPU7x": "refused: Custom emitter for CustomSPMDPartitioning not found",
    },
    "collective_id, no barrier": {
        "TPU v5e": "refused: collective_id has to be unspecified or None",
        "TPU v5p": "refused: collective_id has to be unspecified or None",
        "TPU v6e": "refused: collective_id has to be unspecified or None",
        "TPU7x": "refused: collective_id has to be unspecified or None",
    },
    "blocks of 5 x 100": {
        "TPU v5e": "refused: divisible by 8 and 128",
        "TPU v5p": "refused: divisible by 8 and 128",
        "TPU v6e": "refused: divisible by 8 and 128",
        "TPU7x": "refused: divisible by 8 and 128",
    },
    "200 MiB of VMEM": {
        "TPU v5e": "refused: would exceed memory (size=134217728)",
        "TPU v5p": "refused: would exceed memory (size=67108864)",
        "TPU v6e": "refused: would exceed memory (size=134217728)",
        "TPU7x": "refused: would exceed memory (size=67108864)",
    },
    "bfloat16, precision highest": {
        "TPU v5e": "refused: Bad lhs type",
        "TPU v5p": "refused: Bad lhs type",
        "TPU v6e": "refused: Bad lhs type",
        "TPU7x": "refused: Bad lhs type",
    },
}
