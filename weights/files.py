"""
Files that appear whole or not at all, and a lock that dies with its process.

    with whole("runs/x/metrics.json") as part:
        part.write_text(json.dumps(metrics))
"""
import os
import secrets
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def whole(path):
    """Yields a temporary Path beside `path` to write to; it becomes `path` when the block ends well
    and is removed when not.

    The name is unique, so that a file of the user's is never hit; what is renamed has reached the
    disk (fsync)."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        with open(part, "rb+") as f:
            os.fsync(f.fileno())
            # safetensors writes for the owner alone; what others may read is the umask's business
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(f.fileno(), 0o666 & ~mask)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def lock(path, problem):
    """Hold the file `path` against other processes until this one ends, however it ends; returns
    the open file. ValueError(problem) if another holds it. Without fcntl (Windows) nothing is
    held."""
    f = open(path, "w")
    if fcntl:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(problem) from None
    return f
