# @title Recorded faults
# Written by lab/hosts.py of commit adadcbf, which causes each fault between two hosts
# with one process each. A list has one entry for each process; seconds count from the
# fault.
#   first_word, message   seconds until its first error message, and its text; None: no
#                         such message
#   end, status           None: it was still running after `watched` seconds
#   on_disk               steps with a complete checkpoint; every 25th step starts one
RECORDED_ON = {"date": "2026-11-23", "JAX": "0.12.0.1", "heartbeat": 10}
RECORDED = {
    "process 1 killed": {
        "first_word": [0.1, None],
        "message": [
            "ValueError: Gloo all-reduce failed: Read error host 1: Connection ...",
            None,
        ],
        "steps_after": [0, 0],
        "watched": 40,
        "last_step": [35, 35],
        "end": [6.3, 0.1],
        "status": [-6, -9],
        "on_disk": [0, 25],
    },
    "process 0 killed": {
        "first_word": [None, 0.1],
        "message": [
            None,
            "Failed to send RPC to coordination service. Either the leader task ...",
        ],
        "steps_after": [0, 0],
        "watched": 40,
        "last_step": [35, 35],
        "end": [0.1, 0.4],
        "status": [-9, -6],
        "on_disk": [0, 25],
    },
    "process 1 stopped": {
        "first_word": [7.2, None],
        "message": [
            "The following tasks are unhealthy (stopped sending heartbeats): 1 ...",
            None,
        ],
        "steps_after": [0, 0],
        "watched": 20,
        "last_step": [35, 35],
        "end": [7.4, None],
        "status": [-6, None],
        "on_disk": [0, 25],
    },
    "process 1 stopped, default heartbeat": {
        "first_word": [98.0, None],
        "message": [
            "The following tasks are unhealthy (stopped sending heartbeats): 1 ...",
            None,
        ],
        "steps_after": [0, 0],
        "watched": 110,
        "end": [98.1, None],
        "status": [-6, None],
    },
    "link down": {
        "first_word": [8.7, 8.9],
        "message": [
            "The following tasks are unhealthy (stopped sending heartbeats): 1 ...",
            "Deadline Exceeded RPC: Heartbeat",
        ],
        "steps_after": [0, 0],
        "watched": 40,
        "end": [8.9, 9.1],
        "status": [-6, -6],
    },
    "link down for 5 s": {
        "first_word": [None, None],
        "message": [None, None],
        "steps_after": [182, 182],
        "watched": 15,
        "step_before": [0.0022, 0.002],
        "slowest_step": [5.1, 5.1],
        "end": [None, None],
        "status": [None, None],
    },
    "coordinator's port dropped": {
        "first_word": [8.9, 8.9],
        "message": [
            "The following tasks are unhealthy (stopped sending heartbeats): 1 ...",
            "Deadline Exceeded RPC: Heartbeat",
        ],
        "steps_after": [164, 164],
        "watched": 40,
        "end": [9.0, 9.0],
        "status": [-6, -6],
    },
    "only the coordinator's port open": {
        "first_word": [150.2, 133.9],
        "message": [
            "JaxRuntimeError: Gloo context initialization failed: ...",
            "JaxRuntimeError: Gloo context initialization failed: timed out ...",
        ],
        "steps_after": [0, 0],
        "watched": 200,
        "end": [151.2, 151.1],
        "status": [1, 1],
    },
    "slow link": {
        "first_word": [None, None],
        "message": [None, None],
        "steps_after": [7, 6],
        "watched": 15,
        "step_before": [0.0023, 0.0023],
        "slowest_step": [2.2, 2.2],
        "end": [None, None],
        "status": [None, None],
    },
    "SIGTERM, not polled": {
        "first_word": [None, None],
        "message": [None, None],
        "steps_after": [192, 192],
        "watched": 10,
        "end": [None, None],
        "status": [None, None],
    },
    "SIGTERM, only Orbax polls": {
        "first_word": [None, None],
        "message": [None, None],
        "steps_after": [53, 53],
        "watched": 3,
        "last_step": [88, 88],
        "end": [None, None],
        "status": [None, None],
        "on_disk": [0, 25, 46, 50, 75],
    },
    "SIGTERM, both poll": {
        "first_word": [None, None],
        "message": [None, None],
        "steps_after": [4, 4],
        "watched": 20,
        "last_step": [39, 39],
        "end": [1.4, 1.6],
        "status": [0, 0],
        "on_disk": [0, 25, 39],
    },
    "one step more": {
        "first_word": [15.3, 15.3],
        "message": [
            "Shutdown barrier in coordination service has failed: Barrier timed ...",
            "Shutdown barrier has failed. Barrier result: 'Barrier timed out. ...",
        ],
        "steps_after": [0, 0],
        "watched": 40,
        "end": [15.8, 15.7],
        "status": [-6, -6],
    },
    "port in use": {
        "first_word": [0.0, 15.5],
        "message": [
            "Failed to add port to server: No address added out of total 1 ...",
            "Deadline Exceeded RPC: RegisterTask",
        ],
        "steps_after": [0, 0],
        "watched": 40,
        "end": [0.1, 15.7],
        "status": [-11, -6],
    },
    "process 1 never starts": {
        "first_word": [15.0],
        "message": ["Deadline Exceeded RPC: RegisterTask"],
        "steps_after": [0],
        "watched": 40,
        "end": [15.7],
        "status": [-6],
    },
}
