# @title Recorded kills
# Written by lab/kills.py of commit 559601b: KILLS[release][devices][collective] of
# two processes, one of which is killed, three times.
#   heard   seconds until the other one gets an exception: None, none soon
#   end     seconds until it ends
KILLS_ON = {"date": "2026-11-23", "heartbeat": 10, "soon": 5}
KILLS = {
    "0.7.2": {
        "1": {
            "all-reduce": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.5]},
            "all-gather": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.6, 0.6]},
            "ppermute": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.6]},
            "ppermute, waiting": {"heard": [0.01, 0.01, 0.01], "end": [0.1, 0.1, 0.1]},
        },
        "2": {
            "all-reduce": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.6]},
            "all-gather": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.5]},
            "ppermute": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.5]},
            "ppermute, waiting": {"heard": [0.01, 0.03, 0.02], "end": [0.0, 0.1, 0.1]},
        },
        "4": {
            "all-reduce": {"heard": [None, None, None], "end": [9.7, 9.7, 10.3]},
            "all-gather": {"heard": [None, None, None], "end": [10.4, 9.4, 10.2]},
            "ppermute": {"heard": [None, None, None], "end": [9.7, 10.7, 10.5]},
            "ppermute, waiting": {"heard": [0.01, 0.01, 0.02], "end": [0.0, 0.0, 0.0]},
        },
        "4 in turn": {
            "all-reduce": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.6, 0.6]},
            "all-gather": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.6, 0.5]},
            "ppermute": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.5]},
            "ppermute, waiting": {"heard": [0.02, 0.01, 0.01], "end": [0.0, 0.0, 0.1]},
        },
    },
    "0.10.2": {
        "1": {
            "all-reduce": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.5]},
            "all-gather": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.6, 0.5]},
            "ppermute": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.6, 0.5]},
            "ppermute, waiting": {"heard": [0.02, 0.02, 0.02], "end": [0.1, 0.1, 0.1]},
        },
        "2": {
            "all-reduce": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.5, 0.5]},
            "all-gather": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.5, 0.6]},
            "ppermute": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.5, 0.5]},
            "ppermute, waiting": {"heard": [0.01, 0.02, 0.02], "end": [0.1, 0.1, 0.1]},
        },
        "4": {
            "all-reduce": {"heard": [None, None, None], "end": [9.5, 10.5, 10.5]},
            "all-gather": {"heard": [None, None, None], "end": [9.4, 10.5, 10.7]},
            "ppermute": {"heard": [None, None, None], "end": [9.9, 10.8, 10.2]},
            "ppermute, waiting": {"heard": [0.02, 0.02, 0.02], "end": [0.1, 0.1, 0.1]},
        },
        "4 in turn": {
            "all-reduce": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.5]},
            "all-gather": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.6, 0.5]},
            "ppermute": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.5]},
            "ppermute, waiting": {"heard": [0.02, 0.02, 0.02], "end": [0.1, 0.1, 0.1]},
        },
    },
    "0.12.0.1": {
        "1": {
            "all-reduce": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.5, 0.6]},
            "all-gather": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.6, 0.5]},
            "ppermute": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.5]},
            "ppermute, waiting": {"heard": [0.01, 0.01, 0.02], "end": [0.0, 0.0, 0.1]},
        },
        "2": {
            "all-reduce": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.5, 0.6]},
            "all-gather": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.5, 0.6]},
            "ppermute": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.6, 0.5]},
            "ppermute, waiting": {"heard": [0.02, 0.02, 0.02], "end": [0.1, 0.1, 0.1]},
        },
        "4": {
            "all-reduce": {"heard": [None, None, None], "end": [10.6, 10.4, 9.8]},
            "all-gather": {"heard": [None, None, None], "end": [10.1, 9.7, 9.8]},
            "ppermute": {"heard": [None, None, None], "end": [10.4, 9.9, 9.8]},
            "ppermute, waiting": {"heard": [0.02, 0.02, 0.02], "end": [0.1, 0.1, 0.1]},
        },
        "4 in turn": {
            "all-reduce": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.5, 0.5]},
            "all-gather": {"heard": [0.5, 0.5, 0.5], "end": [0.5, 0.6, 0.6]},
            "ppermute": {"heard": [0.5, 0.5, 0.5], "end": [0.6, 0.6, 0.6]},
            "ppermute, waiting": {"heard": [0.03, 0.02, 0.03], "end": [0.1, 0.1, 0.1]},
        },
    },
}
