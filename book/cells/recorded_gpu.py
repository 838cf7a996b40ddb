# @title Recorded times on one H100
recorded_gpu_with = {
    "date": "2026-11-28",
    "jax": "0.11.2",
    "jax-cuda13-plugin": "0.11.2",
    "nvidia-cudnn-cu13": "9.19.0.56",
}
# Llama 3 8B with random bfloat16 weights. Positions in the cache: batch: ms per step.
recorded_decode = {
    128: {
        1: 5.87,
        8: 5.81,
        32: 6.38,
        64: 6.9,
        128: 7.63,
        256: 9.42,
        512: 14.81,
        1024: 30.53,
    },
    2048: {1: 5.83, 4: 6.07, 16: 7.49, 64: 12.74, 128: 19.3, 160: 22.31},
    8192: {1: 6.36, 4: 7.23, 16: 12.03, 32: 18.34, 40: 21.6},
}
# The same with int8 weights in the layers.
recorded_decode_int8 = {2048: {1: 4.64, 16: 5.9, 64: 11.34}}
# Tokens of one prompt: ms until its first token.
recorded_prefill = {128: 7.0, 512: 11.6, 2048: 47.0, 8192: 184.8}
# Rows of x: microseconds of x [rows, 4096] times w [4096, 14336] in bfloat16.
recorded_rows = {
    1: 43.4,
    8: 45.6,
    32: 50.5,
    64: 51.9,
    128: 49.9,
    192: 61.3,
    256: 62.1,
    384: 108.7,
    512: 116.2,
    1024: 215.0,
    2048: 376.1,
}
# n: TFLOP/s of an n x n matmul in bfloat16.
recorded_matmul = {
    512: 5.0,
    1024: 28.0,
    2048: 282.0,
    4096: 725.0,
    8192: 782.0,
    16384: 680.0,
}
# GB/s of copies.
recorded_copies = {
    "HBM, read and write": 2968.0,
    "device to host": 53.0,
    "host to device": 54.0,
}
# The largest relative error of a 1,024 x 1,024 float32 matmul, by precision.
recorded_precision = {"default": 0.0003285, "high": 0.0003285, "highest": 1.4e-06}
# One AdamW step of Llama 3.2 1B.
recorded_train = {
    "seconds": 0.318,
    "first call": 13.843,
    "tokens": 16384,
    "parameters": 1235746816,
    "loss": 1.086,
    "peak bytes": 31191440384,
}
