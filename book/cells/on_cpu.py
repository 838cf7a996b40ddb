# @title Check what the CPU's compiler chose
def on_cpu(found, expected) -> None:
    """Assert that two values are equal if the CPU's compiler made the program. Another
    compiler may choose differently: then print both."""
    if device.platform == "cpu":
        assert found == expected, f"expected {expected}, found {found}"
    else:
        print(f"the CPU's compiler: {expected}\n{device.device_kind}: {found}")
