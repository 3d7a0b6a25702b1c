"""What is downloaded from the hub, and what is said of it: against a hub on this machine (local_hub.py)."""
import json

from plumbing import checkpoint, datasets, hub
from plumbing.files import TINY

import pytest
from local_hub import served

import eval as evaluation
import train

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights" * 9}


@pytest.fixture
def here(monkeypatch, tmp_path):
    with served(monkeypatch, tmp_path) as server:
        server.repos["org/name"] = {"main": dict(FILES), "v1": FILES | {"config.json": b'{"old": 1}'}}
        yield server


@pytest.fixture
def network(monkeypatch):
    """Forget what this process has asked; with False there is no network from then on."""
    from huggingface_hub import constants

    def again(there=True):
        hub.download.cache_clear()
        hub.COMMITS.clear()
        if not there:
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens

    return again


def says(capsys):
    return capsys.readouterr().err


def test_a_model_is_downloaded_once_and_its_commit_is_kept(here, capsys):
    folder = checkpoint.fetch("org/name")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == FILES
    sha = here.commit("org/name", "main")[0]
    assert hub.COMMITS == {"org/name": sha} and folder.name == sha
    assert f"--model org/name: commit {sha[:12]}\n" in says(capsys)
    here.asked.clear()
    assert checkpoint.fetch("org/name") == folder and not here.asked  # the process has asked
    hub.download.cache_clear()
    assert checkpoint.fetch("org/name") == folder and not here.downloads("model.safetensors")


def test_other_precisions_and_other_programs_files_stay_where_they_are(here):
    """The same weights in a second precision, or as pickles, are twice the download and cannot be told from shards."""
    shards = {f"model-0000{i}-of-00002.safetensors": b"x" for i in (1, 2)}
    read = FILES | shards | {"model.safetensors.index.json": b"{}", "merged.json": b"{}", "generation_config.json": b"{}", "tokenizer_config.json": b"{}",
                             "chat_template.jinja": b"x"}
    other = ("model.fp16.safetensors", "model.bf16-00001-of-00002.safetensors", "model-00001-of-00002.fp16.safetensors",
             "pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.safetensors", "README.md")
    here.repos["org/name"]["main"] = read | dict.fromkeys(other, b"?")
    assert {p.name for p in checkpoint.fetch("org/name").iterdir()} == set(read)


def test_without_weights_the_config_alone_is_downloaded(here):
    assert [p.name for p in checkpoint.fetch("org/name", weights=False).iterdir()] == ["config.json"]


def test_a_revision_is_a_branch_a_tag_or_a_commit(here):
    old = here.commit("org/name", "v1")[0]
    for place in ("org/name@v1", f"org/name@{old}"):
        folder = checkpoint.fetch(place)
        assert (folder / "config.json").read_bytes() == b'{"old": 1}' and hub.COMMITS[place] == old == folder.name
    with pytest.raises(OSError, match=r"--model org/name@v9: .*\(Invalid rev id\); check id, revision"):
        checkpoint.fetch("org/name@v9")


def test_a_pinned_id_stands_for_its_commit_whatever_the_branch_holds_now(here):
    """A run that is resumed, and an adapter that is evaluated, pin the base they began with."""
    hub.COMMITS["org/name"] = here.commit("org/name", "v1")[0]
    assert (checkpoint.fetch("org/name") / "config.json").read_bytes() == b'{"old": 1}'


@pytest.mark.parametrize(("why", "words"), [
    ("gated", r".*\(Access to model is restricted\. You must be authenticated to access it\.\).* at {page}, .* hf auth login"),
    ("private", r".*\(Invalid username or password\.\); check id.* at {page}, .* hf auth login")])
def test_a_refusal_is_in_the_hubs_words_with_the_page_and_the_command(here, why, words):
    here.refused = {"org/name": why, "datasets/org/set": why}
    for flag, page, ask in (("model", "org/name", lambda: checkpoint.fetch("org/name")),
                            ("data", "datasets/org/set", lambda: datasets.read("org/set", "train"))):
        with pytest.raises(OSError, match=f"--{flag} org/[a-z]+: " + words.format(page=f"{here.url}/{page}")):
            ask()


