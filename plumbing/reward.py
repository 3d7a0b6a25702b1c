"""
--reward file.py:function: a reward of the user's own.
"""
import importlib.util
import math
import sys
from pathlib import Path

from plumbing.files import cause


def own_reward(spec):
    """The grader of --reward file.py:function: a function (text, row) -> a dict like `reward`'s.

    Yours is called with a completion's text and the whole row of the data set, every column. It
    returns a number r, which counts as correct if r >= 1 and always as well formed, or a dict with
    "reward" and, optionally, "correct", "format" and "given". Where it raises there is a
    RuntimeError, hence a traceback; a missing file or function, or a bad result, is one line."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"--reward {spec}: want file.py:function")
    function = getattr(module_of(Path(path).resolve()), name, None)
    if not callable(function):
        raise ValueError(f"--reward {path}: has no function {name}; define {name}(text, row) there")

    def grade(text, row):
        try:
            value = function(text, dict(row))  # what it changes there is its own
        except (Exception, SystemExit) as e:  # a completion that it runs may call exit()
            raise RuntimeError(f"--reward {spec}: raised {cause(e)}") from e
        score = value if isinstance(value, dict) else {"reward": value}
        try:
            r = float(score["reward"])
        except (KeyError, TypeError, ValueError):
            r = math.nan
        if not abs(r) <= 1e9:  # its square must fit float32
            raise ValueError(f"--reward {spec}: returned {value!r:.80}; return a number within "
                             '+-1e9, or a dict with one as "reward"')
        marks = {"correct": score.get("correct", r >= 1), "format": score.get("format", True)}
        for name, mark in marks.items():
            if mark not in (0, 1):  # the text "False", say, which is true
                raise ValueError(f'--reward {spec}: returned {mark!r:.40} as "{name}"; it is True '
                                 "or False, or left out")
        given = score.get("given")
        return {"reward": r, **{name: bool(mark) for name, mark in marks.items()},
                "given": None if given is None else str(given)}

    return grade


def module_of(file):
    """The module in a file: the running script, if it is that, whose patches must not be applied
    twice; else it is imported."""
    script = sys.modules["__main__"]
    if getattr(script, "__file__", None) and Path(script.__file__).resolve() == file:
        return script
    sys.path.append(str(file.parent))  # its folder, as `python file.py` does
    loader = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    module = sys.modules[loader.name] = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module
