"""
Repositories of the hub as folders. What a download takes is shown before it begins, an interrupted
one goes on where it stopped, and the commit that an id stood for is kept, so that a run goes on,
and is evaluated, with the files that it began with.

    folder = hub.download("Qwen/Qwen2.5-3B-Instruct", "model", ("config.json", "*.safetensors"))
    folder = hub.download("openai/gsm8k@main", "dataset", ("main/test-*.parquet",))
"""
import fcntl
import functools
import re
import shutil
import sys
import time
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from plumbing.files import cause, file_digest

ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")  # owner/name, owner/name@revision
PAUSES = (1, 5, 20, 60)  # seconds before the hub is asked again, where it does not say how many
LARGE = 16 << 20  # bytes of a file that is worth going on with
COMMITS = {}  # {id: the commit of its files}; what is in it beforehand is what is downloaded


@functools.cache  # a process asks once
def download(place, kind, patterns):
    """The folder, in the hub's cache, with those files of a repository whose names match one of
    `patterns`. place: its id, which may end in @revision; kind: model or dataset.

    Without a network the cache is used, and a line says so. FileNotFoundError, in the hub's own
    words, for what it does not give; OSError for a full disk or a download that broke off."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    flag = f"--{'data' if kind == 'dataset' else kind} {place}"
    repo, _, revision = place.partition("@")
    revision = COMMITS.get(place) or revision or "main"
    page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{repo}"
    wanted = {"repo_id": repo, "repo_type": kind, "revision": revision}
    try:
        info = patiently(lambda: HfApi().repo_info(**wanted, files_metadata=True), flag)
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{flag}: has no revision {revision}; its branches and tags are "
                                f"at {page}/tree/main") from None
    except errors.RepositoryNotFoundError as e:  # a GatedRepoError is one too
        raise FileNotFoundError(f"{flag}: {e.server_message or 'not found'} Is the id right? For "
                                f"what is gated or private: ask for access at {page}, then log in "
                                "by hf auth login") from None
    except Exception as e:  # no network, and all that the hub may answer to a request
        folder = cached(wanted, patterns, flag, cause(e))
    else:
        files = {f.rfilename: f for f in info.siblings
                 if any(fnmatch(f.rfilename, p) for p in patterns)}
        if not files:
            raise FileNotFoundError(f"{flag}: holds no {' nor '.join(patterns)}; see {page}/tree/"
                                    f"{revision}")
        wanted["revision"] = info.sha
        missing = announce(wanted, files, flag)
        try:
            for name in missing:
                if (files[name].size or 0) >= LARGE:
                    patiently(lambda name=name: download_large(wanted, name), flag)
            folder = patiently(lambda: Path(snapshot_download(
                **wanted, allow_patterns=list(patterns), local_files_only=not missing)), flag)
        except Exception as e:
            raise OSError(f"{flag}: the download broke off ({cause(e)}); the same command goes on "
                          "with it") from None
        if revision != info.sha:
            remember(wanted, revision)
    COMMITS[place] = folder.name
    return folder


def patiently(ask, flag):
    """ask(), again after a pause where the hub has had too many requests (429) or is out of order
    (5xx)."""
    from huggingface_hub.errors import HfHubHTTPError

    for pause in (*PAUSES, None):
        try:
            return ask()
        except HfHubHTTPError as e:
            status = e.response.status_code
            if pause is None or status != 429 and status < 500:
                raise
            told = e.response.headers.get("Retry-After", "")
            pause = min(int(told), 300) if told.isdecimal() else pause
            what = "has had too many requests" if status == 429 else "is out of order"
            print(f"{flag}: the hub {what} ({status}); asking again in {pause} s", file=sys.stderr)
            time.sleep(pause)


def remember(wanted, revision):
    """Tell the cache which commit a branch or a tag stands for, also where its files were there
    already: without a network that commit is taken."""
    ref = blobs_of(wanted).with_name("refs") / revision
    with suppress(OSError):  # a cache that several share may be read-only
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(wanted["revision"])


def cached(wanted, patterns, flag, why):
    """The repository's folder in the cache, where the hub could not be asked."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(**wanted, allow_patterns=list(patterns),
                                        local_files_only=True))
    except FileNotFoundError:
        raise FileNotFoundError(f"{flag}: not a local file or folder, not whole in the cache, and "
                                f"the hub did not give it ({why}); check id, network and login"
                                ) from None
    print(f"{flag}: the hub cannot be asked ({why}); taken from the cache, commit "
          f"{folder.name[:12]}", file=sys.stderr)
    return folder


def announce(wanted, files, flag):
    """Print the commit and what has to be downloaded of `files`, {name: what the hub says of it};
    returns the names of those. OSError if the disk has no room for them."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing = [name for name in files if not isinstance(
        try_to_load_from_cache(filename=name, **wanted), str)]
    commit = f"{flag}: commit {wanted['revision'][:12]}"
    if not missing:
        print(f"{commit}, in the cache", file=sys.stderr)
        return missing
    cache = Path(constants.HF_HUB_CACHE)
    disk = next(p for p in (cache, *cache.absolute().parents) if p.exists())
    size = sum((files[name].size or 0) - left_of(wanted, files[name]) for name in missing)
    free = shutil.disk_usage(disk).free
    if size > free:
        raise OSError(f"{flag}: {shown(size)} to download, and {cache} has room for {shown(free)}; "
                      "make room, or set HF_HOME to a folder on another disk")
    print(f"{commit}, {len(missing)} files, {shown(size)} to download; {shown(free)} are free",
          file=sys.stderr)
    return missing


def left_of(wanted, file):
    """Bytes of a large file that a killed download has left among the blobs: all, or a part."""
    if not file.lfs:
        return 0
    blob = blobs_of(wanted) / file.lfs.sha256
    found = (p.stat().st_size for p in (blob, blob.with_name(f"{blob.name}.part")) if p.is_file())
    return next(found, 0)


def download_large(wanted, name):
    """Download one file into the cache's blobs. Its part, which a killed process leaves, is gone on
    with; the library itself would begin anew."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(filename=name, **wanted)
    meta = get_hf_file_metadata(url)
    blob = blobs_of(wanted) / meta.etag
    part = blob.with_name(f"{blob.name}.part")
    blob.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)  # other ranks, or another run, may be downloading it
        if blob.exists():
            return part.unlink(missing_ok=True)
        had = f.seek(0, 2)
        http_get(url, f, resume_size=had, headers=build_hf_headers(), expected_size=meta.size,
                 displayed_filename=name)
        f.flush()
        if had and len(meta.etag) == 64 and file_digest(part) != meta.etag:
            part.unlink()
            raise OSError(f"{name}: the part that was here and the rest do not fit together")
        part.rename(blob)


def blobs_of(wanted):
    """Where the cache has a repository's files by their digests, and their parts."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=wanted["repo_id"], repo_type=wanted["repo_type"])
    return Path(constants.HF_HUB_CACHE, folder, "blobs")


def shown(size):
    """Bytes for the terminal."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
