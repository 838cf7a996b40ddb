"""The recorded faults are what chapter 25 needs, and causing them leaves nothing.

Most of it runs without root, with a stand-in for `ip`; the last tests make namespaces.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts
import pytest

NAMES = [fault.name for fault in hosts.FAULTS]
RECORD = hosts.RECORD.read_text()
CELL = {}
exec(RECORD, CELL)
RECORDED = CELL["RECORDED"]
PER_PROCESS = ["first_word", "message", "end", "status", "steps_after"]
OFTEN_KEPT = ["abort", "last_step", "step_before", "slowest_step"]

# It keeps one empty file for each namespace and runs programs where they are. Of the
# calls that make something, the one whose number is in `fail` fails.
IP = """#!/bin/sh
state=%s
case "$*" in
"netns list") ls $state/names; exit ;;
"netns pids"*) exit ;;
"netns delete"*) rm $state/names/$3; exit ;;
"netns exec"*) shift 3; exec "$@" ;;
esac
echo "call $*" >> $state/calls
if [ $(wc -l < $state/calls) = "$(cat $state/fail)" ]; then echo refused >&2; exit 1; fi
case "$*" in "netns add"*) touch $state/names/$3 ;; esac
"""
SLEEPER = """#!/bin/sh
echo sleeping
exec sleep 600
"""


# ---------------------------------------------------------------------- the record


def test_the_record_has_every_fault_and_is_as_it_was_written():
    assert list(RECORDED) == NAMES, "run: nox -s hosts"
    assert hosts.cell(CELL["RECORDED_ON"], RECORDED) == RECORD
    assert max(map(len, RECORD.splitlines())) <= 88
    assert RECORD.startswith("# @title Recorded faults\n")


def test_the_record_says_when_and_with_what_it_was_made():
    said = CELL["RECORDED_ON"]
    assert {"date", "commit", "JAX", "Python", "Linux", "heartbeat"} <= {*said}
    assert said["heartbeat"] == hosts.HEARTBEAT


@pytest.mark.parametrize("fault", hosts.FAULTS, ids=NAMES)
def test_what_is_recorded_of_a_fault_is_whole_and_is_that_fault(fault):
    found = RECORDED[fault.name]
    assert list(found)[:6] == [*PER_PROCESS, "watched"]
    for name in [*PER_PROCESS, *(name for name in OFTEN_KEPT if name in found)]:
        assert len(found[name]) == len(fault.ends), name
    for word, message in zip(found["first_word"], found["message"], strict=True):
        assert (word is None) == (message is None)
    for end, status in zip(found["end"], found["status"], strict=True):
        assert (end is None) == (status is None)
    assert ("on_disk" in found) == fault.save
    assert hosts.contradictions(fault, found) == []


def test_messages_name_no_address_port_or_time():
    for found in RECORDED.values():
        for message in filter(None, [*found["message"], *found.get("abort", [])]):
            assert hosts.plain(message) == message
            assert not any(address in message for address in hosts.ADDRESSES)


# -------------------------------------------------------------------- the timeline

GLOO = (
    "ValueError: UNKNOWN: Gloo all-reduce failed: [external/tcp/pair.cc:547] "
    "Connection closed by peer [192.0.2.2]:17066"
)
ABORT = [
    "F1122 05:48:31.183766    6992 client.h:86] Terminating process because of it. "
    "absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded",
    "",
    "RPC: /xla.coordination.CoordinationService/Heartbeat",
    "=== Source Location Trace: ===",
    "external/util.cc:64",
]


def steps_at(*when: float) -> list[hosts.Note]:
    return [hosts.Note(at, "step", f"{i} 0.0010") for i, at in enumerate(when)]


def survivor() -> hosts.Seen:
    """A process whose fault comes at 100: it complains at once and aborts at 107.7."""
    notes = [*steps_at(99.8, 99.9), hosts.Note(100.05, "complaint", GLOO)]
    lines = [
        (98.0, "[Gloo] Rank 0"),
        (107.7, "E1122 05:48:31.1 7 a.cc:2] Polled an error"),
    ]
    lines += [(107.7, line) for line in ABORT]
    return hosts.Seen(100.0, 7.81, -6, lines, notes)


def killed() -> hosts.Seen:
    return hosts.Seen(100.0, 0.01, -9, [], steps_at(99.8, 99.9))


KILL = hosts.Fault("process 1 killed", ("fails", "killed"), 40)


def test_a_timeline_is_made_of_diaries_and_of_what_was_printed():
    found = hosts.timeline(KILL, [survivor(), killed()], [])
    closed = "ValueError: Gloo all-reduce failed: Connection closed by peer host 1"
    assert found == {
        "first_word": [0.0, None],
        "message": [closed, None],
        "end": [7.8, 0.0],
        "status": [-6, -9],
        "steps_after": [0, 0],
        "watched": 40,
        "abort": ["Deadline Exceeded RPC: Heartbeat", None],
    }
    assert hosts.contradictions(KILL, found) == []


def test_a_word_that_says_nothing_of_the_fault_is_passed_over():
    waiting = survivor()._replace(notes=steps_at(99.8, 99.9))
    found = hosts.timeline(KILL, [waiting, killed()], [])
    assert found["first_word"] == [7.7, None]
    assert found["message"] == ["Deadline Exceeded RPC: Heartbeat", None]
    assert "abort" not in found


@pytest.mark.parametrize(
    "ends, changes, told",
    [
        (("fails", "killed"), {"status": -9}, "process 0 killed"),
        (("fails", "killed"), {"status": 0}, "process 0 leaves"),
        (("fails", "killed"), {"status": None, "end": None}, "process 0 hangs"),
        (("fails", "killed"), {"notes": [], "output": []}, "process 0 said nothing"),
        (("hangs", "killed"), {"status": None}, "process 0 complained"),
        (("goes on", "killed"), {"status": None}, "process 0 hangs"),
    ],
)
def test_a_fault_that_does_not_show_is_told(ends, changes, told):
    fault = KILL._replace(ends=ends)
    found = hosts.timeline(fault, [survivor()._replace(**changes), killed()], [])
    assert any(told in wrong for wrong in hosts.contradictions(fault, found))


def test_a_link_that_is_not_slow_and_a_checkpoint_that_is_not_there_are_told():
    fault = KILL._replace(ends=("goes on", "goes on"), slower=50, save=True)
    alive = hosts.Seen(100.0, None, None, [], steps_at(99.8, 99.9, 100.2))
    wrong = hosts.contradictions(fault, hosts.timeline(fault, [alive, alive], []))
    assert ["slowed down" in line for line in wrong] == [True, True, False]
    assert wrong[2].endswith("nothing was saved")


def test_a_checkpoint_in_the_making_does_not_count(tmp_path):
    for name in ("0", "20", "40.orbax-checkpoint-tmp"):
        Path(tmp_path, "checkpoints", name).mkdir(parents=True)
    assert hosts.committed(tmp_path) == [0, 20]


def test_half_a_line_of_a_diary_is_left_for_later(tmp_path):
    diary = tmp_path / "0.txt"
    diary.write_text("1.5 initialized\n1.6 step 0 0.0010\n1.7 st")
    assert hosts.read(diary) == [
        hosts.Note(1.5, "initialized", ""),
        hosts.Note(1.6, "step", "0 0.0010"),
    ]
    assert hosts.read(tmp_path / "absent.txt") == []


# ----------------------------------------------------------------- nothing is left


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A folder in which a stand-in for ip keeps the namespaces that it did not make."""
    (tmp_path / "names").mkdir()
    (tmp_path / "fail").write_text("0")
    for name, text in ("ip", IP % tmp_path), ("sleeper", SLEEPER):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(hosts, "ETC", tmp_path / "etc")
    monkeypatch.setattr(hosts.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path


def nothing_left(folder: Path) -> bool:
    return not any(folder.glob("names/*")) and not (folder / "etc").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
class TestUndone:
    def test_all_is_undone_when_nothing_fails(self, stand_in):
        with hosts.Hosts() as pair:
            assert len(list(stand_in.glob("names/*"))) == 2
            assert len(list(stand_in.glob("etc/*/hosts"))) == 2
            process = pair.start(1, str(stand_in / "sleeper"), "work").process
            assert process.poll() is None
        assert process.poll() == -signal.SIGKILL
        assert nothing_left(stand_in)

    @pytest.mark.parametrize("call", range(1, 10))
    def test_all_is_undone_when_a_step_of_building_fails(self, stand_in, call):
        (stand_in / "fail").write_text(str(call))
        with pytest.raises(RuntimeError, match="refused"):
            with hosts.Hosts():
                pass
        assert nothing_left(stand_in)

    def test_building_takes_as_many_steps_as_were_made_to_fail(self, stand_in):
        with hosts.Hosts():
            assert len((stand_in / "calls").read_text().splitlines()) == 9

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
    def test_all_is_undone_when_what_follows_fails(self, stand_in, error):
        with pytest.raises(error):
            with hosts.Hosts() as pair:
                pair.start(0, str(stand_in / "sleeper"), "work")
                process = pair.start(1, str(stand_in / "sleeper"), "work").process
                process.send_signal(signal.SIGSTOP)
                raise error
        assert process.poll() == -signal.SIGKILL
        assert nothing_left(stand_in)

    def test_one_thing_that_cannot_be_undone_keeps_no_other(
        self, stand_in, monkeypatch
    ):
        remove = hosts.remove

        def refuse_the_second(name):
            if name.endswith("-1"):
                raise RuntimeError("not this one")
            remove(name)

        monkeypatch.setattr(hosts, "remove", refuse_the_second)
        with pytest.raises(RuntimeError, match="left behind"):
            with hosts.Hosts() as pair:
                process = pair.start(0, str(stand_in / "sleeper"), "work").process
        assert process.poll() == -signal.SIGKILL
        assert [path.name for path in stand_in.glob("names/*")] == [pair.names[1]]

    def test_what_another_run_left_is_removed_and_what_runs_is_not(self, stand_in):
        gone = subprocess.Popen(["true"])
        gone.wait()  # its number is nobody's now
        left = f"{hosts.PREFIX}-{gone.pid}-0"
        kept = f"{hosts.PREFIX}-{os.getpid()}-0"
        other = f"{hosts.PREFIX}-other"
        for name in (left, kept, other):
            (stand_in / "names" / name).touch()
            (stand_in / "etc" / name).mkdir(parents=True)
            (stand_in / "tmp" / name).mkdir(parents=True)
        hosts.remove_leftovers()
        for folder in ("names", "etc", "tmp"):
            found = sorted(path.name for path in stand_in.glob(f"{folder}/*"))
            assert found == [kept, other]


@pytest.mark.parametrize(
    "platform, user, present, told",
    [
        ("darwin", 0, True, "only Linux"),
        ("linux", 1000, True, "need root"),
        ("linux", 0, False, "there is no ip: install iproute2"),
    ],
)
def test_a_machine_that_cannot_is_told_why(monkeypatch, platform, user, present, told):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "geteuid", lambda: user, raising=False)
    monkeypatch.setattr(
        hosts.shutil, "which", lambda name: "there" if present else None
    )
    assert told in hosts.hindrance()


