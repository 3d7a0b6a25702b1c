"""
Sampling: prompts in, completions with the log-prob of each token out.

`generate` is what training, evaluation and the command line call. A prompt is prefilled once and
its keys and values are copied to the rows of its group; then all rows decode together, one token a
step. A row lives in a slot: when it finishes, a waiting row takes the slot, and when none waits,
the last row moves into the hole and the batch shrinks.

What a row draws depends on (seed, prompt index, sample index, position) and its logits, never on
what else is in the batch. fast/engine.py has the engines: the model's modules on the CPU, CUDA
graphs of fast/decode.py's kernels on the GPU. The GPU's stays attached to the model between
calls, with its keys and values, until `release(model)`.

Left out: beam search, repetition penalties, stop strings, speculative decoding.

    python sample.py --prompt "What is 3 + 4 * 5?"
    python sample.py --model Qwen/Qwen2.5-0.5B-Instruct --file prompts.txt --out out.jsonl --n 4
"""
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

from plumbing import flags
from plumbing.draw import row_keys
from plumbing.files import lines, read_jsonl, write_jsonl
from plumbing.tokenizer import styled

import torch
from tqdm import tqdm

from fast.engine import Eager, engine_for, onednn_linears, prefill, release

__all__ = ["Sample", "generate", "release"]
MAX_ROWS = 256  # rows that decode together, if the caller does not say


@dataclass
class Sample:
    """One completion. ids: tokens, the EOS included if it was drawn. logprobs: of each, under
    softmax(logits / temperature) over the whole tokenizer vocabulary (also when top_p < 1 cut the
    tail before drawing; at temperature 0, under softmax(logits)). finished: ended with EOS, not at
    the length limit."""

    ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finished: bool = False


@dataclass(eq=False)  # equal to itself alone: a key of Flight.places
class Row:
    """A Sample in the making."""

    p: int  # its prompt's number
    j: int  # its own among that prompt's
    prompt: list  # ids
    limit: int  # new tokens at most
    key: int  # of its random numbers
    sample: Sample
    launched: int = 0  # steps that the engine was told to decode for it

    @property
    def ended(self):
        return self.sample.finished or len(self.sample.ids) == self.limit

    def take(self, ids, logprobs, eos):
        """Drawn tokens into the sample, up to its end; returns them."""
        ids = ids[: self.limit - len(self.sample.ids)]
        if not eos.isdisjoint(ids):
            ids = ids[: 1 + next(i for i, t in enumerate(ids) if t in eos)]
            self.sample.finished = True
        self.sample.ids += ids
        self.sample.logprobs += logprobs[: len(ids)]
        return ids


class Flight(NamedTuple):
    """Steps that an engine was told to decode, in vain for a row that has ended before."""

    steps: int
    places: dict  # {row: its slot then}: it may have moved since
    fetch: Callable  # waits for the steps; returns ids and log-probs as lists [slot][step]


@torch.no_grad()
def generate(model, prompts, n=1, max_new_tokens=256, temperature=1.0, top_p=1.0, eos_ids=(),
             seed=0, max_rows=None, progress=False, on_token=None, eager=False, indices=None):
    """n completions of each prompt (lists of ids); returns, per prompt and in order, a list of n
    Samples. indices: of the prompts in a set of which these are a part, 0, 1, ... by default: the
    part draws what it would in the whole.

    max_new_tokens: an int, or one per prompt. temperature 0: greedy. max_rows: rows that decode
    together (default: MAX_ROWS, or what fits the GPU's memory; the others wait). progress: a live
    line (rows done, tokens/s). on_token(prompt, sample, id) is called as tokens arrive, for
    streaming. eager: the reference engine on the GPU too. ValueError names the flag when an
    argument is out of range, a prompt does not fit the model, no row fits the memory, or what the
    model says is not finite."""
    per_prompt = isinstance(max_new_tokens, (list, tuple))
    limits = max_new_tokens if per_prompt else [max_new_tokens] * len(prompts)
    check_arguments(model, prompts, n, limits, temperature, top_p, max_rows)
    out = [[Sample() for _ in range(n)] for _ in prompts]
    if not prompts:
        return out
    eos, top_p = set(eos_ids), top_p if temperature else 1.0  # greedy: no sort to keep memory for
    numbers = torch.tensor(range(len(prompts)) if indices is None else indices)
    keys = row_keys(seed, *torch.cartesian_prod(numbers, torch.arange(n)).T).tolist()
    rows = [Row(p, j, prompts[p], limits[p], key, out[p][j])
            for (p, j), key in zip(product(range(len(prompts)), range(n)), keys, strict=True)]
    slots = min(len(rows), max_rows or MAX_ROWS)
    max_len = max(len(p) + m for p, m in zip(prompts, limits, strict=True))
    with torch.cuda.device_of(model.embed.weight):  # streams and Triton go by the current device
        if eager or not model.embed.weight.is_cuda:
            engine = Eager(model, slots, max_len)
        else:
            engine = engine_for(model, slots, max_len, top_p)
        engine.begin(temperature, top_p, eos)
        with onednn_linears(model):
            decode_all(model, engine, rows, eos, min(slots, engine.slots), progress, on_token)
    if lost := sum(not math.isfinite(sum(s.logprobs)) for group in out for s in group):
        raise ValueError(f"{lost} of {len(rows)} samples have log-probs that are NaN or inf: the "
                         "model overflows; check --model and --adapter, or train with a lower --lr")
    return out


