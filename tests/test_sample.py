"""Sampling: what is drawn depends on the prompt and the seed alone, and each log-prob is the full forward's."""

from plumbing import checkpoint

import pytest
import torch

import aqn
import grpo
import lora
import model as M
import sample

CONFIG = M.Config(101, 48, 64, 2, 4, 2, 12, max_position_embeddings=64)
PROMPTS = [[5], [1, 2, 3], list(range(20, 37)), [9, 8, 7, 6, 5, 4], [1, 2, 3]]


@pytest.fixture(scope="module")
def model():
    m = M.build(CONFIG, checkpoint.RandomCheckpoint(1), dtype=torch.float32)
    m.lm_head.weight.mul_(8)  # far from uniform
    m.valid_vocab = 97
    return m


def tokens(groups):
    return [[s.ids for s in g] for g in groups]


def full_logprobs(model, prompt, ids, temperature=1.0):
    logits = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1, : model.valid_vocab]
    return (logits.float() / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


class AsOnAGpu(sample.Decoder):
    """Rows stay until half of them have ended, and attention looks at a whole bucket; nothing is captured."""

    def __init__(self, *args):
        super().__init__(*args)
        self.graphs = True

    def capture(self):
        self.graph = self.drawn = None


@pytest.mark.parametrize("decoder", [sample.Decoder, AsOnAGpu])
def test_rows_that_leave_change_no_other(model, monkeypatch, decoder):
    """A row that moves into a hole must take its keys, values, position and random numbers along; one that has ended draws no more."""
    kw = dict(n=4, max_new_tokens=[9, 4, 12, 7, 10], eos_ids=range(8), seed=3)
    alone = tokens(sample.generate(model, PROMPTS, max_rows=1, **kw))
    assert len({tuple(ids) for group in alone for ids in group}) > 10
    monkeypatch.setattr(sample, "Decoder", decoder)
    for rows in (2, 3, 7, 256):
        assert tokens(sample.generate(model, PROMPTS, max_rows=rows, **kw)) == alone


def test_a_step_that_cannot_be_captured_is_tried_once(model, monkeypatch):
    """A hook that asks the GPU: each further attempt launches the step, as far as that, a second time."""
    want, tried = tokens(sample.generate(model, PROMPTS, max_new_tokens=6)), []
    init = sample.Decoder.__init__
    monkeypatch.setattr(sample.Decoder, "__init__", lambda self, *args: init(self, *args) or setattr(self, "graphs", True))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: tried.append(graph) or (_ for _ in ()).throw(RuntimeError("not permitted")))
    with pytest.warns(UserWarning, match="decoding without a CUDA graph, slowly: not permitted") as warned:
        assert tokens(sample.generate(model, PROMPTS, max_new_tokens=6)) == want
    assert len(tried) == len(warned) == 1


def test_prompts_are_prefilled_once_and_within_the_budget(model, monkeypatch):
    """A prefill a completion costs a group of 16 sixteen times; all prompts at once do not fit beside the cache."""
    filled, hidden = [], M.Transformer.hidden
    monkeypatch.setattr(M.Transformer, "hidden", lambda self, ids, cache=None: filled.append(tuple(ids.shape)) or hidden(self, ids, cache))
    want = tokens(sample.generate(model, PROMPTS, n=3, max_new_tokens=2))
    assert filled[0] == (5, 16) and [shape[1] for shape in filled[1:]] == [1, 1]
    filled.clear()
    monkeypatch.setattr(sample, "PREFILL_TOKENS", 33)
    assert tokens(sample.generate(model, PROMPTS, n=3, max_new_tokens=2)) == want
    assert [shape for shape in filled if shape[1] > 1] == [(2, 16), (2, 16), (1, 16)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_the_full_forward(model, temperature):
    """Temperature comes before the softmax, ids past the tokenizer have no mass, in sampler and trainer alike."""
    groups = sample.generate(model, PROMPTS, n=2, max_new_tokens=20, temperature=temperature)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for s in group:
            assert max(s.ids) < model.valid_vocab and len(s.ids) == len(s.logprobs) == 20
            want = full_logprobs(model, prompt, s.ids, temperature)
            trained = grpo.completion_logprobs(model, [grpo.Completion({}, prompt, s.ids, s.logprobs, False)], temperature)[0][0]
            torch.testing.assert_close(torch.tensor(s.logprobs), want, atol=1e-4, rtol=0)
            torch.testing.assert_close(trained, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_what_is_drawn_is_a_function_of_seed_prompt_sample_and_position(model, top_p):
    """Any of the four left out repeats random numbers: completions that rhyme. top-p must reach the draw."""
    groups = sample.generate(model, PROMPTS, n=3, max_new_tokens=9, top_p=top_p, seed=7)
    for p, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True)):
        for j, s in enumerate(group):
            logits = model(torch.tensor([prompt + s.ids]))[0, len(prompt) - 1 : -1, : model.valid_vocab]
            key = sample.row_keys(7, torch.tensor([p]), torch.tensor([j]))
            u = sample.uniform(key, len(prompt) + torch.arange(9))
            assert s.ids == sample.sample_ids(logits, u, 1.0, top_p)[0].tolist()