def test_where_it_cannot_be_done_nothing_is(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hosts.py"])
    monkeypatch.setattr(hosts, "hindrance", lambda: "not here")
    monkeypatch.setattr(hosts, "circumstances", None)  # a call of it would fail
    assert hosts.main() == "not here"


def test_an_unknown_fault_is_told(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hosts.py", "flood"])
    assert "there is no fault ['flood']" in hosts.main()


# ---------------------------------------------------------------- real namespaces


def started_tool() -> tuple[subprocess.Popen, list[str], list[str]]:
    """The tool, a second after it has a process in either namespace; those; these."""
    command = [sys.executable, hosts.__file__, "link down"]
    tool = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    names = [f"{hosts.PREFIX}-{tool.pid}-{host}" for host in (0, 1)]
    deadline = time.monotonic() + 30
    inside = []
    while len(inside) < 2 and time.monotonic() < deadline and tool.poll() is None:
        time.sleep(0.05)
        if {*names} <= {*hosts.namespaces()}:
            lists = [hosts.run("ip", "netns", "pids", name).split() for name in names]
            inside = [pid for pids in lists for pid in pids]
    time.sleep(1)  # by then they run Python
    return tool, names, inside


def wait_until_gone(pids: list[str]) -> None:
    """Fail if one of the processes is there for five seconds more."""
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if Path("/proc", pid).exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.skipif(bool(hosts.hindrance()), reason=str(hosts.hindrance()))
class TestNamespaces:
    def test_two_hosts_reach_each_other_and_are_gone_afterwards(self):
        with hosts.Hosts() as pair:
            listen = "import socket; print(socket.create_server(('', 47000)).accept())"
            connect = (
                "import socket; host = socket.gethostbyname(socket.gethostname());"
                f"s = socket.create_connection(('{hosts.ADDRESSES[0]}', 47000), 5);"
                "assert s.getsockname()[0] == host, host"
            )
            command = ["ip", "netns", "exec", pair.names[0], sys.executable, "-c"]
            pair.started.append(hosts.Watched([*command, listen], dict(os.environ)))
            time.sleep(0.5)
            pair.inside(1, sys.executable, "-c", connect)
            for _ in range(100):
                if pair.started[0].output:
                    break
                time.sleep(0.05)
            [(_, line)] = pair.started[0].output
        assert hosts.ADDRESSES[1] in line
        assert not {*pair.names} & {*hosts.namespaces()}
        assert not [name for name in pair.names if (hosts.ETC / name).exists()]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_tool_that_is_told_to_stop_leaves_nothing(self, number):
        tool, names, inside = started_tool()
        tool.send_signal(number)
        assert tool.wait(30) == 128 + number
        assert len(inside) == 2
        wait_until_gone(inside)
        assert not {*names} & {*hosts.namespaces()}
        assert not [name for name in names if (hosts.ETC / name).exists()]

    def test_the_processes_of_a_killed_tool_die_and_its_hosts_are_removed_later(self):
        tool, names, inside = started_tool()
        tool.kill()
        tool.wait()
        assert len(inside) == 2
        wait_until_gone(inside)
        assert {*names} <= {*hosts.namespaces()}
        hosts.remove_leftovers()
        assert not {*names} & {*hosts.namespaces()}
        assert not [name for name in names if (hosts.ETC / name).exists()]
