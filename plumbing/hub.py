"""
Repositories of the hub as folders, downloaded by huggingface_hub into its cache. The commit that an
id stood for is kept: a run goes on with the files that it began with, and is evaluated with the
same model.

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
    """The folder, in the hub's cache, with the files of a repository that match one of `patterns`;
    without a network as it is there. place: its id, which may end in @revision; kind: model or
    dataset. OSError, in the hub's own words, for what it does not give."""
    from huggingface_hub import constants, snapshot_download

    flag = f"--{'data' if kind == 'dataset' else kind} {place}"
    repo, _, revision = place.partition("@")
    revision = COMMITS.get(place) or revision or "main"
    try:
        folder = Path(snapshot_download(repo, repo_type=kind, revision=revision,
                                        allow_patterns=list(patterns)))
    except Exception as e:  # no network, a full disk, and all that the hub may answer to a request
        why = getattr(e, "server_message", None) or cause(e)
        page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{repo}"
        raise OSError(f"{flag}: the hub did not give it ({why}); check id, revision and network, "
                      "and run it again. For what is gated or private: ask for access at "
                      f"{page}, then log in by hf auth login") from None
    print(f"{flag}: commit {folder.name[:12]}", file=sys.stderr)
    COMMITS[place] = folder.name
    return folder
