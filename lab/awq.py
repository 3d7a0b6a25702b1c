"""
AWQ: activation-aware weight quantization (Lin et al., arXiv 2306.00978), for all formats.

Rounding errors of a weight column are multiplied by that input channel's activations, and few
channels are large. AWQ scales the columns up where activations are large, W diag(s), and the
activations down, diag(s)^-1 x, before rounding. The second factor is folded into whatever makes x,
so that the model stays the same function and gets no new operation:

    q,k,v   <- input_layernorm's weight
    o       <- the v rows of qkv (one s for all heads that share a kv head)
    gate,up <- post_attention_layernorm's weight
    down    <- the up rows of gate_up

s = mean|x|^a, normalised; a goes over a grid in [0, 1] and the one with the least output error
|| (Q(W s) / s - W) X ||^2 on calibration text wins. a = 0 is s = 1, plain rounding. Then each
block's scale is searched for among its neighbours (AWQ calls its form of this weight clipping): the
largest weight need not sit on the grid's end, if the other 15 gain by it.

On Qwen2.5-Coder-0.5B (restored from a Q4_K_M file) channel scales on top of block scales help a
quarter of the linears in NVFP4 (exponent above 0), three quarters in MXFP4: 16 weights to a scale
leave them little to do.

AQN's noise is added to the folded norm weights, w / s: it is then relative to those.

The error needs no stored activations: with H = X^T X it is sum((D H) * D), D = Q(W s) / s - W. One
block's 16-bit weights are on the device at a time, and calibration text passes through the original
blocks.

    model = awq.load("Qwen/Qwen2.5-3B-Instruct", device="cuda", fmt="nvfp4", calib="train.jsonl")
    python nvfp4.py --model Qwen/Qwen2.5-3B-Instruct --awq --calib train.jsonl --out q/

Shapes: N rows, K columns, B sequences, T tokens, C hidden, H query heads, Hkv kv heads, D head
size, G = H / Hkv.
"""
import math
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from plumbing import checkpoint
from plumbing.files import decode, read_jsonl
from plumbing.formats import FORMATS, block_scales, encode, scale_bits, snap
from plumbing.logprobs import token_logprobs

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import data
from model import PROJECTIONS
from nvfp4 import QuantLinear

GRID = 20  # exponents tried: 0, 1/20, ..., 1
FINALISTS = 3  # exponents whose block scales are searched, besides 0
BATCH = 8  # calibration sequences that go through a block together


class Stats:
    """H = X^T X / n (K, K) and mean|x| (K,) of a linear's inputs, gathered by a forward hook."""

    def __init__(self, K, device):
        self.H, self.mean = torch.zeros(K, K, device=device), torch.zeros(K, device=device)
        self.n = 0

    def __call__(self, module, args):
        x = args[0].reshape(-1, self.mean.numel()).float()  # (B*T, K)
        self.H += x.T @ x  # (K, M) @ (M, K)
        self.mean += x.abs().sum(0)
        self.n += x.shape[0]


def output_error(D, H):
    """sum over rows of d H d^T: the squared output error of a weight error D (N, K), for inputs
    with X^T X = H (K, K)."""
    return ((D @ H) * D).sum().item()  # (N, K) @ (K, K)


def neighbours(scale, fmt):
    """Block scales near `scale`, in the stored type: what `search_blocks` tries."""
    if FORMATS[fmt].codebook:
        return [scale * f for f in (0.75, 0.8, 0.84, 0.88, 0.91, 0.94, 0.97, 1.03, 1.06, 1.1)]
    # neighbouring bytes are neighbouring values: E4M3 has eight to an octave
    byte = scale_bits(scale).int()
    top, low, high = (254, -1, 1) if fmt == "mxfp4" else (126, -6, 8)
    return [(byte + d).clamp(1, top).to(torch.uint8).view(scale.dtype)
            for d in range(low, high + 1) if d]


