# @title The judge of the exercises
import inspect
import traceback
from collections.abc import Callable


def is_open(answer: Callable) -> bool:
    """Whether an answer is still the stub, which raises NotImplementedError."""
    code = getattr(inspect.unwrap(answer), "__code__", None)
    return code is not None and "NotImplementedError" in code.co_names


def reason(error: Exception) -> str:
    """What a check complains of: its own words, or the line that failed."""
    words = str(error).strip()
    if words.startswith(("Not equal to tolerance", "Arrays are not equal")):
        words = words.partition("\n")[2]  # NumPy's heading; the check's words follow
    if not words:
        words = traceback.extract_tb(error.__traceback__)[-1].line
    if isinstance(error, AssertionError):
        return words
    return f"{type(error).__name__}: {words}"


def judge(check: Callable, answer: Callable) -> None:
    """Print the verdict on a reader's answer: open, right, or what is not right yet."""
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
    """Fail unless the check turns a wrong answer down; print its complaint."""
    try:
        check(wrong)
    except AssertionError as error:
        print(f"{wrong.__name__} is turned down: {reason(error).splitlines()[0]}")
    else:
        raise AssertionError(f"the check accepts {wrong.__name__}")
