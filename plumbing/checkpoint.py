"""
Checkpoints as files: the hub, and sharded safetensors in Hugging Face layout. What config.json says
is config.py's; model.py makes a model of the tensors (`load`, `stream`) and gives them back
(`tensors`).

Four-bit weights are stored as compressed-tensors does, so that other engines can serve them: each
original projection, q, k and v apart, is codes (N, K/2), two a byte, scales of blocks (N, K/block)
and, in NVFP4, the reciprocal of one scale of the whole tensor. Formats with a codebook (NF4), for
which compressed-tensors has none, are stored in the same way under the quant_method qerl. lm_head
and embeddings stay in 16 bits; so do activations and KV caches that a checkpoint wants in fewer.

    source = Checkpoint(fetch("Qwen/Qwen2.5-3B-Instruct"))
    w = source.get("model.norm.weight", (2048,))
    with Writer("out/", folder, fmt="nvfp4", format=FORMATS["nvfp4"]) as writer:
        writer.add("model.norm.weight", w)

Shapes: N rows of one projection, K columns.
"""
import hashlib
import math
import os
import shutil
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from plumbing import hub
from plumbing.config import format_of, quantization_config, read_config
from plumbing.files import TINY, beside, check_out, read_json, whole, write_json

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
          "generation_config.json", "merged.json")  # what goes with the weights
# what a checkpoint may hold beside its weights, to quantize activations and the KV cache
OF_ACTIVATIONS = ("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale",
                  "v_scale")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of unquantized weights
# what is read of a repository; others beside it are the same weights in other precisions
HUB_FILES = ("config.json", "model.safetensors", "model-?????-of-?????.safetensors",
             "model.safetensors.index.json", *BESIDE)


# ---- where tensors come from


def fetch(path_or_hub_id, weights=True):
    """A local checkpoint folder as a Path; for "tiny", the embedded model's. A hub id, which may
    end in @revision, is downloaded first (without `weights` only config.json)."""
    name = str(path_or_hub_id)
    if name == "tiny":
        return TINY
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    if path.exists() or not hub.ID.fullmatch(name):
        raise FileNotFoundError(f"--model {name}: no such folder; give a checkpoint folder or a "
                                "hub id")
    return hub.download(name, "model", HUB_FILES if weights else ("config.json",))


