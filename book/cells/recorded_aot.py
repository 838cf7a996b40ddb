# @title Recorded programs
recorded_with = {
    "date": "2026-11-28",
    "jax": "0.12.0.1",
    "libtpu": "0.0.50.1",
    "jax-cuda12-plugin": "0.12.0.1",
}
# Program, chip, kind of collective, group size, lines in the text, times run, bytes.
recorded_sent = [
    ("data_parallel", "TPU v5e", "all-reduce", 8, 2, 2, 58720263),
    ("data_parallel", "TPU v5p", "all-reduce", 8, 2, 2, 58720263),
    ("data_parallel", "TPU v6e", "all-reduce", 8, 2, 2, 58720263),
    ("data_parallel", "TPU7x", "all-reduce", 8, 2, 2, 58720263),
    ("data_parallel", "H100", "all-reduce", 8, 3, 3, 58720263),
    ("fully_sharded", "TPU v5e", "all-gather", 8, 9, 4, 29360128),
    ("fully_sharded", "TPU v5e", "all-reduce", 8, 1, 1, 7),
    ("fully_sharded", "TPU v5e", "reduce-scatter", 8, 4, 4, 29360128),
    ("fully_sharded", "TPU v5p", "all-gather", 8, 4, 4, 29360128),
    ("fully_sharded", "TPU v5p", "all-reduce", 8, 2, 2, 58720263),
    ("fully_sharded", "TPU v6e", "all-gather", 8, 4, 4, 29360128),
    ("fully_sharded", "TPU v6e", "all-reduce", 8, 2, 2, 29360135),
    ("fully_sharded", "TPU v6e", "reduce-scatter", 8, 2, 2, 14680064),
    ("fully_sharded", "TPU7x", "all-gather", 8, 4, 4, 29360128),
    ("fully_sharded", "TPU7x", "all-reduce", 8, 1, 1, 7),
    ("fully_sharded", "TPU7x", "reduce-scatter", 8, 4, 4, 29360128),
    ("fully_sharded", "H100", "all-gather", 8, 2, 2, 29360128),
    ("fully_sharded", "H100", "all-reduce", 8, 1, 1, 7),
    ("fully_sharded", "H100", "reduce-scatter", 8, 1, 1, 29360128),
    ("fully_sharded", "v5p:2x4x1", "all-gather", 8, 4, 4, 29360128),
    ("fully_sharded", "v5p:2x4x1", "all-reduce", 8, 1, 1, 7),
    ("fully_sharded", "v5p:2x4x1", "reduce-scatter", 8, 4, 4, 29360128),
    ("data_parallel_wide", "TPU v5e", "all-reduce", 8, 5, 5, 939524103),
    ("data_parallel_wide", "TPU v5p", "all-reduce", 8, 5, 5, 939524103),
    ("data_parallel_wide", "TPU v6e", "all-reduce", 8, 5, 5, 939524103),
    ("data_parallel_wide", "TPU7x", "all-reduce", 8, 5, 5, 939524103),
    ("data_parallel_wide", "H100", "all-reduce", 8, 5, 5, 939524103),
    ("fully_sharded_wide", "TPU v5e", "all-gather", 8, 10, 4, 469762048),
    ("fully_sharded_wide", "TPU v5e", "all-reduce", 8, 3, 1, 7),
    ("fully_sharded_wide", "TPU v5e", "collective-permute", 7, 2, 2, 4587520),
    ("fully_sharded_wide", "TPU v5e", "reduce-scatter", 8, 2, 4, 474349568),
    ("fully_sharded_wide", "TPU v5p", "all-gather", 8, 4, 4, 469762048),
    ("fully_sharded_wide", "TPU v5p", "all-reduce", 8, 5, 5, 939524103),
    ("fully_sharded_wide", "TPU v6e", "all-gather", 8, 4, 4, 469762048),
    ("fully_sharded_wide", "TPU v6e", "all-reduce", 8, 3, 1, 7),
    ("fully_sharded_wide", "TPU v6e", "collective-permute", 7, 2, 2, 9175040),
    ("fully_sharded_wide", "TPU v6e", "reduce-scatter", 8, 2, 4, 478937088),
    ("fully_sharded_wide", "TPU7x", "all-gather", 8, 4, 4, 469762048),
    ("fully_sharded_wide", "TPU7x", "all-reduce", 8, 1, 1, 7),
    ("fully_sharded_wide", "TPU7x", "reduce-scatter", 8, 4, 4, 469762048),
    ("fully_sharded_wide", "H100", "all-gather", 8, 4, 4, 469762048),
    ("fully_sharded_wide", "H100", "all-reduce", 8, 1, 1, 7),
    ("fully_sharded_wide", "H100", "reduce-scatter", 8, 4, 4, 469762048),
    ("fully_sharded_wide", "v5p:2x4x1", "all-gather", 8, 4, 4, 469762048),
    ("fully_sharded_wide", "v5p:2x4x1", "all-reduce", 8, 3, 1, 7),
    ("fully_sharded_wide", "v5p:2x4x1", "collective-permute", 7, 2, 2, 4587520),
    ("fully_sharded_wide", "v5p:2x4x1", "reduce-scatter", 8, 2, 4, 474349568),
    ("fully_sharded_auto", "TPU v5e", "all-gather", 8, 8, 3, 22020096),
    ("fully_sharded_auto", "TPU v5e", "all-reduce", 8, 1, 1, 7),
    ("fully_sharded_auto", "TPU v5e", "collective-permute", 8, 25, 45, 47185920),
    ("fully_sharded_auto", "H100", "all-gather", 8, 2, 2, 29360128),
    ("fully_sharded_auto", "H100", "all-reduce", 8, 1, 1, 7),
    ("fully_sharded_auto", "H100", "reduce-scatter", 8, 1, 1, 29360128),
    ("tensor_parallel", "TPU v5e", "all-reduce", 8, 3, 3, 88080384),
    ("tensor_parallel", "H100", "all-reduce", 8, 3, 3, 88080384),
    ("experts", "TPU v5e", "all-reduce", 8, 2, 2, 28679),
    ("experts", "TPU v5e", "all-to-all", 8, 3, 3, 5505024),
    ("experts", "H100", "all-reduce", 8, 2, 2, 28679),
    ("experts", "H100", "all-to-all", 8, 3, 3, 5505024),
    ("ring_attention", "TPU v5e", "collective-permute", 8, 2, 16, 33554432),
    ("ring_attention", "H100", "collective-permute", 8, 1, 8, 33554432),
    ("ring_attention_unrolled", "TPU v5e", "collective-permute", 8, 14, 14, 29360128),
    ("ring_attention_unrolled", "H100", "collective-permute", 8, 13, 13, 29360128),
]
# Argument memory, temporary memory and peak memory in bytes; FLOPs.
recorded_numbers = {
    ("data_parallel", "TPU v5e"): (35651584, 1096704, 136316416, 95101648896),
    ("data_parallel", "TPU v5p"): (35651584, 42663232, 85984288, 95101648896),
    ("data_parallel", "TPU v6e"): (35651584, 9174272, 127927328, 95105843200),
    ("data_parallel", "TPU7x"): (35651584, 68220928, 102762528, 94852087808),
    ("data_parallel", "H100"): (35651584, 62920720, 98570284, None),
    ("fully_sharded", "TPU v5e"): (6291456, 1419264, 65013760, 94996791296),
    ("fully_sharded", "TPU v5p"): (6291456, 38632128, 46151200, 95013568512),
    ("fully_sharded", "TPU v6e"): (6291456, 359616, 66070048, 95004655616),
    ("fully_sharded", "TPU7x"): (6291456, 44037664, 48236576, 94805950464),
    ("fully_sharded", "H100"): (6291456, 88087584, 94375980, None),
    ("fully_sharded", "v5p:2x4x1"): (6291456, 42728704, 48236064, 94996791296),
    ("data_parallel_wide", "TPU v5e"): (545259520, 320573440, 796919296, 1515687247872),
    ("data_parallel_wide", "TPU v5p"): (545259520, 336002656, 796918816, 1515687247872),
    ("data_parallel_wide", "TPU v6e"): (545259520, 430044576, 973080096, 1515855020032),
    ("data_parallel_wide", "TPU7x"): (545259520, 1527871424, 1753221152, 1513883697152),
    ("data_parallel_wide", "H100"): (545259520, 578816784, 1124073516, None),
    ("fully_sharded_auto", "TPU v5e"): (6291456, 6194176, 79716864, 73573335040),
    ("fully_sharded_auto", "H100"): (6291456, 88087584, 94375980, None),
    ("ring_attention", "TPU v5e"): (6291456, 0, 44173824, 4393574400),
    ("ring_attention", "H100"): (6291456, 29460280, 37847048, None),
    ("ring_attention_unrolled", "TPU v5e"): (6291456, 26521088, 125829120, 35124346880),
    ("ring_attention_unrolled", "H100"): (6291456, 231151144, 239534080, None),
    ("ten_columns", "TPU v5e"): (65536, 0, 131072, 10240),
    ("ten_columns", "H100"): (40960, 0, 81920, None),
}
# Lines that show communication, and arguments that are stored column by column.
recorded_lines = {
    ("data_parallel", "TPU v5e"): [
        "all-reduce, UniDirection1DRingStrategy, colors:2 phases:1"
    ],
    ("data_parallel", "TPU v5p"): [
        "all-reduce, UniDirectionNDRingStrategy, colors:6 phases:3"
    ],
    ("data_parallel", "TPU v6e"): [
        "all-reduce, UniDirection1DRingStrategy, colors:2 phases:1"
    ],
    ("data_parallel", "TPU7x"): ["asynchronous, sparsecore"],
    ("data_parallel", "H100"): [],
    ("ten_columns", "TPU v5e"): ["f32[1024,10]{0,1:T(8,128)}"],
    ("ten_columns", "H100"): [],
}
# Matmuls and collectives of the ENTRY computation, in the order of the text.
recorded_orders = """
data_parallel, TPU v5e: 4 matmul, scalar all-reduce, 7 matmul, all-reduce
data_parallel, TPU v5p: 4 matmul, scalar all-reduce, 7 matmul, all-reduce
data_parallel, TPU v6e: 4 matmul, scalar all-reduce, 7 matmul, all-reduce
data_parallel, TPU7x: 11 matmul, start all-reduce 0, scalar all-reduce, done all-reduce
  0
data_parallel, H100: 10 matmul, start scalar all-reduce 0, done scalar all-reduce 0,
  start all-reduce 1, matmul, done all-reduce 1, start all-reduce 2, done all-reduce 2
fully_sharded, TPU v5e: 2 all-gather, start all-gather 0, matmul, done all-gather 0,
  start all-gather 1, 2 matmul, done all-gather 1, matmul, scalar all-reduce, matmul,
  reduce-scatter, 2 matmul, reduce-scatter, 4 matmul, 2 reduce-scatter
fully_sharded, TPU v5p: all-gather, matmul, all-gather, matmul, all-gather, matmul,
  all-gather, 8 matmul, all-reduce, scalar all-reduce
fully_sharded, TPU v6e: all-gather, matmul, all-gather, matmul, all-gather, matmul,
  all-gather, 6 matmul, all-reduce, matmul, reduce-scatter, matmul, reduce-scatter,
  scalar all-reduce
fully_sharded, TPU7x: start all-gather 0, start all-gather 1, start all-gather 2, start
  all-gather 3, done all-gather 0, matmul, done all-gather 1, matmul, done all-gather 2,
  matmul, done all-gather 3, 5 matmul, start reduce-scatter 4, matmul, start
  reduce-scatter 5, matmul, start reduce-scatter 6, matmul, start reduce-scatter 7,
  scalar all-reduce, done reduce-scatter 4, done reduce-scatter 5, done reduce-scatter
  6, done reduce-scatter 7
fully_sharded, H100: all-gather, start all-gather 0, 3 matmul, done all-gather 0, 7
  matmul, start scalar all-reduce 1, matmul, done scalar all-reduce 1, start
  reduce-scatter 2, done reduce-scatter 2
fully_sharded, v5p:2x4x1: 4 all-gather, 4 matmul, scalar all-reduce, 3 matmul,
  reduce-scatter, matmul, reduce-scatter, 2 matmul, reduce-scatter, matmul,
  reduce-scatter
data_parallel_wide, TPU v5e: 4 matmul, scalar all-reduce, 4 matmul, all-reduce, matmul,
  all-reduce, matmul, all-reduce, matmul, all-reduce
data_parallel_wide, TPU v5p: 4 matmul, scalar all-reduce, 4 matmul, all-reduce, matmul,
  all-reduce, matmul, all-reduce, matmul, all-reduce
data_parallel_wide, TPU v6e: 8 matmul, all-reduce, matmul, all-reduce, matmul,
  all-reduce, matmul, all-reduce, scalar all-reduce
data_parallel_wide, TPU7x: 8 matmul, start all-reduce 0, matmul, start all-reduce 1,
  matmul, start all-reduce 2, matmul, start all-reduce 3, scalar all-reduce, done
  all-reduce 0, done all-reduce 1, done all-reduce 2, done all-reduce 3
data_parallel_wide, H100: 4 matmul, start scalar all-reduce 0, 4 matmul, done scalar
  all-reduce 0, start all-reduce 1, matmul, done all-reduce 1, start all-reduce 2,
  matmul, done all-reduce 2, start all-reduce 3, matmul, done all-reduce 3, start
  all-reduce 4, done all-reduce 4
fully_sharded_wide, TPU v5e: all-gather, start all-gather 0, matmul, done all-gather 0,
  start all-gather 1, matmul, done all-gather 1, start all-gather 2, matmul, done
  all-gather 2, 8 matmul, 2 reduce-scatter, start collective-permute 3, 2
  reduce-scatter, start collective-permute 4, scalar all-reduce, done collective-permute
  3, done collective-permute 4
fully_sharded_wide, TPU v5p: all-gather, matmul, all-gather, matmul, all-gather, matmul,
  all-gather, 4 matmul, all-reduce, 2 matmul, all-reduce, matmul, all-reduce, matmul,
  all-reduce, scalar all-reduce
fully_sharded_wide, TPU v6e: all-gather, matmul, all-gather, matmul, 2 all-gather, 6
  matmul, reduce-scatter, matmul, reduce-scatter, start collective-permute 0, done
  collective-permute 0, matmul, reduce-scatter, matmul, reduce-scatter, start
  collective-permute 1, done collective-permute 1, scalar all-reduce
fully_sharded_wide, TPU7x: start all-gather 0, start all-gather 1, start all-gather 2,
  start all-gather 3, done all-gather 0, matmul, done all-gather 1, matmul, done
  all-gather 2, matmul, done all-gather 3, 3 matmul, start reduce-scatter 4, 3 matmul,
  start reduce-scatter 5, matmul, start reduce-scatter 6, matmul, start reduce-scatter
  7, scalar all-reduce, done reduce-scatter 4, done reduce-scatter 5, done
  reduce-scatter 6, done reduce-scatter 7
fully_sharded_wide, H100: 2 all-gather, start all-gather 0, matmul, done all-gather 0,
  start all-gather 1, 2 matmul, done all-gather 1, matmul, start scalar all-reduce 2, 3
  matmul, done scalar all-reduce 2, start reduce-scatter 3, matmul, done reduce-scatter
  3, start reduce-scatter 4, matmul, done reduce-scatter 4, start reduce-scatter 5, 2
  matmul, done reduce-scatter 5, start reduce-scatter 6, done reduce-scatter 6
fully_sharded_wide, v5p:2x4x1: all-gather, matmul, all-gather, matmul, all-gather,
  matmul, all-gather, 5 matmul, reduce-scatter, matmul, reduce-scatter, start
  collective-permute 0, done collective-permute 0, matmul, reduce-scatter, matmul,
  reduce-scatter, start collective-permute 1, done collective-permute 1, scalar
  all-reduce
tensor_parallel, TPU v5e: 2 matmul, all-reduce, 2 matmul, all-reduce, 4 matmul,
  all-reduce, 3 matmul
tensor_parallel, H100: 2 matmul, all-reduce, 2 matmul, all-reduce, 2 matmul, start
  all-reduce 0, 2 matmul, done all-reduce 0, 3 matmul
ring_attention, TPU v5e: loop of 8, start collective-permute 0, start collective-permute
  1, 2 matmul, done collective-permute 0, done collective-permute 1, end of loop
ring_attention, H100: loop of 8, start collective-permute 0, 2 matmul, done
  collective-permute 0, end of loop
"""
