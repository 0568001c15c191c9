"""Count the functions of deepmd_ema that `dp-ema train INPUT` enters before the first backward
pass.

`python tests/first_step.py input.json [--list]` prints the numbers of functions and of files, and
the depth of the stack at the optimizer; with ``--list`` the functions before them.
"""

import inspect
import sys
import threading
from pathlib import Path

import deepmd_ema
from deepmd_ema.__main__ import main

PACKAGE = f"{Path(deepmd_ema.__file__).parent}/"
functions, depths, is_counting = {}, [], [True]


def is_ours(code):
    """Whether it is a function of the package: no module, class body, lambda or comprehension."""
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith(
        "<"
    )
    return bool(is_function) and code.co_filename.startswith(PACKAGE)


def depth_of(frame):
    return 0 if frame is None else is_ours(frame.f_code) + depth_of(frame.f_back)


def look(frame, event, _):
    code = frame.f_code
    if (
        event == "call"
        and code.co_name == "step"
        and "/torch/optim/" in code.co_filename
    ):
        depths.append(depth_of(frame))
    elif (
        event == "call" and code.co_name == "backward" and "/torch/" in code.co_filename
    ):
        is_counting.clear()
    elif event == "call" and is_counting and is_ours(code):
        functions[code.co_filename.removeprefix(PACKAGE), code.co_firstlineno] = (
            code.co_name
        )


if __name__ == "__main__":
    arguments, sys.argv[1:] = sys.argv[1:], ["train", sys.argv[1], "--device", "cpu"]
    threading.setprofile(look)
    sys.setprofile(look)
    code = main()
    sys.setprofile(None)
    for (path, line), name in functions.items() if "--list" in arguments else ():
        print(path, line, name)
    print(len(functions), len({path for path, _ in functions}), depths[0])
    sys.exit(code)
