"""
Repositories of the hub as folders, downloaded by huggingface_hub into its cache. The commit that an
id stood for is kept, so that a run goes on, and is evaluated, with the files that it began with.

    folder = hub.download("Qwen/Qwen2.5-3B-Instruct", "model", ("config.json", "*.safetensors"))
"""
import functools
import re
import sys
from pathlib import Path

from plumbing.files import cause

ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")  # owner/name, owner/name@revision
COMMITS = {}  # {id: the commit of its files}; what is in it beforehand is what is downloaded


@functools.cache  # a process asks once
def download(place, kind, patterns):
    """The folder, in the hub's cache, with the files of a repository that match one of `patterns`.
    place: its id, which may end in @revision; kind: model or dataset.

    Without a network the cache is used, and a line says so. FileNotFoundError, in the hub's own
    words, for what it does not give; OSError for a full disk or a download that broke off."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    flag = f"--{'data' if kind == 'dataset' else kind} {place}"
    repo, _, revision = place.partition("@")
    revision = COMMITS.get(place) or revision or "main"
    page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{repo}"
    offline = None  # why the hub cannot be asked
    try:
        HfApi().repo_info(repo, repo_type=kind, revision=revision)
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{flag}: has no revision {revision}; its branches and tags are "
                                f"at {page}/tree/main") from None
    except errors.RepositoryNotFoundError as e:  # a GatedRepoError is one too
        raise FileNotFoundError(f"{flag}: {e.server_message or 'not found'} Is the id right? For "
                                f"what is gated or private: ask for access at {page}, then log in "
                                "by hf auth login") from None
    except Exception as e:  # no network, and all that the hub may answer to a request
        offline = cause(e)
    try:
        folder = Path(snapshot_download(repo, repo_type=kind, revision=revision,
                                        allow_patterns=list(patterns),
                                        local_files_only=offline is not None))
    except Exception as e:
        if offline:
            raise FileNotFoundError(f"{flag}: not a local file or folder, not whole in the cache, "
                                    f"and the hub did not give it ({offline}); check id, network "
                                    "and login") from None
        raise OSError(f"{flag}: the download broke off ({cause(e)}); the same command goes on with "
                      "the files that are missing") from None
    taken = f"the hub cannot be asked ({offline}); taken from the cache, " if offline else ""
    print(f"{flag}: {taken}commit {folder.name[:12]}", file=sys.stderr)
    COMMITS[place] = folder.name
    return folder
