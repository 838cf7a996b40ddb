# @title Check the answers to exercises
import inspect
import traceback
from collections.abc import Callable


def is_open(answer: Callable) -> bool:
    """Return whether an answer is still the stub, which raises NotImplementedError."""
    code = getattr(inspect.unwrap(answer), "__code__", None)
    return code is not None and "NotImplementedError" in code.co_names


def reason(error: Exception) -> str:
    """Return why a check failed: its message, or else the line that failed."""
    message = str(error).strip()
    if message.startswith(("Not equal to tolerance", "Arrays are not equal")):
        message = message.partition("\n")[2]  # without NumPy's heading
    if not message:
        message = traceback.extract_tb(error.__traceback__)[-1].line
    if isinstance(error, AssertionError):
        return message
    return f"{type(error).__name__}: {message}"


def judge(check: Callable, answer: Callable) -> None:
    """Print that a reader's answer is open or right, or why the check rejects it."""
    if is_open(answer):
        print("Open. Write your answer in the cell above, run it, then run this cell.")
        return
    try:
        check(answer)
    except Exception as error:
        print("Not yet.", reason(error))
    else:
        print("Right.")


def reject(check: Callable, wrong: Callable) -> None:
    """Print why the check rejects a wrong answer; fail if it accepts it."""
    try:
        check(wrong)
    except AssertionError as error:
        print(f"{wrong.__name__} is rejected: {reason(error).splitlines()[0]}")
    else:
        raise AssertionError(f"the check accepts {wrong.__name__}")