@pytest.mark.parametrize(("dtype", "quant", "atol"), [(torch.float64, "none", 1e-6), (torch.float64, "nvfp4", 1e-6), (torch.float16, "none", 2e-2)])
def test_a_dtype_that_onednn_does_not_take(dtype, quant, atol):
    """What model.load and a forward take was an error of oneDNN's here."""
    m = M.build(CONFIG, checkpoint.RandomCheckpoint(1), dtype=dtype, quant=quant)
    [[s]] = sample.generate(m, PROMPTS[1:2], max_new_tokens=5)
    torch.testing.assert_close(torch.tensor(s.logprobs), full_logprobs(m, PROMPTS[1], s.ids), atol=atol, rtol=0)


def test_temperature_zero_is_the_argmax(model):
    """Greedy, whatever the seed."""
    [[s], [t]] = sample.generate(model, PROMPTS[1:3], max_new_tokens=10, temperature=0, seed=5)
    for prompt, x in ((PROMPTS[1], s), (PROMPTS[2], t)):
        logits = model(torch.tensor([prompt + x.ids]))[0, len(prompt) - 1 : -1, : model.valid_vocab]
        assert x.ids == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(x.logprobs), full_logprobs(model, prompt, x.ids), atol=1e-4, rtol=0)


def test_edges(model):
    """No prompt, one prompt of one token, and a prompt that leaves room for one token."""
    assert sample.generate(model, []) == []
    [[s]] = sample.generate(model, [[7]], n=1, max_new_tokens=1)
    assert len(s.ids) == 1
    long = [i % 90 for i in range(63)]
    [[s], [t]] = sample.generate(model, [long, [3]], max_new_tokens=[1, 5])
    assert len(s.ids) == 1 and len(t.ids) == 5
    torch.testing.assert_close(torch.tensor(s.logprobs), full_logprobs(model, long, s.ids), atol=1e-4, rtol=0)


def test_the_limit_is_what_each_prompt_leaves(model, monkeypatch):
    """Where none is given: one long question cut the answers to all others to what it left, 40% right to none."""
    limits = []
    monkeypatch.setattr(sample, "decode", lambda model, rows, *_: limits.append([row.limit for row in rows]))
    sample.generate(model, PROMPTS, max_new_tokens=None)
    monkeypatch.setattr(model.config, "max_position_embeddings", 10_000)
    sample.generate(model, PROMPTS, max_new_tokens=None)
    assert limits == [[64 - len(prompt) for prompt in PROMPTS], [4096] * len(PROMPTS)]


def test_a_forward_or_hook_of_ones_own_is_what_samples(monkeypatch):
    """Dropout put into LoRA's forward once never ran in a rollout."""
    m = M.build(CONFIG, checkpoint.RandomCheckpoint(1), dtype=torch.float32)
    lora.add_lora(m, 2, 4)
    called, own = [], lora.LoRALinear.forward
    monkeypatch.setattr(lora.LoRALinear, "forward", lambda self, x: called.append(self) or own(self, x))
    m.layers[0].attn.o_proj.register_forward_hook(lambda layer, *_: called.append("hook"))
    sample.generate(m, PROMPTS, n=1, max_new_tokens=3)
    assert called.count("hook") == 4 and len(called) == 4 + 4 * len(lora.lora_layers(m))  # a prefill and three steps


def test_lora_and_noise_changed_between_calls(model):
    """Nothing of the last call may be left over: the model is sampled as it is now."""
    m = M.build(CONFIG, checkpoint.RandomCheckpoint(1), dtype=torch.float32)
    m.lm_head.weight.mul_(8)
    lora.add_lora(m, 2, 4)
    kw = dict(n=2, max_new_tokens=8)
    clean = tokens(sample.generate(m, PROMPTS, **kw))
    aqn.set_noise(m, 0.5, seed=1)
    assert tokens(sample.generate(m, PROMPTS, **kw)) != clean
    aqn.set_noise(m, 0.0)
    assert tokens(sample.generate(m, PROMPTS, **kw)) == clean
    for _, layer in lora.lora_layers(m):
        torch.nn.init.normal_(layer.B, std=0.3)
    changed = sample.generate(m, PROMPTS, **kw)
    assert tokens(changed) != clean
    s = changed[2][0]
    torch.testing.assert_close(torch.tensor(s.logprobs), full_logprobs(m, PROMPTS[2], s.ids).detach(), atol=1e-4, rtol=0)


