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
