"""
Checkpoints in and out: the hub, sharded safetensors in Hugging Face layout, and how four-bit
weights are stored in them. What config.json says is in plumbing/config.py.

`stream` is the one way in: it fills a model piece by piece. Whoever keeps the pieces has loaded the
model (`build`, `load`); whoever drops each block holds one at a time (lab/convert.py quantizes
and merges so, lab/awq.py calibrates so). `Writer` and `tensors` are the way out.

NVFP4 and MXFP4 are written as compressed-tensors does it (formats `nvfp4-pack-quantized` and
`mxfp4-pack-quantized`, weights only, "W4A16"), so that other engines can serve them. Each original
projection, q, k and v apart, becomes

    weight_packed        uint8 (N, K/2)   two E2M1 codes a byte, the even column in the low nibble
    weight_scale         NVFP4: float8_e4m3fn (N, K/16); MXFP4: uint8 (N, K/32), the exponent + 127
    weight_global_scale  NVFP4 only: float32 (1,), the *reciprocal*:
                         w_hat = value[code] * weight_scale / weight_global_scale

and config.json gets a `quantization_config`; lm_head and embeddings stay in 16 bits.
compressed-tensors has no NF4, so the layout of formats with a codebook is our own (quant_method
`qerl`, which makes other tools refuse rather than misread): weight_packed as above with codebook
indices, weight_scale float32 (N, K/block), a block's absmax over the codebook's last value.

Left out: quantized activations (W4A4) and KV caches; asymmetric zero points; bitsandbytes' NF4.

    model = load("Qwen/Qwen2.5-3B-Instruct", "cuda", quant="nvfp4")
    with Writer("out/", folder, fmt="nvfp4") as w:
        for name, tensor in tensors(model): w.add(name, tensor)

Shapes: N rows of one projection, K columns.
"""
import contextlib
import hashlib
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

from plumbing.config import packed_format, quantization_config, read_config
from plumbing.files import TINY, beside, cause, check_out, read_json, whole, write_json
from plumbing.formats import FORMATS, Quantized, pack, quantize, scale_bits, unpack

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model import RMSNorm, Transformer, prefix
from nvfp4 import QuantLinear

BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
          "generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
          "merges.txt", "merged.json")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of unquantized weights


DOWNLOADED = {}  # (hub id, weights) -> folder: one process uses one revision, and asks once


# ---- where tensors come from


def fetch(path_or_hub_id, weights=True):
    """A local checkpoint folder as a Path; for "tiny", the embedded model's; a hub id is downloaded
    first (only the files this project reads, resumed; without `weights` only config.json)."""
    name = str(path_or_hub_id)
    if name == "tiny":
        return TINY
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise FileNotFoundError(f"--model {name}: no such folder; give a checkpoint folder or a "
                                "hub id")
    if (name, weights) in DOWNLOADED:
        return DOWNLOADED[name, weights]
    from huggingface_hub import snapshot_download

    wanted = ["config.json"]
    if weights:
        wanted += ["generation_config.json", "tokenizer.json", "tokenizer_config.json",
                   "chat_template.jinja", "model*.safetensors", "model.safetensors.index.json"]
    try:
        DOWNLOADED[name, weights] = Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as e:  # the client raises many kinds: no network, no repository, no access
        raise FileNotFoundError(f"--model {name}: not a local folder, and the hub did not give it "
                                f"({cause(e)}); check id, network and login") from None
    return DOWNLOADED[name, weights]


