"""
--reward file.py:function: a reward of the user's own, loaded and guarded.
"""
import copy
import importlib.util
import numbers
import os
import sys
import traceback
from pathlib import Path

from plumbing.files import cause

import torch


def own_reward(spec):
    """The grader of --reward file.py:function: a function (text, row) -> a dict like `reward`'s.

    Yours is called with a completion's text and the whole row of the data set, every column. It
    returns a number r, which counts as correct if r >= 1 and always as well formed, or a dict with
    "reward" and, optionally, "correct", "format" and "given". It runs in this process.
    FileNotFoundError / ValueError name the file and the function when they cannot be loaded;
    ValueError when the function raises, or returns no number within +-1e9.
    """
    function, flag = _function(spec), f"--reward {spec}"
    file = str(Path(spec.rpartition(":")[0]).resolve())

    def grade(text, row):
        folder, gradients = os.getcwd(), torch.is_grad_enabled()
        try:
            value = function(text, copy.deepcopy(row))
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # the user's own code, or a completion that it ran
            frames = traceback.extract_tb(e.__traceback__)
            place = [f for f in frames if f.filename == file][-1:] or frames[-1:]
            raise ValueError(f"{flag}: raised {cause(e)} ({place[0].filename}, line "
                             f"{place[0].lineno})") from e
        finally:  # what it may have changed for all
            os.chdir(folder)
            torch.set_grad_enabled(gradients)
        score = value if isinstance(value, dict) else {"reward": value}
        r = _plain(score.get("reward"))
        if not isinstance(r, numbers.Real) or not abs(r) <= 1e9:  # its square must fit float32
            raise ValueError(f'{flag}: returned {value!r:.80}; return a number within +-1e9, or a '
                             'dict with one as "reward"')
        said = {"correct": score.get("correct", r >= 1), "format": score.get("format", True)}
        for name, mark in said.items():
            if not isinstance(mark := _plain(mark), numbers.Real) or mark not in (0, 1):
                raise ValueError(f'{flag}: returned {mark!r:.40} as "{name}"; it is True or False, '
                                 "or left out")
            said[name] = bool(mark)
        return {"reward": float(r), **said,
                "given": None if score.get("given") is None else str(score["given"])}

    return grade


def _plain(value):
    """A numpy or torch number as a Python number: a numpy bool is no numbers.Real."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _function(spec):
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"--reward {spec}: want file.py:function")
    if not Path(path).is_file():
        raise FileNotFoundError(f"--reward {path}: not found; name a Python file that defines "
                                f"{name}(text, row)")
    if not callable(function := getattr(_module(path), name, None)):
        raise ValueError(f"--reward {path}: has no function {name}; define {name}(text, row) there")
    return function


def _module(path):
    """The module in a file: the running script, if it is that, whose patches must not be applied
    twice; else it is imported."""
    file, script = Path(path).resolve(), sys.modules["__main__"]
    if getattr(script, "__file__", None) and Path(script.__file__).resolve() == file:
        return script
    sys.path.append(str(file.parent))  # its folder, as `python path` does
    loader = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    module = sys.modules[loader.name] = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # the user's own code
        raise ValueError(f"--reward {path}: import fails with {cause(e)}; `python {path}` shows "
                         "where") from e
    return module
