# @title Recorded programs
from typing import NamedTuple


class Written(NamedTuple):
    """What a compiler wrote for one device."""

    collectives: dict | str  # (kind, group size): (times, bytes sent), or a refusal
    printed: dict  # kind: how many lines of the text print one
    given: int  # bytes of the arguments, of temporaries, of all at the worst moment
    scratch: int
    peak: int
    flops: float | None
    order: str  # matmuls and collectives of the ENTRY, in the order of the text
    lines: list  # excerpts: how it communicates, arguments that lie column by column


recorded_with = {
    "date": "2026-11-23",
    "jax": "0.12.0.1",
    "libtpu": "0.0.50.1",
    "jax-cuda12-plugin": "0.12.0.1",
}
recorded = {
    ("data_parallel", "TPU v5e"): Written(
        collectives={("all-reduce", 8): (2, 58720263)},
        printed={"all-reduce": 2},
        given=35651584,
        scratch=1096704,
        peak=136316416,
        flops=95101648896.0,
        order="4 matmul, scalar all-reduce, 7 matmul, all-reduce",
        lines=["all-reduce, UniDirection1DRingStrategy, colors:2 phases:1"],
    ),
    ("data_parallel", "TPU v5p"): Written(
        collectives={("all-reduce", 8): (2, 58720263)},
        printed={"all-reduce": 2},
        given=35651584,
        scratch=42663232,
        peak=85984288,
        flops=95101648896.0,
        order="4 matmul, scalar all-reduce, 7 matmul, all-reduce",
        lines=["all-reduce, UniDirectionNDRingStrategy, colors:6 phases:3"],
    ),
    ("data_parallel", "TPU v6e"): Written(
        collectives={("all-reduce", 8): (2, 58720263)},
        printed={"all-reduce": 2},
        given=35651584,
        scratch=9174272,
        peak=127927328,
        flops=95105843200.0,
        order="4 matmul, scalar all-reduce, 7 matmul, all-reduce",
        lines=["all-reduce, UniDirection1DRingStrategy, colors:2 phases:1"],
    ),
    ("data_parallel", "TPU7x"): Written(
        collectives={("all-reduce", 8): (2, 58720263)},
        printed={"all-reduce": 2},
        given=35651584,
        scratch=68220928,
        peak=102762528,
        flops=94852087808.0,
        order="11 matmul, start all-reduce 0, scalar all-reduce, done all-reduce 0",
        lines=["asynchronous, sparsecore"],
    ),
    ("data_parallel", "H100"): Written(
        collectives={("all-reduce", 8): (3, 58720263)},
        printed={"all-reduce": 3},
        given=35651584,
        scratch=62920720,
        peak=98570284,
        flops=None,
        order=(
            "10 matmul, start scalar all-reduce 0, done scalar all-reduce "
            "0, start all-reduce 1, matmul, done all-reduce 1, start all-"
            "reduce 2, done all-reduce 2"
        ),
        lines=[],
    ),
    ("fully_sharded", "TPU v5e"): Written(
        collectives={
            ("all-gather", 8): (4, 29360128),
            ("all-reduce", 8): (1, 7),
            ("reduce-scatter", 8): (4, 29360128),
        },
        printed={"all-reduce": 1, "all-gather": 9, "reduce-scatter": 4},
        given=6291456,
        scratch=1419264,
        peak=65013760,
        flops=94996791296.0,
        order=(
            "2 all-gather, start all-gather 0, matmul, done all-gather 0, "
            "start all-gather 1, 2 matmul, done all-gather 1, matmul, "
            "scalar all-reduce, matmul, reduce-scatter, 2 matmul, reduce-"
            "scatter, 4 matmul, 2 reduce-scatter"
        ),
        lines=["reduce-scatter, StrategyRing, colors:1 phases:1"],
    ),
    ("fully_sharded", "TPU v5p"): Written(
        collectives={
            ("all-gather", 8): (4, 29360128),
            ("all-reduce", 8): (2, 58720263),
        },
        printed={"all-reduce": 2, "all-gather": 4},
        given=6291456,
        scratch=38632128,
        peak=46151200,
        flops=95013568512.0,
        order=(
            "all-gather, matmul, all-gather, matmul, all-gather, matmul, "
            "all-gather, 8 matmul, all-reduce, scalar all-reduce"
        ),
        lines=["all-reduce, UniDirectionNDRingStrategy, colors:6 phases:3"],
    ),
    ("fully_sharded", "TPU v6e"): Written(
        collectives={
            ("all-gather", 8): (4, 29360128),
            ("all-reduce", 8): (2, 29360135),
            ("reduce-scatter", 8): (2, 14680064),
        },
        printed={"all-reduce": 2, "all-gather": 4, "reduce-scatter": 2},
        given=6291456,
        scratch=359616,
        peak=66070048,
        flops=95004655616.0,
        order=(
            "all-gather, matmul, all-gather, matmul, all-gather, matmul, "
            "all-gather, 6 matmul, all-reduce, matmul, reduce-scatter, "
            "matmul, reduce-scatter, scalar all-reduce"
        ),
        lines=[
            "all-reduce, UniDirection1DRingStrategy, colors:2 phases:1",
            "reduce-scatter, StrategyRing, colors:1 phases:1",
        ],
    ),
    ("fully_sharded", "TPU7x"): Written(
        collectives={
            ("all-gather", 8): (4, 29360128),
            ("all-reduce", 8): (1, 7),
            ("reduce-scatter", 8): (4, 29360128),
        },
        printed={"all-reduce": 1, "all-gather": 4, "reduce-scatter": 4},
        given=6291456,
        scratch=44037664,
        peak=48236576,
        flops=94805950464.0,
        order=(
            "start all-gather 0, start all-gather 1, start all-gather 2, "
            "start all-gather 3, done all-gather 0, matmul, done all-gather"
            " 1, matmul, done all-gather 2, matmul, done all-gather 3, 5 "
            "matmul, start reduce-scatter 4, matmul, start reduce-scatter "
            "5, matmul, start reduce-scatter 6, matmul, start reduce-"
            "scatter 7, scalar all-reduce, done reduce-scatter 4, done "
            "reduce-scatter 5, done reduce-scatter 6, done reduce-scatter 7"
        ),
        lines=["asynchronous, sparsecore"],
    ),
    ("fully_sharded", "H100"): Written(
        collectives={
            ("all-gather", 8): (2, 29360128),
            ("all-reduce", 8): (1, 7),
            ("reduce-scatter", 8): (1, 29360128),
        },
        printed={"all-reduce": 1, "all-gather": 2, "reduce-scatter": 1},
        given=6291456,
        scratch=88087584,
        peak=94375980,
        flops=None,
        order=(
            "all-gather, start all-gather 0, 3 matmul, done all-gather 0, 7"
            " matmul, start scalar all-reduce 1, matmul, done scalar all-"
            "reduce 1, start reduce-scatter 2, done reduce-scatter 2"
        ),
        lines=[],
    ),
    ("fully_sharded", "v5p:2x4x1"): Written(
        collectives={
            ("all-gather", 8): (4, 29360128),
            ("all-reduce", 8): (1, 7),
            ("reduce-scatter", 8): (4, 29360128),
        },
        printed={"all-reduce": 1, "all-gather": 4, "reduce-scatter": 4},
        given=6291456,
        scratch=42728704,
        peak=48236064,
        flops=94996791296.0,
        order=(
            "4 all-gather, 4 matmul, scalar all-reduce, 3 matmul, reduce-"
            "scatter, matmul, reduce-scatter, 2 matmul, reduce-scatter, "
            "matmul, reduce-scatter"
        ),
        lines=["reduce-scatter, StrategyRing, colors:1 phases:1"],
    ),
    ("data_parallel_wide", "TPU v5e"): Written(
        collectives={("all-reduce", 8): (5, 939524103)},
        printed={"all-reduce": 5},
        given=545259520,
        scratch=320573440,
        peak=796919296,
        flops=1515687247872.0,
        order=(
            "4 matmul, scalar all-reduce, 4 matmul, all-reduce, matmul, "
            "all-reduce, matmul, all-reduce, matmul, all-reduce"
        ),
        lines=["all-reduce, UniDirection1DRingStrategy, colors:2 phases:1"],
    ),
    ("data_parallel_wide", "TPU v5p"): Written(
        collectives={("all-reduce", 8): (5, 939524103)},
        printed={"all-reduce": 5},
        given=545259520,
        scratch=336002656,
        peak=796918816,
        flops=1515687247872.0,
        order=(
            "4 matmul, scalar all-reduce, 4 matmul, all-reduce, matmul, "
            "all-reduce, matmul, all-reduce, matmul, all-reduce"
        ),
        lines=["all-reduce, UniDirectionNDRingStrategy, colors:6 phases:3"],
    ),
    ("data_parallel_wide", "TPU v6e"): Written(
        collectives={("all-reduce", 8): (5, 939524103)},
        printed={"all-reduce": 5},
        given=545259520,
        scratch=430044576,
        peak=973080096,
        flops=1515855020032.0,
        order=(
            "8 matmul, all-reduce, matmul, all-reduce, matmul, all-reduce, "
            "matmul, all-reduce, scalar all-reduce"
        ),
        lines=["all-reduce, UniDirection1DRingStrategy, colors:2 phases:1"],
    ),
    ("data_parallel_wide", "TPU7x"): Written(
        collectives={("all-reduce", 8): (5, 939524103)},
        printed={"all-reduce": 5},
        given=545259520,
        scratch=1527871424,
        peak=1753221152,
        flops=1513883697152.0,
        order=(
            "8 matmul, start all-reduce 0, matmul, start all-reduce 1, "
            "matmul, start all-reduce 2, matmul, start all-reduce 3, scalar"
            " all-reduce, done all-reduce 0, done all-reduce 1, done all-"
            "reduce 2, done all-reduce 3"
        ),
        lines=["asynchronous, sparsecore"],
    ),
    ("data_parallel_wide", "H100"): Written(
        collectives={("all-reduce", 8): (5, 939524103)},
        printed={"all-reduce": 5},
        given=545259520,
        scratch=578816784,
        peak=1124073516,
        flops=None,
        order=(
            "4 matmul, start scalar all-reduce 0, 4 matmul, done scalar "
            "all-reduce 0, start all-reduce 1, matmul, done all-reduce 1, "
            "start all-reduce 2, matmul, done all-reduce 2, start all-"
            "reduce 3, matmul, done all-reduce 3, start all-reduce 4, done "
            "all-reduce 4"
        ),
        lines=[],
    ),
    ("fully_sharded_wide", "TPU v5e"): Written(
        collectives={
            ("all-gather", 8): (4, 469762048),
            ("all-reduce", 8): (1, 7),
            ("collective-permute", 7): (2, 4587520),
            ("reduce-scatter", 8): (4, 474349568),
        },
        printed={
            "all-reduce": 3,
            "all-gather": 10,
            "reduce-scatter": 2,
            "collective-permute": 2,
        },
        given=75497472,
        scratch=807499264,
        peak=654322176,
        flops=1514146365440.0,
        order=(
            "all-gather, start all-gather 0, matmul, done all-gather 0, "
            "start all-gather 1, matmul, done all-gather 1, start all-"
            "gather 2, matmul, done all-gather 2, 8 matmul, 2 reduce-"
            "scatter, start collective-permute 3, 2 reduce-scatter, start "
            "collective-permute 4, scalar all-reduce, done collective-"
            "permute 3, done collective-permute 4"
        ),
        lines=[
            "fusion, StrategyRing, colors:1 phases:1",
            "reduce-scatter, StrategyRing, colors:1 phases:1",
        ],
    ),
    ("fully_sharded_wide", "TPU v5p"): Written(
        collectives={
            ("all-gather", 8): (4, 469762048),
            ("all-reduce", 8): (5, 939524103),
        },
        printed={"all-reduce": 5, "all-gather": 4},
        given=75497472,
        scratch=520813408,
        peak=595605536,
        flops=1514277961728.0,
        order=(
            "all-gather, matmul, all-gather, matmul, all-gather, matmul, "
            "all-gather, 4 matmul, all-reduce, 2 matmul, all-reduce, "
            "matmul, all-reduce, matmul, all-reduce, scalar all-reduce"
        ),
        lines=["all-reduce, UniDirectionNDRingStrategy, colors:6 phases:3"],
    ),
    ("fully_sharded_wide", "TPU v6e"): Written(
        collectives={
            ("all-gather", 8): (4, 469762048),
            ("all-reduce", 8): (1, 7),
            ("collective-permute", 7): (2, 9175040),
            ("reduce-scatter", 8): (4, 478937088),
        },
        printed={
            "all-reduce": 3,
            "all-gather": 4,
            "reduce-scatter": 2,
            "collective-permute": 2,
        },
        given=75497472,
        scratch=506294976,
        peak=578824224,
        flops=1514182541312.0,
        order=(
            "all-gather, matmul, all-gather, matmul, 2 all-gather, 6 "
            "matmul, reduce-scatter, matmul, reduce-scatter, start "
            "collective-permute 0, done collective-permute 0, matmul, "
            "reduce-scatter, matmul, reduce-scatter, start collective-"
            "permute 1, done collective-permute 1, scalar all-reduce"
        ),
        lines=[
            "fusion, StrategyRing, colors:1 phases:1",
            "reduce-scatter, StrategyRing, colors:1 phases:1",
        ],
    ),
    ("fully_sharded_wide", "TPU7x"): Written(
        collectives={
            ("all-gather", 8): (4, 469762048),
            ("all-reduce", 8): (1, 7),
            ("reduce-scatter", 8): (4, 469762048),
        },
        printed={"all-reduce": 1, "all-gather": 4, "reduce-scatter": 4},
        given=75497472,
        scratch=790329120,
        peak=696256544,
        flops=1513145499648.0,
        order=(
            "start all-gather 0, start all-gather 1, start all-gather 2, "
            "start all-gather 3, done all-gather 0, matmul, done all-gather"
            " 1, matmul, done all-gather 2, matmul, done all-gather 3, 3 "
            "matmul, start reduce-scatter 4, 3 matmul, start reduce-scatter"
            " 5, matmul, start reduce-scatter 6, matmul, start reduce-"
            "scatter 7, scalar all-reduce, done reduce-scatter 4, done "
            "reduce-scatter 5, done reduce-scatter 6, done reduce-scatter 7"
        ),
        lines=["asynchronous, sparsecore"],
    ),
    ("fully_sharded_wide", "H100"): Written(
        collectives={
            ("all-gather", 8): (4, 469762048),
            ("all-reduce", 8): (1, 7),
            ("reduce-scatter", 8): (4, 469762048),
        },
        printed={"all-reduce": 1, "all-gather": 4, "reduce-scatter": 4},
        given=75497472,
        scratch=654315280,
        peak=729808940,
        flops=None,
        order=(
            "2 all-gather, start all-gather 0, matmul, done all-gather 0, "
            "start all-gather 1, 2 matmul, done all-gather 1, matmul, start"
            " scalar all-reduce 2, 3 matmul, done scalar all-reduce 2, "
            "start reduce-scatter 3, matmul, done reduce-scatter 3, start "
            "reduce-scatter 4, matmul, done reduce-scatter 4, start reduce-"
            "scatter 5, 2 matmul, done reduce-scatter 5, start reduce-"
            "scatter 6, done reduce-scatter 6"
        ),
        lines=[],
    ),
    ("fully_sharded_wide", "v5p:2x4x1"): Written(
        collectives={
            ("all-gather", 8): (4, 469762048),
            ("all-reduce", 8): (1, 7),
            ("collective-permute", 7): (2, 4587520),
            ("reduce-scatter", 8): (4, 474349568),
        },
        printed={
            "all-reduce": 3,
            "all-gather": 4,
            "reduce-scatter": 2,
            "collective-permute": 2,
        },
        given=75497472,
        scratch=520813408,
        peak=595601440,
        flops=1514146365440.0,
        order=(
            "all-gather, matmul, all-gather, matmul, all-gather, matmul, "
            "all-gather, 5 matmul, reduce-scatter, matmul, reduce-scatter, "
            "start collective-permute 0, done collective-permute 0, matmul,"
            " reduce-scatter, matmul, reduce-scatter, start collective-"
            "permute 1, done collective-permute 1, scalar all-reduce"
        ),
        lines=[
            "fusion, StrategyRing, colors:1 phases:1",
            "reduce-scatter, StrategyRing, colors:1 phases:1",
        ],
    ),
    ("fully_sharded_auto", "TPU v5e"): Written(
        collectives={
            ("all-gather", 8): (3, 22020096),
            ("all-reduce", 8): (1, 7),
            ("collective-permute", 8): (45, 47185920),
        },
        printed={"all-reduce": 1, "all-gather": 8, "collective-permute": 25},
        given=6291456,
        scratch=6194176,
        peak=79716864,
        flops=73573335040.0,
        order=(
            "start collective-permute 0, all-gather, start all-gather 1, "
            "done collective-permute 0, loop of 2, start collective-permute"
            " 0, start collective-permute 1, matmul, done collective-"
            "permute 0, start collective-permute 2, done collective-permute"
            " 1, start collective-permute 3, matmul, done collective-"
            "permute 2, done collective-permute 3, end of loop, matmul, "
            "done all-gather 1, start all-gather 2, matmul, done all-gather"
            " 2, 4 matmul, loop of 2, start collective-permute 0, start "
            "collective-permute 1, matmul, done collective-permute 0, done "
            "collective-permute 1, start collective-permute 2, start "
            "collective-permute 3, matmul, done collective-permute 2, done "
            "collective-permute 3, end of loop, start collective-permute 3,"
            " loop of 2, start collective-permute 0, start collective-"
            "permute 1, matmul, done collective-permute 0, done collective-"
            "permute 1, start collective-permute 2, start collective-"
            "permute 3, matmul, done collective-permute 2, done collective-"
            "permute 3, end of loop, start collective-permute 4, loop of 2,"
            " start collective-permute 0, start collective-permute 1, "
            "matmul, done collective-permute 0, done collective-permute 1, "
            "start collective-permute 2, start collective-permute 3, "
            "matmul, done collective-permute 2, done collective-permute 3, "
            "end of loop, start collective-permute 5, loop of 2, start "
            "collective-permute 0, start collective-permute 1, matmul, done"
            " collective-permute 0, done collective-permute 1, start "
            "collective-permute 2, start collective-permute 3, matmul, done"
            " collective-permute 2, done collective-permute 3, end of loop,"
            " start collective-permute 6, scalar all-reduce, done "
            "collective-permute 4, done collective-permute 3, done "
            "collective-permute 5, done collective-permute 6"
        ),
        lines=[],
    ),
    ("fully_sharded_auto", "H100"): Written(
        collectives={
            ("all-gather", 8): (2, 29360128),
            ("all-reduce", 8): (1, 7),
            ("reduce-scatter", 8): (1, 29360128),
        },
        printed={"all-reduce": 1, "all-gather": 2, "reduce-scatter": 1},
        given=6291456,
        scratch=88087584,
        peak=94375980,
        flops=None,
        order=(
            "all-gather, start all-gather 0, 3 matmul, done all-gather 0, 7"
            " matmul, start scalar all-reduce 1, matmul, done scalar all-"
            "reduce 1, start reduce-scatter 2, done reduce-scatter 2"
        ),
        lines=[],
    ),
    ("tensor_parallel", "TPU v5e"): Written(
        collectives={("all-reduce", 8): (3, 88080384)},
        printed={"all-reduce": 3},
        given=20971520,
        scratch=1257984,
        peak=109053440,
        flops=95231672320.0,
        order=(
            "2 matmul, all-reduce, 2 matmul, all-reduce, 4 matmul, all-reduce, 3 matmul"
        ),
        lines=["all-reduce, UniDirection1DRingStrategy, colors:2 phases:1"],
    ),
    ("tensor_parallel", "H100"): Written(
        collectives={("all-reduce", 8): (3, 88080384)},
        printed={"all-reduce": 3},
        given=20971520,
        scratch=100664336,
        peak=121634860,
        flops=None,
        order=(
            "2 matmul, all-reduce, 2 matmul, all-reduce, 2 matmul, start "
            "all-reduce 0, 2 matmul, done all-reduce 0, 3 matmul"
        ),
        lines=[],
    ),
    ("experts", "TPU v5e"): Written(
        collectives={("all-reduce", 8): (2, 28679), ("all-to-all", 8): (3, 5505024)},
        printed={"all-reduce": 2, "all-to-all": 3},
        given=18890752,
        scratch=580608,
        peak=65031168,
        flops=49768202240.0,
        order=(
            "2 matmul, all-to-all, 2 matmul, all-to-all, matmul, scalar "
            "all-reduce, 2 matmul, all-reduce, all-to-all, 3 matmul"
        ),
        lines=[
            "all-reduce, StrategyRing, colors:1 phases:1",
            "bf16[1024,8]{0,1:T(8,128)(2,1)}",
        ],
    ),
    ("experts", "H100"): Written(
        collectives={("all-reduce", 8): (2, 28679), ("all-to-all", 8): (3, 5505024)},
        printed={"all-reduce": 2, "all-to-all": 3},
        given=18890752,
        scratch=39888920,
        peak=58777636,
        flops=None,
        order=(
            "2 matmul, all-to-all, 2 matmul, all-to-all, matmul, start "
            "scalar all-reduce 0, matmul, done scalar all-reduce 0, start "
            "all-to-all 1, matmul, done all-to-all 1, start all-reduce 2, 3"
            " matmul, done all-reduce 2"
        ),
        lines=[],
    ),
    ("ring_attention", "TPU v5e"): Written(
        collectives={("collective-permute", 8): (16, 33554432)},
        printed={"collective-permute": 2},
        given=6291456,
        scratch=0,
        peak=44173824,
        flops=4393574400.0,
        order=(
            "loop of 8, start collective-permute 0, start collective-"
            "permute 1, 2 matmul, done collective-permute 0, done "
            "collective-permute 1, end of loop"
        ),
        lines=[],
    ),
    ("ring_attention", "H100"): Written(
        collectives={("collective-permute", 8): (8, 33554432)},
        printed={"collective-permute": 1},
        given=6291456,
        scratch=29460280,
        peak=37847048,
        flops=None,
        order=(
            "loop of 8, start collective-permute 0, 2 matmul, done "
            "collective-permute 0, end of loop"
        ),
        lines=[],
    ),
    ("ring_attention_unrolled", "TPU v5e"): Written(
        collectives={("collective-permute", 8): (14, 29360128)},
        printed={"collective-permute": 14},
        given=6291456,
        scratch=26521088,
        peak=125829120,
        flops=35124346880.0,
        order=(
            "start collective-permute 0, start collective-permute 1, 2 "
            "matmul, done collective-permute 0, start collective-permute 2,"
            " done collective-permute 1, start collective-permute 3, "
            "matmul, done collective-permute 2, start collective-permute 4,"
            " done collective-permute 3, start collective-permute 5, "
            "matmul, done collective-permute 4, start collective-permute 6,"
            " done collective-permute 5, start collective-permute 7, "
            "matmul, done collective-permute 6, start collective-permute 8,"
            " done collective-permute 7, start collective-permute 9, "
            "matmul, done collective-permute 8, start collective-permute "
            "10, done collective-permute 9, start collective-permute 11, "
            "matmul, done collective-permute 10, start collective-permute "
            "12, done collective-permute 11, start collective-permute 13, "
            "matmul, done collective-permute 12, 7 matmul, done collective-"
            "permute 13, matmul"
        ),
        lines=[],
    ),
    ("ring_attention_unrolled", "H100"): Written(
        collectives={("collective-permute", 8): (13, 29360128)},
        printed={"collective-permute": 13},
        given=6291456,
        scratch=231151144,
        peak=239534080,
        flops=None,
        order=(
            "6 collective-permute, start collective-permute 0, matmul, done"
            " collective-permute 0, start collective-permute 1, done "
            "collective-permute 1, start collective-permute 2, 2 matmul, "
            "done collective-permute 2, start collective-permute 3, done "
            "collective-permute 3, start collective-permute 4, done "
            "collective-permute 4, start collective-permute 5, done "
            "collective-permute 5, start collective-permute 6, 6 matmul, "
            "done collective-permute 6, matmul"
        ),
        lines=[],
    ),
    ("ten_columns", "TPU v5e"): Written(
        collectives={},
        printed={},
        given=65536,
        scratch=0,
        peak=131072,
        flops=10240.0,
        order="",
        lines=["f32[1024,10]{0,1:T(8,128)}"],
    ),
    ("ten_columns", "H100"): Written(
        collectives={},
        printed={},
        given=40960,
        scratch=0,
        peak=81920,
        flops=None,
        order="",
        lines=[],
    ),
}
