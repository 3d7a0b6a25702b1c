"""Without a GPU, Triton's kernels run in its interpreter; that is decided when they are defined, so before any import of them."""
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def exit_code(main, argv):
    """What the shell would see of a command."""
    try:
        return main(argv)
    except SystemExit as e:  # argparse's own refusals
        return e.code


def adapted(spread=0.05):
    """(the tiny model in NVFP4 whose adapter is away from zero by `spread`, its tokenizer, its optimizer)."""
    import data
    import grpo
    import lora
    import model as qwen
    from runtime import flags

    tok = data.Tokenizer(flags.TINY)
    model = qwen.load(flags.TINY, "cpu", torch.float32, "nvfp4")
    model.valid_vocab = len(tok)
    params = lora.add_lora(model, 4, 4)
    torch.manual_seed(0)
    for p in params:
        p.data.add_(spread * torch.randn_like(p))
    return model, tok, grpo.AdamW(params, 0.0, (0.9, 0.99), 0.0)


def drawn(model, tok, n, **options):
    """Four completions of up to 40 tokens of each of n problems: a list of Completions."""
    import data
    import grpo
    import sample

    rows, _ = data.prompts(tok, data.load("arithmetic", "train", n=n))
    groups = sample.generate(model, [row["ids"] for row in rows], 4, 40, eos_ids=tok.eos_ids, **options)
    return [grpo.Completion(row, row["ids"], s.ids, s.logprobs, s.finished)
            for row, group in zip(rows, groups, strict=True) for s in group]
