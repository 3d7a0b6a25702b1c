"""The fast generate against the plain one: slots that are refilled, moved and left empty, steps launched ahead of their results.

In float32, where both draw the same tokens; on the engine's kernels, in Triton's interpreter, and on slots that the modules fill."""
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import model as M
import sample
from fast import decode, engine, memory, packed, scheduler
from tests.test_decode import PROMPTS, build


def small(rank=0, positions=64):
    """One block, one head: the interpreter is slow."""
    return build(M.Config(301, 64, 32, 1, 2, 1, 32, max_position_embeddings=positions), rank=rank)


def compare(got, want, atol=1e-4):
    for p, (a, b) in enumerate(zip(got, want, strict=True)):
        for j, (x, y) in enumerate(zip(a, b, strict=True)):
            k = next((i for i, (s, t) in enumerate(zip(x.ids, y.ids, strict=False)) if s != t), None)
            assert x.ids == y.ids, f"sample {j} of prompt {p}, from place {k} on: {x.logprobs[:k][-3:]}, {y.logprobs[:k][-3:]}"
            assert x.finished == y.finished and x.logprobs == pytest.approx(y.logprobs, abs=atol)


class Slots:
    """What the scheduler asks of engine.Graphs, by the model's modules: the interpreter takes a hundred times as long."""

    stall, ahead, most, capture, prefill_tokens = 2, 1, 2, None, 8192

    def __init__(self, model, slots, max_len, longest):
        self.model, self.slots, self.max_len = model, slots, max_len
        self.cache = M.KVCache(model, slots, max_len)
        self.token, self.key = torch.zeros(2, slots, dtype=torch.long)
        self.prompts = SimpleNamespace(run=self.fill)

    def fill(self, model, prompts, slots, capture):
        for prompt, slot in zip(prompts, slots, strict=True):
            row = self.cache.rows(slot, slot + 1)
            row.length, row.used = torch.zeros_like(row.length), 0
            model.hidden(torch.tensor([prompt]), row)

    def begin(self, temperature, top_p, eos_ids, draw):
        self.draw, self.how = draw, (temperature, top_p)

    def start(self, slots, rows):
        self.token[slots], self.key[slots] = torch.tensor([row.prompt[-1] for row in rows]), torch.tensor([row.key for row in rows])
        self.cache.length[slots] = torch.tensor([len(row.prompt) - 1 for row in rows])

    copy_row = engine.Graphs.copy_row

    def move(self, source, target, length):
        self.copy_row(source, target, target + 1, length)
        for t in (self.token, self.key, self.cache.length):
            t[target] = t[source]

    def run(self, rows, steps):
        steps, drawn = min(steps, self.most), []
        for _ in range(steps):
            view = self.cache.rows(0, rows)
            view.used = int(view.length.max())
            x = self.model.hidden(self.token[:rows, None], view)[:, 0]
            view.length.add_(1).clamp_(max=self.max_len - 1)  # a row that has ended goes on
            logits = M.logits(x, self.model.lm_head.weight)[:, : self.model.valid_vocab]
            drawn.append(self.draw(logits, self.key[:rows], view.length, *self.how))
            self.token[:rows] = drawn[-1][0]
        ids, logprobs = (torch.stack(columns, 1).tolist() for columns in zip(*drawn, strict=True))
        return steps, lambda: (ids, logprobs)


@pytest.fixture
def on_slots(monkeypatch, on_fast_path):
    """on_fast_path, with Slots for engine."""
    monkeypatch.setattr(scheduler, "engine_for", Slots)
    return on_fast_path


@pytest.mark.parametrize("kw", [{}, {"temperature": 0}, {"temperature": 0.7, "top_p": 0.6}])
def test_generate_equals_the_plain_function(monkeypatch, on_fast_path, kw):
    """Slots that refill and shrink, rows that stop inside a burst of steps, a limit a prompt."""
    monkeypatch.setattr(decode, "STEPS", 2)
    m = small(rank=0 if kw else 3)
    prompts, kw = [[5], [1, 2, 3], [4, 3, 2, 1]], dict(n=2, max_new_tokens=[3, 1, 3], eos_ids=range(40), seed=3, max_rows=4, **kw)
    want = sample.generate(m, prompts, **kw)
    compare(sample.generate(on_fast_path(m), prompts, **kw), want)
    assert m in engine.ENGINES


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_refill_and_shrink_keep_every_sample(on_slots, rows):
    """A row that takes over a slot, or moves into a hole, must find its own prompt, position and random numbers there."""
    m, kw = small(), dict(n=4, max_new_tokens=[9, 4, 12, 7, 10], eos_ids=range(24), seed=3)
    want = sample.generate(m, PROMPTS, **kw)
    assert len({tuple(s.ids) for g in want for s in g}) > 10
    compare(sample.generate(on_slots(m), PROMPTS, max_rows=rows, **kw), want)


@pytest.mark.parametrize(("stall", "starts"), [(0, 4), (1000, 2)])
def test_rows_that_wait_for_company_leave_holes_and_draw_the_same(monkeypatch, on_slots, stall, starts):
    """A prefill stops all rows: three ends should cost one, and a slot that stands empty until then must not be read."""
    m, kw, calls, start = small(), dict(n=2, max_new_tokens=[8, 1, 2], seed=3, max_rows=3), [], Slots.start
    want = sample.generate(m, PROMPTS[:3], **kw)
    monkeypatch.setattr(Slots, "stall", stall)
    monkeypatch.setattr(Slots, "start", lambda self, slots, *rest: calls.append(slots) or start(self, slots, *rest))
    compare(sample.generate(on_slots(m), PROMPTS[:3], **kw), want)
    assert len(calls) == starts


