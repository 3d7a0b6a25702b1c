"""Noise schedules and noise as separate state on the RMSNorms of a tiny random model."""
import copy
import types

from plumbing import checkpoint, flags

import pytest
import torch

import aqn
import model as qwen
import sample
import train
from tests.conftest import tiny

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def test_schedule_gives_the_published_levels():
    """An off-by-one in the stage: noise in the first interval, or a last level that never reaches the end."""
    want = [0, 1e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1e-4]
    got = [aqn.sigma(s, 600, 1e-2, 1e-4) for s in range(600)]
    for stage, level in enumerate(want):
        assert len(set(got[60 * stage : 60 * stage + 60])) == 1
        assert got[60 * stage] == pytest.approx(level, rel=1e-3)
    assert got[59] == 0 and got[60] == 1e-2 and got[-1] == 1e-4


@pytest.mark.parametrize("schedule", aqn.SCHEDULES)
def test_every_schedule_decays_from_start_to_exactly_the_end(schedule):
    """A schedule that stops above its end level, or rises on the way."""
    for stages in (3, 10, 37):
        got = [aqn.sigma(s, 111, 5e-2, 5e-4, stages, schedule) for s in range(111)]
        noisy = [x for x in got if x]
        assert noisy[0] == 5e-2 and noisy[-1] == 5e-4
        assert noisy == sorted(noisy, reverse=True) and len(set(noisy)) == stages - (schedule != "eq8")
    assert aqn.sigma(1, 2, 5e-2, 5e-4, stages=2, schedule=schedule) == 5e-4
    assert aqn.sigma(500, 100, 5e-2, 5e-4, 10, schedule) == 5e-4  # past the end: the last level


def test_a_schedule_of_ones_own_is_a_row(monkeypatch):
    """Half the way, noise; then as much as at the end: a script adds it, and the flag takes it."""
    monkeypatch.setitem(aqn.SCHEDULES, "half", lambda start, end, x, n: start if x < 0.5 else end)
    assert [aqn.sigma(s, 5, 0.3, 0.1, 5, "half") for s in range(5)] == [0.0, 0.3, 0.3, 0.1, 0.1]
    assert flags.parse(train.COMMAND, ["--aqn-schedule", "half"]).aqn_schedule == "half"


def test_schedules_by_hand_at_one_inner_stage():
    """A formula swapped for another one: they agree at both ends and differ only between."""
    got = {s: aqn.sigma(4, 10, 1.0, 0.01, 10, s) for s in aqn.SCHEDULES}  # noisy stage i = 3 of 0..8, x = 3/8
    assert got["exponential"] == pytest.approx(0.17782794)
    assert got["linear"] == pytest.approx(0.62875)
    assert got["cosine"] == pytest.approx(0.69442830)
    assert got["logarithmic"] == pytest.approx(0.37537954)
    assert got["eq8"] == pytest.approx(0.12915497)


def test_noise_reaches_every_layer_norm_and_only_those():
    """A type test that matches no module, so that the noise never fires."""
    m = tiny()
    before = {k: v.clone() for k, v in m.state_dict().items()}
    clean_logits = m(IDS)
    aqn.set_noise(m, 0.1, seed=3)
    layer_norms = [n for block in m.layers for n in (block.input_layernorm, block.post_attention_layernorm)]
    for norm in layer_norms:
        assert norm.noise.dtype == torch.float32 and norm.noise.count_nonzero() == 32
        assert 0.05 < norm.noise.std() < 0.15
    assert len({tuple(n.noise.tolist()) for n in layer_norms}) == 6  # each norm draws its own
    assert not m.norm.noise.any()
    assert (m(IDS) - clean_logits).abs().max() > 1e-3
    assert all(v.equal(before[k]) for k, v in m.state_dict().items())  # no weight was touched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigma_zero_restores_the_clean_output_bit_for_bit(dtype):
    """Noise added to the weight and taken off again leaves rounding behind."""
    m = tiny(dtype=dtype)
    want = m(IDS)
    for seed in range(5):
        aqn.set_noise(m, 0.3, seed)
        assert not m(IDS).equal(want)
    aqn.set_noise(m, 0.0)
    assert m(IDS).equal(want)


def test_noise_is_written_in_place():
    """A CUDA graph that captured the buffers would go on reading the old noise."""
    m = tiny()
    where = [n.noise.data_ptr() for pair in aqn.norms(m) for n in pair]
    aqn.set_noise(m, 0.1, 1)
    with aqn.clean(m):
        pass
    aqn.set_noise(m, 0.0)
    assert [n.noise.data_ptr() for pair in aqn.norms(m) for n in pair] == where