def decode_all(model, engine, rows, eos, slots, progress, on_token):
    """generate's loop: every row through one of the engine's slots, its tokens into its sample."""
    waiting = deque(rows)
    live = [None] * slots  # the row in each slot, None for a hole
    held = [None] * slots  # the prompt (its number) whose keys and values lie in each slot
    idle = 0  # the slots that have stood empty, times steps
    flights = deque()  # launched and not collected yet, the oldest first
    bar = tqdm(total=len(rows), unit="row", desc="sample", leave=False, disable=not progress)
    begin, tokens = time.perf_counter(), 0
    while waiting or any(live):
        # Waiting rows take the free slots once these have stood empty for as long as a prefill
        # makes the others wait: sooner, and all wait too often; later, and too few rows decode.
        free = [s for s, row in enumerate(live) if row is None]
        if waiting and free and idle >= engine.stall * (len(live) - len(free)):
            starts, idle = free[: len(waiting)], 0
            for s in starts:
                live[s] = waiting.popleft()
            begin_rows(model, engine, starts, live, held)
        if not waiting:
            close_holes(engine, live)
        # an engine that works ahead has its next steps before the host waits for the last ones
        while len(flights) <= engine.ahead and (flight := launch(engine, live)):
            flights.append(flight)
        flight = flights.popleft()
        tokens += collect(flight, live, eos, on_token)
        idle += live.count(None) * flight.steps
        if progress:
            n, speed = len(live) - live.count(None), tokens / (time.perf_counter() - begin)
            bar.update(len(rows) - len(waiting) - n - bar.n)
            bar.set_postfix_str(f"{n} live, {speed:.0f} tokens/s")
    bar.close()


def launch(engine, live):
    """Launch the live rows' next steps: a Flight, or None if no row has steps left to launch."""
    places = {row: s for s, row in enumerate(live) if row}
    if (left := max(row.limit - row.launched for row in places)) <= 0:
        return None
    steps, fetch = engine.run(len(live), left)
    for row in places:
        row.launched += steps
    return Flight(steps, places, fetch)


def collect(flight, live, eos, on_token):
    """Wait for a flight's tokens and give them to the live rows; returns how many they took."""
    tokens, (ids, logprobs) = 0, flight.fetch()
    for s, row in enumerate(live):
        if (place := flight.places.get(row)) is None:  # a hole, or it began after the launch
            continue
        new = row.take(ids[place], logprobs[place], eos)
        tokens += len(new)
        if row.ended:
            live[s] = None  # a hole
        if on_token:
            for t in new:
                on_token(row.p, row.j, t)
    return tokens


def close_holes(engine, live):
    """Move the last rows into the holes, so that the batch shrinks; none begins after that."""
    for s in reversed(range(len(live))):  # behind s there are rows only
        if live[s] is None:
            row = live.pop()
            if s < len(live):
                engine.move(len(live), s, len(row.prompt) + row.launched)
                live[s] = row


def begin_rows(model, engine, starts, live, held):
    """Begin the rows in the slots `starts`. A row's prompt may lie in its slot already, or in that
    of another row of its group, else it is prefilled. While a prompt has rows waiting, some slot
    always holds it, since freed slots go to them."""
    fresh = {}  # prompt -> the slot it is prefilled into
    where = {p: s for s, p in enumerate(held) if p is not None}
    copies = []  # [prompt, first slot, end]: neighbours go at once
    for s in starts:
        p = live[s].p
        if held[s] == p:
            continue
        if p not in where:
            where[p] = fresh[p] = s
        elif copies and copies[-1][::2] == [p, s]:
            copies[-1][2] += 1
        else:
            copies.append([p, s, s + 1])
    # a slot that still holds another group's prompt may be its only copy: read those before they
    # are overwritten
    for p, first, end in copies:
        if p not in fresh:
            engine.copy_row(where[p], first, end, len(live[first].prompt) - 1)
    prefill(model, engine, [live[s].prompt for s in fresh.values()], list(fresh.values()))
    for p, first, end in copies:
        if p in fresh:
            engine.copy_row(fresh[p], first, end, len(live[first].prompt) - 1)
    for s in starts:
        held[s] = live[s].p
    rows = [live[s] for s in starts]
    engine.start(starts, [row.prompt[-1] for row in rows], [len(row.prompt) - 1 for row in rows],
                 [row.limit for row in rows], [row.key for row in rows])


