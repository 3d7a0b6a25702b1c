"""
The scheduler of sample.generate on the GPU: sequences live in slots of an engine (fast/engine.py).

When a sequence ends, a waiting one takes its slot; when none waits, the last one moves into the
hole and the batch shrinks. The next few steps are launched before the host looks at the tokens of
the last ones, so a sequence that has ended meanwhile is decoded in vain for these.
"""
from collections import deque

import torch

from fast.engine import engine_for, prefill


def decode(model, rows, temperature, top_p, eos, max_rows, draw, bar, on_token):
    """Fill the samples of `rows`, as sample.decode does; draw: sample.draw; bar: a tqdm."""
    if not rows:
        return
    top_p = top_p if temperature else 1.0  # greedy: the fused sampler will do
    slots = min(len(rows), max_rows)
    max_len = max(len(row.prompt) + row.limit for row in rows)
    longest = max(len(row.prompt) for row in rows)
    with torch.cuda.device_of(model.embed.weight):  # streams and Triton go by the current device
        engine = engine_for(model, slots, max_len, longest)
        engine.begin(temperature, top_p, eos, draw)
        Scheduler(model, engine, rows, eos, min(slots, engine.slots), on_token).run(bar)


class Scheduler:
    """Takes every row through one of the engine's slots.

    live: the row in each slot, None for a hole. held: the prompt (its number) whose keys and values
    lie in each slot. launched: {id of a row: steps that the engine was told to decode for it}."""

    def __init__(self, model, engine, rows, eos, slots, on_token):
        self.model, self.engine, self.eos, self.on_token = model, engine, eos, on_token
        self.waiting = deque(rows)
        self.live, self.held = [None] * slots, [None] * slots
        self.launched = {id(row): 0 for row in rows}
        self.empty_steps = 0  # slots that have stood empty, times steps

    def run(self, bar):
        in_flight = deque()
        while self.waiting or any(self.live):
            self.refill()
            if not self.waiting:
                self.close_holes()
            # the engine has its next steps before the host waits for the last ones
            while len(in_flight) <= self.engine.ahead and (launched := self.launch()):
                in_flight.append(launched)
            steps, rows, fetch = in_flight.popleft()
            bar.update(self.collect(rows, *fetch()))
            self.empty_steps += self.live.count(None) * steps

    def refill(self):
        """Waiting rows take the free slots once these have stood empty for as long as a prefill
        makes the others wait: sooner, and all wait too often; later, and too few rows decode."""
        free = [slot for slot, row in enumerate(self.live) if row is None]
        wait = self.engine.stall * (len(self.live) - len(free))
        if self.waiting and free and self.empty_steps >= wait:
            self.empty_steps = 0
            slots = free[: len(self.waiting)]
            for slot in slots:
                self.live[slot] = self.waiting.popleft()
            self.begin(slots)

    def begin(self, slots):
        """Begin the rows in `slots`. While a prompt has rows waiting, some slot always holds it,
        since freed slots go to them: its keys and values are copied from there. Else it is
        prefilled."""
        holder = {p: slot for slot, p in enumerate(self.held) if p is not None}
        fresh = {}  # {prompt: the slot that it is prefilled into}
        early, late = [], []  # [prompt, first slot, end] to copy: neighbours go at once
        for slot in slots:
            p = self.live[slot].p
            if self.held[slot] == p:
                continue
            copies = late if p in fresh else early
            if p not in holder:
                holder[p] = fresh[p] = slot
            elif copies and copies[-1][0] == p and copies[-1][2] == slot:
                copies[-1][2] += 1
            else:
                copies.append([p, slot, slot + 1])

        # A slot that still holds another group's prompt may be its only copy: read those before
        # they are overwritten.
        self.copy(early, holder)
        prefill(self.model, self.engine, [self.live[slot].prompt for slot in fresh.values()],
                list(fresh.values()))
        self.copy(late, holder)

        for slot in slots:
            self.held[slot] = self.live[slot].p
        self.engine.start(slots, [self.live[slot] for slot in slots])

    def copy(self, copies, holder):
        for p, first, end in copies:
            self.engine.copy_row(holder[p], first, end, len(self.live[first].prompt) - 1)

    def close_holes(self):
        """Move the last rows into the holes, so that the batch shrinks; none begins after that."""
        for slot in reversed(range(len(self.live))):  # behind it there are rows only
            if self.live[slot] is None:
                row = self.live.pop()
                if slot < len(self.live):
                    length = len(row.prompt) + self.launched[id(row)]
                    self.engine.move(len(self.live), slot, length)
                    self.live[slot] = row

    def launch(self):
        """Launch the live rows' next steps: (how many, the row in each slot now, a function that
        waits for their tokens), or None if no row has steps left to launch."""
        left = max(row.limit - self.launched[id(row)] for row in self.live if row)
        if left <= 0:
            return None
        steps, fetch = self.engine.run(len(self.live), left)
        for row in filter(None, self.live):
            self.launched[id(row)] += steps
        return steps, [*self.live], fetch

    def collect(self, rows, ids, logprobs):
        """Give rows their tokens, up to their ends, from lists [slot][step] of steps that were
        launched for these `rows`; returns how many have ended."""
        ended = 0
        for row, new, logp in zip(rows, ids, logprobs, strict=True):
            if row is None or row.ended:  # a hole, or its end was in earlier steps
                continue
            new = new[: row.limit - len(row.sample.ids)]
            end = next((i + 1 for i, token in enumerate(new) if token in self.eos), None)
            new = new[:end]
            row.sample.finished = end is not None
            row.sample.ids += new
            row.sample.logprobs += logp[: len(new)]
            ended += row.ended
            if self.on_token:
                for token in new:
                    self.on_token(row.p, row.j, token)
        self.live = [row if row and not row.ended else None for row in self.live]
        return ended
