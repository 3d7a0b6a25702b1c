"""The chunked LM head against the dense one, in value, gradient and memory, and its kernel against it."""
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import model as M
from model import token_logprobs


def way(name):
    """token_logprobs, plain or fast."""
    return token_logprobs if name == "plain" else pytest.importorskip("fast.logprobs").token_logprobs


both = pytest.mark.parametrize("name", ["plain", "fast"])


def dense(hidden, weight, targets, temperature=1.0, valid=None):
    logits = (hidden @ weight.T)[:, :valid] / temperature
    lp = torch.log_softmax(logits, -1)
    return lp.gather(1, targets[:, None])[:, 0], -(lp.exp() * lp).sum(-1)


def head(S=23, C=6, V=17, valid=13, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(S, C, generator=g, dtype=torch.float64)
    weight = torch.randn(V, C, generator=g, dtype=torch.float64)
    targets = torch.randint(valid or V, (S,), generator=g)
    return hidden, weight, targets, torch.randn(S, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [1, 5, 23, 1000, None])
@pytest.mark.parametrize("temperature,valid", [(1.0, None), (0.7, 13)])
def test_chunked_head_equals_dense_in_value_and_gradient(chunk, temperature, valid):
    """A chunk boundary, the temperature or the mask missing from one of the three results."""
    hidden, weight, targets, up = head(valid=valid)
    h1, w1, h2, w2 = (t.clone().requires_grad_() for t in (hidden, weight, hidden, weight))
    logp, entropy = token_logprobs(h1, w1, targets, temperature, valid, chunk)
    want, want_entropy = dense(h2, w2, targets, temperature, valid)
    torch.testing.assert_close(logp, want)
    torch.testing.assert_close(entropy, want_entropy.detach())
    assert logp.requires_grad and not entropy.requires_grad
    (logp * up).sum().backward()
    (want * up).sum().backward()
    torch.testing.assert_close(h1.grad, h2.grad)
    torch.testing.assert_close(w1.grad, w2.grad)


def test_ids_past_the_tokenizer_have_probability_zero():
    """The embedding's spare rows take probability in the trainer that the sampler never gives them."""
    hidden, weight, _, _ = head()
    for name, kind in (("plain", torch.double), ("fast", torch.float)):
        for row in range(3):
            logp = way(name)(hidden[row].expand(13, -1).to(kind), weight.to(kind), torch.arange(13), valid_vocab=13)[0]
            assert logp.exp().sum().item() == pytest.approx(1.0)
    w = weight.clone().requires_grad_()
    h = hidden.clone().requires_grad_()
    token_logprobs(h, w, torch.zeros(23, dtype=torch.long), valid_vocab=13)[0].sum().backward()
    assert not w.grad[13:].any() and w.grad[:13].any() and h.grad.isfinite().all()


class Widest(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operator, forward or backward, returns, and counts the matrix products."""

    nbytes = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.aten.mm.default
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.nbytes = max(self.nbytes, t.nbytes)
        return out


@pytest.mark.parametrize(("name", "train_weight"), [("plain", False), ("plain", True), ("fast", False)])
def test_no_full_logits_tensor_in_forward_or_backward(name, train_weight):
    """(B, T, V) float32 logits, in either pass, are the memory peak at a vocabulary of 152k."""
    S, C, V, chunk = 64, 4, 50, 8
    hidden, weight, targets, up = (t.float() if t.is_floating_point() else t for t in head(S, C, V, None))
    hidden.requires_grad_(), weight.requires_grad_(train_weight)
    with Widest() as chunked:
        (way(name)(hidden, weight, targets, chunk=chunk)[0] * up).sum().backward()
    with Widest() as full:
        (dense(hidden, weight, targets)[0] * up).sum().backward()
    assert full.nbytes == 4 * S * V and chunked.nbytes == 4 * chunk * V


def test_default_chunk_bounds_the_logits(monkeypatch):
    """A default chunk in tokens that does not know the vocabulary: 1024 tokens are 0.6 GB at 152k and nothing at 512."""
    chunks = []
    monkeypatch.setattr(M, "recomputed", lambda score, h, *_, **kw: chunks.append(len(h)) or h.new_zeros(2, len(h)))
    for V, S in ((512, 300000), (151936, 1000), (2**28, 2)):
        token_logprobs(torch.empty(1, 1).expand(S, 1), torch.empty(1, 1).expand(V, 1), torch.zeros(S, dtype=torch.long))
    assert chunks == [262144, 300000 - 262144, 883, 1000 - 883, 1, 1] and 883 * 151936 * 4 <= 2**29
    fast, chunks = pytest.importorskip("fast.logprobs"), []
    monkeypatch.setattr(fast.TokenLogprobs, "apply", lambda *a: chunks.append(a[5]))
    for V in (512, 151936, 2**28):
        fast.token_logprobs(torch.empty(1, 1), torch.empty(1, 1).expand(V, 1), torch.zeros(1, dtype=torch.long))
    # beside the logits, 16-bit probabilities; a chunk of 441 would begin where other kernels are compiled
    assert chunks == [131072, 384, 128]


@pytest.mark.parametrize(("name", "products"), [("plain", (2, 4)), ("fast", (4, 0))])
def test_head_computes_no_more_than_was_asked_for(name, products):
    """LoRA: a gradient for a weight that is not trained, and on the fast path a backward that goes over the vocabulary again; under
    no_grad (old and reference log-probs): gradients for nobody."""
    hidden, weight, targets, up = (t.float() if t.is_floating_point() else t for t in head(S=64, C=4, V=50, valid=None))
    hidden.requires_grad_()
    with Widest() as forward:
        loss = (way(name)(hidden, weight, targets, chunk=32)[0] * up).sum()
    with Widest() as backward:
        loss.backward()
    assert (forward.products, backward.products) == products
    assert name == "plain" or backward.nbytes == hidden.nbytes
    weight.requires_grad_()
    with torch.no_grad(), Widest() as silent:
        logp, _ = way(name)(hidden, weight, targets, chunk=32)
    assert silent.products == 2 and not logp.requires_grad
    torch.testing.assert_close(logp, dense(hidden, weight, targets)[0].detach())


@both
def test_bf16_inputs_give_float32_logprobs_close_to_dense(name):
    """A bf16 softmax: sums over the vocabulary lose everything below 1/256."""
    hidden, weight, targets, up = head(S=40, C=16, V=300, valid=None)
    h1 = hidden.bfloat16().requires_grad_()
    h2 = hidden.bfloat16().float().requires_grad_()
    w = (weight * 0.3).bfloat16()
    logp, entropy = way(name)(h1, w, targets, chunk=16)
    want, want_entropy = dense(h2, w.float(), targets)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp, want, atol=0.03, rtol=0)
    torch.testing.assert_close(entropy, want_entropy, atol=0.03, rtol=0)
    (logp * up.float()).sum().backward()
    (want * up.float()).sum().backward()
    assert h1.grad.dtype == torch.bfloat16
    torch.testing.assert_close(h1.grad.float(), h2.grad, atol=0.05, rtol=0.03)


@both
def test_gradients_of_bf16_do_not_cancel(name):
    """p - 1 of a token that is nearly certain is 0 once p is rounded."""
    hidden, weight = torch.tensor([[8.0, 0.0]]).bfloat16().requires_grad_(), torch.eye(2).bfloat16()
    way(name)(hidden, weight, torch.tensor([0]))[0].sum().backward()
    p = 1 / (1 + math.e**8)
    assert hidden.grad[0].tolist() == pytest.approx([p, -p], rel=0.01)
    hidden, weight = torch.ones(61, 1).bfloat16(), torch.zeros(4, 1).bfloat16().requires_grad_()
    logp = token_logprobs(hidden, weight, torch.zeros(61, dtype=torch.long), chunk=1)[0]
    (logp[0] * 1000 + logp[1:].sum()).backward()
    assert weight.grad[:, 0].tolist() == pytest.approx([795, -265, -265, -265], rel=0.01)


@pytest.mark.parametrize(("hidden", "targets"), [((2, 3, 4), 2), ((6, 4), 5)])
def test_shapes_that_do_not_fit_are_refused(hidden, targets):
    """Targets of a micro-batch's other half would be scored without a word."""
    with pytest.raises((ValueError, RuntimeError)):
        token_logprobs(torch.ones(hidden), torch.ones(7, 4), torch.zeros(targets, dtype=torch.long))


@both
def test_no_tokens_at_all(name):
    """A micro-batch whose completions are all masked away: empty results, no crash."""
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(5, 4)
    logp, entropy = way(name)(hidden, weight, torch.zeros(0, dtype=torch.long))
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0,) and hidden.grad.shape == (0, 4)


# ---- the kernel


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("V, valid, spread", [(301, 297, 9), (5000, 5000, 9), (9001, 8200, 9), (9001, 8200, 0.5)])
def test_the_kernel_equals_the_plain_function(V, valid, spread, temperature):
    """Log-probs, entropies and the gradient, chunk by chunk: a vocabulary within one block and over several, with spare rows; large
    logits must not overflow, and small ones all count."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, up = spread * torch.randn(6, 8, generator=g), torch.randn(V, 8, generator=g), torch.randn(6, generator=g)
    targets, found = torch.tensor([0, 1, valid - 1, valid // 2, 5, 7]), []
    for name in ("plain", "fast"):
        h = hidden.clone().requires_grad_()
        logp, entropy = way(name)(h, weight, targets, temperature, valid, chunk=4)
        assert logp.requires_grad and not entropy.requires_grad
        (logp * up).sum().backward()
        found.append((logp, entropy, h.grad))
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_large_logits_round_no_log_prob():
    """Logits that are larger by one number have the same probabilities, to the last bit."""
    fast = pytest.importorskip("fast.logprobs")
    g = torch.Generator().manual_seed(0)
    logits = torch.randint(-999, 999, (4, 50), generator=g) / 128  # exact beside 8192 as well
    targets = torch.tensor([0, 11, 12, 49])
    plain, *far = (fast.score(logits + by, targets, torch.ones(1), 50, torch.float32) for by in (0, 8192, -8192))
    assert all(torch.equal(a, b) for other in far for a, b in zip(plain, other, strict=True))


@pytest.mark.gpu
@both
def test_gpu_bf16_head_keeps_float32_logits(name):
    """On the device the GEMM must hand out float32: bf16 logits near 20 move the log-prob by up to 0.06."""
    g = torch.Generator().manual_seed(0)
    hidden = (torch.randn(700, 512, generator=g)).cuda().bfloat16().requires_grad_()
    weight = (torch.randn(30000, 512, generator=g) * 0.2).cuda().bfloat16()
    targets = torch.randint(29000, (700,), generator=g).cuda()
    ref = hidden.detach().float().requires_grad_()
    want, want_entropy = dense(ref, weight.float(), targets, 0.9, 29000)
    logp, entropy = way(name)(hidden, weight, targets, 0.9, 29000, chunk=256)
    torch.testing.assert_close(logp, want, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(entropy, want_entropy, atol=2e-3, rtol=1e-3)
    logp.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(hidden.grad.float(), ref.grad, atol=0.02, rtol=0.02)


@pytest.mark.gpu
def test_gpu_the_kernel_errs_by_the_rounding_of_the_slope_alone():
    """Against float64: log-prob and entropy to float32's rounding, the gradient to bfloat16's."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 256, generator=g).cuda().bfloat16().requires_grad_()
    weight = (torch.randn(5003, 256, generator=g) / 4).cuda().bfloat16()
    targets, exact = torch.randint(4999, (300,), generator=g).cuda(), hidden.detach().double().requires_grad_()
    got, want = way("fast")(hidden, weight, targets, 0.9, 4999, chunk=128), dense(exact, weight.double(), targets, 0.9, 4999)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-4, atol=1e-4)
    got[0].sum().backward()
    want[0].sum().backward()
    assert (hidden.grad.double() - exact.grad).norm() < 1e-2 * exact.grad.norm()
