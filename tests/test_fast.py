"""The door between the plain functions and the fast ones: what is replaced, what is refused, and that both draw and train alike.

On the CPU the kernels run in Triton's interpreter, in float32, where both do the same; -m gpu compares them in 16 bits."""
import copy
import dataclasses
import functools
import importlib
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

from plumbing import metrics

import pytest
import torch

pytest.importorskip("triton")

import aqn
import fast
import grpo
import lora
import model as M
import nvfp4
import sample
import train
from fast import engine, gemm, layout, linears
from tests import conftest
from tests.conftest import first_blocks, rows_of
from tests.test_decode import GPU, ONE, PROMPTS, check_gaps, random_model, tokens, with_head_norms

gpu = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[1]
LONGER = 4.0, 0.1, 0.5  # Config.rope_scaling: most pairs turn slower


def test_each_row_of_the_table_names_functions_and_a_test_that_exist():
    """A function that was renamed, or whose equality nothing holds any more: the table would still promise it."""
    for plain, quick, _, test in fast.TABLE:
        for place in (plain, f"fast.{quick}"):
            module, _, name = place.rpartition(".")
            assert callable(getattr(importlib.import_module(module), name, None)), place
        file, _, name = test.partition("::")
        assert re.search(rf"(?m)^def {name}\(", (ROOT / "tests" / file).read_text()), test


def test_what_the_plain_functions_hand_over_is_in_the_table():
    """A function that has a faster twin which no test compares it with."""
    text = "".join((ROOT / name).read_text() for name in ("sample.py", "grpo.py", "model.py", "nvfp4.py", "lora.py", "aqn.py"))
    handed = {*re.findall(r"model\.fast\.(\w+)\(", text)} - {"knows"}
    assert handed and handed <= {row[1].rpartition(".")[2] for row in fast.TABLE}


# ---- what is refused


def card(head_dim=64, **weight):
    """What fast.refusal looks at, of a model on an H100."""
    weight = dict(is_cuda=True, device="cuda:0", dtype=torch.bfloat16) | weight
    embed, config = SimpleNamespace(weight=SimpleNamespace(**weight)), SimpleNamespace(head_dim=head_dim)
    return SimpleNamespace(embed=embed, config=config, layers=[], fast=None)


def with_a_scale(fmt, byte):
    """A card's model of which one block has this scale."""
    m = card()
    m.layers = random_model(ONE, fmt).layers
    nvfp4.scale_bits(m.layers[0].mlp.down_proj.base.scale)[3, 1] = byte
    return m


def with_a_narrow_projection():
    """A card's model of 192 columns."""
    m = card()
    m.layers = random_model(dataclasses.replace(ONE, intermediate_size=192), "nvfp4").layers
    return m


@pytest.mark.parametrize(("model", "capability", "says"), [
    (card(is_cuda=False), (9, 0), "not on a CUDA device"), (card(), (7, 5), "an Ampere card"),
    (card(dtype=torch.float32), (9, 0), "in torch.float32"), (card(head_dim=80), (9, 0), "heads of 32, 64 or 128 numbers, not 80"),
    (card(), (8, 0), "a hook"), (card(dtype=torch.float16), (9, 0), "in torch.float16"),
    (with_a_scale("mxfp4", 155), (9, 0), "layers.0.mlp.down_proj has a block scale that the kernels do not carry"),
    (with_a_scale("nvfp4", 0x81), (9, 0), "layers.0.mlp.down_proj has a block scale that the kernels do not carry"),
    (with_a_narrow_projection(), (9, 0), "layers.0.mlp.down_proj is 128 x 192, no multiple of 8 x 128")])