def check_arguments(model, prompts, n, limits, temperature, top_p, max_rows):
    if n < 1:
        raise ValueError(f"--n {n}: must be at least 1")
    if any(m < 1 for m in limits) or len(limits) != len(prompts):
        raise ValueError(f"--max-new-tokens {min(limits, default=0)}: must be at least 1, one "
                         "number or one per prompt")
    if not (temperature == 0 or temperature >= 1e-6):  # logits / T would overflow
        raise ValueError(f"--temperature {temperature}: must be 0 (greedy), or 1e-6 or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p}: must be above 0 and at most 1")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"--max-rows {max_rows}: must be at least 1")
    room = model.config.max_position_embeddings
    for i, (p, m) in enumerate(zip(prompts, limits, strict=True)):
        if not p:
            raise ValueError(f"prompt {i} is empty: a prompt has at least one token")
        if len(p) + m > room:
            raise ValueError(f"prompt {i}: its {len(p)} tokens and {m} new ones pass the model's "
                             f"{room} positions; shorten it, or lower --max-new-tokens")
        worst = min(p) if min(p) < 0 else max(p)
        if not 0 <= worst < model.config.vocab_size:
            raise ValueError(f"prompt {i} holds the id {worst}, the model has "
                             f"{model.config.vocab_size}: wrong tokenizer?")


# ---- the command


def read_prompts(path):
    """Prompts of a file: one a line, or .jsonl rows with "prompt" (or "question")."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--file {path}: no such file")
    if path.suffix.lower() == ".jsonl":
        prompts = []
        for where, row in read_jsonl(path, {"prompt": str, "question": str}):
            given = (row.get(column) or "" for column in ("prompt", "question"))
            prompts.append(next((text for text in given if text.strip()), ""))
            if not prompts[-1]:
                raise ValueError(f'--file {where}: needs "prompt" or "question"')
    else:
        prompts = [text for _, text in lines(path)]
    if not prompts:
        raise ValueError(f"--file {path}: no prompts in it, one line of text each is expected")
    return prompts


def turns(args, *texts):
    """Messages of a conversation: --system, then user and assistant in turn, questions in
    --prompt-style."""
    messages = [{"role": "system", "content": args.system}] if args.system else []
    for i, text in enumerate(texts):
        user = i % 2 == 0
        content = styled(text, args.prompt_style) if user else text
        messages.append({"role": "user" if user else "assistant", "content": content})
    return messages


def limit(model, prompt, wanted):
    """New tokens at most: `wanted`, or 4096, or what the model's positions leave after a prompt."""
    room = model.config.max_position_embeddings - len(prompt)
    return max(1, min(4096, room)) if wanted is None else wanted


def answer(model, tok, args, texts):
    """The next turn of a conversation, printed piece by piece as its tokens arrive; returns its
    text."""
    ids, shown = [], ""

    def show(_prompt, _sample, token):
        nonlocal shown
        ids.append(token)
        text = tok.decode(ids)
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            print(text[len(shown) :], end="", flush=True)
            shown = text

    prompt = tok.encode(tok.chat(turns(args, *texts)))
    most = limit(model, prompt, args.max_new_tokens)
    [[sample]] = generate(model, [prompt], 1, most, args.temperature,
                          args.top_p, tok.eos_ids, args.seed, on_token=show)
    full = len(prompt) + most == model.config.max_position_embeddings
    cut = "the model has no more positions" if full else "raise --max-new-tokens"
    text = tok.decode(sample.ids)
    print(text[len(shown) :] + ("" if sample.finished else f" [cut: {cut}]"))
    return text


def chat(model, tok, args):
    """A conversation in the terminal until /quit, end of input (ctrl-D) or ctrl-C."""
    print("A line that ends in \\ goes on. /clear starts over, /quit ends.", file=sys.stderr)
    texts = []
    while True:
        try:
            text = input("User: ")
            while text.endswith("\\"):
                text = f"{text[:-1]}\n{input('... ')}"
            if text.strip() == "/quit":
                return
            if text.strip() == "/clear":
                texts = []
            elif text.strip():
                print("Assistant: ", end="", flush=True)
                texts += [text, answer(model, tok, args, [*texts, text])]
        except ValueError as e:  # past the model's positions
            print(f"[{e}; /clear starts over]")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def batch(model, tok, args, prompts):
    """--file -> --out: one JSON row a sample, in order, written whole at the end."""
    ids = [tok.encode(tok.chat(turns(args, text))) for text in prompts]
    limits = [limit(model, p, args.max_new_tokens) for p in ids]
    groups = generate(model, ids, args.n, limits, args.temperature, args.top_p, tok.eos_ids,
                      args.seed, args.max_rows, progress=sys.stderr.isatty())
    rows = [{"prompt": text, "sample": j, "text": tok.decode(s.ids), "tokens": len(s.ids),
             "finished": s.finished, "logprob": sum(s.logprobs)}
            for text, group in zip(prompts, groups, strict=True) for j, s in enumerate(group)]
    write_jsonl(args.out, rows, ensure_ascii=False)
    print(f"{args.out}: {len(rows)} rows, {sum(row['tokens'] for row in rows)} tokens")


def run(args, argv):
    prompts = read_prompts(args.file) if args.file else None
    model, tok = flags.load_policy(args)
    if prompts:
        batch(model, tok, args, prompts)
    elif args.prompt is not None:
        answer(model, tok, args, [args.prompt])
    else:
        chat(model, tok, args)


def main(argv=None):
    return flags.run_command("sample", run, argv)


if __name__ == "__main__":
    sys.exit(main())