def test_the_next_steps_are_launched_before_the_last_ones_are_fetched(monkeypatch, on_slots):
    """Else the device waits for the host each time; and no step is launched that a limit says is in vain. Rows of 8, 2 and 3 tokens in
    two slots: the third begins as the second's end is seen, while the first's last steps are on their way."""
    events, run = [], Slots.run

    def recorded(self, rows, steps):
        steps, fetch = run(self, rows, steps)
        events.append(steps)
        return steps, lambda: events.append("fetch") or fetch()

    for name, value in (("most", 4), ("run", recorded), ("stall", 0)):
        monkeypatch.setattr(Slots, name, value)
    assert Slots.ahead == engine.Graphs.ahead
    sample.generate(on_slots(small()), PROMPTS[:3], max_new_tokens=[8, 2, 3], seed=3, max_rows=2)
    assert events == [4, 4, "fetch", 3, "fetch", "fetch"]


def test_the_batch_shrinks_as_rows_end(monkeypatch, on_slots):
    """Else the last row of a rollout, which is often far longer than the others, decodes at the price of all."""
    sizes, run = [], Slots.run
    monkeypatch.setattr(Slots, "run", lambda self, rows, steps: sizes.append(rows) or run(self, rows, steps))
    sample.generate(on_slots(small()), PROMPTS[:3], max_new_tokens=[1, 9, 2], seed=3)
    assert sizes[0] == 3 and sizes[-1] == 1 and sizes == sorted(sizes, reverse=True)


def test_a_prompt_is_filled_in_once_for_its_group(monkeypatch, on_slots):
    """Sixteen completions of a prompt of a thousand tokens: computed once, and copied to the rows that begin, later ones too."""
    m, asked, fill = small(), [], scheduler.prefill
    kw = dict(n=5, max_new_tokens=[3, 2], seed=3)
    want = sample.generate(m, PROMPTS[1:3], **kw)
    monkeypatch.setattr(scheduler, "prefill", lambda model, graphs, prompts, slots: asked.extend(prompts) or fill(model, graphs, prompts, slots))
    compare(sample.generate(on_slots(m), PROMPTS[1:3], max_rows=3, **kw), want)
    assert asked == PROMPTS[1:3]


def test_what_is_streamed_is_what_is_returned_and_a_part_draws_as_in_the_whole(on_slots):
    """Ids after a row's end on the terminal, or in another row's stream; a rank's share drawn with the numbers of the first prompts."""
    m, seen, kw = on_slots(small()), {}, dict(n=4, max_new_tokens=5, eos_ids=range(120), seed=1)
    whole = sample.generate(m, PROMPTS[:3], max_rows=3, on_token=lambda p, j, t: seen.setdefault((p, j), []).append(t), **kw)
    assert seen == {(p, j): s.ids for p, g in enumerate(whole) for j, s in enumerate(g)}
    compare(sample.generate(m, PROMPTS[1:3], indices=[1, 2], **kw), whole[1:])
    assert sample.generate(m, []) == []


def test_a_model_that_overflows_is_refused(on_slots):
    """A NaN in one row: training would skip updates for hours, and leave metrics that no one can read."""
    m = small()
    m.embed.weight.data[7] = float("nan")
    with pytest.raises(ValueError, match="1 of 3 samples .* NaN or inf"):
        sample.generate(on_slots(m), [[1, 2], [7], [3]], max_new_tokens=1, temperature=0)


def test_more_stop_tokens_than_a_step_compares_with_are_refused(on_fast_path):
    """The last of them would end no row."""
    m = on_fast_path(small())
    with pytest.raises(ValueError, match="129 stop tokens: the GPU engine compares with at most 128"):
        sample.generate(m, PROMPTS[:1], max_new_tokens=1, eos_ids=range(129))


def test_greedy_decoding_sorts_nothing(monkeypatch, on_slots):
    """At the evaluation's top-p; nor is there a step of its own to be captured."""
    m, asked, begin = on_slots(small()), [], Slots.begin
    monkeypatch.setattr(Slots, "begin", lambda self, *args: asked.append(args[:2]) or begin(self, *args))
    for temperature in (0, 0.6):
        sample.generate(m, PROMPTS[:2], max_new_tokens=1, temperature=temperature, top_p=0.95)
    assert asked == [(0, 1.0), (0.6, 0.95)]


def test_a_prompt_of_one_token_beside_one_of_a_thousand(monkeypatch, on_fast_path):
    """Nothing to fill in beside more than a prefill was to hold: the short row's own positions, and memory for the whole of the longest
    prompt, which is computed at once."""
    m, long, kw = small(positions=1300), [i * i % 297 for i in range(1200)], dict(max_new_tokens=[2, 2, 4, 4, 4], temperature=0)
    want = sample.generate(m, prompts := [[5], [1, 2], long[:257], [3, 4, 6], long], **kw)
    run, taken, activations, planned = packed.Prefill.run, [], memory.prefill_bytes, []
    monkeypatch.setattr(packed.Prefill, "run", lambda self, m, rows, *a: taken.append([*map(len, rows)]) or run(self, m, rows, *a))
    monkeypatch.setattr(memory, "prefill_bytes", lambda c, tokens: planned.append(tokens) or activations(c, tokens))
    monkeypatch.setattr(memory, "PREFILL_TOKENS", (256,))
    compare(sample.generate(on_fast_path(m), prompts, max_rows=3, **kw), want)  # the longest beside a short one, where others ended
    assert planned == [1200] and taken == [[1, 256], [2], [1199]]
    assert engine.ENGINES[m][1].prefill_tokens == 1200