def test_a_hub_that_stays_busy_is_an_error_that_says_so(here):
    here.busy = [(429, {"Retry-After": "0"})] * 50
    with pytest.raises(OSError, match=r"--model org/name: .*\b429\b") as e:
        checkpoint.fetch("org/name")
    assert "\n" not in str(e.value)


def test_without_a_network_the_cache_is_used(here, network, capsys):
    sha = checkpoint.fetch("org/name").name
    network(False)
    assert checkpoint.fetch("org/name").name == sha == hub.COMMITS["org/name"]
    assert f"--model org/name: commit {sha[:12]}" in says(capsys)
    with pytest.raises(OSError, match=r"--model org/other: .*ConnectError.* check id, revision and network") as e:
        checkpoint.fetch("org/other")
    assert "\n" not in str(e.value)


def test_without_a_network_a_branch_is_the_commit_that_it_was_last(here, monkeypatch, network):
    """Where the branch had moved to a commit that was in the cache already, by its tag, its older one was taken."""
    old, (new, files) = checkpoint.fetch("org/name"), here.commit("org/name", "v1")
    checkpoint.fetch("org/name@v1")
    monkeypatch.setattr(here, "commit", lambda *_: (new, files))
    network()
    assert checkpoint.fetch("org/name").name == new != old.name
    network(False)
    assert checkpoint.fetch("org/name").name == new


def test_a_data_set_has_a_revision_too_and_its_split_alone_is_downloaded(here, monkeypatch):
    row = b'{"question": "%s", "answer": "1"}\n'
    here.repos["datasets/org/set"] = {name: {"train.jsonl": row % name.encode(), "test.jsonl": b"{}"} for name in ("main", "v1")}
    here.repos["datasets/openai/gsm8k"] = {name: {"main/train.jsonl": row % name.encode(), "socratic/train.jsonl": b"{}"}
                                           for name in ("main", "v1")}
    for place, question in (("org/set", "main"), ("org/set@v1", "v1"), ("gsm8k", "main"), ("gsm8k@v1", "v1")):
        assert [r["question"] for r in datasets.read(place, "train")] == [question]
    assert not here.downloads("test.jsonl") and here.downloads("train.jsonl") == 4
    assert set(hub.COMMITS) == {"org/set", "org/set@v1", "openai/gsm8k", "openai/gsm8k@v1"}
    with pytest.raises(FileNotFoundError, match=r"org--set/.*validation\.jsonl: not found .* may have no validation split"):
        datasets.read("org/set", "validation")
    with pytest.raises(FileNotFoundError, match=r"--data sets/mine\.jsonl: no such file"):
        datasets.read("sets/mine.jsonl", "train")  # by its name no set of the hub


def test_a_run_keeps_its_commits_and_goes_on_and_is_evaluated_with_them(here, network, tmp_path, capsys):
    """Whatever the branch holds by then. PEFT finds the base by the adapter's own file."""
    tiny = {p.name: p.read_bytes() for p in TINY.iterdir() if p.is_file()}
    here.repos["org/tiny"] = {"main": tiny}
    sha = here.commit("org/tiny", "main")[0]
    out, reward = str(tmp_path / "run"), tmp_path / "r.py"
    reward.write_text("def f(text, row):\n    return len(text)\n")  # something to learn
    argv = ["--model", "org/tiny", "--data", "arithmetic", "--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--out", out,
            "--updates-per-rollout", "1", "--max-new-tokens", "4", "--eval-limit", "2", "--lora-rank", "4", "--device", "cpu",
            "--reward", f"{reward}:f"]
    assert train.main(argv) == 0

    def saved(name):
        return json.loads((tmp_path / "run" / name).read_text())

    assert saved("config.json")["commits"] == {"org/tiny": sha} and saved("config.json")["model"] == "org/tiny"
    assert saved("adapter/policy.json")["commit"] == sha
    assert saved("adapter/adapter_config.json")["revision"] == sha
    assert saved("adapter/adapter_config.json")["base_model_name_or_path"] == "org/tiny"

    here.repos["org/tiny"] = {"main": FILES, sha: tiny}  # the branch has gone on
    for again in (lambda: train.main(["--resume", "--steps", "2", "--out", out]),
                  lambda: evaluation.main(["--run", out, "--data", "arithmetic", "--limit", "2", "--max-new-tokens", "4", "--device", "cpu"])):
        network()
        assert again() == 0, says(capsys)
        assert hub.COMMITS == {"org/tiny": sha}
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