def test_what_the_kernels_do_not_take_is_refused_with_a_reason(monkeypatch, capsys, model, capability, says):
    """Heads of 80 would be an error from a compiler, a scale of 2^28, or a negative one, another number; with auto it is one line."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(engine, "own_code", lambda model: "a hook of your own")
    assert says in fast.install(model) and model.fast is None
    with pytest.raises(ValueError, match=f"--engine fast: .*{says}.*; take --engine auto or plain"):
        sample.set_engine(model, "fast")
    assert capsys.readouterr().err == ""
    for choice in ("plain", "auto"):
        sample.set_engine(model, choice)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == model.embed.weight.is_cuda and all(line.startswith("engine: plain, since ") and says in line for line in told)


def test_a_model_on_a_cpu_is_left_as_it_was():
    """Laid out for a tensor core that is not there, its codes would be decoded as other weights."""
    m = random_model(ONE, "nvfp4")
    before = {name: b.clone() for name, b in m.named_buffers()}
    assert fast.install(m) == "the model is not on a CUDA device" and m.fast is None
    assert all(torch.equal(b, before[name]) for name, b in m.named_buffers())
    assert {type(linear.base) for _, linear in M.projections(m)} == {nvfp4.QuantLinear}


# ---- codes, laid out and back


@pytest.mark.parametrize("rank", [0, 3])
def test_one_copy_of_the_codes_at_any_time(monkeypatch, rank):
    """A 72B model that fits the card once does not fit it twice: each layer's codes go before the next layer's are laid out."""
    m, alive, pack = random_model(M.Config(301, 128, 128, 3, 4, 2, 32), "nvfp4", rank), [], layout.pack
    codes = [weakref.ref(linear.base.codes) for _, linear in M.projections(m)]
    monkeypatch.setattr(layout, "pack", lambda *args: alive.append(sum(c() is not None for c in codes)) or pack(*args))
    fast.tile(m)
    assert alive == [*range(12, 0, -1)] and not any(c() for c in codes)


@pytest.mark.parametrize("fmt", nvfp4.FORMATS)
@torch.no_grad()
def test_a_linear_that_was_laid_out_is_the_same_linear(fmt):
    """With a bias, on the CPU; and back."""
    q = nvfp4.quantize(torch.randn(24, 256, generator=torch.Generator().manual_seed(0)), fmt)
    m, x = random_model(ONE), torch.randn(3, 2, 256)
    plain = m.layers[0].attn.qkv_proj = nvfp4.QuantLinear(q, {"q_proj": 16, "k_proj": 8}, torch.arange(24.0))
    y, dense = plain(x), plain.dense()
    fast.tile(m)
    plain.copy = None
    assert type(plain) is gemm.TiledLinear and not torch.equal(plain.codes, q.codes) and torch.equal(plain.dense(), dense)
    torch.testing.assert_close(plain(x), y)
    fast.uninstall(m)
    assert type(plain) is nvfp4.QuantLinear and torch.equal(plain.codes, q.codes) and torch.equal(plain(x), y)


def test_a_model_that_was_laid_out_is_not_laid_out_again():
    """Its codes would be taken for a checkpoint's: as many bytes, other weights."""
    m = random_model(ONE, "nvfp4")
    fast.tile(m)
    before = [linear.base.codes for _, linear in M.projections(m)]
    fast.tile(m)
    assert all(linear.base.codes is old for (_, linear), old in zip(M.projections(m), before, strict=True))


@pytest.mark.parametrize(("quant", "rank"), [("nvfp4", 3), ("mxfp4", 0), ("none", 3)])
@torch.no_grad()
def test_uninstall_gives_the_plain_model_back_bit_for_bit(on_fast_path, quant, rank):
    """After a hook of one's own the run goes on with these modules; what the fast functions kept is freed."""
    m, ids = random_model(ONE, quant, rank), torch.tensor([[1, 2, 3]])
    before, logits = {name: t.clone() for name, t in m.state_dict().items()}, m(ids)
    kinds = [(path, type(linear), type(linear.base)) for path, linear in M.projections(m)]
    sample.generate(on_fast_path(m), PROMPTS[:1], max_new_tokens=1)
    assert m in engine.ENGINES and m in linears.LINEARS
    fast.uninstall(m)
    assert m.fast is None and m not in engine.ENGINES and m not in linears.LINEARS
    assert [(path, type(linear), type(linear.base)) for path, linear in M.projections(m)] == kinds
    after = m.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(t, before[name]) for name, t in after.items())
    assert torch.equal(m(ids), logits)


