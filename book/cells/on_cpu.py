# @title What holds for the CPU's compiler
def on_cpu(found, expected) -> None:
    """Assert that two values agree where the CPU's compiler made the program. Another
    compiler may choose otherwise: there, print both."""
    if device.platform == "cpu":
        assert found == expected, f"expected {expected}, found {found}"
    else:
        print(f"the CPU's compiler: {expected}\n{device.device_kind}: {found}")
