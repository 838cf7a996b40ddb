# @title The ledger: what a compiled step sends and holds
class Entry(NamedTuple):
    """Bytes that one device sends in a step, is given, and needs in between."""

    sent: int
    given: int
    scratch: int


def enter(layout: str, compiled, answer: float) -> Entry:
    """Read a compiled step, print its line of the ledger, which ends with the step's
    answer, and return the bytes."""
    sent = sum(nbytes for _, nbytes in collectives(compiled).values())
    memory = compiled.memory_analysis()
    given = memory.argument_size_in_bytes
    scratch = memory.temp_size_in_bytes
    print(f"{layout:23}sent {sent:>9,}  given {given:>9,}  ", end="")
    print(f"scratch {scratch:>10,}  {answer:.6f}")
    return Entry(sent, given, scratch)
