# @title Costs of a compiled step: bytes sent and memory
class StepCosts(NamedTuple):
    """Bytes of one device in one step: sent, of arguments, and of temporary memory."""

    sent: int
    arguments: int
    temporary: int


def step_costs(name: str, compiled, loss: float) -> StepCosts:
    """Return the costs of a compiled step, and print them in a line that begins with
    the step's name and ends with its loss."""
    sent = sum(nbytes for _, nbytes in collectives(compiled).values())
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    temporary = memory.temp_size_in_bytes
    print(f"{name:23}sent {sent:>9,}  arguments {arguments:>9,}  ", end="")
    print(f"temporary {temporary:>10,}  {loss:.6f}")
    return StepCosts(sent, arguments, temporary)