def test_noise_depends_on_seed_and_step_only():
    """Ranks that disagree about the noise sample from different policies; a resume must redraw the same."""
    a, b = tiny(), tiny(seed=7, dtype=torch.bfloat16)  # other weights, other dtype
    aqn.set_noise(a, 0.1, aqn.noise_seed(5, 12))
    torch.manual_seed(99)
    torch.randn(3)
    aqn.set_noise(b, 0.1, aqn.noise_seed(5, 12))
    for p, q in zip(aqn.norms(a), aqn.norms(b), strict=True):
        assert all(x.noise.equal(y.noise) for x, y in zip(p, q, strict=True))
    seen = {aqn.noise_seed(s, t) for s in range(30) for t in range(30)}
    assert len(seen) == 900 and all(0 <= s < 2**63 for s in seen) and aqn.noise_seed(5, 12) == 2413053827261848919
    first = a.layers[0].input_layernorm.noise.clone()
    aqn.set_noise(a, 0.1, aqn.noise_seed(5, 13))
    assert not a.layers[0].input_layernorm.noise.equal(first)
    state = torch.get_rng_state()
    aqn.set_noise(a, 0.1, 1)
    assert torch.get_rng_state().equal(state)  # drawing leaves the sampler's stream alone


def noisy_o_proj(module=__name__):
    """The tiny model with a noise of one's own on what o_proj reads, by a forward from a script, or as if model.py had been edited."""
    m = tiny()
    o = m.layers[0].attn.o_proj
    o.register_buffer("noise", torch.full((32,), 0.5))
    forward = (lambda self, x: qwen.Linear.forward(self, x * (1 + self.noise))).__code__
    o.forward = types.MethodType(types.FunctionType(forward, {**globals(), "__name__": module}), o)
    return m