def test_an_installed_model_is_not_written_as_a_checkpoint(on_fast_path):
    """Its codes lie in another order: the file would hold other weights."""
    m = random_model(ONE, "nvfp4", rank=0)
    want = dict(M.tensors(m))
    with pytest.raises(ValueError, match="fast.uninstall"):
        dict(M.tensors(on_fast_path(m)))
    with pytest.raises(ValueError, match="layers.0.self_attn.q_proj: .* fast.uninstall"):  # a block alone, as converting streams them
        dict(M.tensors(m.layers[0], "layers.0"))
    fast.uninstall(m)
    assert all(torch.equal(t.view(torch.uint8), want[name].view(torch.uint8)) for name, t in M.tensors(m))


# ---- code of one's own


class NoisyMLP(M.MLP):
    def forward(self, x):
        return super().forward(x * (1 + self.noise))


class Halved(M.Transformer):
    def hidden(self, ids, cache=None):
        return 0.5 * super().hidden(ids, cache)


def change(m, what):
    """A forward, a hook or a noise of one's own in the first block; "base": a hook on what has the codes; "bias": where models have none
    (a steering vector); "hidden", "rope": the model's own, by its class or itself."""
    mlp = m.layers[0].mlp
    if what == "forward":
        own = mlp.forward
        mlp.forward = lambda x: 0.5 * own(x)
    elif what == "hook":
        m.layers[0].attn.o_proj.register_forward_hook(lambda module, args, y: 0.5 * y)
    elif what == "base":
        m.layers[0].attn.o_proj.base.register_forward_hook(lambda module, args, y: 0.5 * y)
    elif what == "size":  # one number for all channels: the kernels would read behind it
        m.layers[0].input_layernorm.noise = torch.full((1,), 0.5)
    elif what == "stride":  # a column of a table: the kernels would read along its rows
        m.layers[0].input_layernorm.noise = torch.linspace(-1, 1, 2 * m.config.hidden_size).view(-1, 2)[:, 0]
    elif what.endswith("bias"):
        linear = m.layers[0].mlp.down_proj if what == "bias" else m.layers[0].mlp.gate_up_proj
        linear.base.bias = torch.nn.Parameter(torch.linspace(-1, 1, linear.shape[0]), False)
    elif what == "torch":
        m.norm = torch.nn.LayerNorm(m.config.hidden_size).requires_grad_(False)
    elif what == "hidden":
        m.__class__ = Halved
    elif what == "rope":
        own = m.rope
        m.rope = lambda pos: own(2 * pos)
    else:
        mlp.__class__ = NoisyMLP
        mlp.register_buffer("noise", torch.linspace(-0.5, 0.5, m.config.hidden_size))


OWN = {"forward": "layers.0.mlp has a class, a forward or a hook of your own",
       "hook": "layers.0.attn.o_proj has a class, a forward or a hook of your own",
       "base": "layers.0.attn.o_proj.base has a class, a forward or a hook of your own",
       "bias": "layers.0.mlp.down_proj has a bias, and the kernels add none there",
       "wide bias": "layers.0.mlp.gate_up_proj has a bias, and the kernels add none there",
       "torch": "norm has a class, a forward or a hook of your own",
       "stride": "layers.0.input_layernorm.noise is a noise of your own, and the kernels read that of the norms alone",
       "size": "layers.0.input_layernorm.noise is a noise of your own, and the kernels read that of the norms alone",
       "hidden": "model.Transformer.hidden is your own, and the kernels do not call it",
       "rope": "model.Transformer.rope is your own, and the kernels do not call it",
       "noise": "layers.0.mlp.noise is a noise of your own, and the kernels read that of the norms alone"}


@pytest.mark.parametrize("what", OWN)
def test_code_of_ones_own_samples_by_the_plain_functions(on_fast_path, capsys, what):
    """The kernels would pass over it, and nothing would say so; nor may the line be printed for each rollout."""
    m, kw = random_model(ONE, "nvfp4"), dict(n=2, max_new_tokens=3, seed=1)
    same = copy.deepcopy(m)
    change(same, what)
    want = sample.generate(same, PROMPTS[:3], **kw)
    change(on_fast_path(m), what)
    for _ in range(2):
        assert sample.generate(m, PROMPTS[:3], **kw) == want
    assert m.fast is None and capsys.readouterr().err == f"engine: plain from here on, since {OWN[what]}\n"


