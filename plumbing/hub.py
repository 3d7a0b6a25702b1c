"""
Repositories of the hub as folders. The commit that an id stood for is kept, so that a run goes on,
and is evaluated, with the files that it began with. Progress, retries, the cache, and what a killed
download goes on with, are huggingface_hub's.

    folder = hub.download("Qwen/Qwen2.5-3B-Instruct", "model", ["config.json", "*.safetensors"])
    folder = hub.download("openai/gsm8k@main", "dataset", ["main/test-*.parquet"])
"""
import re
import sys
from pathlib import Path

from plumbing.files import cause

ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")  # owner/name, owner/name@revision
COMMITS = {}  # {id: the commit of its files}; what is in it beforehand is what is downloaded
FOLDERS = {}  # {(id, patterns): folder}: a process asks once


def download(place, kind, patterns):
    """The folder, in the hub's cache, with those files of a repository whose names match one of
    `patterns`. place: its id, which may end in @revision; kind: model or dataset.

    Without a network the cache is used. FileNotFoundError, in the hub's own words, for what it does
    not give; OSError for a full disk or a download that broke off."""
    if (place, *patterns) in FOLDERS:
        return FOLDERS[place, *patterns]
    from huggingface_hub import constants, errors, snapshot_download

    flag = f"--{'data' if kind == 'dataset' else kind} {place}"
    repo, _, revision = place.partition("@")
    revision = COMMITS.get(place) or revision or "main"
    page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{repo}"
    try:
        folder = Path(snapshot_download(repo, repo_type=kind, revision=revision,
                                        allow_patterns=list(patterns)))
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{flag}: has no revision {revision}: {page}/tree/main") from None
    except errors.RepositoryNotFoundError as e:  # a GatedRepoError is one too
        raise FileNotFoundError(f"{flag}: {e.server_message or 'not found'} Is the id right? If "
                                f"it is gated: ask for access at {page}, hf auth login") from None
    except errors.LocalEntryNotFoundError as e:  # no network, and all that the hub may answer
        raise FileNotFoundError(f"{flag}: not a local file or folder, nor whole in the cache; the "
                                f"hub: {cause(e.__cause__ or e)}; check id, network, login"
                                ) from None
    except Exception as e:
        raise OSError(f"{flag}: the download broke off ({cause(e)}); start it again") from None
    if not any(any(folder.glob(pattern)) for pattern in patterns):
        raise FileNotFoundError(f"{flag}: holds no {' nor '.join(patterns)}; see {page}")
    COMMITS[place], FOLDERS[place, *patterns] = folder.name, folder
    print(f"{flag}: commit {folder.name[:12]}", file=sys.stderr)
    return folder
