"""
Reading files (text, JSON, with errors that name file and row), and writing them whole or not at
all; a lock that is released when its process dies.

    heads = read_json("config.json", ["num_attention_heads"])["num_attention_heads"]
"""
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

TINY = Path(__file__).resolve().parents[1] / "assets" / "tiny"  # what --model tiny stands for


# ---- reading


def decode(raw, where):
    """bytes -> text. ValueError naming `where` if they are not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{where}: not UTF-8 text (byte {raw[e.start]:#x} at {e.start}); convert "
                         "it, unpack it if it is compressed, or choose another file") from None


def lines(path):
    """Yields (line number from 1, text) for each line of a file that is not blank."""
    with open(path, "rb") as f:
        for n, raw in enumerate(f, 1):
            if (text := decode(raw, f"{path}, row {n}")).strip():
                yield n, text.rstrip("\r\n")


def parse_json(text, where, needs=()):
    """text -> the JSON object in it, which `require`s the fields `needs`; NaN counts as null.
    ValueError naming `where` for anything else."""
    try:
        value = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where}: not JSON ({e})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not a JSON object {{...}} but {value!r:.40}")
    require(value, where, needs)
    return value


def require(value, where, names):
    """ValueError naming `where` if a field of an object is missing or null."""
    for name in names:
        if value.get(name) is None:
            raise ValueError(f"{where}: the field {name!r} is missing")


def cause(error):
    """The type of an error from a library or the user's code, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def read_json(path, needs=()):
    """The JSON object in a file, as parse_json."""
    return parse_json(decode(Path(path).read_bytes(), path), path, needs)


def saved(folder, name):
    """The JSON object in the file `name` of a folder, as parse_json; {} where there is none."""
    path = Path(folder) / name
    return read_json(path) if path.is_file() else {}


def file_digest(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_jsonl(path, needs=()):
    """("file, row n", object) of each line of a .jsonl, as parse_json."""
    for n, text in lines(path):
        where = f"{path}, row {n}"
        yield where, parse_json(text, where, needs)


def read_log(path):
    """The object with a "step" in each line of a run's .jsonl, as parse_json. An incomplete last
    line is left out: the run may be writing it, or was killed."""
    rows = [*lines(path)]
    for n, text in rows:
        try:
            yield parse_json(text, f"{path}, row {n}", ["step"])
        except ValueError:
            if n < rows[-1][0]:
                raise


# ---- writing


@contextmanager
def writing(path):
    """What goes wrong with writing in the block (a full disk) becomes one that names `path`."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as e:  # torch.save raises RuntimeError
        if isinstance(e, OSError) and e.errno is None:
            raise  # a message of ours
        why = getattr(e, "strerror", None) or str(e).partition("\n")[0]
        raise OSError(f"{path}: cannot be written ({why}); make room, or choose another place"
                      ) from None


def beside(path):
    """A new name in the folder of `path`, which nothing else uses."""
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.part"


@contextmanager
def whole(path):
    """Yields a temporary Path beside `path` to write to; it becomes `path` when the block ends well
    and is removed when not. Of a link, the file that it points to is replaced, not the link. The
    content has reached the disk (fsync) before it has its name."""
    path = Path(path).resolve()
    check_regular(path, path)
    part = beside(path)
    with writing(path):
        try:
            with open(part, "x") as f:
                mode = os.fstat(f.fileno()).st_mode & 0o777  # as the umask gives it
            yield part
            with open(part, "rb+") as f:
                os.fsync(f.fileno())
                os.fchmod(f.fileno(), mode)  # safetensors writes for the owner alone
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def discard(path):
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_json(path, value, indent=2):
    """Write the file `path`, whole or not at all: one JSON value."""
    with whole(path) as part:
        part.write_text(json.dumps(value, indent=indent) + "\n")


def write_jsonl(path, rows):
    """Write the file `path`, whole or not at all: one JSON value a line."""
    with whole(path) as part, open(part, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


def check_regular(path, name):
    """ValueError for a device or a pipe: renaming a finished file to its name would destroy it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{name}: is a device or a pipe, not a file; choose another name")


def append(path, rows):
    """Append `rows` to the file as JSON, a line each."""
    with writing(path), open(path, "a", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


def check_out(out, folder=False, new=False):
    """ValueError unless `out`, a file or a `folder`, can be written, or if it has to be `new` and
    is there; called before the work."""
    name, out = f"--out {out}", Path(out)
    check_regular(out, name)
    if out.exists() and out.is_dir() != folder:
        raise ValueError(f"{name}: is a {'file' if folder else 'folder'}; choose another name")
    if new and out.exists():
        raise ValueError(f"{name}: exists already; choose another name")
    place = out if out.is_dir() else out.absolute().parent
    while folder and not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"{name}: cannot be written in {place}; choose another place")


def lock(path, problem):
    """Hold the file `path` until this process ends, however it ends; returns the open file.
    ValueError(problem) if another process holds it."""
    f = open(path, "a")
    try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(problem) from None
    return f