class Checkpoint:
    """The tensors of a safetensors folder by name, one or many shards; remembers which names were
    not asked for."""

    def __init__(self, folder):
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.is_file():
            self.where = read_json(index, ["weight_map"])["weight_map"]
        elif single.is_file():
            self.where = dict.fromkeys(self._open(single.name).keys(), single.name)
        else:
            raise FileNotFoundError(f"{self.folder}: neither {single.name} nor {index.name} is "
                                    "there; is the download complete? docs/guide.md says how to "
                                    "make them of .bin and GGUF files")
        if single.is_file() and single.name not in self.where.values():
            raise ValueError(f"{self.folder}: holds {single.name} and other shards; remove the "
                             f"older, and {index.name} if that is the shards")
        self.unused, self.files = set(self.where), {}
        self.fmt = None  # of four bits

    def _open(self, shard):
        try:
            return safe_open(self.folder / shard, framework="pt")
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{self.folder / shard}: not a readable safetensors file ({e}); "
                             "download it again") from None

    def __contains__(self, name):
        return name in self.where

    def read(self, name, few=None):
        """The tensor `name` as stored; few: only its first rows, that many numbers or one row."""
        if name not in self.where:
            raise ValueError(f"{self.folder}: the tensor {name} is missing")
        shard = self.where[name]
        if shard not in self.files:
            self.files = {shard: self._open(shard)}  # one open: host memory stays below one shard
        try:
            if few and (shape := self.files[shard].get_slice(name).get_shape()):
                return self.files[shard].get_slice(name)[: max(1, few // math.prod(shape[1:]))]
            return self.files[shard].get_tensor(name)
        except SafetensorError as e:  # an index of other shards
            raise ValueError(f"{self.folder / shard}: cannot read {name} ({e})") from None

    def take(self, name, shape, dtypes):
        """The tensor `name` as stored, in `shape` and one of `dtypes`; it counts as used."""
        t, file = self.read(name), self.folder / self.where[name]
        if tuple(t.shape) != tuple(shape):
            raise ValueError(f"{file}: {name} has shape {tuple(t.shape)}, config.json asks for "
                             f"{tuple(shape)}")
        if t.dtype not in dtypes:
            raise ValueError(f"{file}: {name} is stored as {t.dtype}, and can be read as "
                             f"{' or '.join(map(str, dtypes))} alone")
        self.unused.discard(name)
        return t

    def get(self, name, shape, dtype=None, device="cpu"):
        """The weight or bias `name`, checked and cast to `dtype`."""
        if self.is_packed(name.removesuffix(".weight")):
            raise ValueError(f"{self.folder}: {name} is stored in four bits; the head, and a q, k, "
                             "v, gate or up beside others in 16, can be read in 16 alone: give the "
                             f"16-bit checkpoint and --quant {self.fmt}")
        t = self.take(name, shape, FLOATS)
        return t.to(device=device, dtype=dtype or t.dtype)

    # ---- what model.stream asks

    def check_format(self, quant, formats):
        """The four-bit format that the weights are stored in, None for 16 bits; ValueError if
        `quant` is another one."""
        raw = read_config(self.folder)["quantization"]
        if not raw:
            return None
        self.fmt = format_of(raw, self.folder, formats)
        self.format = formats[self.fmt]
        if quant not in ("none", self.fmt):
            raise ValueError(f"--quant {quant}: {self.folder} is quantized to {self.fmt} already; "
                             f"use --quant {self.fmt}")
        if any(g.get("input_activations") for g in (raw.get("config_groups") or {}).values()):
            print(f"{self.folder}: activations, which it would quantize too, stay in 16 bits",
                  file=sys.stderr)
        return self.fmt

    def is_packed(self, name):
        """Whether the projection `name` is stored in four bits. A quantized checkpoint may leave
        some in 16."""
        parts = ("weight_packed", "weight_scale") if self.fmt else ()
        return any(f"{name}.{part}" in self for part in parts)

    def packed(self, names, K, device):
        """(codes, scale, global scale) of the projections names, {name: rows}, stacked, for an
        nvfp4.Quantized."""
        parts, block = [], self.format.block
        for name, n in names.items():
            codes = self.take(f"{name}.weight_packed", (n, K // 2), [torch.uint8])
            scale = self.take(f"{name}.weight_scale", (n, K // block), [self.format.scale_dtype])
            top = torch.ones((), device=device)
            if self.fmt == "nvfp4":
                name = f"{name}.weight_global_scale"
                shape = () if name in self and self.read(name).dim() == 0 else (1,)
                top = 1 / self.take(name, shape, [torch.float32]).to(device).squeeze()
            parts.append((codes.to(device), scale.to(device), top.expand(n)))
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def check_tied_head(self, embedding):
        """ValueError if a head is stored beside the embedding that it is tied to, and differs: a
        trained head beside a config from before. Some exports store the same tensor twice."""
        if "lm_head.weight" in self.unused:
            head = self.get("lm_head.weight", embedding.shape, embedding.dtype, embedding.device)
            if not torch.equal(head, embedding):
                raise ValueError(f"{self.folder}: lm_head.weight is not the embedding that "
                                 "config.json ties it to; set tie_word_embeddings to false")

    def check_all_used(self):
        """ValueError if tensors are left that fit nowhere."""
        free = ("rotary_emb.inv_freq", *OF_ACTIVATIONS * bool(self.fmt))
        unused = sorted(n for n in self.unused if not n.endswith(free))
        if unused:
            raise ValueError(f"{self.folder}: {len(unused)} tensors fit nowhere in this model, the "
                             f"first is {unused[0]}")


def fingerprint(path_or_hub_id):
    """Digests that tell models apart, from the first rows of tensors: base, of the final norm and
    the embedding, which all number formats share; norms, of the other norms, into which AWQ folds
    its scales; weights, of all tensors as stored and of config.json, after the format's name and a
    colon, since they cannot be compared across formats."""
    folder = fetch(path_or_hub_id)
    config, source = read_config(folder), Checkpoint(folder)
    fields = config | {"quantization": None, "max_position_embeddings": 0}  # length does not matter
    if config["rope_scaling"] is None:  # as it was before there was this field
        del fields["rope_scaling"]
    shape = f"Config({', '.join(f'{k}={v!r}' for k, v in fields.items())})"

    def some(name, few=4096):
        t = source.read(name, few).flatten()
        t = t.to(torch.bfloat16) if t.dtype in FLOATS else t  # some exports store 32 bits
        return t.view(torch.uint8).numpy().tobytes()

    def digest(content):
        return hashlib.sha256(content).hexdigest()[:16]

    # may be stored or not: a tied head, and tables that follow from config.json
    derived = ("inv_freq", *["lm_head.weight"] * config["tie_word_embeddings"])
    each = sorted((n, digest(some(n))) for n in source.where if not n.endswith(derived))
    C, stored = config["hidden_size"], "none"
    ends = some("model.norm.weight", C) + some("model.embed_tokens.weight", 64 * C)
    if config["quantization"]:
        stored = format_of(config["quantization"], folder)
    norms = [told for name, told in each if name.endswith("layernorm.weight")]
    return {"base": digest(ends), "norms": digest(repr(norms).encode()),
            "weights": f"{stored}:{digest(f'({each!r}, {shape})'.encode())}"}


class RandomCheckpoint(Checkpoint):
    """Seeded random weights of the true shapes, made where they are needed, to measure with."""

    def __init__(self, seed=0):
        self.seed, self.fmt, self.unused = seed, None, set()

    def check_format(self, quant, formats):
        return None

    def get(self, name, shape, dtype, device="cpu"):
        dtype = dtype or torch.bfloat16  # as stored
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        self.seed += 1
        g = torch.Generator(device).manual_seed(self.seed)
        return torch.randn(shape, dtype=dtype, device=device, generator=g).mul_(0.02)


# ---- the way out


def packed_tensors(name, q, rows):
    """Yields (name, tensor) of one projection in four bits: `rows` of the quantized weight q in
    which it is stacked."""
    yield f"{name}.weight_packed", q.codes[rows]
    yield f"{name}.weight_scale", q.scale[rows]
    if q.fmt == "nvfp4":
        yield f"{name}.weight_global_scale", 1 / q.global_scale[rows][:1]


class Writer(AbstractContextManager):
    """A checkpoint folder that appears whole or not at all: everything goes to a folder of a new
    name beside it, which is renamed at the end; an exception removes it. `add` holds one shard in
    host memory. config.json, with `fmt` (None: 16 bits; `format` is its nvfp4.Format), and the
    tokenizer's files are those of `folder`; `self.notes` are more files, {name: JSON content}."""

    def __init__(self, out, folder, fmt=None, format=None, shard_bytes=2 << 30):
        check_out(out, folder=True, new=True)
        self.out, self.folder, self.fmt, self.format = Path(out), Path(folder), fmt, format
        self.partial = beside(self.out)
        self.shard_bytes, self.shard, self.size, self.total = shard_bytes, {}, 0, 0
        self.shards, self.notes, self.dtype = [], {}, None
        self.dense = []  # projections in 16 bits

    def add(self, name, tensor):
        t = tensor.detach().to("cpu").contiguous()
        if t.untyped_storage().nbytes() > t.nbytes:
            t = t.clone()  # a view would keep the whole fused weight in memory
        if self.size and self.size + t.nbytes > self.shard_bytes:
            self.flush()
        self.shard[name] = t
        self.size += t.nbytes
        if name.endswith("_proj.weight") and t.is_floating_point():
            self.dense.append(name.removesuffix(".weight"))
        if name == "model.embed_tokens.weight":
            self.dtype = str(t.dtype).removeprefix("torch.")

    def flush(self):
        self.partial.mkdir(parents=True, exist_ok=True)
        with whole(self.partial / f"shard-{len(self.shards)}") as part:
            save_file(self.shard, part, metadata={"format": "pt"})
        self.shards.append(list(self.shard))
        self.total, self.shard, self.size = self.total + self.size, {}, 0

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self.finish()
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)  # renamed by now if all went well

    def finish(self):
        self.flush()
        where, n = {}, len(self.shards)
        for i, names in enumerate(self.shards):
            file = f"model-{i + 1:05d}-of-{n:05d}.safetensors" if n > 1 else "model.safetensors"
            (self.partial / f"shard-{i}").rename(self.partial / file)
            where |= dict.fromkeys(names, file)
        if n > 1:
            write_json(self.partial / "model.safetensors.index.json", {
                "metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))})
        for name in BESIDE:
            if (self.folder / name).is_file():
                with whole(self.partial / name) as part:
                    shutil.copyfile(self.folder / name, part)
        for name, content in self.notes.items():
            write_json(self.partial / name, content)
        raw = read_json(self.folder / "config.json")
        raw.pop("quantization_config", None)
        raw["dtype" if "dtype" in raw else "torch_dtype"] = self.dtype  # what other tools cast to
        if self.fmt:
            raw["quantization_config"] = quantization_config(self.fmt, self.format, self.dense)
        write_json(self.partial / "config.json", raw)
        self.partial.rename(self.out)