def test_uniform_is_a_pure_function_and_never_0_or_1():
    """u = 1 would run off the end of the distribution; equal keys at neighbouring places would repeat tokens."""
    keys = sample.row_keys(0, torch.arange(200) // 10, torch.arange(200) % 10)
    assert len(set(keys.tolist())) == 200
    assert sample.row_keys(7, *torch.tensor([[3], [1]])).item() == 7781137402269926631  # or a seed draws what it never drew
    assert sample.row_keys(2**63 - 1, *torch.ones(2, 1, dtype=torch.long)) not in keys  # the largest --seed
    u = sample.uniform(keys[:, None], torch.arange(500)[None])
    assert 0 < u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1 and abs(u.mean() - 0.5) < 0.005
    assert abs((u[:, 1:] * u[:, :-1]).mean() - 0.25) < 0.005 and abs((u[1:] * u[:-1]).mean() - 0.25) < 0.005
    assert (u * 2**23 % 1 == 0.5).all()
    assert sample.mix(torch.tensor(sample.GOLDEN)) == 0xE220A8397B1DCDAF - 2**64  # the first number of splitmix64
    assert torch.equal(u[3, 7:9], sample.uniform(keys[3], torch.tensor([7, 8])))


def test_sample_ids_inverts_the_distribution():
    """Drawn frequencies are the probabilities, and an id of probability zero is never drawn, not even at the ends."""
    p = torch.tensor([0.0, 0.1, 0.0, 0.4, 0.3, 0.2, 0.0])
    n = 1000
    u = (torch.arange(n) + 0.5) / n
    ids, logp = sample.sample_ids(p.log().expand(n, -1), u)
    assert torch.equal(ids.bincount(minlength=7), (p * n).round().long())
    torch.testing.assert_close(logp, p.log()[ids])
    ids, _ = sample.sample_ids(p.log().expand(2, -1), torch.tensor([2.0**-24, 1 - 2.0**-24]))
    assert ids.tolist() == [1, 5]


def test_top_p_keeps_the_boundary_token():
    """The id that crosses top_p belongs to the kept set; dropping it leaves nothing when one id has more than top_p."""
    p = torch.tensor([0.05, 0.5, 0.15, 0.3])
    u = (torch.arange(1000) + 0.5) / 1000
    for top_p, kept in ((0.1, {1}), (0.49, {1}), (0.6, {1, 3}), (0.9, {1, 2, 3}), (1.0, {0, 1, 2, 3})):
        ids, logp = sample.sample_ids(p.log().expand(1000, -1), u, top_p=top_p)
        assert set(ids.tolist()) == kept
        torch.testing.assert_close(logp, p.log()[ids])


@pytest.mark.parametrize("kw", [{"n": 0}, {"max_new_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}])
def test_arguments_that_would_draw_something_else_are_errors(model, kw):
    """An empty result, rows that never end, the least likely ids first, or always the last one."""
    with pytest.raises(AssertionError):
        sample.generate(model, PROMPTS[:2], **{"max_new_tokens": 4, **kw})


def test_prompts_that_do_not_fit(model):
    """An empty prompt has nothing to condition on; an id past the embedding would read foreign memory."""
    with pytest.raises(ValueError, match="positions"):
        sample.generate(model, PROMPTS[:2], max_new_tokens=62)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        sample.generate(model, [[1], []], max_new_tokens=2)
    for bad in (101, -1):
        with pytest.raises(ValueError, match=rf"prompt 0: ids .*{bad}\b.* wrong tokenizer"):
            sample.generate(model, [[1, bad]], max_new_tokens=2)


def test_a_model_that_overflows_is_refused(model):
    """A NaN in one row: training would skip updates for hours, and leave metrics that no one can read."""
    m = M.build(CONFIG, checkpoint.RandomCheckpoint(1), dtype=torch.float32)
    m.embed.weight.data[7] = float("nan")
    with pytest.raises(ValueError, match="1 of 3 samples .* NaN or inf"):
        sample.generate(m, [[1, 2], [7], [3]], max_new_tokens=1, temperature=0)


def test_on_token_streams_what_is_returned(model):
    """The stream and the result are the same ids, in order."""
    seen = {}
    groups = sample.generate(model, PROMPTS[:2], n=2, max_new_tokens=6, eos_ids=range(30),
                             on_token=lambda p, j, t: seen.setdefault((p, j), []).append(t))
    assert seen == {(p, j): s.ids for p, g in enumerate(groups) for j, s in enumerate(g)}