class Checkpoint:
    """The tensors of a safetensors folder by name, one or many shards; remembers which names were
    not asked for."""

    def __init__(self, folder):
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.is_file():
            self.where = read_json(index, {"weight_map": dict}, ["weight_map"])["weight_map"]
            for shard in self.where.values():
                # a name, not a path: an index must not lead to another folder's files
                if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]+\.safetensors", shard):
                    raise ValueError(f"{index}: {shard!r:.80} is no shard's name; download it "
                                     "again")
            if not self.where:
                raise ValueError(f"{index}: not an index of tensors to shards; download it again")
        elif single.is_file():
            self.where = dict.fromkeys(self._open(single.name).keys(), single.name)
        else:
            raise FileNotFoundError(f"{self.folder}: neither {single.name} nor {index.name} is "
                                    "there; is the download complete?")
        for shard in sorted(set(self.where.values())):
            if not (self.folder / shard).is_file():
                raise FileNotFoundError(f"{self.folder / shard}: the shard named in {index.name} "
                                        "is missing; download it again")
        if single.is_file() and single.name not in self.where.values():
            raise ValueError(f"{self.folder}: holds {single.name} and other shards; remove the "
                             f"older, and {index.name} if that is the shards")
        self.unused, self.files = set(self.where), {}

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
                row = math.prod(shape[1:]) or 1
                return self.files[shard].get_slice(name)[: max(1, few // row)]
            return self.files[shard].get_tensor(name)
        except SafetensorError as e:
            raise ValueError(f"{self.folder / shard}: cannot read {name} ({e})") from None

    def get(self, name, shape=None, dtype=None, device="cpu"):
        """The tensor `name`, checked against `shape`, cast to `dtype` on the CPU side if that
        makes it smaller to move."""
        t, shard = self.read(name), self.where[name]
        if shape is not None and tuple(t.shape) != tuple(shape):
            raise ValueError(f"{self.folder / shard}: {name} has shape {tuple(t.shape)}, "
                             f"config.json asks for {tuple(shape)}")
        self.unused.discard(name)
        weight = name.endswith((".weight", ".bias"))  # not the codes and scales of four bits
        if weight and t.dtype not in FLOATS:
            raise ValueError(f"{self.folder / shard}: {name} is stored as {t.dtype}; weights of 16 "
                             "or 32 bits, or of the formats of --quant, can be read")
        t = t.to(device=device, dtype=dtype or t.dtype)
        # minimum and maximum show NaN and inf, at a twentieth of the cost of testing each number
        if weight and not torch.stack(t.aminmax()).isfinite().all():
            raise ValueError(f"{self.folder / shard}: {name} holds NaN or inf; the checkpoint is "
                             "damaged, download it again")
        return t


def fingerprint(path_or_hub_id):
    """Digests that tell models apart, from the first rows of each tensor in the files:

    base: of the final norm and the embedding alone, which all number formats share;
    norms: of the other norms, into which AWQ folds its scales;
    weights: of every tensor as stored and of what config.json makes of them, after the format's
    name and a colon; these cannot be compared across formats."""
    folder = fetch(path_or_hub_id)
    config, source = read_config(folder), Checkpoint(folder)

    def some(name, few=4096):
        t = source.read(name, few).flatten()
        t = t.to(torch.bfloat16) if t.dtype in FLOATS else t  # some exports store 32 bits
        return t.view(torch.uint8).numpy().tobytes()

    def digest(content):
        return hashlib.sha256(content).hexdigest()[:16]

    # may be stored or not: a tied head, and tables that follow from config.json
    derived = ("inv_freq", *["lm_head.weight"] * config.tie_word_embeddings)
    each = sorted((n, digest(some(n))) for n in source.where if not n.endswith(derived))
    shape = replace(config, quantization=None, max_position_embeddings=0)  # length does not matter
    C, stored = config.hidden_size, "none"
    ends = some("model.norm.weight", C) + some("model.embed_tokens.weight", 64 * C)
    if config.quantization:
        stored = packed_format(config.quantization, folder)
    norms = [told for name, told in each if name.endswith("layernorm.weight")]
    return {"base": digest(ends), "norms": digest(repr(norms).encode()),
            "weights": f"{stored}:{digest(repr((each, shape)).encode())}"}


class RandomCheckpoint:
    """Stands in for a Checkpoint: seeded random weights of the true shapes, made where they are
    needed. For speed and memory."""

    def __init__(self, seed=0):
        self.seed, self.unused = seed, set()

    def get(self, name, shape, dtype, device="cpu"):
        dtype = dtype or torch.bfloat16  # as stored
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        self.seed += 1
        g = torch.Generator(device).manual_seed(self.seed)
        return torch.randn(shape, dtype=dtype, device=device, generator=g).mul_(0.02)


# ---- the one way in


def load(path_or_hub_id, device="cpu", dtype=torch.bfloat16, quant="none"):
    """A model.Transformer from a Hugging Face folder or hub id, frozen, in eval mode.

    dtype: of embeddings, norms, biases and (unquantized) weights; None: as stored.
    quant: none, or one of FORMATS. Raises FileNotFoundError / ValueError with one line that
    names the file or tensor."""
    folder = fetch(path_or_hub_id)
    return build(read_config(folder), Checkpoint(folder), device, dtype, quant)


def build(config, source, device="cpu", dtype=torch.bfloat16, quant="none"):
    """A Transformer of `config` with the tensors of `source` (Checkpoint or RandomCheckpoint)."""
    model = skeleton(config)
    for _ in stream(model, source, device, dtype, quant):
        pass
    return model.eval()


def open_16_bit(folder, flag):
    """(config, source) of a checkpoint folder that is to be quantized; ValueError if it is."""
    config = read_config(folder)
    if config.quantization:
        raise ValueError(f"{flag}: {folder} is quantized already; give the 16-bit checkpoint")
    return config, Checkpoint(folder)


def skeleton(config):
    """A Transformer without memory, on the meta device."""
    with torch.device("meta"):
        return Transformer(config)


def pieces(config):
    """The paths of a model's pieces in the order of `stream`: embed, norm, lm_head (unless it is
    the embedding), layers.0, layers.1, ..."""
    ends = ["embed", "norm"] if config.tie_word_embeddings else ["embed", "norm", "lm_head"]
    return ends + [f"layers.{i}" for i in range(config.num_hidden_layers)]


@torch.no_grad()
def stream(model, source, device="cpu", dtype=None, quant="none", ends=None):
    """Fill a skeleton from `source` piece by piece; yields the path of each of `pieces` when it
    is done. The embedding is there from the beginning.

    One tensor at a time moves to the device: memory holds the pieces that the caller has not
    dropped (model.layers[i] = None) and one projection as stored. quant != none turns each
    projection into an nvfp4.QuantLinear as it is read (a checkpoint that is quantized already says
    so in its config.json). dtype None: as stored. ends: the device of embedding, norm and head, if
    not `device`. ValueError at the end if tensors are left that fit nowhere."""
    for piece in pieces(model.config):
        place = device if piece.startswith("layers.") else ends or device
        for path, _ in list(model.get_submodule(piece).named_modules(prefix=piece)):
            read_module(model, path, source, place, dtype, quant)
        if piece == "embed" and model.config.tie_word_embeddings:
            model.lm_head.weight = tied = model.embed.weight
            if "lm_head.weight" in source.unused:  # some exports store the tied head once more
                head = source.get("lm_head.weight", tied.shape, dtype, tied.device)
                if not torch.equal(head, tied):  # a trained head beside a config from before
                    raise ValueError(f"{source.folder}: lm_head.weight is not the embedding that "
                                     "config.json ties it to; set tie_word_embeddings to false")
        yield piece
    unused = sorted(n for n in source.unused if not n.endswith("rotary_emb.inv_freq"))
    if unused:
        raise ValueError(f"{source.folder}: {len(unused)} tensors fit nowhere in this model, the "
                         f"first is {unused[0]}")


def read_module(model, path, source, device, dtype, quant):
    """Read the module at `path` of a skeleton, if it is one with weights."""
    m = model.get_submodule(path)

    def get(name):
        return nn.Parameter(source.get(name, m.weight.shape, dtype, device), requires_grad=False)

    if (noise := getattr(m, "noise", None)) is not None:  # a norm's, or the user's own
        m.noise = torch.zeros_like(noise, device=device)
    if isinstance(m, RMSNorm):
        m.weight = get(norm_name(path))
    elif isinstance(m, nn.Embedding):
        m.weight = get("model.embed_tokens.weight")
    elif path == "lm_head":
        m.weight = get("lm_head.weight")
    elif path.endswith("_proj"):
        projection = read_projection(source, path, m, model.config, quant, dtype, device)
        model.set_submodule(path, projection)


def read_projection(source, path, m, config, quant, dtype, device):
    """The linear for the fused projection at `path` (its shape is that of the meta model.Linear
    `m`), its parts read in row order.

    Weights are rounded to `quant` from what is stored, whatever `dtype` is: so an adapter meets the
    same four bits on all devices, in a converted checkpoint and in a merge. From a checkpoint that
    is quantized already they are taken unchanged, and a projection that it left in 16 bits stays a
    model.Linear."""
    def get(part, n, suffix, *shape, dtype=dtype):
        return source.get(f"{prefix(path)}.{part}.{suffix}", (n, *shape), dtype, device)

    stored_fmt = config.quantization and packed_format(config.quantization, source.folder)
    if stored_fmt and quant not in ("none", stored_fmt):
        raise ValueError(f"--quant {quant}: {source.folder} is quantized to {stored_fmt} already; "
                         f"use --quant {stored_fmt}")
    bias = None if m.bias is None else torch.cat([get(p, n, "bias") for p, n in m.parts.items()])
    if stored_fmt and not all(f"{prefix(path)}.{p}.weight" in source for p in m.parts):
        q = Quantized(stored_fmt, m.shape, *read_packed(source, path, m, stored_fmt, device))
        return QuantLinear(q, m.parts, bias)
    rounds = quant != "none" and not stored_fmt
    weight = torch.cat([get(p, n, "weight", m.shape[1], dtype=None if rounds else dtype)
                        for p, n in m.parts.items()])
    if rounds:
        return QuantLinear(quantize(weight, quant, path), m.parts, bias)
    m.weight = nn.Parameter(weight, requires_grad=False)
    m.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return m


def read_packed(source, path, m, fmt, device):
    """(codes, scale, global_scale) of the fused projection at `path` (its shape is that of the meta
    model.Linear `m`), checked."""
    K, f, parts = m.shape[1], FORMATS[fmt], []
    if K % f.block:
        raise ValueError(f"{source.folder}: {path} has K = {K}, not divisible by {fmt}'s block of "
                         f"{f.block}")
    for part, n in m.parts.items():
        name = f"{prefix(path)}.{part}.weight"
        codes = stored(source, f"{name}_packed", (n, K // 2), torch.uint8, device)
        scale = stored(source, f"{name}_scale", (n, K // f.block), f.scale_dtype, device)
        bits = scale_bits(scale)
        valid = {"nvfp4": bits < 127, "mxfp4": bits < 253}.get(fmt, (bits >= 0) & (bits < 1e38))
        if not valid.all():
            raise ValueError(f"{source.folder}: {name}_scale holds negative numbers, NaN or "
                             "inf; the checkpoint is damaged")
        top = torch.ones((), device=device)
        if fmt == "nvfp4":
            name = f"{name}_global_scale"
            shape = () if name in source and source.get(name).dim() == 0 else (1,)
            top = 1 / stored(source, name, shape, torch.float32, device).squeeze()
            if not 0 < top < 1e34:  # 6 * 448 times that is still finite
                raise ValueError(f"{source.folder}: {name} is not a positive number; the "
                                 "checkpoint is damaged")
        codes = torch.stack([codes & 15, codes >> 4], -1).view(n, K)  # (n, K/2, 2) -> (n, K)
        parts.append((codes, bits, top.expand(n)))
    codes, bits, top = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return pack(codes, fmt), bits.view(f.scale_dtype), top


def stored(source, name, shape, dtype, device):
    """source.get that also insists on the stored type: casting codes or scales would change
    them."""
    t = source.get(name, shape, device=device)
    if t.dtype != dtype:
        raise ValueError(f"{source.folder}: {name} is stored as {t.dtype}, config.json asks for "
                         f"{dtype}")
    return t


# ---- the way out


def norm_name(path):
    return f"model.{path}.weight".replace(".attn.", ".self_attn.")


def tensors(piece, path=""):
    """Yields (name, tensor) for everything below `piece`, the module at `path` of a model, as a
    checkpoint stores it. A tied head is not stored, and neither is an adapter."""
    embedding = None
    for at, m in piece.named_modules(prefix=path):
        if isinstance(m, RMSNorm):
            yield norm_name(at), m.weight
        elif isinstance(m, nn.Embedding):
            embedding = m.weight
            yield "model.embed_tokens.weight", embedding
        elif at == "lm_head" and m.weight is not embedding:
            yield "lm_head.weight", m.weight
        elif at.endswith("_proj"):
            where, rows = prefix(at), list(m.parts.values())
            if m.q is not None:
                yield from packed_tensors(m.q, m.parts, where)
            else:
                for name, w in zip(m.parts, m.base.weight.split(rows), strict=True):
                    yield f"{where}.{name}.weight", w
            if m.bias is not None:
                for name, b in zip(m.parts, m.bias.split(rows), strict=True):
                    yield f"{where}.{name}.bias", b


def packed_tensors(q, parts, where):
    """Yields (name, tensor) for each projection stacked in the quantized weight q: its rows as a
    checkpoint stores them."""
    codes, at = unpack(q.codes, q.shape[1], q.fmt), 0  # (N, K)
    codes = codes[:, 0::2] | codes[:, 1::2] << 4  # (N, K/2)
    for part, n in parts.items():
        rows, name = slice(at, at + n), f"{where}.{part}.weight"
        at += n
        yield f"{name}_packed", codes[rows]
        yield f"{name}_scale", q.scale[rows]
        if q.fmt == "nvfp4":
            yield f"{name}_global_scale", 1 / q.global_scale[rows][:1]


class Writer:
    """A checkpoint folder that appears whole or not at all: everything goes to a folder of a new
    name beside it, which is renamed at the end; an exception removes it. `add` holds one shard in
    host memory. Tokenizer and generation files are copied from `folder`; fmt (or None for 16 bits)
    goes into config.json; `self.notes` are further JSON files, {name: content}."""

    def __init__(self, out, folder, fmt=None, shard_bytes=2 << 30):
        self.out, self.folder, self.fmt = Path(out), Path(folder), fmt
        self.partial = beside(self.out)
        self.shard_bytes, self.shard, self.size, self.total = shard_bytes, {}, 0, 0
        self.shards, self.notes, self.dtype = [], {}, None

    def __enter__(self):
        check_out(self.out, folder=True)
        if self.out.exists():
            raise ValueError(f"--out {self.out}: exists already; remove it or choose another name")
        self.made = [p for p in self.out.absolute().parents if not p.exists()]
        return self

    def add(self, name, tensor):
        t = tensor.detach().to("cpu").contiguous()
        if t.untyped_storage().nbytes() > t.nbytes:
            t = t.clone()  # a view would keep the whole fused weight in memory
        if self.size and self.size + t.nbytes > self.shard_bytes:
            self.flush()
        self.shard[name] = t
        self.size += t.nbytes
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
            for parent in self.made:
                with contextlib.suppress(OSError):  # not empty: it holds the checkpoint
                    parent.rmdir()

    def finish(self):
        if self.shard:
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
        if self.dtype:  # other tools read the tensors as this dtype
            raw["dtype" if "dtype" in raw else "torch_dtype"] = self.dtype
        if self.fmt:
            raw["quantization_config"] = quantization_config(self.fmt)
        write_json(self.partial / "config.json", raw)
        self.partial.rename(self.out)