def search_blocks(w, fmt, scale, global_scale, H):
    """The block scales (N, K/block), for each block the one with the least output error among
    `scale` and its neighbours."""
    (N, K), b = w.shape, FORMATS[fmt].block
    diagonal = torch.stack([H[i : i + b, i : i + b] for i in range(0, K, b)])  # (K/b, b, b)

    def errors(s):
        d = (snap(w, fmt, s, global_scale) - w).view(N, K // b, b).transpose(0, 1)  # (K/b, N, b)
        return ((d @ diagonal) * d).sum(-1).T  # (N, K/b)

    best, least = scale.clone(), errors(scale)
    for s in neighbours(scale, fmt):
        e = errors(s)
        better = e < least
        least = torch.where(better, e, least)
        scale_bits(best)[better] = scale_bits(s)[better]
    return best


class Trial(NamedTuple):
    """Channel scales s = mean|x|^exponent (K,), `blocks`: the block scales and the global one, and
    the output error of rounding with both."""

    error: float
    exponent: float
    s: torch.Tensor
    blocks: tuple


BY_ERROR = attrgetter("error")


class Search:
    """One linear: the best scales of its input channels, and its quantized weight.

    w (N, K) float32, H (K, K), magnitude (K,) = mean|x| (already shared over tied channels), exact:
    s -> the s that folding realises exactly, divide (N,): what w's rows will be divided by, because
    they feed a scaled consumer. grid 0: no channel scales; finalists None: no search of block
    scales. Errors are relative to || W X ||^2: `rtn` for plain rounding, `channels` for the best
    channel scales alone, `awq` for what was chosen."""

    def __init__(self, w, H, magnitude, fmt, exact=lambda s: s, divide=None, grid=GRID,
                 finalists=FINALISTS):
        power = output_error(w, H) or 1.0
        divide = torch.ones(len(w), 1, device=w.device) if divide is None else divide[:, None]

        def attempt(exponent, s, search=False):
            t = w * s / divide
            scale, top = block_scales(t, fmt)
            if search:
                scale = search_blocks(t, fmt, scale, top, H / s / s[:, None])
            d = snap(t, fmt, scale, top) * divide / s - w
            return Trial(output_error(d, H) / power, exponent, s, (scale, top))

        self.rtn = output_error(snap(w, fmt, *block_scales(w, fmt)) - w, H) / power
        trials = [attempt(0.0, torch.ones_like(magnitude))]
        for i in range(1, grid + 1):
            s = magnitude.clamp(min=1e-8) ** (i / grid)
            trials.append(attempt(i / grid, exact(s / (s.max() * s.min()).sqrt())))
        best = min(trials, key=BY_ERROR)
        self.channels = best.error
        if finalists is not None:
            # a search of blocks costs ten trials, and evens out much of the difference between
            # exponents: only for the best of them, and 0
            for plain in sorted(trials[1:], key=BY_ERROR)[:finalists] + trials[:1]:
                found = attempt(plain.exponent, plain.s, search=True)
                best = min(best, found, key=BY_ERROR)
        self.exponent, self.s, self.awq = best.exponent, best.s, best.error
        self.q = encode(w * best.s / divide, fmt, *best.blocks)


def quantize_block(block, stats, config, fmt, **options):
    """Replace the four linears of `block` (model.Block, 16-bit weights) by QuantLinears, its norms
    by folded ones.

    stats: {name: Stats} of its linears; options: grid, finalists of Search. Returns a row of the
    report for each linear: {"linear", "exponent", "rtn", "channels", "awq"}."""
    H, Hkv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q_k = (H + Hkv) * D  # rows above the v rows
    return [*quantize_pair(block.attn, ("qkv_proj", "o_proj"), block.input_layernorm, q_k, H // Hkv,
                           D, stats, fmt, **options),
            *quantize_pair(block.mlp, ("gate_up_proj", "down_proj"), block.post_attention_layernorm,
                           config.intermediate_size, 1, 1, stats, fmt, **options)]


def quantize_pair(owner, names, norm, above, G, D, stats, fmt, **options):
    """Quantize the linears `names` of `owner`: a producer behind `norm`, whose rows from `above` on
    feed the consumer, a head of D rows for G heads of inputs (in the MLP, a row for one input)."""
    first, then = names
    producer, consumer, gain = getattr(owner, first), getattr(owner, then), norm.weight

    def share(x):  # mean over the heads that read the same rows: (H*D) -> (Hkv*D)
        return x.view(-1, G, D).mean(1).flatten()

    def spread(x):  # (Hkv*D) -> (H*D)
        return x.view(-1, 1, D).expand(-1, G, D).flatten()

    def folded(s):  # the norm's weight / s, in its dtype; unchanged where that is 0 or infinite
        w = (gain / s).to(gain.dtype)
        return torch.where((w != 0) & torch.isfinite(w), w, gain)

    def foldable(s):  # the s that `folded` divides by, rounding included; 1 if the weight is 0
        return torch.where(gain == 0, 1.0, gain.float() / folded(s).float())

    def search_consumer(**options):
        mean = spread(share(stats[then].mean))
        return Search(consumer.dense(), stats[then].H, mean, fmt, **options)

    def search_producer(s):  # for a consumer with channel scales s
        divide = torch.ones(producer.shape[0], device=s.device)
        divide[above:] = share(s)  # rows of v, or of up
        return divide, Search(producer.dense(), stats[first].H, stats[first].mean, fmt, foldable,
                              divide, **options)

    out = search_consumer(**options)
    divide, into = search_producer(out.s)
    if into.awq > into.rtn:  # worse than plain rounding: the consumer gets no scales
        out = search_consumer(**options | {"grid": 0})
        divide, into = search_producer(out.s)
    norm.weight.data = folded(into.s)
    bias = producer.bias
    bias = None if bias is None else (bias.float() / divide).to(bias.dtype)
    setattr(owner, first, QuantLinear(into.q, producer.parts, bias))
    setattr(owner, then, QuantLinear(out.q, consumer.parts, consumer.bias))
    return [{"linear": name, "exponent": s.exponent, "rtn": s.rtn, "channels": s.channels,
             "awq": s.awq} for name, s in ((first, into), (then, out))]


@torch.no_grad()
def calibrated(model, pieces, fmt, ids, device, held_out=None, **options):
    """Quantizes the blocks of `model` as they arrive in `pieces`, a checkpoint.stream of it; yields
    (path, rows of the report) for each, as convert.rounded does.

    ids (B, T): calibration text. Its hidden states go through the original blocks, so a layer is
    calibrated on what the 16-bit model feeds it, and one pass a layer is enough. held_out: a
    HeldOut, carried along; options: grid, finalists of Search."""
    x, rope = None, model.rope(torch.arange(ids.shape[1], device=device)[None])
    for path in pieces:
        if not path.startswith("layers."):
            yield path, []
            continue
        block = model.get_submodule(path)
        if x is None:  # the embedding comes before the blocks, and may be stored in another dtype
            dtype = block.attn.qkv_proj.weight.dtype
            x = embedded(model, ids, device, dtype)  # (B, T, C)
            if held_out:
                held_out.begin(model, device, dtype)
        stats = gather(block, x, rope)
        if held_out:
            through(block, held_out.before, held_out.rope)
        rows = quantize_block(block, stats, model.config, fmt, **options)
        if held_out:
            through(block, held_out.after, held_out.rope)
        del block, stats  # so that the caller can free it
        yield path, rows


def gather(block, x, rope):
    """{linear: Stats} of a block's inputs; x (B, T, C) goes through it, in place."""
    linears = {name.rsplit(".", 1)[-1]: block.get_submodule(name) for name in PROJECTIONS}
    stats = {name: Stats(m.shape[1], x.device) for name, m in linears.items()}
    hooks = [m.register_forward_pre_hook(stats[name]) for name, m in linears.items()]
    through(block, x, rope)
    for hook in hooks:
        hook.remove()
    for s in stats.values():
        s.H /= s.n
        s.mean /= s.n
    return stats


def embedded(model, ids, device, dtype):
    return model.embed(ids.to(model.embed.weight.device)).to(device, dtype)  # (B, T, C)


def through(block, x, rope):
    """x (B, T, C) through a block, in place, a few sequences at a time."""
    for rows in x.split(BATCH):
        rows.copy_(block(rows, *rope))


class HeldOut:
    """Hidden states of text that was not calibrated on, through the original blocks and through
    the quantized ones, block by block: perplexity before and after without ever holding either
    model."""

    def __init__(self, ids):
        self.ids = ids

    def begin(self, model, device, dtype):
        self.rope = model.rope(torch.arange(self.ids.shape[1], device=device)[None])
        self.before = embedded(model, self.ids, device, dtype)  # (B, T, C)
        self.after = self.before.clone()

    @torch.no_grad()
    def perplexity(self, model):
        """{"before", "after"}: e to the mean negative log-likelihood of a token; call it when all
        blocks are done."""
        out = {}
        for name, x in (("before", self.before), ("after", self.after)):
            hidden = model.norm.to(x.device)(x[:, :-1]).flatten(0, 1)  # (B, T-1, C) -> (S, C)
            targets = self.ids[:, 1:].flatten().to(x.device)
            logp, _ = token_logprobs(hidden, model.lm_head.weight.to(x), targets)
            out[name] = math.exp(-logp.mean().item())
        return out


def load(path_or_hub_id, device="cpu", dtype=torch.bfloat16, fmt="nvfp4", calib=None,
         sequences=128, length=512, **options):
    """model.load(..., quant=fmt) with AWQ; the layers' report is in model.awq. calib: a file for
    `texts`; options: grid and finalists of Search. Raises as model.load does, and ValueError for
    too little text or a checkpoint quantized already."""
    folder = checkpoint.fetch(path_or_hub_id)
    config, source = checkpoint.open_16_bit(folder, "--awq")
    ids = calibration(calib, folder, sequences, length)
    model = checkpoint.skeleton(config)
    pieces = checkpoint.stream(model, source, device, dtype)
    steps = calibrated(model, pieces, fmt, ids, device, **options)
    progress = tqdm(steps, f"AWQ {fmt}", len(checkpoint.pieces(config)), disable=None)
    model.awq = [{"layer": int(path.split(".")[1]), **row} for path, rows in progress
                 for row in rows]
    return model.eval()


# ---- text


def text_file(path):
    """--calib's file as a Path. FileNotFoundError if it is not there."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--calib {path}: no such file; give a .jsonl (question and "
                                "answer, or text) or a text file")
    return path


def texts(path):
    """The texts of a file: question and answer of each row of a .jsonl (or its "text"), else the
    file as one text."""
    path = text_file(path)
    if path.suffix.lower() != ".jsonl":
        return [decode(path.read_bytes(), path)]
    out = []
    for where, row in read_jsonl(path, {"text": str}):
        text, question, answer = map(row.get, ("text", "question", "answer"))
        if text is None and not (isinstance(question, str) and isinstance(answer, str | int)):
            raise ValueError(f'{where}: needs "text", or "question" and "answer"')
        out.append(f"{question}\n{answer}" if text is None else text)
    return out


def calibration(path, folder, sequences=128, length=512):
    """ids (sequences, length) long of calibration text in the checkpoint's own tokens; documents
    follow one another, each ended by EOS. Without a file: worked arithmetic problems in the
    checkpoint's chat template, as in the embedded task."""
    tok = data.Tokenizer(folder)
    if path is None:
        rows = data.arithmetic("train", 4096)
        docs = (tok.prompt_ids(r["question"]) + tok.encode(data.solution(r)) for r in rows)
    else:
        docs = (tok.encode(t) for t in texts(path))
    ids, want = [], sequences * length
    for doc in docs:
        ids += doc + tok.eos_ids[-1:]
        if len(ids) >= want:
            break
    rows = min(sequences, len(ids) // length)
    if rows < 1:
        raise ValueError(f"--calib {path or 'by default'}: {len(ids)} tokens, fewer than one "
                         f"sequence of {length}; give more text, or lower --length")
    return torch.tensor(ids[: rows * length]).view(rows, length)


@torch.no_grad()
def perplexity(model, docs, batch=16):
    """docs: token ids of each document -> [(summed negative log-likelihood in nats, summed entropy,
    tokens scored)] for each, in order; a document's first token is not scored. exp(sum / tokens) is
    the perplexity."""
    device, out = model.embed.weight.device, [None] * len(docs)
    order = sorted(range(len(docs)), key=lambda i: len(docs[i]))
    for at in range(0, len(docs), batch):
        chosen = order[at : at + batch]
        n = torch.tensor([len(docs[i]) - 1 for i in chosen], device=device)
        ids = pad_sequence([torch.tensor(docs[i]) for i in chosen], batch_first=True)  # (B, T)
        ids = ids.to(device)
        scored = torch.arange(ids.shape[1] - 1, device=device) < n[:, None]  # (B, T-1)
        hidden = model.hidden(ids[:, :-1])[scored]  # (B, T-1, C) -> (S, C)
        logp, entropy = token_logprobs(hidden, model.lm_head.weight, ids[:, 1:][scored],
                                       valid_vocab=model.valid_vocab)
        for i, p, e in zip(chosen, logp.split(n.tolist()), entropy.split(n.tolist()), strict=True):
            out[i] = (-p.sum().item(), e.sum().item(), len(docs[i]) - 1)
    return out
