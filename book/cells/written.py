# @title Read collectives, memory and schedule from a compiled program
import itertools
from typing import NamedTuple


class Written(NamedTuple):
    """One device's program, as a compiler wrote it."""

    collectives: dict | str  # (kind, group size): (times, bytes sent), or an error
    printed: dict  # kind: number of lines that contain it
    arguments: int  # bytes
    temporary: int
    peak: int
    flops: float | None
    order: str  # schedule: matmuls and collectives of the ENTRY in order
    lines: list  # excerpts, see below


def what_it_wrote(compiled: jax.stages.Compiled) -> Written:
    """Read collectives, memory and schedule from a compiled program."""
    text = compiled.as_text()
    program, entry = read_program(text)
    try:
        sent = collectives(compiled)
    except ValueError as refusal:
        sent = str(refusal)
    lines = [line for body in program.values() for line in body.values()]
    kinds = [line.operation.removesuffix("-start") for line in lines]
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}  # None for a GPU
    return Written(
        collectives=sent,
        printed={kind: kinds.count(kind) for kind in RING if kind in kinds},
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        flops=cost.get("flops"),
        order=in_words(steps_of(entry, program)),
        lines=excerpts(text, program[entry]),
    )


def lines_within(line: Line, lines: dict, program: dict) -> Iterator[Line]:
    """Yield a line, and all lines of the computations that it calls."""
    yield line
    for called, _ in called_by(line, lines, program):
        for name, _ in all_runs(called, 1, program):
            yield from program[name].values()


def kind_in(within: list[Line]) -> str | None:
    """Return the kind of collective in a line, with "scalar" if it is at most 8 B."""
    for line in within:
        kind = line.operation.removesuffix("-start")
        if kind in RING:
            return f"scalar {kind}" if result_bytes(line) <= 8 else kind
    return None


def multiplies(within: list[Line]) -> bool:
    """Return whether a matrix product is among these lines."""
    return bool({each.operation for each in within} & {"dot", "convolution"})


def verb_of(within: list[Line]) -> str:
    """Return what a line does with an async collective: start, update, done or ""."""
    text = " ".join(each.text for each in within)
    verb = re.search("Collective(Start|Done)", text)
    verb = verb or re.search("-(start|update|done)$", within[0].operation)
    return verb[1].lower() if verb else ""


def thread_of(within: list[Line], verb: str) -> str:
    """Return what the lines of one async collective share: a chain id, or a name."""
    chains = {chain_of(each) for each in within} - {"unnamed"}
    if chains:
        return chains.pop()
    return within[0].name if verb == "start" else within[0].operands[0]


def in_words(steps: Iterator[str]) -> str:
    """Join steps in one line: "2 matmul, all-reduce" from three steps."""
    words = []
    for step, same in itertools.groupby(steps):
        times = len(list(same))
        words.append(step if times == 1 else f"{times} {step}")
    return ", ".join(words)


def steps_of(name: str, program: dict) -> Iterator[str]:
    """Yield a computation's matmuls, collectives and loops in the order of its text.

    A synchronous collective is one step, an asynchronous one a start/done pair, such as
    "start all-gather 0" and "done all-gather 0".
    """
    lines, started = program[name], {}
    for line in lines.values():
        within = list(lines_within(line, lines, program))
        kind, verb = kind_in(within), verb_of(within)
        thread = thread_of(within, verb)
        fused = "calls=%all-reduce-scatter" in line.text  # a TPU's reduce-scatter
        if line.operation == "while" and (kind or multiplies(within)):
            yield f"loop of {trip_count(line, lines, program)}"
            yield from steps_of(re.search(r"body=%?([\w.-]+)", line.text)[1], program)
            yield "end of loop"
        elif verb == "start" and kind:
            started[thread] = f"{kind} {len(set(started.values()))}"
            if line.operands[0] in lines:  # call-start() has no data yet
                yield f"start {started[thread]}"
        elif verb and thread in started:
            started[line.name] = started[thread]
            yield f"{verb.replace('update', 'start')} {started[thread]}"
        elif kind and (fused or line.operation in RING):
            yield "reduce-scatter" if fused else kind
        elif multiplies(within):
            yield "matmul"


def excerpts(text: str, entry: dict) -> list[str]:
    """Return the algorithms and threads that a TPU's text names, and the types of
    arguments that are stored column by column."""
    threads = re.findall(r'async_execution_thread="(\w+)"', text)
    found = {f"asynchronous, {thread}" for thread in threads}
    named = r' ([\w-]+)\(.*"strategy":"(\w+)".*?{(colors:\d+ phases:\d+)'
    for row in text.splitlines():
        parts = re.search(named, row)
        if parts and result_bytes(read_line(row.strip())) > 8:
            found.add(", ".join(parts.groups()))
    for line in entry.values():
        if line.operation == "parameter" and "{0,1" in line.type:
            found.add(line.type)
    return sorted(found)