@pytest.mark.parametrize("module", [__name__, "model"])
def test_a_noise_in_a_linear_reaches_the_sampler(module):
    """On the CPU the sampler puts linears of its own in the model's place: the noise was in no rollout, and nothing said so."""
    m, prompt = noisy_o_proj(module), [3, 1, 4]
    [[s]] = sample.generate(m, [prompt], 1, 8)
    logp = m(torch.tensor([prompt + s.ids]))[0, 2:-1].log_softmax(-1)  # (8, V)
    torch.testing.assert_close(torch.tensor(s.logprobs), logp.gather(1, torch.tensor(s.ids)[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    aqn.set_noise(m, 0.0)
    assert (m(torch.tensor([prompt + s.ids]))[0, 2:-1].log_softmax(-1) - logp).abs().max() > 1e-2


def test_the_noise_is_gaussian():
    """Uniform noise of the same spread, or one whose tails are cut, would pass every test of its size."""
    m = torch.nn.Module()
    m.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(8))
    for block in m.layers:
        block.input_layernorm, block.post_attention_layernorm = qwen.RMSNorm(8192, 1e-6), qwen.RMSNorm(8192, 1e-6)
    aqn.set_noise(m, 0.02, seed=3)
    z = torch.cat(aqn.buffers(m)).double() / 0.02  # 131,072 numbers
    assert abs(z.mean()) < 0.01 and abs(z.std() - 1) < 0.01 and abs((z**3).mean()) < 0.03 and abs((z**4).mean() - 3) < 0.06
    for tail, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
        assert abs((z.abs() > tail).double().mean() - share) < 4 * (share / len(z)) ** 0.5


def test_noise_equals_row_scaling_of_the_weights_behind_it():
    """Sec. 3.3, Eq. 10: noise on the norm is (Z / w + 1) on the input channels of q,k,v and of gate,up, nothing else."""
    noisy = tiny()
    scaled = copy.deepcopy(noisy)
    aqn.set_noise(noisy, 0.2, 11)
    for (pre, post), block in zip(aqn.norms(noisy), scaled.layers, strict=True):
        block.attn.qkv_proj.weight *= pre.noise / pre.weight + 1  # (N, C) * (C,)
        block.mlp.gate_up_proj.weight *= post.noise / post.weight + 1
    torch.testing.assert_close(noisy(IDS), scaled(IDS), rtol=1e-4, atol=1e-4)
    assert (noisy(IDS) - tiny()(IDS)).abs().max() > 1e-2


def test_clean_block_is_clean_and_restores_the_noise():
    """Algorithm 1: the update must see the clean policy, and the next rollout of the same step the same noise."""
    m = tiny()
    want = m(IDS)
    aqn.set_noise(m, 0.1, 2)
    noisy = m(IDS)
    with aqn.clean(m):
        assert m(IDS).equal(want)
    assert m(IDS).equal(noisy)
    with pytest.raises(KeyError), aqn.clean(m):
        raise KeyError
    assert m(IDS).equal(noisy)
    with aqn.clean(m):  # a hook of one's own that makes its buffer at its first call
        m.layers[0].mlp.register_buffer("noise", torch.ones(3), persistent=False)
    assert m(IDS).equal(noisy) and m.layers[0].mlp.noise.equal(torch.ones(3))


def test_a_noise_of_ones_own_is_cleared_with_the_others():
    """A buffer called noise in any module: what set_noise and `clean` leave there reaches the update and the evaluation."""
    m = tiny()
    own = m.layers[1].mlp
    own.register_buffer("noise", torch.ones(4), persistent=False)
    with aqn.clean(m):
        assert not own.noise.any()
    assert own.noise.all()
    aqn.set_noise(m, 0.1, 1)
    assert not own.noise.any() and m.layers[1].input_layernorm.noise.any()


def test_a_noise_may_be_a_modules_own_from_its_beginning(monkeypatch):
    """A buffer registered in __init__, as noise.md has it, stayed without memory when the weights came: a traceback of torch's."""
    init = qwen.MLP.__init__

    def with_noise(self, *args):
        init(self, *args)
        self.register_buffer("noise", torch.zeros(5, dtype=torch.float64), persistent=False)

    monkeypatch.setattr(qwen.MLP, "__init__", with_noise)
    m = qwen.build(qwen.Config(31, 32, 48, 3, 4, 2, 8), checkpoint.RandomCheckpoint(1), dtype=torch.float32)
    assert all(layer.mlp.noise.tolist() == [0.0] * 5 for layer in m.layers)
    assert m.layers[0].mlp.noise.dtype == torch.float64
    m.layers[0].mlp.noise.fill_(1.0)
    aqn.set_noise(m, 0.1, 1)
    assert not m.layers[0].mlp.noise.any()


def test_a_noise_that_never_ends_is_gone_where_the_policy_must_be_clean(monkeypatch):
    """`clean` asked set_noise for a sigma of 0; one of someone's own that knows no sigma filled the buffers again, in evaluations too."""
    m = tiny()
    monkeypatch.setattr(aqn, "set_noise", lambda model, sigma, seed=0: [norm.noise.fill_(1.0) for pair in aqn.norms(model) for norm in pair])
    aqn.set_noise(m, 0.0)
    with aqn.clean(m):
        assert not any(b.any() for b in aqn.buffers(m))
    assert all(norm.noise.all() for pair in aqn.norms(m) for norm in pair)
    aqn.clear(m)
    assert not any(b.any() for b in aqn.buffers(m))


@pytest.mark.parametrize("argv", [[], ["--aqn-schedule", "linear", "--aqn-end", "1e-3"], ["--aqn-schedule", "eq8", "--aqn-start", "2e-2"]])
def test_the_command_prints_what_training_uses(argv, capsys):
    """A default of its own, or a flag that it drops: the levels that are looked at are not those of the run."""
    a = flags.parse(train.COMMAND, ["--model", "m", "--steps", "40", *argv])
    used = [aqn.sigma(s, 40, a.aqn_start, a.aqn_end, schedule=a.aqn_schedule) for s in range(40)]
    aqn.main(["--steps", "40", *argv])
    begins = [s for s in range(40) if s == 0 or used[s] != used[s - 1]]
    assert capsys.readouterr().out.splitlines() == [f"from step {s:5d} on: sigma {used[s]:.3e}" for s in begins]
    assert len(begins) == 10
    for bad in (["--aqn-end", "0"], ["--aqn-start", "nan"], ["--aqn-schedule", "step"], ["--steps", "0"], ["--no-such-flag"]):
        with pytest.raises(ValueError, match=bad[0]):
            aqn.main(bad)


@pytest.mark.gpu
def test_gpu_noise_equals_the_cpus():
    """A device generator would give every kind of device its own noise."""
    a, b = tiny(), tiny().cuda()
    aqn.set_noise(a, 0.1, 4)
    aqn.set_noise(b, 0.1, 4)
    for p, q in zip(aqn.norms(a), aqn.norms(b), strict=True):
        assert all(x.noise.equal(y.noise.cpu()) for x, y in zip(p, q, strict=True))
