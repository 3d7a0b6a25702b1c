"""
Repositories of the hub as folders. What a download takes is shown before it begins, and the commit
that an id stood for is kept, so that a run goes on, and is evaluated, with the files that it began
with. Retries, and what a killed download goes on with, are huggingface_hub's.

    folder = hub.download("Qwen/Qwen2.5-3B-Instruct", "model", ["config.json", "*.safetensors"])
    folder = hub.download("openai/gsm8k@main", "dataset", ["main/test-*.parquet"])
"""
import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

from plumbing.files import cause

ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")  # owner/name, owner/name@revision
COMMITS = {}  # {id: the commit of its files}; what is in it beforehand is what is downloaded
FOLDERS = {}  # {(id, patterns): folder}: a process asks once


def download(place, kind, patterns):
    """The folder, in the hub's cache, with those files of a repository whose names match one of
    `patterns`. place: its id, which may end in @revision; kind: model or dataset.

    Without a network the cache is used, and a line says so. FileNotFoundError, in the hub's own
    words, for what it does not give; OSError for a full disk or a download that broke off."""
    if (place, *patterns) in FOLDERS:
        return FOLDERS[place, *patterns]
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    flag = f"--{'data' if kind == 'dataset' else kind} {place}"
    repo, _, revision = place.partition("@")
    revision = COMMITS.get(place) or revision or "main"
    page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{repo}"
    wanted, unreachable = {"repo_id": repo, "repo_type": kind, "revision": revision}, ""
    try:
        info = HfApi().repo_info(**wanted, files_metadata=True)
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{flag}: has no revision {revision}: {page}/tree/main") from None
    except errors.RepositoryNotFoundError as e:  # a GatedRepoError is one too
        raise FileNotFoundError(f"{flag}: {e.server_message or 'not found'} Is the id right? If "
                                f"it is gated: ask for access at {page}, hf auth login") from None
    except Exception as e:  # no network, and all that the hub may answer to a request
        unreachable = cause(e)
    else:
        files = {f.rfilename: f for f in info.siblings
                 if any(fnmatch(f.rfilename, p) for p in patterns)}
        if not files:
            raise FileNotFoundError(f"{flag}: holds no {' nor '.join(patterns)}; see {page}/tree/"
                                    f"{revision}")
        announce(wanted | {"revision": info.sha}, files, flag)
    try:
        folder = Path(snapshot_download(**wanted, allow_patterns=list(patterns),
                                        local_files_only=bool(unreachable)))
    except Exception as e:
        if unreachable:
            raise FileNotFoundError(f"{flag}: not a local file or folder, nor whole in the cache; "
                                    f"the hub: {unreachable}; check id, network, login") from None
        raise OSError(f"{flag}: the download broke off ({cause(e)}); start it again") from None
    if unreachable:
        print(f"{flag}: the hub cannot be asked ({unreachable}); taken from the cache, commit "
              f"{folder.name[:12]}", file=sys.stderr)
    COMMITS[place] = folder.name
    FOLDERS[place, *patterns] = folder
    return folder


def announce(wanted, files, flag):
    """Print the commit and what has to be downloaded of `files`, {name: what the hub says of it}.
    OSError if the disk has no room for them."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing = [file for name, file in files.items() if not isinstance(
        try_to_load_from_cache(filename=name, **wanted), str)]
    commit = f"{flag}: commit {wanted['revision'][:12]}"
    if not missing:
        print(f"{commit}, in the cache", file=sys.stderr)
        return
    cache = Path(constants.HF_HUB_CACHE)
    disk = next(p for p in (cache, *cache.absolute().parents) if p.exists())
    size, free = sum(file.size or 0 for file in missing), shutil.disk_usage(disk).free
    if size > free:
        raise OSError(f"{flag}: {shown(size)} to download, and {cache} has room for {shown(free)}; "
                      "make room, or set HF_HOME to a folder on another disk")
    print(f"{commit}, {len(missing)} files, {shown(size)} to download; {shown(free)} are free",
          file=sys.stderr)


def shown(size):
    """Bytes for the terminal."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