@pytest.mark.parametrize("what", OWN)
def test_code_of_ones_own_trains_by_the_plain_functions(on_fast_path, capsys, what):
    """Installed between a rollout and its update, as by a script that hooks the trainer alone."""
    m, settings = random_model(ONE, "nvfp4"), conftest.settings(micro_batch_tokens=20)
    batch = [grpo.Completion({}, [1, 2, 3], [4 + i] * (1 + i), [-5.0] * (1 + i), True, advantage=i - 1.0) for i in range(3)]
    same, found = copy.deepcopy(m), []
    change(same, what)
    change(on_fast_path(m), what)
    for model in (same, m):
        sums = grpo.backward(model, batch, settings)
        found.append([*sums.values(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(map(torch.equal, *found))
    assert m.checkpointing and m.fast is None and capsys.readouterr().err == f"engine: plain from here on, since {OWN[what]}\n"


def test_code_of_ones_own_has_its_logprobs_by_the_plain_functions(on_fast_path):
    """A hook for one pass, of a reference say, within an update whose micro-batches are planned already."""
    m, batch = random_model(ONE, "nvfp4"), [grpo.Completion({}, [1, 2, 3], [4, 5], [-5.0] * 2, True)]
    same = copy.deepcopy(m)
    change(same, "hook")
    change(on_fast_path(m), "hook")
    assert torch.equal(*(grpo.completion_logprobs(model, batch, 1.0)[0] for model in (same, m))) and m.fast is None


def test_a_run_plans_no_rollouts_for_code_of_ones_own(on_fast_path, capsys):
    """An engine with keys and values for all rows, which no rollout would use."""
    m = on_fast_path(random_model(ONE, "nvfp4"))
    change(m, "hook")
    m.fast.plan_rollouts(m, SimpleNamespace(), 64)
    assert m.fast is None and m not in engine.ENGINES and OWN["hook"] in capsys.readouterr().err


@pytest.mark.parametrize("patch", ["class", "wraps", "no_grad", "object", "base", "method", "before", "after", "back", "all", "learned"])
def test_what_counts_as_ones_own_code(monkeypatch, patch):
    """Dropout put into LoRA's forward, under whatever name: functools.wraps copies that of the module it wraps, a decorator is torch's."""
    m = random_model(ONE, "nvfp4", rank=2)
    assert engine.own_code(m) is None
    fast.tile(m)
    with lora.disabled(m):
        assert engine.own_code(m) is None
    layer, own = m.layers[0].attn.o_proj, lora.LoRALinear.forward

    def forward(self, x):
        return own(self, x)

    if patch == "class":
        monkeypatch.setattr(lora.LoRALinear, "forward", forward)
    elif patch == "wraps":
        monkeypatch.setattr(lora.LoRALinear, "forward", functools.wraps(own)(forward))
    elif patch == "no_grad":
        monkeypatch.setattr(lora.LoRALinear, "forward", torch.no_grad()(forward))
    elif patch == "object":
        layer.forward = functools.partial(forward, layer)
    elif patch == "base":
        monkeypatch.setattr(gemm.TiledLinear, "forward", lambda self, x: x)
    elif patch == "method":  # the kernels ask for none, and `tile` would leave its codes as they are
        layer.base.__class__ = type("Own", (gemm.TiledLinear,), {"dense": lambda self: 0, "__module__": "__main__"})
    elif patch == "all":
        with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
            assert engine.own_code(m) == "all modules have a hook of your own"
        return
    elif patch == "learned":  # its size would get no gradient
        m.layers[0].input_layernorm.noise = torch.ones(m.config.hidden_size, requires_grad=True) * 2
        assert "input_layernorm.noise is a noise of your own" in engine.own_code(m)
        return
    else:
        way = {"before": "forward_pre", "after": "forward", "back": "full_backward"}[patch]
        getattr(layer, f"register_{way}_hook")(lambda *_: None)
    assert engine.own_code(m).endswith("has a class, a forward or a hook of your own")


@torch.no_grad()
def test_blocks_that_a_script_leaves_out_or_norms_are_drawn_as_the_modules_do(on_fast_path):
    """A decode step read a prompt's keys in another layer of the cache than they lie in, and passed over norms that config.json lacks."""
    m = random_model(dataclasses.replace(ONE, num_hidden_layers=3), "nvfp4")
    m.layers = torch.nn.ModuleList([m.layers[2], m.layers[0]])
    m.layers[1].attn.q_norm, m.layers[1].attn.k_norm = M.RMSNorm(32, 1e-6), M.RMSNorm(32, 1e-6)
    m.layers[1].requires_grad_(False)
    want = tokens(sample.generate(m, PROMPTS[:3], n=2, max_new_tokens=4, seed=1))
    assert tokens(sample.generate(on_fast_path(m), PROMPTS[:3], n=2, max_new_tokens=4, seed=1)) == want and m.fast


@pytest.mark.parametrize("how", ["function", "wraps", "partial", "subclass", "factory", "linear", "weight"])
def test_a_plain_function_of_ones_own_goes_back_to_the_plain_functions(monkeypatch, on_fast_path, capsys, how):
    """Noise on the keys of the cache, a sampler of one's own: the kernels compute these themselves, and would pass over them."""
    m, drawn, kw = random_model(ONE, "nvfp4"), sample.draw, dict(n=2, max_new_tokens=3, seed=1)
    plain = sample.generate(m, PROMPTS[:3], **kw)
    if how in ("subclass", "factory"):
        class Loud(M.KVCache):
            def write(self, layer, k, v, pos):
                return super().write(layer, k * 2, v * 2, pos)

        monkeypatch.setattr(M, "KVCache", Loud if how == "subclass" else lambda *args: Loud(*args))
        name = "model.KVCache.write"
    elif how == "linear":
        own = nvfp4.QuantLinear.forward
        monkeypatch.setattr(nvfp4.QuantLinear, "forward", lambda self, x: 2 * own(self, x))
        name = "nvfp4.QuantLinear.forward"
    elif how == "weight":
        own = nvfp4.QuantLinear.q.fget
        monkeypatch.setattr(nvfp4.QuantLinear, "q", property(lambda self: dataclasses.replace(own(self), global_scale=2 * self.global_scale)))
        for _, linear in M.projections(m):
            linear.base.copy = None
        name = "nvfp4.QuantLinear.q.fget"
    else:
        def lowest(logits, *rest):
            return drawn(-logits, *rest)

        own = {"wraps": functools.wraps(drawn)(lowest), "partial": functools.partial(lowest)}.get(how, lowest)
        monkeypatch.setattr(sample, "draw", own)
        name = "sample.draw"
    want = sample.generate(m, PROMPTS[:3], **kw)
    assert want != plain and sample.generate(on_fast_path(m), PROMPTS[:3], **kw) == want and m.fast is None
    assert capsys.readouterr().err == f"engine: plain from here on, since {name} is your own, and the kernels do not call it\n"


# of what the plain path calls: what the fast one calls as well, and how rows of ids become tensors
SHARED = {"model": {"to_device", "padded", "KVCache.__init__", "KVCache.rows"},
          "sample": {"generate", "check_prompts", "decode", "row_keys", "Row.ended"}}


def test_what_the_kernels_bypass_is_all_that_the_plain_functions_call():
    """A function that joins the plain path and is in neither list: replaced by a script, it would be passed over on a card."""
    called, files = {"model": set(), "sample": set()}, {M.__file__: "model", sample.__file__: "sample"}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename in files and "<" not in code.co_qualname and code.co_name != "forward":
            called[files[code.co_filename]].add(code.co_qualname)

    m, settings = random_model(ONE, "nvfp4", rank=2), conftest.settings(old_logp="trainer")
    sys.setprofile(note)
    try:
        groups = sample.generate(m, PROMPTS[:3], n=2, max_new_tokens=4, top_p=0.9)
        batch = [grpo.Completion({}, p, s.ids, s.logprobs, s.finished) for p, g in zip(PROMPTS, groups, strict=False) for s in g]
        grpo.record_trainer_logprobs(m, batch, settings)
        grpo.backward(m, batch, settings)
    finally:
        sys.setprofile(None)
    for home, names in called.items():
        assert names - SHARED[home] == {*engine.BYPASSED[home]}


@pytest.mark.parametrize("name", ["embed", "layers.0.attn.q_norm", "layers.0.attn.qkv_proj.base"])
def test_weights_that_are_trained_go_back_to_the_plain_functions(on_fast_path, capsys, name):
    """They would get no gradient; also where they are unfrozen beside an adapter, after the kernels were installed."""
    m = on_fast_path(with_head_norms(ONE))
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        m.get_submodule(norm).requires_grad_(True)
    assert m.fast.knows(m)  # these get theirs
    m.get_submodule(name).requires_grad_(True)
    assert not m.fast.knows(m) and m.fast is None
    assert f"since {name} has parameters that are trained, and the kernels train adapters and" in capsys.readouterr().err


# ---- plain and fast, draws and updates


def some_steps(m):
    """[(completions' ids, metrics)] of two steps of rollout, reward and update."""
    optimizer, settings, found = grpo.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2), conftest.settings(micro_batch_tokens=24), []
    for step in range(2):
        aqn.set_noise(m, 0.1, seed=step)
        groups = [[grpo.Completion({}, prompt, s.ids, s.logprobs, True, reward=sum(s.ids) / 1000) for s in group]
                  for prompt, group in zip(PROMPTS[:2], sample.generate(m, PROMPTS[:2], 2, 2, seed=step), strict=True)]
        grpo.set_advantages(groups)
        aqn.clear(m)
        sums, norm = grpo.update(m, optimizer, sum(groups, []), settings)
        found.append(([c.ids for group in groups for c in group], metrics.mean_metrics(sums) | {"grad_norm": norm}))
    return found


def test_plain_and_fast_draw_and_train_alike(on_fast_path):
    """The same tokens, and the metrics of each update to float32's rounding: what one step does wrong, the next one shows."""
    config = dataclasses.replace(ONE, rope_scaling=LONGER)
    plain, other = (some_steps(m) for m in (random_model(config), on_fast_path(random_model(config))))
    for (ids, row), (want_ids, want) in zip(other, plain, strict=True):
        assert ids == want_ids and row == pytest.approx(want, rel=1e-3, abs=1e-5)


def test_a_run_of_train_is_the_same_on_both_paths(monkeypatch, tmp_path, on_fast_path):
    """From the flags to the last row: what is planned, handed over and freed between rollouts and updates included."""
    (tmp_path / "data.jsonl").write_text("".join(f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(4)))
    (tmp_path / "own.py").write_text("def even(text, answer, **_):\n    return sum(map(ord, text)) % 7\n")
    argv = ["--model", str(first_blocks(1, tmp_path / "model")), "--data", str(tmp_path / "data.jsonl"), "--prompt-style", "plain",
            "--reward", f"{tmp_path / 'own.py'}:even", "--device", "cpu", "--steps", "2", "--prompts-per-step", "2", "--group-size", "2",
            "--updates-per-rollout", "2", "--max-new-tokens", "3", "--eval-n", "0", "--lora-rank", "4", "--micro-batch-tokens", "40",
            "--checkpointing", "off", "--aqn-start", "0.1", "--lr", "0.01"]
    made, graphs = [], engine.Graphs
    monkeypatch.setattr(engine, "Graphs", lambda *args: made.append(args[1:]) or graphs(*args))
    for name in ("plain", "fast"):
        if name == "fast":
            monkeypatch.setattr(sample, "set_engine", lambda model, engine: on_fast_path(model))
        assert train.main([*argv, "--out", str(tmp_path / name)]) == 0
        assert len(made) == (name == "fast")  # one, for the longest row of the run
    for row, want in zip(rows_of(tmp_path / "fast"), rows_of(tmp_path / "plain"), strict=True):
        assert row.keys() == want.keys() and want["grad_norm"] > 0
        for key, value in want.items():
            assert row[key] == (pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value), key


# ---- on the device


def dequantized(m):
    """The model with each four-bit weight in float32: no kernel of ours computes with it."""
    for path, linear in M.projections(m):
        if (base := linear.base).q is not None:
            dense = M.Linear(base.shape[1], base.parts)
            dense.weight, dense.bias = torch.nn.Parameter(base.dense(), requires_grad=False), base.bias
            m.set_submodule(path if linear is base else f"{path}.base", dense)
    return m


@gpu
@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_gpu_install_and_uninstall_leave_the_codes_as_they_were(quant):
    """On the card as in the interpreter, graphs and all."""
    m = random_model(GPU, quant, 16, "cuda", torch.bfloat16)
    before = {name: t.clone() for name, t in m.state_dict().items()}
    assert fast.install(m) is None and m.fast
    sample.generate(m, PROMPTS, max_new_tokens=4)
    fast.uninstall(m)
    after = m.state_dict()
    assert m.fast is None and after.keys() == before.keys() and all(torch.equal(t, before[name]) for name, t in after.items())


@gpu
@pytest.mark.parametrize(("quant", "scaling"), [("none", None), ("nvfp4", None), ("nvfp4", LONGER)])
def test_gpu_plain_and_fast_draw_alike(quant, scaling):
    """Both within the bound of what the modules say of the samples, and by the same random numbers: of this model's first tokens 60 and
    70% are the same on an H100; of the modules' own in bfloat16 and in float32, 68%; with another seed, 5%."""
    config, mean = dataclasses.replace(GPU, rope_scaling=scaling), 0.08 if scaling else 0.06
    m, kw = random_model(config, quant, 16, "cuda", torch.bfloat16), dict(n=16, max_new_tokens=40, seed=3)
    plain = sample.generate(m, PROMPTS, **kw)
    check_gaps(m, plain, mean=mean)
    assert fast.install(m) is None
    other = sample.generate(m, PROMPTS, **kw)
    check_gaps(m, other, mean=mean)
    first = [(a[0], b[0]) for p, q in zip(tokens(plain), tokens(other), strict=True) for a, b in zip(p, q, strict=True)]
    assert sum(a == b for a, b in first) > 0.45 * len(first)


@gpu
@pytest.mark.parametrize(("quant", "scaling"), [("none", None), ("nvfp4", None), ("nvfp4", LONGER)])
def test_gpu_plain_and_fast_train_alike(quant, scaling):
    """Three optimizer steps on the same completions: metrics and trained adapters of the two in bfloat16 are as far from those in float32.
    An error is one draw (a lucky one has failed this test step by step): compared are each figure's errors of the three steps together."""
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 4990, (n,), generator=g).tolist() for n in (40, 7, 90)]
    batch = [grpo.Completion({}, prompt, torch.randint(0, 4990, (5 + 9 * j,), generator=g).tolist(), [], True, advantage=j - 1.5)
             for prompt in prompts for j in range(4)]
    config = dataclasses.replace(GPU, rope_scaling=scaling)
    exact = dequantized(random_model(config, quant, 16, "cuda"))
    with torch.no_grad():
        logp, _, mask = grpo.completion_logprobs(exact, batch, 1.0)
    for c, row, live in zip(batch, logp, mask, strict=True):
        c.logprobs = row[live].tolist()
    found = []
    for way in ("exact", "plain", "fast"):
        m = exact if way == "exact" else random_model(config, quant, 16, "cuda", torch.bfloat16)
        if way == "fast":
            assert fast.install(m) is None
        params = [p for p in m.parameters() if p.requires_grad]
        before, optimizer, steps = [p.detach().clone() for p in params], grpo.AdamW(params, 1e-3), []
        for _ in range(3):
            sums, norm = grpo.update(m, optimizer, batch, conftest.settings(micro_batch_tokens=300, grad_clip=1.0))
            means = metrics.mean_metrics(sums)
            steps += [means["loss"], means["entropy"], norm]
        moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(params, before, strict=True)])
        found.append((torch.tensor(steps), moved))
        assert bool(m.fast) == (way == "fast")
    (numbers, change), (plain_numbers, plain_change), (fast_numbers, fast_change) = found
    assert (fast_change - change).norm() < 1.5 * (plain_change - change).norm() + 1e-2 * change.norm()
    plain_error, fast_error = ((n - numbers).reshape(3, 3).norm(dim=0) for n in (plain_numbers, fast_numbers))  # over the steps: loss, entropy, norm
    assert (fast_error < 3 * plain_error + 2e-2 * numbers.reshape(3, 3).norm(dim=0) + 1e-2).all(), (numbers, plain_numbers, fast_numbers)
